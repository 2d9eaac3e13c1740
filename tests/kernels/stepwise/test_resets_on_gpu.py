"""Resets in the kernel `stepwise` on a GPU, compared with float64."""

import pytest
import torch

from gatewise import testing
from gatewise.cells import SHIPPED
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.saved import Needs
from gatewise.kernels.criteria import is_fused
from gatewise.kernels.stepwise import layer, stepwise
from gatewise.kernels.stepwise.product_layout import ProductLayout
from tests.pairwise import pairwise

pytestmark = pytest.mark.gpu

FUSED = [cell for cell in SHIPPED if is_fused(cell)]

SHAPES = {case.name: case.shape for case in testing.CASES if case.shape.resets} | {
    "encoder": Problem(9, 128, 64, 512, num_layers=2, bidirectional=True, resets=True),
    "few-steps": Problem(2, 64, 64, 512, resets=True),
    "odd": Problem(37, 21, 61, 133, bidirectional=True, resets=True),
    "ragged": Problem(37, 70, 40, 256, layout=Layout.DEVICE_LENGTHS, bidirectional=True, resets=True),
}
LAYOUTS = [
    ProductLayout(),
    ProductLayout(transposed_forward=True, transposed_backward=True, split_k=4),
    ProductLayout(column_major=True),
    ProductLayout(True, True, True, 4),
]
NUMBERS = {
    "bfloat16": {"dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16},
    "TF32": {"dtype": torch.float32, "allow_tf32": True},
    "float32": {"dtype": torch.float32},
    "float64": {"dtype": torch.float64},
}


@pytest.mark.parametrize(("name", "numbers", "cell"), pairwise([*SHAPES], [*NUMBERS], FUSED), ids=str)
def test_agrees_with_the_oracle(name, numbers, cell):
    problem = SHAPES[name].replace(needs_grad=True, cell=cell, **NUMBERS[numbers])
    if cell.name != "lstm":
        problem = problem.replace(proj_size=0)
    testing.check_kernel(stepwise, problem, "cuda")


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", ["encoder", "ragged"])
def test_every_layout_agrees_with_the_oracle(name, layout, monkeypatch):
    monkeypatch.setattr(layer, "product_layout_of", lambda problem, device: layout)
    testing.check_kernel(stepwise, SHAPES[name].replace(dtype=torch.bfloat16, needs_grad=True), "cuda")


def test_recorded_steps_read_the_resets_of_the_call():
    """Calls of one shape replay the same graphs; calls without resets have graphs of their own."""
    problem = Problem(40, 16, 32, 64, bidirectional=True, dtype=torch.float32, needs_grad=True, resets=True)
    plain = problem.replace(resets=False)
    for seed in range(3):
        inputs = testing.make_inputs(problem, "cuda", seed=seed)
        gradients = testing.make_gradients(problem, inputs)
        for own, given in ((problem, inputs), (plain, inputs._replace(resets=None))):
            found = testing.named(own, *testing.run_kernel(stepwise, own, given, gradients))
            exact = testing.named(own, *testing.oracle(own, given, gradients))
            for name, value in exact.items():
                assert testing.relative_error(found[name], value) < 1e-4, name


@pytest.mark.parametrize("cell", FUSED, ids=lambda cell: cell.name)
def test_nan_stays_in_its_episode(cell):
    problem = Problem(12, 8, 16, 32, bidirectional=True, needs_grad=True, resets=True, cell=cell)
    resets = torch.zeros(12, 8, dtype=torch.bool, device="cuda")
    resets[[4, 9], 3] = True
    inputs = testing.make_inputs(problem, "cuda")._replace(resets=resets)
    gradients = testing.make_gradients(problem, inputs)
    clean, clean_gradients = testing.run_kernel(stepwise, problem, inputs, gradients, Needs(weights=False))
    broken = torch.zeros_like(resets)
    broken[4:9, 3] = True
    dirty = inputs._replace(x=inputs.x.masked_fill(broken.unsqueeze(2), torch.nan))
    result, found = testing.run_kernel(stepwise, problem, dirty, gradients, Needs(weights=False))
    assert result.y[broken].isnan().all()
    assert torch.equal(result.y[~broken], clean.y[~broken])
    assert torch.equal(found.x[~broken], clean_gradients.x[~broken])
    assert torch.equal(result.h_n, clean.h_n)
    assert torch.equal(found.h0, clean_gradients.h0)
