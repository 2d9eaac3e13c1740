"""Training in little memory with emulated launches: the oracle's numbers, launched and replayed, in any segments."""

import pytest
import torch

from gatewise import testing
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.saved import Needs, Saved
from gatewise.functional import explicit
from gatewise.kernels.persistent import launches, replay
from gatewise.kernels.persistent.kernel import persistent
from gatewise.kernels.persistent.sizes import memory
from tests.kernels.cell_code import FUSED
from tests.kernels.persistent.emulation import assert_agrees, emulate, without_loops
from tests.pairwise import each_value, one_in, pairwise

PROBLEM = Problem(6, 3, 6, 5, dtype=torch.float64, needs_grad=True, lean=True)
KINDS = [
    {},
    {"hidden_size": 8, "input_size": 8},
    {"hidden_size": 8, "num_layers": 2, "time": 7},
    {"num_layers": 3, "bidirectional": True},
    {"hidden_size": 8, "input_size": 16, "bidirectional": True},
    {"num_layers": 3, "dropout": 0.4},
    {"bias": False, "num_layers": 2},
    {"time": 1, "num_layers": 2, "bidirectional": True},
    {"batch": 1, "hidden_size": 16, "input_size": 8, "time": 5},
    {"layout": Layout.HOST_LENGTHS, "bidirectional": True, "num_layers": 2},
    {"layout": Layout.DEVICE_LENGTHS, "hidden_size": 8},
]
COUNTS = (1,), (2,), (3,), (5,), (1, 1), (1, 3), (2, 1), (3, 2)  # segments: gates made again, gates kept


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    emulate(monkeypatch)


@pytest.mark.parametrize(
    ("options", "count", "by_row", "cell"), each_value(pairwise(KINDS, COUNTS, [False, True], FUSED), most=4), ids=str
)
def test_agrees_with_the_oracle_launched_and_replayed(cut, options, count, by_row, cell):
    cut(*count)
    problem = PROBLEM.replace(cell=cell, **options)
    assert_agrees(problem, rows_first=by_row)


@pytest.mark.parametrize(
    ("options", "count", "cell"), each_value(pairwise(KINDS, [(1,), (3,), (1, 1), (2, 3)], FUSED), most=4), ids=str
)
def test_agrees_with_the_oracle_where_gradients_take_the_place_of_gates(cut, overwritten, options, count, cell):
    cut(*count)
    problem = PROBLEM.replace(cell=cell, **options)
    assert_agrees(problem)


@pytest.mark.parametrize("count", COUNTS, ids=str)
def test_segments_are_computed_one_by_one(monkeypatch, cut, count):
    cut(*count)
    problem, launched, real = PROBLEM.replace(time=9, num_layers=2), [], launches.backward_pass

    def counted(launch, weights, tokens, **options):
        launched.append(tokens.time)
        real(launch, weights, tokens, **options)

    monkeypatch.setattr(launches, "backward_pass", counted)
    inputs = testing.make_inputs(problem)
    testing.run_kernel(persistent, problem, inputs, testing.make_gradients(problem, inputs))
    assert len(launched) == 2 * memory.lean_cut(problem).segments
    assert sum(launched) == 2 * 9


@pytest.mark.parametrize(
    ("options", "count", "gates", "cell"),
    each_value(pairwise(KINDS, COUNTS, ["made again", "overwritten"], FUSED)),
    ids=str,
)
def test_scratch_memory_is_as_predicted(request, cut, options, count, gates, cell):
    if gates == "overwritten":
        request.getfixturevalue("overwritten")
    cut(*count)
    problem = PROBLEM.replace(cell=cell, **({"input_size": 61, "hidden_size": 61} | options))
    problem = problem.replace(time=12, batch=32)
    inputs = testing.make_inputs(problem)
    with without_loops():
        result = persistent.forward(problem, inputs)
        gradients = testing.make_gradients(problem, inputs)
        persistent.backward(problem, inputs, result, gradients, Needs())
    masks = sum(mask.nbytes for mask in inputs.masks)
    taken = {
        name: replay._replays(name, problem, orders, Needs()).scratch_bytes
        for name, orders in (("forward", (True,)), ("backward", (True, True)))
    }
    assert persistent.workspace_bytes(problem, Device.probe("cpu")) == taken["backward"] + masks
    # Cuts are chosen by an estimate.
    kept, cut = replay.kept_bytes(problem), memory.lean_cut(problem)
    estimated = memory._lean_workspace_bytes(problem, cut, memory.holds_matrices(problem))
    assert 0.95 < (kept + taken["backward"] + masks) / (kept + estimated) < 1.1
    # The forward pass has no gradients beside it yet.
    gradients = inputs.x.nbytes + sum(own.nbytes for own in inputs.weights)
    between = 2 * len(memory.lean_forward_pieces(problem)) * inputs.h0.nbytes
    assert taken["forward"] <= 1.05 * (taken["backward"] + gradients + between)


