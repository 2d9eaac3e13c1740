"""Resets in emulated launches: every schedule's results and gradients are the oracle's, launched and replayed."""

from collections.abc import Mapping
from typing import ClassVar

import pytest
import torch

from gatewise import testing
from gatewise.cells import Cell
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.saved import Needs
from gatewise.kernels.cuda import toolchain
from gatewise.kernels.persistent import replay
from gatewise.kernels.persistent.kernel import persistent
from gatewise.kernels.persistent.launches import Operand, Tokens, compiled
from gatewise.kernels.persistent.sizes import layer_pairs, memory
from tests.kernels.cell_code import FUSED
from tests.kernels.persistent.emulation import assert_agrees, emulate, without_loops, write_operands
from tests.pairwise import each_value, pairwise

PROBLEM = Problem(6, 4, 6, 5, dtype=torch.float64, needs_grad=True, resets=True)
KINDS = [
    {},
    {"hidden_size": 8, "input_size": 8, "bidirectional": True},
    {"num_layers": 3, "bidirectional": True},
    {"num_layers": 2, "dropout": 0.4},
    {"num_layers": 2, "hidden_size": 8, "time": 7},
    {"bias": False, "num_layers": 2},
    {"time": 1, "num_layers": 2, "bidirectional": True},
    {"batch": 1, "hidden_size": 16, "input_size": 8},
    {"layout": Layout.HOST_LENGTHS, "bidirectional": True, "num_layers": 2},
    {"layout": Layout.DEVICE_LENGTHS, "hidden_size": 8},
]
COUNTS = (1,), (2,), (3,), (5,), (1, 1), (1, 3), (2, 1), (3, 2)  # segments: gates made again, gates kept
H200 = Device.named("h200")


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    emulate(monkeypatch)


@pytest.mark.parametrize(
    ("options", "by_row", "cell"), each_value(pairwise(KINDS, [False, True], FUSED), most=4), ids=str
)
def test_single_layers(options, by_row, cell):
    assert_agrees(PROBLEM.replace(cell=cell, **options), rows_first=by_row)


@pytest.mark.parametrize(
    ("options", "gates", "cell"),
    each_value(
        pairwise(
            [kind for kind in KINDS if "num_layers" in kind and "bidirectional" not in kind], ["kept", "over"], FUSED
        ),
        most=3,
    ),
    ids=str,
)
def test_layers_in_pairs(request, monkeypatch, options, gates, cell):
    if gates == "over":
        request.getfixturevalue("overwritten")
    monkeypatch.setattr(layer_pairs, "stacked_cut", lambda problem, device, *, backward: True)
    assert_agrees(PROBLEM.replace(cell=cell, **options))


@pytest.mark.parametrize(
    ("options", "count", "gates", "cell"),
    each_value(pairwise(KINDS, COUNTS, ["made again", "over"], FUSED), most=4),
    ids=str,
)
def test_in_little_memory(request, cut, options, count, gates, cell):
    if gates == "over":
        request.getfixturevalue("overwritten")
    cut(*count)
    assert_agrees(PROBLEM.replace(cell=cell, lean=True, **options))


@pytest.mark.parametrize("lean", [False, True])
def test_in_a_compiled_graph(lean):
    """Such calls allocate their tensors one by one, and may not change what they keep."""
    assert_agrees(PROBLEM.replace(traced=True, num_layers=2, bidirectional=True, lean=lean), calls=1)


@pytest.mark.parametrize(
    ("options", "layout"),
    each_value(
        pairwise(
            [{}, {"bidirectional": True, "num_layers": 2}, {"bias": False}, {"hidden_size": 13}],
            [Layout.DENSE, Layout.HOST_LENGTHS],
        )
    ),
    ids=str,
)
def test_projection(layout, options):
    problem = Problem(7, 5, 8, 16, proj_size=8, dtype=torch.float64, layout=layout, needs_grad=True, resets=True)
    assert_agrees(problem.replace(**options), calls=1)


def inputs_with(problem, resets, lengths=None):
    return testing.make_inputs(problem, lengths=lengths)._replace(resets=resets)


