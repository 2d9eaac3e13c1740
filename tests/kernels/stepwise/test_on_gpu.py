"""The kernel `stepwise` on a GPU: captured and launched, on several streams and threads, in every layout."""

import subprocess
import sys
import textwrap
import threading

import pytest
import torch

import gatewise
from gatewise import testing
from gatewise.cells import SHIPPED
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.saved import Needs
from gatewise.derivation.trace import is_pointwise
from gatewise.kernels.stepwise import layer, recording, stepwise
from gatewise.kernels.stepwise.padding import padded
from gatewise.kernels.stepwise.plan import memory_bytes
from gatewise.kernels.stepwise.product_layout import ProductLayout
from gatewise.kernels.stepwise.single_criteria import is_single_call
from gatewise.selection import cost
from tests.kernels.cell_code import FUSED

pytestmark = pytest.mark.gpu

SHAPES = {
    "large-batch": Problem(6, 256, 64, 512),
    "encoder": Problem(9, 128, 64, 512, num_layers=2, bidirectional=True),
    "large-weights": Problem(5, 20, 64, 2048),
    "ptb-medium": Problem(12, 20, 650, 650),
    "ragged": Problem(37, 70, 40, 256, layout=Layout.DEVICE_LENGTHS, bidirectional=True),
    "projected": Problem(17, 30, 64, 256, proj_size=96, bidirectional=True, layout=Layout.HOST_LENGTHS),
    "few-steps": Problem(2, 64, 64, 512),
}
LAYOUTS = [
    ProductLayout(),
    ProductLayout(transposed_forward=True, transposed_backward=True, split_k=4),
    ProductLayout(column_major=True),
    ProductLayout(True, True, True, 4),
]
RAGGED = Problem(
    45, 40, 96, 160, num_layers=2, bidirectional=True, layout=Layout.DEVICE_LENGTHS, dtype=torch.bfloat16
).replace(needs_grad=True)


@pytest.fixture
def inputs():
    return testing.make_inputs(RAGGED, "cuda")


def run(problem, inputs):
    gradients = testing.make_gradients(problem, inputs) if problem.needs_grad else None
    return testing.named(problem, *testing.run_kernel(stepwise, problem, inputs, gradients))


def same(found, expected):
    return all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("cell", [cell for cell in SHIPPED if is_pointwise(cell)], ids=repr)
