"""The persistent kernel on a device: against the float64 oracle, and each of its traps."""

import pytest
import torch

from gatewise import testing
from gatewise.cells import LSTM
from gatewise.contract.device import Device
from gatewise.contract.errors import ExchangeTimeout
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.saved import Needs
from gatewise.kernels.persistent.kernel import persistent
from gatewise.kernels.persistent.launches import failure, launch_of

pytestmark = pytest.mark.gpu

SIXTEEN_BITS = (torch.bfloat16, torch.float16)
SHAPES = {
    "ptb-small": Problem(20, 20, 200, 200),
    "ptb-medium": Problem(12, 20, 650, 650),
    "ptb-large": Problem(8, 20, 1500, 1500),
    "tagger": Problem(9, 40, 64, 256, bidirectional=True, num_layers=2),
    "ragged": Problem(17, 70, 40, 256, layout=Layout.DEVICE_LENGTHS, bidirectional=True),
    "states-not-copied": Problem(31, 70, 64, 256, bidirectional=True),
    "states-not-copied-ragged": Problem(31, 70, 64, 256, layout=Layout.DEVICE_LENGTHS, bidirectional=True),
    "batch-beyond-one-pass": Problem(5, 300, 64, 512),
    "by-warpgroups-ragged": Problem(17, 190, 40, 333, layout=Layout.DEVICE_LENGTHS, bidirectional=True, resets=True),
    "clusters": Problem(9, 64, 128, 1024),
    "one-row": Problem(30, 1, 64, 1024),
    "weights-in-shared-memory": Problem(6, 16, 64, 2048),
    "padded-rows": Problem(17, 9, 40, 1000),
    "padded-rows-ragged": Problem(17, 30, 40, 264, layout=Layout.DEVICE_LENGTHS, bidirectional=True, resets=True),
    "padded-rows-lean": Problem(24, 20, 40, 301, layout=Layout.DEVICE_LENGTHS, bidirectional=True, lean=True),
    "padded-rows-of-two-layers": Problem(20, 20, 296, 296, num_layers=2, dropout=0.3),
    "projected": Problem(12, 20, 64, 512, 128, num_layers=2, bidirectional=True),
    "projected-odd": Problem(12, 20, 31, 250, 61, layout=Layout.DEVICE_LENGTHS, bidirectional=True),
}


def run(problem, seed=0, inputs=None):
    inputs = testing.make_inputs(problem, "cuda", seed=seed) if inputs is None else inputs
    gradients = testing.make_gradients(problem, inputs, seed=seed + 1) if problem.needs_grad else None
    return testing.named(problem, *testing.run_kernel(persistent, problem, inputs, gradients))


@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
@pytest.mark.parametrize("case", testing.CASES, ids=lambda case: case.name)
def test_edges(case, dtype):
    testing.check_kernel(persistent, case.problem(dtype=dtype), "cuda")


@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name, dtype):
    testing.check_kernel(persistent, SHAPES[name].replace(dtype=dtype, needs_grad=True), "cuda")


@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
@pytest.mark.parametrize("hidden_size", [64, 66, 61])
def test_weights_that_begin_anywhere(hidden_size, dtype):
    """Rows are read in words as wide as they are aligned to, from a first one on 16 bytes."""
    problem = Problem(9, 5, 31, hidden_size, dtype=dtype, needs_grad=True)
    inputs = testing.make_inputs(problem, "cuda")
    gradients = testing.make_gradients(problem, inputs, seed=1)
    expected = testing.named(problem, *testing.run_kernel(persistent, problem, inputs, gradients))
    moved = [torch.cat([weight.flatten()[:1], weight.flatten()])[1:].view_as(weight) for weight in inputs.weights]
    assert all(weight.data_ptr() % 16 for weight in moved)
    inputs = inputs._replace(weights=tuple(moved))
    found = testing.named(problem, *testing.run_kernel(persistent, problem, inputs, gradients))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_inference_keeps_nothing_and_equals_training():
    problem = Problem(9, 5, 31, 64, dtype=torch.bfloat16)
    inputs = testing.make_inputs(problem, "cuda")
    inferred = persistent.forward(problem, inputs)
    trained = persistent.forward(problem.replace(needs_grad=True), inputs)
    assert inferred.kept == ()
    assert torch.equal(inferred.y, trained.y)
    assert torch.equal(inferred.c_n, trained.c_n)


def test_kept_is_as_stated():
    problem = Problem(9, 5, 31, 61, dtype=torch.float16, needs_grad=True, num_layers=2, bidirectional=True)
    kept = persistent.forward(problem, testing.make_inputs(problem, "cuda")).kept
    stated = persistent.kept(problem, Device.probe("cuda"))
    assert [(tuple(tensor.shape), tensor.dtype) for tensor in kept] == [(spec.shape, spec.dtype) for spec in stated]


