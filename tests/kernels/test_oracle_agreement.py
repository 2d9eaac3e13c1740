"""Outputs, final states and all gradients agree with the float64 oracle within their error budgets."""

import pytest
import torch

from gatewise import testing
from gatewise.cells import LSTM, SHIPPED

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.mark.usefixtures("budgets_once")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("case", testing.CASES, ids=lambda case: case.name)
def test_every_case(kernel, case, dtype, device, admitted):
    testing.check_kernel(kernel, admitted(case.problem(dtype=dtype)), device)


@pytest.mark.usefixtures("budgets_once")
@pytest.mark.parametrize("cell", [cell for cell in SHIPPED if type(cell) is not LSTM], ids=lambda cell: cell.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize(
    "case", [case for case in testing.CASES if not case.shape.proj_size], ids=lambda case: case.name
)
def test_every_case_of_other_cells(kernel, case, dtype, cell, device, admitted):
    testing.check_kernel(kernel, admitted(case.problem(dtype=dtype).replace(cell=cell)), device)


@pytest.mark.usefixtures("budgets_once")
@pytest.mark.parametrize("case", testing.CASES, ids=lambda case: case.name)
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
