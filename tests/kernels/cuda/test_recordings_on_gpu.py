"""A captured graph returns the same bits as launches after each event that could have made it stale."""

import contextlib
import threading

import pytest
import torch

import gatewise
from gatewise.kernels.cuda import graphs
from tests.logged import logged

pytestmark = pytest.mark.gpu

KERNELS = ("persistent", "stepwise")


@pytest.fixture(params=KERNELS)
def layer(request):
    torch.manual_seed(0)
    return gatewise.LSTM(40, 72, 2, device="cuda", dtype=torch.bfloat16, kernel=request.param)


def step(layer, x):
    y, (h_n, c_n) = layer(x)
    gradients = torch.autograd.grad(y.float().square().sum() + h_n.float().sum(), [x, *layer.parameters()])
    return [y.detach().clone(), c_n.detach().clone(), *[gradient.clone() for gradient in gradients]]


def launched(layer, x):
    """Return the results of the same call inside a graph of the caller, where the layer replays nothing."""
    copy = x.detach().clone().requires_grad_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), gatewise.for_cuda_graph(False):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = step(layer, copy)
        graph.replay()
    torch.cuda.current_stream().wait_stream(stream)
    return found


def warmed(layer):
    x = torch.randn(19, 9, 40, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for _ in range(6):
        step(layer, x)
    return x


def agree(found, expected):
    return all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def other_values(layer, x):
    with torch.no_grad():
        x.normal_()
        for weight in layer.parameters():
            weight.mul_(0.9)


def memory_given_back(layer, x):
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def workspaces_given_back(layer, x):
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    held = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(64)]
    del held


def free_memory_full_of_nan(layer, x):
    held = [torch.full((1 << power,), float("nan"), device="cuda") for power in range(6, 24) for _ in range(2)]
    del held


def parameters_moved(layer, x):
    layer.cpu()
    layer.cuda()


def other_shapes_between(layer, x):
    for time, batch in ((3, 9), (19, 4), (40, 11)):
        step(layer, torch.randn(time, batch, 40, device="cuda", dtype=torch.bfloat16, requires_grad=True))


def another_stream(layer, x):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(4):
            step(layer, x)
    torch.cuda.current_stream().wait_stream(stream)


EVENTS = (
    other_values,
    memory_given_back,
    workspaces_given_back,
    free_memory_full_of_nan,
    parameters_moved,
    other_shapes_between,
    another_stream,
)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
def test_the_bits_of_launches_after(layer, event):
    x = warmed(layer)
    for _ in range(3):
        event(layer, x)
        expected = launched(layer, x)
        for _ in range(4):
            assert agree(step(layer, x), expected)


@contextlib.contextmanager
def setting(name, value):
    before = getattr(torch.backends.cuda.matmul, name)
    setattr(torch.backends.cuda.matmul, name, value)
    try:
        yield
    finally:
        setattr(torch.backends.cuda.matmul, name, before)


def test_settings_of_products_are_part_of_the_key(layer):
    before = graphs.product_settings()
    with setting("allow_bf16_reduced_precision_reduction", False):
        assert graphs.product_settings() != before
        x = warmed(layer)
        expected = launched(layer, x)
        assert agree(step(layer, x), expected)
    assert agree(step(layer, x), launched(layer, x))


def test_deterministic_algorithms_are_part_of_the_key():
    before, enabled = graphs.product_settings(), torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(not enabled, warn_only=True)
    try:
        assert graphs.product_settings() != before
    finally:
        torch.use_deterministic_algorithms(enabled)


def test_a_failed_capture_has_no_side_effects(layer):
    stream = graphs.CaptureStream(torch.device("cuda", torch.cuda.current_device()))

    def waits():
        torch.cuda.synchronize()

    with logged() as messages:
        assert stream.record(waits) is None
    assert any("not captured" in each for each in messages)
    # The random number generator, the allocator and the stream still work.
    torch.randn(4, device="cuda")
    x = warmed(layer)
    assert agree(step(layer, x), launched(layer, x))
    del stream


def test_other_threads_draw_random_numbers_during_a_capture():
    stream = graphs.CaptureStream(torch.device("cuda", torch.cuda.current_device()))
    x = torch.randn(64, 64, device="cuda")
    into, drawn = torch.empty_like(x), []

    def draw():
        drawn.append(torch.randn(4, device="cuda"))

    def work():
        other = threading.Thread(target=draw)
        other.start()
        torch.mm(x, x, out=into)
        other.join()

    assert stream.record(work) is not None
    assert torch.isfinite(drawn[0]).all()
