"""Two layers in one launch: the oracle's numbers, whatever the stack, and a statement of where it is done."""

import functools

import pytest
import torch

from gatewise import testing
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.saved import Needs
from gatewise.kernels.persistent import dry_run, launches, replay
from gatewise.kernels.persistent.kernel import persistent
from gatewise.kernels.persistent.sizes import layer_pairs
from tests.kernels.cell_code import FUSED
from tests.kernels.persistent.emulation import assert_agrees, emulate, without_loops
from tests.pairwise import each_value, pairwise

H200 = Device.named("h200")

PROBLEM = Problem(4, 3, 6, 5, num_layers=2, dtype=torch.float64, needs_grad=True)
KINDS = [
    {},
    {"hidden_size": 8},
    {"num_layers": 3},
    {"num_layers": 4, "hidden_size": 8, "input_size": 9},
    {"num_layers": 5, "layout": Layout.DEVICE_LENGTHS},
    {"bias": False},
    {"num_layers": 3, "dropout": 0.4},
    {"num_layers": 4, "dropout": 0.4, "hidden_size": 8, "layout": Layout.HOST_LENGTHS},
    {"time": 1},
    {"batch": 1, "hidden_size": 16, "input_size": 8},
    {"layout": Layout.HOST_LENGTHS, "hidden_size": 8},
]


@pytest.fixture
def launched(monkeypatch):
    """The passes of pairs of layers that were launched."""
    emulate(monkeypatch)
    passes = []
    for name in ("forward_pass", "backward_pass"):
        real = getattr(launches, name)

        def counted(*given, name=name, real=real, between=None, **more):
            passes.extend([name] if between else [])
            real(*given, between=between, **more)

        monkeypatch.setattr(launches, name, counted)
    return passes


# Which passes take layers in pairs; the other one takes them one by one.
IN_PAIRS = {"both passes": (True, True), "forward": (True, False), "backward": (False, True)}


def _take(monkeypatch, forward, backward):
    asked = {False: forward, True: backward}
    monkeypatch.setattr(layer_pairs, "stacked_cut", lambda problem, device, *, backward: asked[backward] or None)


@pytest.mark.parametrize(
    ("options", "placed", "cell", "passes"),
    each_value(pairwise(KINDS, [("kept", False), ("kept", True), ("overwritten", False)], FUSED, [*IN_PAIRS]), most=5),
    ids=str,
)
def test_agrees_with_the_oracle_launched_and_replayed(request, options, placed, cell, passes, launched, monkeypatch):
    gates, by_row = placed
    _take(monkeypatch, *IN_PAIRS[passes])
    if gates == "overwritten":
        request.getfixturevalue("overwritten")
    problem = PROBLEM.replace(cell=cell, **options)
    assert_agrees(problem, rows_first=by_row, calls=5)
    taken = [name for name, asked in zip(("forward_pass", "backward_pass"), IN_PAIRS[passes], strict=True) if asked]
    assert sorted(set(launched)) == sorted(taken)


@pytest.mark.parametrize("needs", [Needs(x=False), Needs(state=False, weights=False), Needs(False, False)], ids=str)
def test_what_is_not_needed_is_none(needs, launched, monkeypatch):
    _take(monkeypatch, True, True)
    inputs = testing.make_inputs(PROBLEM)
    gradients = testing.make_gradients(PROBLEM, inputs)
    result = persistent.forward(PROBLEM, inputs)
    everything = persistent.backward(PROBLEM, inputs, result, gradients, Needs())
    found = persistent.backward(PROBLEM, inputs, result, gradients, needs)
    assert (found.x is not None, found.h0 is not None, found.weights[0] is not None) == needs
    for one, other in zip((*found[:3], *found.weights), (*everything[:3], *everything.weights), strict=True):
        assert one is None or torch.equal(one, other)


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_inference_equals_training(options, launched, monkeypatch):
    _take(monkeypatch, True, True)
    problem = PROBLEM.replace(**options)
    inputs = testing.make_inputs(problem)
    trained = persistent.forward(problem, inputs)
    inferred = persistent.forward(problem.replace(needs_grad=False), inputs)
    assert all(torch.equal(*both) for both in zip(inferred[:3], trained[:3], strict=True))
    assert inferred.kept == ()


@pytest.mark.parametrize(("options", "gates"), each_value(pairwise(KINDS, ["kept", "overwritten"])), ids=str)
def test_scratch_memory_is_as_predicted(request, options, gates, launched, monkeypatch):
    if gates == "overwritten":
        request.getfixturevalue("overwritten")
    _take(monkeypatch, True, True)
    problem = PROBLEM.replace(**({"input_size": 61, "hidden_size": 61} | options)).replace(time=6, batch=32)
    inputs = testing.make_inputs(problem)
    with without_loops():
        result = persistent.forward(problem, inputs)
        persistent.backward(problem, inputs, result, testing.make_gradients(problem, inputs), Needs())
        persistent.forward(problem.replace(needs_grad=False), inputs)
    masks = sum(mask.nbytes for mask in inputs.masks)
    for name, each in (("backward", problem), ("forward", problem.replace(needs_grad=False))):
        taken = replay._replays(name, each, False, Needs()).scratch_bytes + masks
        assert persistent.workspace_bytes(each, Device.probe("cpu")) == taken


SMALL = Problem(100, 16, 256, 256, num_layers=2, dtype=torch.bfloat16, needs_grad=True, captured=True)


def test_small_stacks_run_beside_each_other_and_wide_ones_do_not():
    for backward in (False, True):
        assert layer_pairs.stacked_cut(SMALL, H200, backward=backward)
        assert not layer_pairs.stacked_cut(SMALL.replace(batch=64, hidden_size=512), H200, backward=backward)
        assert layer_pairs.turns(SMALL.replace(num_layers=5), H200, backward=backward) == [(0, 1), (2, 3), (4,)]


@pytest.mark.parametrize(
    "options",
    [
        {"bidirectional": True},
        {"proj_size": 64},
        {"lean": True},
        {"traced": True},
        {"num_layers": 1},
    ],
    ids=str,
)
def test_what_is_computed_layer_by_layer(options):
    for backward in (False, True):
        assert layer_pairs.room_for_two(SMALL.replace(**options), H200, backward=backward) is None


def test_long_sequences_are_computed_in_pairs():
    long = SMALL.replace(time=200_000)
    for backward in (False, True):
        assert layer_pairs.stacked_cut(long, H200, backward=backward)


def test_the_decision_says_so():
    assert persistent.algorithm(SMALL, H200).count("layers in pairs") == 2
    assert "the last one" in persistent.algorithm(SMALL.replace(num_layers=3), H200)
    assert "pairs" not in persistent.algorithm(SMALL.replace(num_layers=1), H200)


def test_a_pair_is_stated_as_less_work_than_two_layers(monkeypatch):
    work = functools.partial(persistent.work, device=H200)
    stated, workspace = work(SMALL), persistent.workspace_bytes(SMALL, H200)
    monkeypatch.setattr(layer_pairs, "stacked_cut", lambda problem, device, *, backward: None)
    alone = work(SMALL)
    assert stated.exchanges < 0.7 * alone.exchanges
    assert stated.launches < alone.launches
    assert stated.matmul_flops < alone.matmul_flops
    dry_run._memory_of.cache_clear()
    assert workspace > persistent.workspace_bytes(SMALL, H200)
    dry_run._memory_of.cache_clear()
