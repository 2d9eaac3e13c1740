"""Cells that the kernel `stepwise` computes a batch row at a time, on a GPU, compared with float64."""

import pytest
import torch

import gatewise
from gatewise import testing
from gatewise.cells import LSTM, SLSTM, LayerNormGRU, LayerNormLSTM
from gatewise.contract.problem import Layout, Problem
from gatewise.derivation.trace import is_pointwise
from gatewise.kernels.stepwise import stepwise
from tests.graphs import captured
from tests.kernels.cell_code import ROWS
from tests.kernels.stepwise.test_rows_on_cpu import CELLS, MASKED, BeginsElsewhere
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
    if problem.hidden_size == 1 and not is_pointwise(cell):
        pytest.skip("the gradients through a normalization of one number are zero, which no relative error measures")
    testing.check_kernel(stepwise, problem, "cuda")


@pytest.mark.parametrize(
    ("name", "numbers", "cell"), pairwise(["encoder", "odd", "ragged"], [*NUMBERS], MASKED), ids=str
)
def test_masks_agree_with_the_oracle(name, numbers, cell):
    testing.check_kernel(stepwise, SHAPES[name].replace(needs_grad=True, cell=cell, **NUMBERS[numbers]), "cuda")


@pytest.mark.parametrize(("numbers", "cell"), pairwise([*NUMBERS], [SLSTM(), BeginsElsewhere()]), ids=str)
@pytest.mark.parametrize("name", ["odd", "ragged"])
def test_resets_to_initial_values_agree_with_the_oracle(name, numbers, cell):
    problem = SHAPES[name].replace(needs_grad=True, cell=cell, resets=True, **NUMBERS[numbers])
    testing.check_kernel(stepwise, problem, "cuda")


@pytest.mark.parametrize("cell", MASKED, ids=lambda cell: cell.name)
def test_recorded_steps_read_the_masks_of_the_call(cell):
    """Calls of one shape replay the same graphs, with masks that differ from call to call."""
    problem = Problem(40, 16, 32, 64, bidirectional=True, dtype=torch.float32, needs_grad=True, cell=cell)
    for seed in range(3):
        inputs = testing.make_inputs(problem, "cuda", seed=seed)
        gradients = testing.make_gradients(problem, inputs)
        exact = testing.named(problem, *testing.oracle(problem, inputs, gradients))
        found = testing.named(problem, *testing.run_kernel(stepwise, problem, inputs, gradients))
        for name, value in exact.items():
            assert testing.relative_error(found[name], value) < 1e-4, name


@pytest.mark.parametrize("memory", ["normal", "lean"])
def test_a_layer_with_dropout_and_zoneout(memory):
    torch.manual_seed(0)
    options = {"recurrent_dropout": 0.3, "zoneout": {"h": 0.1, "c": 0.2}, "candidate_dropout": 0.25, "memory": memory}
    layer = gatewise.Recurrent(LSTM(), 32, 96, num_layers=2, device="cuda", **options)
    x = torch.randn(20, 8, 32, device="cuda")
    refusals = gatewise.explain(layer, x).verdict("stepwise").refusals
    assert bool(refusals) == (memory == "lean")
    results = []
    for kernel in ("auto" if refusals else "stepwise", "eager"):
        layer.kernel = kernel
        layer.zero_grad()
        torch.manual_seed(1)
        y, (h, c) = layer(x)
        (y.square().mean() + h.sum() + c.sum()).backward()
        results.append([y.detach(), h.detach(), c.detach(), *(parameter.grad for parameter in layer.parameters())])
    for mine, theirs in zip(*results, strict=True):
        assert testing.relative_error(mine, theirs) < 1e-2


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
    layer = gatewise.Recurrent(cell, 64, 96, bias=False, device="cuda", dtype=dtype, kernel="stepwise")
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
        assert gatewise.explain(layer, x).chosen == "stepwise"
        assert layer(x.float())[0].isfinite().all()
