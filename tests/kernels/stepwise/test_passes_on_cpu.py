"""Both passes in every layout, on the CPU: the CUDA kernels compiled as C++, the products of the CPU library."""

import dataclasses
import itertools

import pytest
import torch

from gatewise import testing
from gatewise.cells import GRU, LSTM, Averaged
from gatewise.contract.problem import Problem
from gatewise.contract.saved import Needs
from gatewise.kernels.criteria import is_fused
from gatewise.kernels.stepwise import stepwise
from gatewise.kernels.stepwise.product_layout import ProductLayout
from tests.kernels.cell_code import FUSED
from tests.pairwise import each_value, exhaustive, exhaustive_unless, pairwise

LAYOUTS = {
    "row-major": ProductLayout(),
    "row-major, transposed": ProductLayout(transposed_forward=True, transposed_backward=True),
    "row-major, a product per gate": ProductLayout(split_k=4),
    "row-major, a product per gate, transposed": ProductLayout(transposed_backward=True, split_k=4),
    "column-major": ProductLayout(column_major=True),
    "column-major, transposed, a product per gate": ProductLayout(True, True, True, 4),
}


class Unrefused:
    """The kernel without the criteria that require a GPU."""

    name, layouts = stepwise.name, stepwise.layouts
    forward, backward = staticmethod(stepwise.forward), staticmethod(stepwise.backward)
    single_use = staticmethod(stepwise.single_use)

    def criteria(self):
        return ()


PLAIN = [case for case in testing.CASES if not case.shape.proj_size]
# What these cases have by themselves, others have together with more.
SIMPLER = {"one-row", "one-unit", "one-feature", "no-bias", "two-layers", "bidirectional", "device-lengths", "packed"}
# What these add is arithmetic around the kernels, which other kernels have too.
ALIKE = {"long", "device-lengths-all", "resets-device-lengths", "packed-all"}
USUAL = [case for case in PLAIN if case.name not in SIMPLER | ALIKE]
# `make test` runs these cases with few pairs of a layout and a cell, because each pair is compiled by itself.
PAIRS = [*zip(itertools.cycle(LAYOUTS), FUSED, strict=False)]
PAIRED = [(case, *pair) for case, pair in zip(USUAL, itertools.cycle(PAIRS), strict=False)]
# Projections are computed in one layout, and by the LSTM alone.
PROJECTED = [(case, "row-major", LSTM()) for case in testing.CASES if case.shape.proj_size]


@pytest.mark.usefixtures("budgets_once")
@pytest.mark.parametrize(
    ("case", "layout", "cell"),
    exhaustive_unless([*PAIRED, *PROJECTED], dict.fromkeys([*PAIRED, *pairwise(PLAIN, [*LAYOUTS], FUSED), *PROJECTED])),
    ids=lambda own: getattr(own, "name", own),
)
def test_agrees_with_the_oracle(layout, case, cell, on_cpu):
    own = LAYOUTS[layout]
    on_cpu(own if own.split_k == 1 else dataclasses.replace(own, split_k=len(cell.gates)))
    testing.check_kernel(Unrefused(), case.problem(dtype=torch.float64).replace(cell=cell), "cpu")


@pytest.mark.parametrize(
    "cell", [*exhaustive(Averaged(GRU(), (0.3,))), Averaged(LSTM(), (0.0, 0.3))], ids=lambda cell: cell.name
)
def test_mean_zoneout_agrees_with_the_oracle(cell, on_cpu):
    assert is_fused(cell)
    on_cpu(ProductLayout())
    case = next(case for case in PLAIN if case.shape.num_layers > 1)
    testing.check_kernel(Unrefused(), case.problem(dtype=torch.float64).replace(cell=cell), "cpu")


# Every case is tested in float64 above.
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.exhaustive if place % 8 else ()) for place, case in enumerate(testing.CASES)],
    ids=lambda case: case.name,
)
def test_agrees_with_the_oracle_in_float32(case, on_cpu):
    on_cpu(ProductLayout())
    testing.check_kernel(Unrefused(), case.problem(dtype=torch.float32), "cpu")


@pytest.mark.parametrize("layout", [ProductLayout(), ProductLayout(column_major=True)], ids=str)
def test_gradients_overwrite_the_kept_gates_unless_the_call_is_traced(layout, on_cpu):
    on_cpu(layout)
    problem = testing.CASES[0].problem(dtype=torch.float64)
    inputs = testing.make_inputs(problem)
    gradients = testing.make_gradients(problem, inputs)
    for traced in (False, True):
        result = stepwise.forward(problem, inputs)
        gates = result.kept[0].clone()
        testing.run_kernel(Unrefused(), problem, inputs, gradients)
        stepwise.backward(problem.replace(traced=traced), inputs, result, gradients, Needs())
        assert torch.equal(result.kept[0], gates) == traced


@pytest.mark.parametrize("layout", [testing.CASES[15], testing.CASES[17]], ids=lambda case: case.name)
def test_values_in_the_padding_do_not_matter(layout, on_cpu):
    on_cpu(ProductLayout())
    problem = layout.problem(dtype=torch.float64)
    inputs = testing.make_inputs(problem)
    gradients = testing.make_gradients(problem, inputs)
    beyond = (torch.arange(problem.time)[:, None] >= inputs.lengths).unsqueeze(2)
    clean = testing.named(problem, *testing.run_kernel(Unrefused(), problem, inputs, gradients))
    dirty = inputs._replace(x=inputs.x.masked_fill(beyond, torch.nan))
    above = gradients._replace(y=gradients.y.masked_fill(beyond, torch.nan))
    found = testing.named(problem, *testing.run_kernel(Unrefused(), problem, dirty, above))
    assert all(torch.equal(found[name], clean[name]) for name in clean)


@pytest.mark.parametrize(
    ("cell", "layout"),
    each_value(pairwise([LSTM(), GRU()], [ProductLayout(), ProductLayout(column_major=True)])),
    ids=lambda own: getattr(own, "name", str(own)),
)
def test_nan_stays_in_its_episode(cell, layout, on_cpu):
    on_cpu(layout)
    problem = Problem(7, 4, 3, 5, bidirectional=True, dtype=torch.float64, needs_grad=True, resets=True, cell=cell)
    resets = torch.zeros(7, 4, dtype=torch.bool)
    resets[[2, 5], 1] = True
    inputs = testing.make_inputs(problem)._replace(resets=resets)
    gradients = testing.make_gradients(problem, inputs)
    clean, clean_gradients = testing.run_kernel(Unrefused(), problem, inputs, gradients)
    broken = torch.zeros_like(resets)
    broken[2:5, 1] = True
    x = inputs.x.masked_fill(broken.unsqueeze(2), torch.nan)
    result, found = testing.run_kernel(Unrefused(), problem, inputs._replace(x=x), gradients)
    assert result.y[broken].isnan().all()
    assert found.x[broken].isnan().all()
    pairs = [(result.y[~broken], clean.y[~broken]), (found.x[~broken], clean_gradients.x[~broken])]
    pairs += [(result.h_n, clean.h_n), (result.c_n, clean.c_n)]
    pairs += [(found.h0, clean_gradients.h0), (found.c0, clean_gradients.c0)]
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs)
