"""Cells that the kernel `stepwise` computes a batch row at a time, on a GPU, compared with float64."""

import pytest
import torch

import gatewise
from gatewise import testing
from gatewise.cells import LayerNormGRU, LayerNormLSTM
from gatewise.contract.problem import Layout, Problem
from gatewise.derivation.trace import is_pointwise
from gatewise.kernels.stepwise import stepwise
from tests.kernels.cell_code import ROWS
from tests.kernels.stepwise.test_rows_on_cpu import CELLS
from tests.pairwise import pairwise

pytestmark = pytest.mark.gpu

SHAPES = {case.name: case.shape for case in testing.CASES if not case.shape.proj_size} | {
    "encoder": Problem(9, 64, 64, 512, num_layers=2, bidirectional=True),
    "odd": Problem(37, 21, 61, 133, bidirectional=True, resets=True),
    "ragged": Problem(37, 70, 40, 256, layout=Layout.DEVICE_LENGTHS, bidirectional=True),
    "two-units-a-thread": Problem(6, 5, 20, 1000, bidirectional=True),
    "many-units": Problem(4, 3, 16, 3001),
}
NUMBERS = {
    "bfloat16": {"dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16},
    "TF32": {"dtype": torch.float32, "allow_tf32": True},
    "float32": {"dtype": torch.float32},
    "float64": {"dtype": torch.float64},
}


@pytest.mark.parametrize(("name", "numbers", "cell"), pairwise([*SHAPES], [*NUMBERS], CELLS), ids=str)
def test_agrees_with_the_oracle(name, numbers, cell):
    problem = SHAPES[name].replace(needs_grad=True, cell=cell, **NUMBERS[numbers])
    if problem.resets and cell.initial_states:
        problem = problem.replace(resets=False)
    if problem.hidden_size == 1 and not is_pointwise(cell):
        pytest.skip("the gradients through a normalization of one number are zero, which no relative error measures")
    testing.check_kernel(stepwise, problem, "cuda")


@pytest.mark.parametrize("cell", ROWS, ids=lambda cell: cell.name)
def test_calls_of_one_shape_replay_and_have_the_same_bits(cell):
    problem = Problem(40, 16, 32, 64, bidirectional=True, dtype=torch.float32, needs_grad=True, cell=cell)
    for seed in range(3):
        inputs = testing.make_inputs(problem, "cuda", seed=seed)
        gradients = testing.make_gradients(problem, inputs)
        exact = testing.named(problem, *testing.oracle(problem, inputs, gradients))
        found, again = (
            testing.named(problem, *testing.run_kernel(stepwise, problem, inputs, gradients)) for _ in range(2)
        )
        for name, value in exact.items():
            assert testing.relative_error(found[name], value) < 1e-4, name
            assert torch.equal(found[name], again[name]), name


@pytest.mark.parametrize("cell", [LayerNormLSTM(), LayerNormGRU()], ids=lambda cell: cell.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_training_step_in_a_cuda_graph(cell, dtype):
    torch.manual_seed(0)
    layer = gatewise.Recurrent(cell, 64, 96, bias=False, device="cuda", dtype=dtype)
    x = torch.randn(20, 8, 64, device="cuda", dtype=dtype)

    def step():
        layer.zero_grad(set_to_none=False)
        y, _ = layer(x)
        y.square().mean().backward()
        return y

    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    x.copy_(torch.randn_like(x))
    graph.replay()
    replayed = [y.clone(), *(parameter.grad.clone() for parameter in layer.parameters())]
    expected = [step(), *(parameter.grad for parameter in layer.parameters())]
    for mine, theirs in zip(replayed, expected, strict=True):
        assert torch.equal(mine, theirs)
    with torch.autocast("cuda", torch.bfloat16):
        assert gatewise.explain(layer, x).chosen == "stepwise"
        assert layer(x.float())[0].isfinite().all()