@pytest.mark.parametrize(
    "sizes",
    [
        (1, 1024, 1024, 1),
        (3, 650, 650, 2),
        (8, 33, 264, 3),
        (5, 7, 5, 2),
        (8, 1024, 1024, 2),
        (17, 264, 40, 3),
        (13, 520, 1992, 1),
        (64, 16, 512, 2),
    ],
    ids=str,
)
def test_calls_of_one_step(sizes, cell, dtype):
    batch, features, hidden, layers = sizes
    if batch > 8 and dtype.itemsize > 2:
        pytest.skip("more sequences are for tensor cores")
    problem = Problem(1, batch, features, hidden, num_layers=layers, dtype=dtype, cell=cell, needs_grad=False)
    assert is_single_call(problem, Device.probe("cuda"))
    inputs = testing.make_inputs(problem, "cuda")
    for _ in range(3):
        testing.check_kernel(stepwise, problem, "cuda")
    expected = stepwise.forward(problem, inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = stepwise.forward(problem, inputs)
    for tensor in (inputs.x, inputs.h0):
        tensor.neg_()
    graph.replay()
    for one, other in zip(captured[:3], stepwise.forward(problem, inputs)[:3], strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(captured.y, expected.y)


def test_threads_call_one_step_at_once():
    problem = Problem(1, 2, 64, 512, num_layers=2, needs_grad=False)
    each = [testing.make_inputs(problem, "cuda", seed=seed) for seed in range(6)]
    expected = [stepwise.forward(problem, inputs) for inputs in each]
    wrong = []

    def call(inputs, known):
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            for _ in range(100):
                found = stepwise.forward(problem, inputs)
                if not all(torch.equal(one, other) for one, other in zip(found[:3], known[:3], strict=True)):
                    wrong.append(inputs)

    threads = [threading.Thread(target=call, args=pair) for pair in zip(each, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_layers_take_one_launch_for_a_step_of_a_few_sequences():
    layer = gatewise.LSTM(512, 512, num_layers=2, device="cuda", kernel="stepwise").eval()
    x = torch.randn(1, 1, 512, device="cuda")
    with torch.no_grad():
        layer(x)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            layer(x)
            torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert sum("single_call" in name for name in names) == 2
    assert not any("gemm" in name or "gemv" in name or "step_forward" in name for name in names)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name, dtype):
    testing.check_kernel(stepwise, SHAPES[name].replace(dtype=dtype, needs_grad=True), "cuda")


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", ["encoder", "ragged"])
def test_forms(name, layout, monkeypatch):
    monkeypatch.setattr(layer, "product_layout_of", lambda problem, device: layout)
    testing.check_kernel(stepwise, SHAPES[name].replace(dtype=torch.bfloat16, needs_grad=True), "cuda")


def over_cudnn(problem):
    inputs = testing.make_inputs(problem, "cuda")
    gradients = testing.make_gradients(problem, inputs)
    exact = testing.named(problem, *testing.oracle(problem, inputs, gradients))
    found = testing.named(problem, *testing.run_kernel(stepwise, problem, inputs, gradients))
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=problem.allow_tf32):
        there = testing.reference(problem, inputs, gradients, dtype=torch.float32, device="cuda")
    theirs = testing.named(problem, *there)
    return {
        name: testing.relative_error(found[name], exact[name]) / testing.relative_error(theirs[name], exact[name])
        for name in exact
    }


@pytest.mark.parametrize("sizes", [(20, 256, 512, 512), (20, 64, 1024, 1024)])
def test_never_less_precise_than_cudnn_in_tf32(sizes):
    assert max(over_cudnn(Problem(*sizes, allow_tf32=True, needs_grad=True)).values()) <= 1.2


def test_long_sums_are_as_precise_as_cudnns():
    assert over_cudnn(Problem(7, 100, 1500, 1500, needs_grad=True))["dx"] <= 1.2  # 6000 terms


def test_exact_where_tf32_is_not_allowed_whatever_products_are_allowed():
    problem = Problem(20, 64, 256, 256, needs_grad=True)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        testing.check_kernel(stepwise, problem, "cuda")
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def test_the_same_bits_at_other_addresses_and_after_release(inputs):
    first = run(RAGGED, inputs)
    weights = tuple(weight.clone() for weight in inputs.weights)
    moved = inputs._replace(x=inputs.x.clone(), h0=inputs.h0.clone(), c0=inputs.c0.clone(), weights=weights)
    assert same(run(RAGGED, moved), first)
    recording.release()
    assert same(run(RAGGED, inputs), first)


def test_a_larger_problem_takes_the_memory_and_a_smaller_one_works_afterwards(inputs):
    recording.release()
    first = run(RAGGED, inputs)
    large = Problem(9, 64, 64, 1024, dtype=torch.bfloat16, needs_grad=True)
    testing.check_kernel(stepwise, large, "cuda")
    assert same(run(RAGGED, inputs), first)


def test_a_first_call_in_inference_mode_leaves_memory_that_others_can_write(inputs):
    recording.release()
    with torch.inference_mode():
        inferred = stepwise.forward(RAGGED.replace(needs_grad=False), inputs)
    expected = run(RAGGED, inputs)
    assert torch.equal(inferred.y, expected["y"])


def test_more_streams_than_recorders_take_no_more_memory(inputs):
    recording.release()
    expected = run(RAGGED, inputs)
    streams = [torch.cuda.Stream() for _ in range(12)]
    torch.cuda.synchronize()
    reserved = []
    for _ in range(3):
        for stream in streams:
            with torch.cuda.stream(stream):
                assert same(run(RAGGED, inputs), expected)
        torch.cuda.synchronize()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[1] == reserved[2]


@pytest.mark.parametrize("time", [1, 3, 4, 31, 33, 200])
def test_any_number_of_steps(time):
    problem = Problem(time, 5, 16, 64, dtype=torch.float32, needs_grad=True)
    testing.check_kernel(stepwise, problem, "cuda")


def test_streams_and_threads_beside_each_other(inputs):
    expected = run(RAGGED, inputs)
    streams = [torch.cuda.Stream() for _ in range(6)]
    found, errors = [], []
    torch.cuda.synchronize()

    def work(stream):
        try:
            for _ in range(4):
                with torch.cuda.stream(stream):
                    found.append(run(RAGGED, inputs))
        except Exception as error:  # noqa: BLE001  a thread's error is shown by the test
            errors.append(error)

    # Two threads on each of three streams, one on each of the others.
    threads = [threading.Thread(target=work, args=(stream,)) for stream in (*streams, *streams[:3])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert errors == []
    assert len(found) == 36
    assert all(same(result, expected) for result in found)


def test_captured_in_a_graph_of_the_caller(inputs):
    expected = run(RAGGED, inputs)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    gradients = testing.make_gradients(RAGGED, inputs)
    with torch.cuda.stream(side):
        testing.run_kernel(stepwise, RAGGED, inputs, gradients)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = testing.run_kernel(stepwise, RAGGED, inputs, gradients)
    graph.replay()
    torch.cuda.synchronize()
    assert same(testing.named(RAGGED, *captured), expected)


def test_the_first_work_of_a_process_may_be_a_training_step():
    """The capture then runs on autograd's thread, where cuBLAS has not been used before."""
    step = """
        import torch, gatewise
        lstm = gatewise.LSTM(64, 64, kernel="stepwise", device="cuda")
        x = torch.ones(20, 8, 64, device="cuda", requires_grad=True)
        y, _ = lstm(x)
        y.sum().backward()
        assert x.grad.isfinite().all()
        torch.cuda.synchronize()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(step)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_lengths_are_read_without_a_wait(inputs):
    gradients = testing.make_gradients(RAGGED, inputs)
    testing.run_kernel(stepwise, RAGGED, inputs, gradients)
    torch.cuda.set_sync_debug_mode("error")
    try:
        testing.run_kernel(stepwise, RAGGED, inputs, gradients)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_calls_between_forward_and_backward_change_nothing(inputs):
    gradients = testing.make_gradients(RAGGED, inputs)
    expected = run(RAGGED, inputs)
    result = stepwise.forward(RAGGED, inputs)
    run(RAGGED, testing.make_inputs(RAGGED, "cuda", seed=7))
    found = testing.named(RAGGED, result, stepwise.backward(RAGGED, inputs, result, gradients, Needs()))
    assert same(found, expected)


def test_a_second_backward_repeats_the_forward():
    module = gatewise.LSTM(16, 64, device="cuda", kernel="stepwise")
    x = torch.randn(9, 5, 16, device="cuda", requires_grad=True)
    y = module(x)[0].square().sum()
    (first,) = torch.autograd.grad(y, x, retain_graph=True)
    (second,) = torch.autograd.grad(y, x)
    assert torch.equal(first, second)


def test_more_steps_than_cudnn_takes():
    problem = Problem(70_001, 2, 3, 8, dtype=torch.float32)
    inputs = testing.make_inputs(problem, "cuda")
    whole = stepwise.forward(problem, inputs)
    half = 35_000
    first = stepwise.forward(problem.replace(time=half), inputs._replace(x=inputs.x[:half]))
    rest = inputs._replace(x=inputs.x[half:], h0=first.h_n, c0=first.c_n)
    second = stepwise.forward(problem.replace(time=70_001 - half), rest)
    assert testing.relative_error(torch.cat([first.y, second.y]), whole.y.double().cpu()) < 1e-5


@pytest.mark.parametrize(
    "sizes", [(50, 256, 1024, 1024), (30, 256, 700, 1500)], ids=str
)  # sizes of the second are rounded up
def test_memory_is_what_was_predicted(sizes):
    problem = Problem(*sizes, dtype=torch.bfloat16, needs_grad=True)
    inputs = testing.make_inputs(problem, "cuda")
    gradients = testing.make_gradients(problem, inputs)

    def call():
        result = stepwise.forward(problem, inputs)
        return result, stepwise.backward(problem, inputs, result, gradients, Needs())

    recording.release()
    call()
    torch.cuda.synchronize()
    # The buffers of captured steps and of cuBLAS that stay allocated between calls exist already.
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = call()
    torch.cuda.synchronize()
    device = Device.probe("cuda")
    measured = torch.cuda.max_memory_allocated() - before + memory_bytes(padded(problem, device) or problem)
    predicted = cost.peak_bytes(stepwise, problem, device)
    assert len(kept) == 2
    assert 0.9 <= measured / predicted <= 1.1


def test_other_devices(inputs):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    expected = run(RAGGED, inputs)
    found = run(RAGGED, testing.make_inputs(RAGGED, "cuda:1"))
    assert all(torch.equal(found[name].cpu(), expected[name].cpu()) for name in expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_captured_steps_of_one_cell_are_not_replayed_for_another(dtype):
    problems = [Problem(9, 16, 24, 64, dtype=dtype, needs_grad=True, cell=cell) for cell in FUSED]
    for problem in (*problems, *problems):
        testing.check_kernel(stepwise, problem, "cuda")
