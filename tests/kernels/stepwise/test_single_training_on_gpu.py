"""Training calls of one step on a GPU: alone, in graphs, under autocast, in a loop of many steps, and compiled."""

import pytest
import torch
from torch import nn

import gatewise
from gatewise import testing
from gatewise.cells import GRU, LSTM, SHIPPED
from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from gatewise.derivation.trace import is_pointwise
from gatewise.kernels.stepwise import stepwise
from gatewise.kernels.stepwise.single_criteria import is_single_training
from tests.pairwise import each_value, pairwise

pytestmark = pytest.mark.gpu

CELLS = [cell for cell in SHIPPED if is_pointwise(cell)]
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
FEW = ((1, 1024, 1024, 1), (3, 650, 650, 2), (8, 33, 264, 3), (5, 7, 5, 2), (8, 1024, 1024, 2), (2, 16, 2048, 1))
MORE = ((17, 264, 40, 3), (13, 520, 1992, 1), (64, 16, 512, 2), (32, 1024, 1024, 1))


def check(sizes, cell, dtype, **options):
    batch, features, hidden, layers = sizes
    options |= {"num_layers": layers, "dtype": dtype, "cell": cell, "needs_grad": True}
    problem = Problem(1, batch, features, hidden, **options)
    assert is_single_training(problem, Device.probe("cuda"))
    testing.check_kernel(stepwise, problem, "cuda")
    return problem


@pytest.mark.parametrize(("sizes", "cell", "dtype"), each_value(pairwise(FEW, CELLS, DTYPES)), ids=str)
def test_a_few_sequences(sizes, cell, dtype):
    problem = check(sizes, cell, dtype)
    inputs = testing.make_inputs(problem, "cuda")
    gradients = testing.make_gradients(problem, inputs)
    expected = testing.named(problem, *testing.run_kernel(stepwise, problem, inputs, gradients))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = testing.run_kernel(stepwise, problem, inputs, gradients)
    # Free memory has NaN, and three replays in a row give the same bits.
    for _ in range(3):
        for tensor in testing.named(problem, *captured).values():
            tensor.fill_(torch.nan)
        graph.replay()
        found = testing.named(problem, *captured)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("sizes", "cell", "dtype"), each_value(pairwise(MORE, CELLS, DTYPES[:2])), ids=str)
def test_more_sequences(sizes, cell, dtype):
    check(sizes, cell, dtype)


@pytest.mark.parametrize("batch", [3, 24])
@pytest.mark.parametrize("cell", [LSTM(), GRU()], ids=repr)
def test_float32_gradients_of_16_bit_weights(cell, batch):
    check((batch, 64, 256, 2), cell, torch.bfloat16, float32_gradients=True)


def kernels_of(run):
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]


def test_the_backward_pass_of_a_layer_takes_two_launches():
    layer = gatewise.LSTM(512, 512, device="cuda", kernel="stepwise")
    x = torch.randn(1, 2, 512, device="cuda", requires_grad=True)
    wanted = [x, *layer.parameters()]
    y, above = layer(x)[0], torch.ones(1, 2, 512, device="cuda")
    names = kernels_of(lambda: torch.autograd.grad(y, wanted, above, retain_graph=True))
    assert [name for name in names if "single" in name] == ["single_adjoint", "single_products"]
    assert not any("gemm" in name or "gemv" in name or "reduce" in name for name in names)


@pytest.mark.parametrize(("kind", "batch"), [("LSTM", 2), ("GRU", 20)])
def test_a_decoder_that_is_called_step_by_step_trains_as_with_pytorch(kind, batch):
    """A loop over time steps under autocast, with dropout off, replayed as a CUDA graph, for 100 updates."""

    def losses(layer, options):
        torch.manual_seed(0)
        readout = nn.Linear(64, 16, device="cuda")
        weights = [*layer.parameters(), *readout.parameters()]
        optimizer = torch.optim.SGD(weights, lr=0.5)
        x = torch.randn(6, batch, 32, device="cuda")
        target = torch.randint(16, (6 * batch,), device="cuda")

        def step():
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", torch.bfloat16):
                state, outputs = None, []
                for each in x:
                    y, state = layer(each[None], state, **options)
                    outputs.append(y[0])
                loss = nn.functional.cross_entropy(readout(torch.cat(outputs)).float(), target)
            loss.backward()
            optimizer.step()
            return loss

        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side):
                loss = step()
            found = []
            for _ in range(100):
                graph.replay()
                found.append(loss.clone())
        torch.cuda.synchronize()
        return torch.stack(found)

    torch.manual_seed(1)
    theirs = getattr(nn, kind)(32, 64, num_layers=2, device="cuda")
    ours = getattr(gatewise, kind)(32, 64, num_layers=2, device="cuda", kernel="stepwise")
    ours.load_state_dict(theirs.state_dict())
    expected, found = losses(theirs, {}), losses(ours, {})
    assert expected[-1] < 0.5 * expected[0]
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("cell", [LSTM(), GRU()], ids=repr)
def test_compiled_and_differentiated_twice(cell, monkeypatch):
    # A compiled call is computed as those of more steps, whose products may be in TF32.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    kind = {"lstm": gatewise.LSTM, "gru": gatewise.GRU}[cell.name]
    layer = kind(16, 32, device="cuda", kernel="stepwise")
    x = torch.randn(1, 3, 16, device="cuda", requires_grad=True)
    plain = torch.autograd.grad(layer(x)[0].sum(), [x, *layer.parameters()])
    compiled = torch.compile(layer, fullgraph=True)
    for one, other in zip(torch.autograd.grad(compiled(x)[0].sum(), [x, *layer.parameters()]), plain, strict=True):
        torch.testing.assert_close(one, other)
    (dx,) = torch.autograd.grad(layer(x)[0].sum(), x, create_graph=True)
    (twice,) = torch.autograd.grad(dx.square().sum(), x)
    with gatewise.use_kernel("eager"):
        (dx,) = torch.autograd.grad(kind.forward(_copy(kind, layer), x)[0].sum(), x, create_graph=True)
        (expected,) = torch.autograd.grad(dx.square().sum(), x)
    torch.testing.assert_close(twice, expected, rtol=1e-3, atol=1e-5)


def _copy(kind, layer):
    other = kind(16, 32, device="cuda")
    other.load_state_dict(layer.state_dict())
    return other
