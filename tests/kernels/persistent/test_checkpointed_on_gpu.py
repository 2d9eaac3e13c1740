"""Training in little memory on a device: against the float64 oracle, beside the ordinary way, and by its peak."""

import pytest
import torch

from gatewise import testing
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.saved import Needs
from gatewise.kernels.persistent import replay
from gatewise.kernels.persistent.kernel import persistent
from gatewise.selection import cost
from gatewise.selection.timing import peak_memory

pytestmark = pytest.mark.gpu

CASES = [case for case in testing.CASES if not case.shape.proj_size]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = {
    "tagger": Problem(40, 40, 64, 256, bidirectional=True, num_layers=2),
    "ragged": Problem(33, 70, 40, 256, layout=Layout.DEVICE_LENGTHS, bidirectional=True),
    "ragged-odd-sizes": Problem(29, 9, 31, 203, layout=Layout.HOST_LENGTHS, bidirectional=True, num_layers=2),
    "batch-beyond-one-pass": Problem(7, 300, 64, 512),
    "ragged-beyond-one-pass": Problem(9, 530, 24, 512, layout=Layout.DEVICE_LENGTHS, bidirectional=True),
    "clusters": Problem(9, 64, 128, 1024),
    "many-segments": Problem(700, 3, 5, 40, bidirectional=True),
    "many-ragged-segments": Problem(700, 5, 3, 33, bidirectional=True, layout=Layout.DEVICE_LENGTHS),
    "allowed-to-round": Problem(20, 64, 64, 512, allow_tf32=True),
}


_PASSES = ("forward", 1), ("backward", 2)  # and of how many tensors the order counts


def lean(problem, dtype=torch.bfloat16):
    return problem.replace(dtype=dtype, needs_grad=True, lean=True)