@pytest.mark.parametrize("bits", [0xFFFF, 0x7FFF], ids=["pattern", "plain"])
@pytest.mark.parametrize("place", ["x", "h0", "c0", "weights"])
@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
def test_nan_comes_out_as_nan(place, bits, dtype):
    """The pattern that means "not yet written" is itself a NaN: it must travel as another one."""
    problem = Problem(12, 9, 16, 64, dtype=dtype, needs_grad=True)
    inputs = testing.make_inputs(problem, "cuda")
    target = inputs.weights[1] if place == "weights" else getattr(inputs, place)
    flat = target.view(torch.int16).view(-1)
    flat[3] = bits - 0x10000 if bits > 0x7FFF else bits
    found = run(problem, inputs=inputs)
    assert found["y"].isnan().any()
    exact = testing.named(problem, *testing.oracle(problem, inputs, None))["y"]
    assert torch.equal(found["y"].isnan().cpu(), exact.isnan().cpu())
    assert not failure.flag(0).is_set()


def test_infinite_inputs_saturate():
    problem = Problem(6, 4, 16, 64, dtype=torch.bfloat16)
    inputs = testing.make_inputs(problem, "cuda")
    inputs.x[2, 1] = 3e38
    exact = testing.named(problem, *testing.oracle(problem, inputs, None))["y"]
    found = run(problem, inputs=inputs)["y"]
    assert torch.equal(found.isnan().cpu(), exact.isnan().cpu())


def test_the_same_bits_every_run():
    problem = Problem(50, 40, 64, 512, dtype=torch.bfloat16, needs_grad=True, bidirectional=True)
    first = run(problem)
    for _ in range(5):
        again = run(problem)
        assert all(torch.equal(first[name], again[name]) for name in first)


def test_two_streams_beside_each_other():
    problem = Problem(60, 64, 64, 512, dtype=torch.bfloat16, needs_grad=True)
    inputs = testing.make_inputs(problem, "cuda")
    gradients = testing.make_gradients(problem, inputs)
    alone = run(problem, inputs=inputs)
    streams, found = [torch.cuda.Stream() for _ in range(2)], [[], []]
    torch.cuda.synchronize()
    for _ in range(10):
        for stream, results in zip(streams, found, strict=True):
            with torch.cuda.stream(stream):
                results.append(testing.run_kernel(persistent, problem, inputs, gradients))
    torch.cuda.synchronize()
    for results in found:
        for result in results:
            named = testing.named(problem, *result)
            assert all(torch.equal(named[name], alone[name]) for name in alone)


def test_beside_a_kernel_that_fills_the_device():
    problem = Problem(60, 64, 64, 512, dtype=torch.bfloat16)
    inputs = testing.make_inputs(problem, "cuda")
    alone = persistent.forward(problem, inputs).y
    large = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    beside = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(beside):
        for _ in range(20):
            large @ large
    results = [persistent.forward(problem, inputs).y for _ in range(5)]
    torch.cuda.synchronize()
    assert all(torch.equal(result, alone) for result in results)


def test_captured_in_a_graph():
    problem = Problem(20, 16, 64, 256, dtype=torch.bfloat16, needs_grad=True, bidirectional=True, num_layers=2)
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
    expected = testing.named(problem, *testing.run_kernel(persistent, problem, inputs, gradients))
    found = testing.named(problem, *captured)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_strided_states():
    problem = Problem(7, 6, 16, 64, dtype=torch.bfloat16, needs_grad=True)
    inputs = testing.make_inputs(problem, "cuda")
    gradients = testing.make_gradients(problem, inputs)
    turned = inputs._replace(
        h0=torch.cat([inputs.h0, inputs.h0], -1)[..., : problem.hidden_size],
        c0=torch.cat([inputs.c0[..., :1], inputs.c0], -1)[..., 1:],
    )
    straight = testing.named(problem, *testing.run_kernel(persistent, problem, inputs, gradients))
    found = testing.named(problem, *testing.run_kernel(persistent, problem, turned, gradients))
    assert all(torch.equal(found[name], straight[name]) for name in straight)


@pytest.mark.parametrize("layout", [Layout.DENSE, Layout.DEVICE_LENGTHS], ids=str)
@pytest.mark.parametrize(
    "sizes", [(7, 6, 16, 64), (1, 5, 8, 32), (9, 1, 8, 61), (12, 70, 40, 200), (9, 20, 40, 264)], ids=str
)
def test_batch_first_is_computed_in_its_own_order(sizes, layout):
    problem = Problem(*sizes, dtype=torch.bfloat16, needs_grad=True, bidirectional=True, num_layers=2, layout=layout)
    inputs = testing.make_inputs(problem, "cuda")
    gradients = testing.make_gradients(problem, inputs)
    turned = inputs._replace(x=inputs.x.transpose(0, 1).contiguous().transpose(0, 1))
    straight = testing.named(problem, *testing.run_kernel(persistent, problem, inputs, gradients))
    found = testing.named(problem, *testing.run_kernel(persistent, problem, turned, gradients))
    assert found["y"].transpose(0, 1).is_contiguous()  # nothing was turned round
    for name, value in straight.items():
        # Weight gradients are sums over all tokens, in another order here.
        assert testing.relative_error(found[name], value) < 4e-3, name


