"""Cells that are not fused, on a GPU, compared with float64."""

import pytest
import torch

import gatewise
from gatewise import testing
from gatewise.cells import LayerNormGRU, LayerNormLSTM, PeepholeLSTM
from gatewise.contract.problem import Layout, Problem
from gatewise.derivation.trace import is_pointwise
from gatewise.kernels.persistent.kernel import persistent
from tests.graphs import captured
from tests.kernels.cell_code import ROWS
from tests.kernels.stepwise.test_rows_on_cpu import CELLS
from tests.pairwise import pairwise

pytestmark = pytest.mark.gpu

SHAPES = {case.name: case.shape for case in testing.CASES if not case.shape.proj_size} | {
    "clusters": Problem(9, 64, 128, 1024),
    "encoder": Problem(9, 128, 64, 512, num_layers=2, bidirectional=True),
    "large-weights": Problem(8, 20, 600, 1150),
    "odd": Problem(37, 21, 61, 133, bidirectional=True, resets=True),
    "ragged": Problem(37, 70, 40, 256, layout=Layout.DEVICE_LENGTHS, bidirectional=True),
    "rows-in-turn": Problem(5, 600, 64, 512, layout=Layout.DEVICE_LENGTHS),
    "one-row": Problem(30, 1, 64, 1024),
}
NUMBERS = {
    "bfloat16": {"dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16},
    "TF32": {"dtype": torch.float32, "allow_tf32": True},
    "exact": {"dtype": torch.float32},
}


@pytest.mark.parametrize(("name", "numbers", "cell"), pairwise([*SHAPES], [*NUMBERS], CELLS), ids=str)
def test_agrees_with_the_oracle(name, numbers, cell):
    problem = SHAPES[name].replace(needs_grad=True, cell=cell, **NUMBERS[numbers])
    if problem.hidden_size == 1 and not is_pointwise(cell):
        pytest.skip("the gradients through a normalization of one number are zero, which no relative error measures")
    refusals = testing.why_not(persistent, problem, "cuda")
    if refusals:
        pytest.skip(f"refused: {'; '.join(refusals)}")
    testing.check_kernel(persistent, problem, "cuda")


@pytest.mark.parametrize("cell", ROWS, ids=lambda cell: cell.name)
def test_calls_of_one_shape_have_the_same_bits(cell):
    problem = Problem(200, 16, 32, 256, bidirectional=True, dtype=torch.float32, needs_grad=True, cell=cell)
    inputs = testing.make_inputs(problem, "cuda")
    gradients = testing.make_gradients(problem, inputs)
    first = testing.named(problem, *testing.run_kernel(persistent, problem, inputs, gradients))
    for _ in range(4):
        again = testing.named(problem, *testing.run_kernel(persistent, problem, inputs, gradients))
        assert all(torch.equal(again[name], value) for name, value in first.items())


@pytest.mark.parametrize("cell", [LayerNormLSTM(), LayerNormGRU(), PeepholeLSTM()], ids=lambda cell: cell.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_training_step_in_a_cuda_graph(cell, dtype):
    torch.manual_seed(0)
    layer = gatewise.Recurrent(cell, 64, 96, bias=False, device="cuda", dtype=dtype, kernel="persistent")
    x = torch.randn(20, 8, 64, device="cuda", dtype=dtype)

    def step():
        layer.zero_grad(set_to_none=False)
        y, _ = layer(x)
        y.square().mean().backward()
        return y

    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    graph, y = captured(step)
    x.copy_(torch.randn_like(x))
    graph.replay()
    replayed = [y.clone(), *(parameter.grad.clone() for parameter in layer.parameters())]
    expected = [step(), *(parameter.grad for parameter in layer.parameters())]
    for mine, theirs in zip(replayed, expected, strict=True):
        assert torch.equal(mine, theirs)
    with torch.autocast("cuda", torch.bfloat16):
        assert layer(x.float())[0].isfinite().all()


@pytest.mark.parametrize("cell", [LayerNormLSTM(), PeepholeLSTM()], ids=lambda cell: cell.name)
def test_compiled_calls_find_the_same(cell):
    torch.manual_seed(0)
    layer = gatewise.Recurrent(cell, 32, 128, bias=False, device="cuda", kernel="persistent")
    x = torch.randn(12, 8, 32, device="cuda", requires_grad=True)
    found = []
    for call in (layer, torch.compile(layer, fullgraph=True)):
        y, _ = call(x)
        found.append([y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])])
    for mine, theirs in zip(*found, strict=True):
        assert testing.relative_error(mine, theirs.double()) < 1e-5