def run(problem, inputs, gradients, needs=Needs()):  # noqa: B008
    return testing.named(problem, *testing.run_kernel(persistent, problem, inputs, gradients, needs))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_edges(case, dtype):
    testing.check_kernel(persistent, lean(case.problem(), dtype), "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_shapes(cut, name, dtype):
    for count in ((1,), (2,), (15,), (1, 1), (2, 2)):
        cut(*count)
        testing.check_kernel(persistent, lean(SHAPES[name], dtype), "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_errors_stay_near_those_of_the_ordinary_way(cut, dtype):
    """Sums of sixteen bits are rounded once a segment, and so are the states between segments."""
    cut(15)
    problem = lean(Problem(1000, 16, 64, 64), dtype)
    inputs = testing.make_inputs(problem, "cuda")
    gradients = testing.make_gradients(problem, inputs)
    exact = testing.named(problem, *testing.oracle(problem, inputs, gradients))
    ours = run(problem, inputs, gradients)
    ordinary = run(problem.replace(lean=False), inputs, gradients)
    unit = torch.finfo(dtype).eps
    for name, value in exact.items():
        error, other = (testing.relative_error(found[name], value) for found in (ours, ordinary))
        assert error <= 1.2 * other + unit / 2, name


def test_keeps_cells_alone():
    problem = lean(Problem(9, 5, 31, 61, num_layers=2, bidirectional=True), torch.float16)
    kept = persistent.forward(problem, testing.make_inputs(problem, "cuda")).kept
    stated = persistent.kept(problem, Device.probe("cuda"))
    assert [(tuple(tensor.shape), tensor.dtype) for tensor in kept] == [(spec.shape, spec.dtype) for spec in stated]


@pytest.mark.parametrize("count", [(1,), (2,), (3,), (2, 1)], ids=str)
def test_the_same_bits_every_run_launched_and_replayed(cut, count):
    cut(*count)
    problem = lean(Problem(150, 40, 64, 256, bidirectional=True))
    inputs = testing.make_inputs(problem, "cuda")
    gradients = testing.make_gradients(problem, inputs)
    first = run(problem, inputs, gradients)
    for _ in range(8):
        again = run(problem, inputs, gradients)
        assert all(torch.equal(first[name], again[name]) for name in first)
        del again  # so that its addresses come back
    replayed = [replay._replays(name, problem, (True,) * n, Needs()).replayed for name, n in _PASSES]
    assert min(replayed) > 0


@pytest.mark.parametrize("bits", [0xFFFF, 0x7FFF], ids=["pattern", "plain"])
def test_nan_comes_out_as_nan(bits):
    problem = lean(Problem(12, 9, 16, 64))
    inputs = testing.make_inputs(problem, "cuda")
    inputs.x.view(torch.int16).view(-1)[3] = bits - 0x10000 if bits > 0x7FFF else bits
    gradients = testing.make_gradients(problem, inputs)
    exact = testing.named(problem, *testing.oracle(problem, inputs, gradients))
    for name, value in run(problem, inputs, gradients).items():
        assert torch.equal(value.isnan().cpu(), exact[name].isnan().cpu()), name


def test_what_follows_a_sequence_is_not_read():
    problem = lean(Problem(50, 6, 24, 64, layout=Layout.DEVICE_LENGTHS, bidirectional=True))
    inputs = testing.make_inputs(problem, "cuda", lengths=[50, 0, 1, 17, 33, 49])
    gradients = testing.make_gradients(problem, inputs)
    clean = run(problem, inputs, gradients)
    beyond = torch.arange(50, device="cuda").unsqueeze(1) >= inputs.lengths
    dirty = inputs._replace(x=inputs.x.masked_fill(beyond.unsqueeze(2), torch.nan))
    found = run(problem, dirty, gradients)
    assert all(torch.equal(found[name], clean[name]) for name in clean)


@pytest.mark.parametrize("count", [(1,), (3,), (1, 1)], ids=str)
def test_batch_first_input_and_a_gradient_that_is_one_number(cut, count):
    cut(*count)
    problem = lean(Problem(50, 6, 24, 64, num_layers=2))
    inputs = testing.make_inputs(problem, "cuda")
    gradients = testing.make_gradients(problem, inputs)
    gradients = gradients._replace(y=torch.ones((), device="cuda", dtype=problem.dtype).expand_as(gradients.y))
    straight = run(problem, inputs, gradients._replace(y=gradients.y.contiguous()))
    turned = inputs._replace(x=inputs.x.transpose(0, 1).contiguous().transpose(0, 1))
    for _ in range(4):
        found = run(problem, turned, gradients)
        assert all(torch.equal(found[name], straight[name]) for name in straight)


def test_no_gradient_that_is_not_wanted():
    problem = lean(Problem(12, 4, 16, 64))
    inputs = testing.make_inputs(problem, "cuda")
    gradients = testing.make_gradients(problem, inputs)
    whole = run(problem, inputs, gradients)
    for needs in (Needs(x=False), Needs(state=False), Needs(weights=False)):
        found = run(problem, inputs, gradients, needs)
        assert found.keys() < whole.keys()
        assert all(torch.equal(found[name], whole[name]) for name in found)


def test_captured_in_a_graph():
    problem = lean(Problem(20, 16, 64, 256, bidirectional=True, num_layers=2))
    inputs = testing.make_inputs(problem, "cuda")
    gradients = testing.make_gradients(problem, inputs)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        testing.run_kernel(persistent, problem, inputs, gradients)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = testing.run_kernel(persistent, problem, inputs, gradients)
    inputs.x.copy_(testing.make_inputs(problem, "cuda", seed=5).x)
    graph.replay()
    torch.cuda.synchronize()
    expected, found = run(problem, inputs, gradients), testing.named(problem, *captured)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "problem",
    [
        Problem(200, 64, 256, 256),
        Problem(512, 32, 512, 512),
        Problem(200, 64, 256, 256, bidirectional=True, num_layers=2),
        Problem(200, 64, 250, 250),
    ],
    ids=["plain", "long", "stack", "odd"],
)
def test_peak_is_a_third_of_nn_lstms_and_as_predicted(problem):
    problem = lean(problem)
    inputs = testing.make_inputs(problem, "cuda")
    gradients = testing.make_gradients(problem, inputs)
    options = {"bidirectional": problem.bidirectional, "device": "cuda", "dtype": problem.dtype}
    rival = torch.nn.LSTM(problem.input_size, problem.hidden_size, problem.num_layers, **options)
    x, h0, c0 = (tensor.clone().requires_grad_() for tensor in inputs[:3])

    def theirs():
        for tensor in (x, h0, c0, *rival.parameters()):
            tensor.grad = None
        y, (h_n, c_n) = rival(x, (h0, c0))
        torch.autograd.backward((y, h_n, c_n), tuple(gradients))

    def ours():
        testing.run_kernel(persistent, problem, inputs, gradients)

    theirs()
    for tensor in (x, h0, c0, *rival.parameters()):
        tensor.grad = None
    ours()
    owned = sum(tensor.nbytes for tensor in (*gradients, *inputs[:3], *inputs.weights))
    peak = peak_memory(ours, "cuda")
    beyond, their_beyond = peak - owned, peak_memory(theirs, "cuda") - owned
    assert beyond <= 0.35 * their_beyond
    device = Device.probe("cuda")
    stated = cost.peak_bytes(persistent, problem, device)
    assert 0.9 <= stated / peak <= 1.1