@pytest.mark.parametrize("needs", [Needs(x=False), Needs(state=False, weights=False), Needs(False, False)], ids=str)
def test_what_is_not_needed_is_none(needs):
    problem = PROBLEM.replace(num_layers=2)
    inputs = testing.make_inputs(problem)
    gradients = testing.make_gradients(problem, inputs)
    result = persistent.forward(problem, inputs)
    all_found = persistent.backward(problem, inputs, result, gradients, Needs())
    for _ in range(4):
        found = persistent.backward(problem, inputs, result, gradients, needs)
        assert (found.x is not None, found.h0 is not None, found.weights[0] is not None) == needs
        for one, other in zip((*found[:3], *found.weights), (*all_found[:3], *all_found.weights), strict=True):
            assert one is None or torch.equal(one, other)


def test_what_an_empty_sequence_begins_with_is_not_read():
    problem = PROBLEM.replace(layout=Layout.DEVICE_LENGTHS, bidirectional=True, hidden_size=8)
    inputs = testing.make_inputs(problem, lengths=[6, 0, 3])
    gradients = testing.make_gradients(problem, inputs)
    clean = testing.named(problem, *testing.run_kernel(persistent, problem, inputs, gradients))
    inputs.h0[:, 1] = torch.nan
    found = testing.named(problem, *testing.run_kernel(persistent, problem, inputs, gradients))
    weights = [name for name in clean if "weight" in name]
    assert weights
    assert all(torch.equal(found[name], clean[name]) for name in weights)


@pytest.mark.parametrize("count", one_in(3, COUNTS), ids=str)
def test_a_second_backward_pass_finds_the_same(monkeypatch, cut, count):
    cut(*count)
    monkeypatch.setattr(explicit, "choose", lambda *args: None)
    problem = PROBLEM.replace(num_layers=2, bidirectional=True, time=9)
    inputs = testing.make_inputs(problem)
    gradients = testing.make_gradients(problem, inputs)
    saved = Saved("persistent", problem, inputs, persistent.forward(problem, inputs))
    first = explicit.run_backward(saved, gradients, Needs(), "persistent")
    assert saved.spent == persistent.single_use(problem) == (len(count) == 2)
    second = explicit.run_backward(saved, gradients, Needs(), "persistent")
    assert all(torch.equal(one, other) for one, other in zip(first[:3], second[:3], strict=True))


def test_keeps_cells_alone(cut):
    cut(1)
    problem = PROBLEM.replace(num_layers=2, bidirectional=True)
    (kept,) = persistent.forward(problem, testing.make_inputs(problem)).kept
    assert [spec.shape for spec in persistent.kept(problem, Device.named("h200"))] == [kept.shape]
    outputs, cells = 6 * 3 * 10, 2 * 6 * 3 * 8  # of the layer below; of each layer, 5 units rounded up to 8
    assert 8 * (outputs + 2 * cells) <= kept.nbytes < 8 * (outputs + 2 * cells) + 3 * 512


def test_keeps_the_gates_of_some_steps(cut):
    cut(2, 1)
    problem = PROBLEM.replace(time=8, bidirectional=True)
    inputs = testing.make_inputs(problem)
    (kept,) = persistent.forward(problem, inputs).kept
    steps = memory.lean_cut(problem).kept_steps
    assert 0 < steps < 8
    cells = 2 * 8 * 3 * 8  # 5 units rounded up to 8
    assert 8 * cells + 2 * steps * 3 * 32 * 8 <= kept.nbytes < 8 * cells + 2 * steps * 3 * 32 * 8 + 3 * 512
