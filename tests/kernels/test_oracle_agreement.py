"""Outputs, final states and all gradients agree with the float64 oracle within their error budgets."""

import itertools

import pytest
import torch

from gatewise import testing
from gatewise.cells import LSTM, SHIPPED
from tests.pairwise import each_value, exhaustive_unless, one_in, pairwise

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
CASES_OF_OTHER_CELLS = (
    [case for case in testing.CASES if not case.shape.proj_size],
    [torch.float32, torch.bfloat16],
    [cell for cell in SHIPPED if type(cell) is not LSTM],
)
# `make test` runs every case but the long one, and every cell.
SHORT = [case for case in CASES_OF_OTHER_CELLS[0] if case.name != "long"]
OF_OTHER_CELLS = exhaustive_unless(
    [case.values for case in each_value(pairwise(SHORT, *CASES_OF_OTHER_CELLS[1:])) if not case.marks],
    itertools.product(*CASES_OF_OTHER_CELLS),
)
# `make test` runs every case in one dtype, in turn.
IN_TURN = [(case, DTYPES[place % 4]) for place, case in enumerate(testing.CASES)]


@pytest.mark.usefixtures("budgets_once")
@pytest.mark.parametrize(
    ("case", "dtype"),
    exhaustive_unless(IN_TURN, itertools.product(testing.CASES, DTYPES)),
    ids=lambda own: getattr(own, "name", str(own)),
)
def test_every_case(kernel, case, dtype, device, admitted):
    testing.check_kernel(kernel, admitted(case.problem(dtype=dtype)), device)


@pytest.mark.usefixtures("budgets_once")
@pytest.mark.parametrize(("case", "dtype", "cell"), OF_OTHER_CELLS, ids=lambda own: getattr(own, "name", str(own)))
def test_every_case_of_other_cells(kernel, case, dtype, cell, device, admitted):
    testing.check_kernel(kernel, admitted(case.problem(dtype=dtype).replace(cell=cell)), device)


@pytest.mark.usefixtures("budgets_once")
@pytest.mark.parametrize("case", one_in(3, testing.CASES), ids=lambda case: case.name)
def test_inference_gives_the_same_outputs(kernel, case, device, admitted):
    testing.check_kernel(kernel, admitted(case.problem(needs_grad=False)), device)


@pytest.mark.parametrize("left_out", ["y", "h_n", "c_n"])
def test_a_missing_output_gradient_is_zero(kernel, left_out, device, admitted):
    problem = admitted(testing.CASES[0].problem(dtype=torch.float64))
    inputs = testing.make_inputs(problem, device)
    gradients = testing.make_gradients(problem, inputs)
    zero = gradients._replace(**{left_out: torch.zeros_like(getattr(gradients, left_out))})
    _, found = testing.run_kernel(kernel, problem, inputs, gradients._replace(**{left_out: None}))
    _, expected = testing.run_kernel(kernel, problem, inputs, zero)
    for mine, theirs in zip((*found[:3], *found.weights), (*expected[:3], *expected.weights), strict=True):
        torch.testing.assert_close(mine, theirs)
