"""Gradients of 16-bit weights in float32, as parameters under autocast get them."""

import pytest
import torch

import gatewise
from gatewise import testing
from gatewise.cells import GRU, RNN, LayerNormLSTM
from gatewise.contract.problem import Layout, Problem
from gatewise.kernels.persistent.kernel import persistent
from gatewise.kernels.persistent.sizes.gradients import gradients_dtype

pytestmark = pytest.mark.gpu

SIXTEEN_BITS = (torch.bfloat16, torch.float16)
SHAPES = {
    "ptb-large": Problem(8, 20, 1500, 1500),
    "rows-not-aligned": Problem(8, 20, 31, 333, bidirectional=True),
    "aligned-without-padding": Problem(8, 20, 30, 332, num_layers=2),
    "pair": Problem(20, 20, 200, 200, num_layers=2, dropout=0.3),
    "states-not-copied": Problem(31, 70, 64, 256, bidirectional=True),
    "ragged": Problem(17, 70, 40, 256, layout=Layout.DEVICE_LENGTHS, bidirectional=True),
    "deep-product": Problem(300, 41, 24, 60),
    "gru": Problem(9, 20, 36, 52, cell=GRU(), bidirectional=True, resets=True),
    "rnn": Problem(9, 20, 40, 64, cell=RNN("tanh")),
}


@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
@pytest.mark.parametrize("case", testing.CASES, ids=lambda case: case.name)
def test_edges(case, dtype):
    testing.check_kernel(persistent, case.problem(dtype=dtype).replace(float32_gradients=True), "cuda")


@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name, dtype):
    problem = SHAPES[name].replace(dtype=dtype, needs_grad=True, float32_gradients=True)
    testing.check_kernel(persistent, problem, "cuda")


@pytest.mark.parametrize("name", SHAPES)
def test_they_are_the_rounded_ones_before_rounding(name):
    problem = SHAPES[name].replace(dtype=torch.bfloat16, needs_grad=True)
    inputs = testing.make_inputs(problem, "cuda")
    gradients = testing.make_gradients(problem, inputs)
    _, unpadded = testing.run_kernel(persistent, problem, inputs, gradients)
    assert gradients_dtype(problem.replace(float32_gradients=True)) == torch.float32
    _, wide = testing.run_kernel(persistent, problem.replace(float32_gradients=True), inputs, gradients)
    for one, other in zip(unpadded.weights, wide.weights, strict=True):
        assert one.dtype == torch.bfloat16
        assert other.dtype == torch.float32
        assert one.shape == other.shape
        assert (one - other).norm() <= 2.0**-8 * other.norm()
        if other.dim() > 1:
            assert not torch.equal(other, other.bfloat16().float())


def layers(name):
    options = {"device": "cuda", "kernel": "persistent"}
    return {
        "lstm": lambda: gatewise.LSTM(44, 52, num_layers=2, bidirectional=True, **options),
        "pair": lambda: gatewise.LSTM(64, 128, num_layers=2, **options),
        "gru": lambda: gatewise.GRU(64, 61, **options),
        "lean": lambda: gatewise.LSTM(64, 128, memory="lean", **options),
        "projection": lambda: gatewise.LSTM(64, 128, proj_size=32, **options),
        "layer-norm": lambda: gatewise.Recurrent(LayerNormLSTM(), 64, 128, **options),
    }[name]()


def step(layer, x, dtype):
    with torch.autocast("cuda", dtype):
        y = layer(x)[0]
    return torch.autograd.grad(y.float().square().sum(), [x, *layer.parameters()])


@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
@pytest.mark.parametrize("name", ["lstm", "pair", "gru", "lean", "projection", "layer-norm"])
def test_layers_under_autocast(name, dtype):
    torch.manual_seed(0)
    layer, x = layers(name), torch.randn(11, 7, 64 - 20 * (name == "lstm"), device="cuda", requires_grad=True)
    free = torch.full((1 << 26,), torch.nan, device="cuda")  # what calls allocate next
    del free
    first = step(layer, x, dtype)
    for _ in range(5):  # launched, recorded, replayed
        assert all(torch.equal(*pair) for pair in zip(step(layer, x, dtype), first, strict=True))
    layer.kernel = "eager"
    exact = step(layer.double(), x.detach().double().requires_grad_(), dtype)
    for one, other in zip(first, exact, strict=True):
        assert one.dtype == torch.float32
        assert (one - other).norm() < 16 * torch.finfo(dtype).eps * other.norm()


@pytest.mark.parametrize("hidden", [64, 61])
def test_a_captured_step_has_the_same_bits(hidden):
    torch.manual_seed(0)
    layer = gatewise.LSTM(64, hidden, num_layers=2, device="cuda", kernel="persistent")
    x = torch.randn(11, 7, 64, device="cuda", requires_grad=True)
    expected = [each.clone() for each in step(layer, x, torch.bfloat16)]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(layer, x, torch.bfloat16)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(layer, x, torch.bfloat16)
    for _ in range(3):
        for each in found:
            each.fill_(torch.nan)
        graph.replay()
        assert all(map(torch.equal, found, expected))
