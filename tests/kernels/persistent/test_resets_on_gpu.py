"""Resets in the persistent kernel on a device: against the float64 oracle, and what must not cross a border."""

import pytest
import torch

import gatewise
from gatewise import testing
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.saved import Needs
from gatewise.kernels.persistent import dry_run, replay
from gatewise.kernels.persistent.kernel import persistent
from gatewise.kernels.persistent.launches import failure
from gatewise.kernels.persistent.sizes import layer_pairs
from tests.kernels.cell_code import FUSED
from tests.pairwise import pairwise

pytestmark = pytest.mark.gpu

NUMBERS = {
    "bfloat16": {"dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16},
    "TF32": {"dtype": torch.float32, "allow_tf32": True},
    "exact": {"dtype": torch.float32},
}
EDGES = {case.name: case.shape for case in testing.CASES if case.shape.resets}
SHAPES = EDGES | {
    "both-directions": Problem(20, 40, 64, 256, bidirectional=True, num_layers=2, resets=True),
    "clusters": Problem(9, 64, 128, 1024, resets=True),
    "few-units": Problem(31, 3, 5, 1, bidirectional=True, resets=True),
    "large-weights": Problem(8, 20, 1500, 1500, resets=True),
    "many-rows": Problem(5, 500, 64, 512, layout=Layout.DEVICE_LENGTHS, resets=True),
    "odd": Problem(29, 21, 61, 203, bidirectional=True, resets=True),
    "one-row": Problem(30, 1, 64, 1024, resets=True),
    "one-step": Problem(1, 20, 64, 256, bidirectional=True, resets=True),
    "ragged": Problem(17, 70, 40, 256, layout=Layout.DEVICE_LENGTHS, bidirectional=True, resets=True),
    "rows-in-turn": Problem(5, 300, 64, 512, resets=True),
    "rows-in-turn-ragged": Problem(7, 300, 61, 512, layout=Layout.DEVICE_LENGTHS, bidirectional=True, resets=True),
}
PROJECTED = {
    "projected": Problem(12, 20, 64, 512, 128, num_layers=2, bidirectional=True, resets=True),
    "projected-odd": Problem(12, 20, 31, 250, 61, layout=Layout.DEVICE_LENGTHS, bidirectional=True, resets=True),
}
PAIRS = {
    "pair": Problem(40, 16, 61, 256, num_layers=2, resets=True),
    "pair-dropout": Problem(31, 20, 31, 128, num_layers=3, dropout=0.4, resets=True),
    "pair-odd-ragged": Problem(31, 40, 31, 61, num_layers=2, layout=Layout.DEVICE_LENGTHS, resets=True),
    "pair-one-row": Problem(31, 1, 31, 200, num_layers=2, resets=True),
}
COUNTS = (1,), (2,), (5,), (1, 1), (2, 2)  # segments of the lean passes: gates made again, gates kept


def check(problem, cell):
    problem = problem.replace(needs_grad=True, cell=cell)
    if cell.name != "lstm":
        problem = problem.replace(proj_size=0)
    if refusals := testing.why_not(persistent, problem, "cuda"):
        pytest.skip(f"persistent refuses: {'; '.join(refusals)}")
    testing.check_kernel(persistent, problem, "cuda")


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize(("name", "cell"), pairwise([*SHAPES], FUSED), ids=str)
def test_agrees_with_the_oracle(name, cell, numbers):
    check(SHAPES[name].replace(**NUMBERS[numbers]), cell)


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("name", PROJECTED)
def test_with_a_projection(name, numbers):
    check(PROJECTED[name].replace(**NUMBERS[numbers]), FUSED[0])


@pytest.mark.parametrize(("name", "numbers", "count", "cell"), pairwise([*SHAPES], [*NUMBERS], COUNTS, FUSED), ids=str)
def test_in_little_memory(cut, name, numbers, count, cell):
    cut(*count)
    check(SHAPES[name].replace(lean=True, proj_size=0, **NUMBERS[numbers]), cell)


@pytest.mark.parametrize(("name", "numbers", "cell"), pairwise([*PAIRS], [*NUMBERS], FUSED), ids=str)
def test_layers_in_pairs(request, monkeypatch, name, numbers, cell):
    monkeypatch.setattr(layer_pairs, "stacked_cut", layer_pairs.room_for_two)
    for remembered in (replay._replays, replay.stack_of, dry_run._memory_of):
        remembered.cache_clear()
        request.addfinalizer(remembered.cache_clear)
    problem = PAIRS[name].replace(needs_grad=True, **NUMBERS[numbers])
    if layer_pairs.room_for_two(problem, Device.probe("cuda"), backward=True) is None:
        pytest.skip("two layers have no room on this device")
    check(problem, cell)


@pytest.mark.parametrize("numbers", NUMBERS)
def test_rows_that_end_where_segments_do(cut, numbers):
    """A mark in the padding, right behind a row's end, is no border, even where a launch ends there."""
    cut(3)
    ragged = {"layout": Layout.DEVICE_LENGTHS, "bidirectional": True}
    problem = Problem(6, 40, 64, 256, lean=True, needs_grad=True, resets=True, **ragged, **NUMBERS[numbers])
    lengths = [6, 4, 2, 3, 0] * 8
    inputs = testing.make_inputs(problem, "cuda", lengths=lengths)
    inputs.resets[2:5] = True
    gradients = testing.make_gradients(problem, inputs)
    found = testing.named(problem, *testing.run_kernel(persistent, problem, inputs, gradients))
    for name, value in testing.named(problem, *testing.oracle(problem, inputs, gradients)).items():
        assert testing.relative_error(found[name], value) < 0.03, name


def results(problem, inputs):
    result, found = testing.run_kernel(persistent, problem, inputs, testing.make_gradients(problem, inputs))
    return dict(zip(("y", "h_n", "c_n", "x", "h0", "c0"), (*result[:3], *found[:3]), strict=True)), found.weights


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("lean", [False, True])
def test_marks_that_are_not_set_change_no_bit(numbers, lean):
    problem = Problem(20, 40, 64, 256, bidirectional=True, needs_grad=True, lean=lean, **NUMBERS[numbers])
    inputs = testing.make_inputs(problem, "cuda")
    plain, weights = results(problem, inputs)
    resets = torch.zeros(20, 40, dtype=torch.bool, device="cuda")
    found, others = results(problem.replace(resets=True), inputs._replace(resets=resets))
    assert all(torch.equal(found[name], plain[name]) for name in plain)
    # The gradient of the recurrent weights may add up in another order.
    assert all(testing.relative_error(*both) < 0.02 for both in zip(others, weights, strict=True))


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("lean", [False, True])
def test_marks_at_every_step_leave_single_steps(numbers, lean):
    problem = Problem(6, 40, 64, 256, needs_grad=True, lean=lean, resets=True, **NUMBERS[numbers])
    inputs = testing.make_inputs(problem, "cuda")
    inputs = inputs._replace(resets=torch.ones_like(inputs.resets))
    one = problem.replace(time=1, batch=240, resets=False)
    zeros = torch.zeros(1, 240, 256, dtype=problem.dtype, device="cuda")
    alone = inputs._replace(x=inputs.x.reshape(1, 240, 64), h0=zeros, c0=zeros, resets=None)
    found, expected = persistent.forward(problem, inputs), persistent.forward(one, alone)
    assert testing.relative_error(found.y.reshape(1, 240, 256), expected.y) < 0.01
    gradients, _ = results(problem, inputs)
    assert not gradients["h0"].any()
    assert not gradients["c0"].any()


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize(("numbers", "cell"), pairwise([*NUMBERS], FUSED), ids=str)
def test_nan_stays_in_its_episode(numbers, cell, lean):
    problem = Problem(12, 40, 16, 256, bidirectional=True, needs_grad=True, lean=lean, resets=True, cell=cell)
    problem = problem.replace(**NUMBERS[numbers])
    resets = torch.zeros(12, 40, dtype=torch.bool, device="cuda")
    resets[[0, 4, 9], 3] = True
    inputs = testing.make_inputs(problem, "cuda")._replace(resets=resets)
    inputs.h0[0, 3] = inputs.c0[0, 3] = torch.nan  # which the forward direction does not read
    clean, _ = results(problem, inputs)
    assert all(tensor.isfinite().all() for tensor in clean.values())
    broken = torch.zeros_like(resets)
    broken[4:9, 3] = True
    for value in (torch.nan, torch.inf):
        dirty = inputs._replace(x=inputs.x.masked_fill(broken.unsqueeze(2), value))
        found, _ = results(problem, dirty)
        if value is torch.nan:
            assert found["y"][broken].isnan().all()
        assert not failure.flag(0).is_set()
        for name, expected in clean.items():
            tensor = found[name]
            if name in ("x", "y"):
                tensor, expected = tensor[~broken], expected[~broken]
            if numbers == "TF32":  # the powers of two that are taken out of a row depend on the steps before
                assert testing.relative_error(tensor, expected) < 1e-3, name
            else:
                assert torch.equal(tensor, expected), name


@pytest.mark.parametrize("by_address", [False, True], ids=["written over", "elsewhere"])
@pytest.mark.parametrize(
    "problem",
    [
        Problem(40, 16, 32, 64, bidirectional=True),
        Problem(40, 16, 32, 61, num_layers=2),
        Problem(40, 16, 32, 64, lean=True),
        Problem(40, 16, 32, 64, layout=Layout.DEVICE_LENGTHS),
    ],
    ids=["both directions", "two layers", "lean", "ragged"],
)
def test_replayed_calls_read_the_resets_of_the_call(problem, by_address):
    """Calls of one shape replay the same graph; calls without resets have graphs of their own."""
    problem = problem.replace(dtype=torch.float32, needs_grad=True, resets=True)
    replay._replays.cache_clear()
    replay.stack_of.cache_clear()
    inputs = testing.make_inputs(problem, "cuda")
    gradients = testing.make_gradients(problem, inputs)
    other = problem.replace(resets=False)
    for seed in range(6):
        resets = torch.rand(40, 16, generator=torch.Generator().manual_seed(seed)) < 0.2
        given = inputs._replace(resets=resets.to("cuda")) if by_address else inputs
        given.resets.copy_(resets)
        for own, arguments in ((problem, given), (other, given._replace(resets=None))):
            found = testing.named(own, *testing.run_kernel(persistent, own, arguments, gradients))
            exact = testing.named(own, *testing.oracle(own, arguments, gradients))
            for name, value in exact.items():
                assert testing.relative_error(found[name], value) < 1e-4, name
            del found
    if not by_address:
        orders = (True, True) if problem.lean else False
        assert replay._replays("backward", problem, orders, Needs()).replayed > 0


def test_in_a_graph_of_the_caller():
    layer = gatewise.LSTM(16, 64, num_layers=2, device="cuda", dtype=torch.bfloat16, kernel="persistent")
    x, resets = torch.randn(20, 9, 16, device="cuda", dtype=torch.bfloat16), torch.zeros(20, 9, device="cuda").bool()
    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                layer(x, resets=resets)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y, _ = layer(x, resets=resets)
        for seed in range(3):
            resets.copy_(torch.rand(20, 9, generator=torch.Generator().manual_seed(seed)) < 0.3)
            graph.replay()
            expected, _ = layer(x, resets=resets)
            assert torch.equal(y, expected)


def test_a_training_step_of_a_layer():
    """Through autograd, in the order of rows, with resets that are integers."""
    torch.manual_seed(0)
    layer = gatewise.LSTM(16, 64, bidirectional=True, batch_first=True, device="cuda", kernel="persistent")
    theirs = gatewise.LSTM(16, 64, bidirectional=True, batch_first=True, device="cuda", kernel="eager")
    theirs.load_state_dict(layer.state_dict())
    x = torch.randn(9, 20, 16, device="cuda")
    resets = (torch.rand(9, 20, device="cuda") < 0.2).to(torch.uint8)
    found, expected = [], []
    for own, into in ((layer, found), (theirs, expected)):
        leaf = x.clone().requires_grad_()
        y, (h_n, c_n) = own(leaf, resets=resets)
        (y.square().sum() + h_n.sum() + c_n.sum()).backward()
        into += [y, h_n, c_n, leaf.grad, *(weight.grad for weight in own.parameters())]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
