"""Cells other than the LSTM on the kernels with generated cell code, compared with the float64 oracle."""

import pytest
import torch

from gatewise import testing
from gatewise.cells import LSTM
from gatewise.contract.problem import Layout, Problem
from gatewise.kernels.persistent.kernel import persistent
from gatewise.kernels.stepwise import stepwise
from tests.kernels.cell_code import FUSED
from tests.pairwise import pairwise

pytestmark = pytest.mark.gpu

CELLS = [cell for cell in FUSED if type(cell) is not LSTM]
EDGES = {case.name: case.shape for case in testing.CASES if not case.shape.proj_size}
SHAPES = EDGES | {
    "clusters": Problem(9, 64, 128, 1024),
    "encoder": Problem(9, 128, 64, 512, num_layers=2, bidirectional=True),
    "large-weights": Problem(8, 20, 1500, 1500),
    "odd": Problem(12, 20, 650, 650, num_layers=2),
    "one-row": Problem(30, 1, 64, 1024),
    "pairs-of-layers": Problem(20, 16, 61, 256, num_layers=2),
    "pairs-with-dropout": Problem(40, 8, 200, 128, num_layers=3, dropout=0.3),
    "ragged": Problem(17, 70, 40, 256, layout=Layout.DEVICE_LENGTHS, bidirectional=True),
    "rows-in-turn": Problem(5, 300, 64, 512, layout=Layout.DEVICE_LENGTHS),
    "states-not-copied": Problem(31, 70, 64, 256, bidirectional=True),
}
NUMBERS = {
    "bfloat16": {"dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16},
    "TF32": {"dtype": torch.float32, "allow_tf32": True},
    "exact": {"dtype": torch.float32},
}


def check(kernel, problem):
    refusals = testing.why_not(kernel, problem, "cuda")
    if refusals:
        pytest.skip(f"{kernel.name} refuses: {'; '.join(refusals)}")
    testing.check_kernel(kernel, problem, "cuda")


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("kernel", [persistent, stepwise], ids=lambda kernel: kernel.name)
def test_agrees_with_the_oracle(kernel, name, numbers, cell):
    problem = SHAPES[name].replace(needs_grad=True, cell=cell, **NUMBERS[numbers])
    check(kernel, problem)


@pytest.mark.parametrize(("name", "numbers", "cell"), pairwise([*SHAPES], [*NUMBERS], CELLS), ids=str)
def test_agrees_with_the_oracle_in_little_memory(name, numbers, cell):
    problem = SHAPES[name].replace(needs_grad=True, lean=True, cell=cell, **NUMBERS[numbers])
    check(persistent, problem)


@pytest.mark.parametrize(("name", "cell"), pairwise([*SHAPES], CELLS), ids=str)
def test_stepwise_agrees_in_float64(name, cell):
    problem = SHAPES[name].replace(needs_grad=True, cell=cell, dtype=torch.float64)
    check(stepwise, problem)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
@pytest.mark.parametrize("kernel", [persistent, stepwise], ids=lambda kernel: kernel.name)
def test_replayed_calls_find_the_same(kernel, cell):
    problem = Problem(20, 16, 64, 256, num_layers=2, dtype=torch.bfloat16, needs_grad=True, cell=cell)
    inputs = testing.make_inputs(problem, "cuda")
    gradients = testing.make_gradients(problem, inputs)
    calls = [testing.named(problem, *testing.run_kernel(kernel, problem, inputs, gradients)) for _ in range(5)]
    for found in calls[1:]:
        assert all(torch.equal(found[name], calls[0][name]) for name in found)