def test_more_steps_than_cudnn_takes():
    problem = Problem(70_001, 2, 3, 8, dtype=torch.bfloat16, needs_grad=True)
    inputs = testing.make_inputs(problem, "cuda")
    whole = persistent.forward(problem, inputs)
    half = 35_000
    first = persistent.forward(problem.replace(time=half), inputs._replace(x=inputs.x[:half]))
    second = persistent.forward(
        problem.replace(time=70_001 - half), inputs._replace(x=inputs.x[half:], h0=first.h_n, c0=first.c_n)
    )
    assert torch.equal(whole.y[:half], first.y)
    # The cell state is carried in 16 bits between the pieces, in 32 inside a call.
    assert testing.relative_error(second.y, whole.y[half:].double().cpu()) < 0.01


def test_no_gradient_that_is_not_wanted():
    problem = Problem(5, 4, 16, 64, dtype=torch.bfloat16, needs_grad=True)
    inputs = testing.make_inputs(problem, "cuda")
    gradients = testing.make_gradients(problem, inputs)
    result = persistent.forward(problem, inputs)
    found = persistent.backward(problem, inputs, result, gradients, Needs(False, False, False))
    assert found.x is None
    assert found.h0 is None
    assert set(found.weights) == {None}


def test_gradients_of_the_outputs_may_be_absent():
    problem = Problem(5, 4, 16, 64, dtype=torch.bfloat16, needs_grad=True)
    inputs = testing.make_inputs(problem, "cuda")
    gradients = testing.make_gradients(problem, inputs)
    result = persistent.forward(problem, inputs)
    zeros = gradients._replace(h_n=torch.zeros_like(gradients.h_n), c_n=torch.zeros_like(gradients.c_n))
    absent = gradients._replace(h_n=None, c_n=None)
    expected = persistent.backward(problem, inputs, result, zeros, Needs())
    found = persistent.backward(problem, inputs, result, absent, Needs())
    assert torch.equal(found.x, expected.x)


def test_lengths_are_read_on_the_device_without_a_wait():
    problem = Problem(9, 5, 16, 64, dtype=torch.bfloat16, needs_grad=True, layout=Layout.DEVICE_LENGTHS)
    inputs = testing.make_inputs(problem, "cuda")
    gradients = testing.make_gradients(problem, inputs)
    run(problem, inputs=inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = persistent.forward(problem, inputs)
        persistent.backward(problem, inputs, result, gradients, Needs())
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_padding_may_hold_anything():
    problem = Problem(9, 5, 16, 64, dtype=torch.bfloat16, needs_grad=True, layout=Layout.DEVICE_LENGTHS)
    inputs = testing.make_inputs(problem, "cuda")
    clean = run(problem, inputs=inputs)
    beyond = torch.arange(problem.time, device="cuda").unsqueeze(1) >= inputs.lengths
    inputs.x[beyond] = float("nan")
    found = run(problem, inputs=inputs)
    assert all(torch.equal(found[name], clean[name]) for name in clean)


def test_the_state_of_a_sequence_of_length_0_may_hold_anything():
    problem = Problem(6, 5, 8, 24, dtype=torch.bfloat16, needs_grad=True, bidirectional=True)
    problem = problem.replace(layout=Layout.DEVICE_LENGTHS)
    inputs = testing.make_inputs(problem, "cuda")
    inputs = inputs._replace(lengths=torch.tensor([6, 0, 2, 0, 4], device="cuda"))
    inputs.h0[:, 1] = torch.nan
    found = run(problem, inputs=inputs)
    assert found["h_n"][:, 1].isnan().all()  # it is returned as it came
    assert not any(value.isnan().any() for name, value in found.items() if name.startswith("dweight"))


def test_a_wait_given_up_is_an_error_of_the_next_call_and_the_one_after_works(monkeypatch):
    problem = Problem(50, 64, 16, 1024, dtype=torch.bfloat16)
    inputs = testing.make_inputs(problem, "cuda")
    expected = persistent.forward(problem, inputs).y
    monkeypatch.setattr(failure, "PATIENCE", 0)
    lost = persistent.forward(problem, inputs).y
    torch.cuda.synchronize()
    monkeypatch.undo()
    assert lost.isnan().any()
    with pytest.raises(ExchangeTimeout, match="persistent"):
        persistent.forward(problem, inputs)
    assert torch.equal(persistent.forward(problem, inputs).y, expected)


def test_other_devices():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    problem = Problem(6, 4, 16, 256, dtype=torch.bfloat16)
    expected = persistent.forward(problem, testing.make_inputs(problem, "cuda:0")).y
    assert torch.equal(persistent.forward(problem, testing.make_inputs(problem, "cuda:1")).y.cpu(), expected.cpu())


def test_launches_name_what_does_not_fit():
    with pytest.raises(ValueError, match="do not fit"):
        launch_of("forward", LSTM(), 8192, 1, 1, torch.bfloat16, False, False, Device.probe("cuda"))