MARKED = {
    "first step": [0],
    "last step": [5],
    "at the ends of segments": [2, 3, 4],
    "every step": range(6),
    "none": [],
}
RAGGED = {"layout": Layout.DEVICE_LENGTHS}
PLACES = {
    "plain": {},
    "lean": {"lean": True},
    "projection": {"proj_size": 3},
    "ragged": RAGGED,
    "lean and ragged": {"lean": True, **RAGGED},
    "ragged projection": {"proj_size": 3, **RAGGED},
}


@pytest.mark.parametrize(("place", "steps"), each_value(pairwise([*PLACES], [*MARKED]), times=2))
def test_marked_steps(cut, steps, place):
    """Where borders lie: at h0, behind the last step, between segments of a lean pass, in the padding."""
    cut(3)
    problem = PROBLEM.replace(bidirectional=True, **PLACES[place])
    resets = torch.zeros(6, 4, dtype=torch.bool)
    resets[list(MARKED[steps])] = True
    # Some rows end where segments do, before a step that is marked.
    inputs = inputs_with(problem, resets, [6, 3, 4, 2] if "ragged" in place else None)
    gradients = testing.make_gradients(problem, inputs)
    found = testing.named(problem, *testing.run_kernel(persistent, problem, inputs, gradients))
    for name, value in testing.named(problem, *testing.oracle(problem, inputs, gradients)).items():
        assert testing.relative_error(found[name], value) < (1e-6 if "bias" in name else 1e-12), name


@pytest.mark.parametrize("options", [{}, {"lean": True}, {"proj_size": 3}], ids=["plain", "lean", "proj"])
def test_nan_of_an_abandoned_episode_stays_there(cut, options):
    cut(3)
    problem = PROBLEM.replace(bidirectional=True, **options)
    resets = torch.zeros(6, 4, dtype=torch.bool)
    resets[[0, 2, 5], 1] = True
    inputs = inputs_with(problem, resets)
    inputs.h0[0, 1] = inputs.c0[0, 1] = torch.nan  # which the first step does not read
    gradients, needs = testing.make_gradients(problem, inputs), Needs(weights=False)
    clean, of_clean = testing.run_kernel(persistent, problem, inputs, gradients, needs)
    assert clean.y.isfinite().all()
    broken = torch.zeros_like(resets)
    broken[2:5, 1] = True
    dirty = inputs._replace(x=inputs.x.masked_fill(broken.unsqueeze(2), torch.nan))
    result, of_dirty = testing.run_kernel(persistent, problem, dirty, gradients, needs)
    assert result.y[broken].isnan().all()
    assert torch.equal(result.y[~broken], clean.y[~broken])
    assert torch.equal(of_dirty.x[~broken], of_clean.x[~broken])
    for name in ("h_n", "c_n"):
        assert torch.equal(getattr(result, name), getattr(clean, name))
    for name in ("h0", "c0"):
        assert torch.equal(getattr(of_dirty, name), getattr(of_clean, name))
        assert getattr(of_dirty, name)[0, 1].count_nonzero() == 0


def test_a_recording_belongs_to_the_address_of_its_resets():
    """A call with resets elsewhere in memory is no replay of an earlier one."""
    inputs = testing.make_inputs(PROBLEM)
    keys = []

    class Played:
        scratch_bytes = 1 << 16

        def play(self, settings, tensors, device, issue):
            every = (*tensors.read, *tensors.written, tensors.scratch)
            keys.append([None if tensor is None else tensor.data_ptr() for tensor in every])
            issue(tensors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay, "_replays", lambda *given: Played())
        replay.stack_of.cache_clear()
        for _ in range(2):
            resets = inputs.resets.clone()
            result = persistent.forward(PROBLEM, inputs._replace(resets=resets))
            given = inputs._replace(resets=resets)
            persistent.backward(PROBLEM, given, result, testing.make_gradients(PROBLEM, inputs), Needs())
            assert all(resets.data_ptr() in key for key in keys[-2:])
    replay.stack_of.cache_clear()
    assert len(keys) == 4


@pytest.mark.parametrize("shift", [-1, 0, 1])
def test_operands_are_zero_where_episodes_begin(shift):
    source, first = torch.randn(4, 2, 8), torch.randn(2, 8)
    resets = torch.tensor([[True, False], [False, True], [True, True], [False, True]])
    operand = Operand(source, first if shift else None, shift)
    (found,) = into = [torch.empty(8, 8)]
    write_operands([operand], into, Tokens(4, 2, by_row=False), torch.tensor([4, 3]), resets)
    zero = found.view(4, 2, 8).count_nonzero(2) == 0
    expected = {
        -1: resets,
        0: torch.zeros(4, 2, dtype=torch.bool),
        1: torch.tensor([[False, True], [True, True], [False, False], [False, False]]),
    }[shift].clone()
    expected[3, 1] = True  # after the end
    assert torch.equal(zero, expected)


@pytest.mark.parametrize(("options", "lean"), each_value(pairwise(KINDS, [False, True])), ids=str)
def test_scratch_memory_is_as_predicted(cut, options, lean):
    cut(3)
    problem = PROBLEM.replace(**({"input_size": 61, "hidden_size": 61} | options), lean=lean)
    problem = problem.replace(time=12, batch=32)
    inputs = testing.make_inputs(problem)
    with without_loops():
        result = persistent.forward(problem, inputs)
        persistent.backward(problem, inputs, result, testing.make_gradients(problem, inputs), Needs())
    orders = (True, True) if lean else False
    taken = replay._replays("backward", problem, orders, Needs()).scratch_bytes
    taken += sum(mask.nbytes for mask in inputs.masks)
    device = Device.probe("cpu")
    assert persistent.workspace_bytes(problem, device) == taken
    if lean:
        kept = replay.kept_bytes(problem)
        estimated = memory._lean_workspace_bytes(problem, memory.lean_cut(problem), memory.holds_matrices(problem))
        assert 0.95 < (kept + taken) / (kept + estimated) < 1.1


@pytest.mark.parametrize("bidirectional", [False, True])
def test_the_estimate_that_cuts_lean_passes_counts_the_copies_of_states(cut, bidirectional):
    cut(3)
    problem = PROBLEM.replace(time=30, batch=32, input_size=64, hidden_size=64, lean=True, bidirectional=bidirectional)
    found = []
    for own in (problem.replace(resets=False), problem):
        estimated = memory._lean_workspace_bytes(own, memory.lean_cut(own), memory.holds_matrices(own))
        found.append((estimated, persistent.workspace_bytes(own, H200)))
    (plain_estimate, plain), (estimate, counted) = found
    assert counted - plain >= 10 * 32 * 64 * 8  # of a segment
    assert estimate - plain_estimate == pytest.approx(counted - plain, rel=0.1)


@pytest.mark.parametrize("resets", [False, True])
def test_only_launches_with_resets_are_compiled_with_them(monkeypatch, resets):
    found = []
    monkeypatch.setattr(toolchain, "compile_source", lambda source, architecture, macros, code: found.append(macros))
    problem = Problem(8, 4, 64, 64, num_layers=2, dtype=torch.bfloat16, needs_grad=True, resets=resets)
    asked = [
        compiled.forward_launch(problem, 4, 1, False, H200),
        compiled.backward_launch(problem, 4, 1, True, H200),
        compiled.pair_launch("backward", problem, 4, False, H200),
    ]
    for launch in asked:
        launch.compile()
    assert [macros["RESETS"] for macros in found] == [resets] * 3


class _BeginsAtOne(Cell):
    name = "a cell with initial states"
    gates = ("a",)
    initial_states: ClassVar[Mapping[str, float]] = {"h": 1.0}

    def step(self, gate, state):
        return torch.tanh(gate.a), {}


def test_a_cell_with_initial_states_is_refused():
    problem = Problem(20, 8, 64, 256, dtype=torch.bfloat16, needs_grad=True, cell=_BeginsAtOne())
    of_plain, of_resets = (
        [found for own in persistent.criteria() if (found := own.check(problem.replace(resets=resets), H200))]
        for resets in (False, True)
    )
    assert of_plain == []
    (refusal,) = of_resets
    assert refusal.quantity == "resets"
    assert "a cell with initial states" in refusal.actual


def test_resets_take_a_copy_of_the_hidden_states():
    problem = Problem(50, 128, 512, 512, dtype=torch.bfloat16, needs_grad=True)
    copied = 50 * 128 * 512 * 2
    with_resets = problem.replace(resets=True)
    assert persistent.workspace_bytes(with_resets, H200) == persistent.workspace_bytes(problem, H200) + copied
    assert persistent.work(with_resets, H200).bytes_moved > persistent.work(problem, H200).bytes_moved
