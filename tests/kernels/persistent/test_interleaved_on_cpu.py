"""Rows of exchanged values that are interleaved, in the CUDA sources run on the CPU, agree with float64."""

from __future__ import annotations

import pytest
import torch

from gatewise import testing
from gatewise.cells import GRU, RNN, Regularised
from gatewise.cells import LSTM as LSTM_CELL
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.saved import Needs
from gatewise.kernels.persistent.kernel import persistent
from gatewise.kernels.persistent.launches import compiled
from gatewise.kernels.persistent.sizes import exactness, layer_pairs, memory, tiling, tiling_choice
from tests.kernels.persistent.sources_on_cpu import launch_on_cpu
from tests.kernels.persistent.test_shared_depth_on_cpu import of_any_size
from tests.kernels.persistent.test_sources_on_cpu import check, check_nan_stays_in_its_row
from tests.pairwise import exhaustive

DEVICE = Device.named("h200").replace(multiprocessors=24)
RAGGED = {"layout": Layout.DEVICE_LENGTHS}
BF16, FP16 = {"dtype": torch.bfloat16}, {"dtype": torch.float16}
TF32 = {"dtype": torch.float32, "allow_tf32": True}
EXACT = {"dtype": torch.float32, "allow_tf32": False}
PROBLEM = Problem(4, 9, 5, 40, dtype=torch.bfloat16, needs_grad=True)
ZONEOUT = {"cell": Regularised(LSTM_CELL(), zoneout=(0.3, 0.4))}
DROPOUT = {"cell": Regularised(LSTM_CELL(), recurrent_dropout=0.4)}


def tolerance_of(problem):
    exact = problem.dtype == torch.float32 and not problem.allow_tf32
    return 3e-5 if exact else {torch.float16: 1e-2, torch.bfloat16: 5e-2, torch.float32: 5e-3}[problem.dtype]


@pytest.fixture
def cut(monkeypatch, cut_where):
    """Interleave the rows of layers of any size, and cut passes as those of wide layers."""

    def of(split=1, eights=1, rows=8):
        monkeypatch.setattr(memory, "_LEAST_INTERLEAVED", {"forward": (2, 0), "backward": (5, 0)})
        monkeypatch.setattr(tiling, "_LEAST_PADDED_BYTES", 0)
        monkeypatch.setattr(tiling_choice, "measured_weights", of_any_size)
        monkeypatch.setattr(tiling_choice, "_WARPS_OF_SEVERAL_GROUPS", 4)
        for name in ("_UNROUNDED_HIDDEN", "_SMALL_HIDDEN"):  # small layers are rounded to TF32, too
            monkeypatch.setattr(exactness, name, 1)

        def fits(cut):
            # In 16 bits, the blocks of the backward pass alone share the depth.
            shares = cut.split == (split if cut.backward or cut.value_bytes == 4 else 1)
            fine = not (cut.distributed or cut.warpgroups) and cut.warps <= 8 and cut.units <= 16
            return fine and shares and cut.eights == eights and cut.rows == rows

        cut_where(fits)
        return launch_on_cpu(monkeypatch, DEVICE)

    return of


def interleaved(sources):
    """Return whether the rows of each pass that was compiled are interleaved, by the name of the source."""
    found = {name: dict(macros) for name, macros in sources.compiled}
    return {name: "INTERLEAVED" in found[name] for name in ("forward.cu", "backward.cu")}


@pytest.mark.parametrize(
    ("cuts", "options"),
    [
        ({}, {"bidirectional": True, **RAGGED}),
        ({}, {**FP16, "hidden_size": 27, "cell": GRU(), "resets": True}),
        ({}, {**TF32, "bidirectional": True, "resets": True, **RAGGED}),
        ({}, {**EXACT, "hidden_size": 13, "bidirectional": True}),
        ({}, ZONEOUT),
        ({"split": 2}, {"batch": 12, "hidden_size": 48}),
        ({"eights": 2, "rows": 24}, {"batch": 41, "resets": True}),
        ({"eights": 2, "rows": 24}, {"batch": 33}),
        pytest.param(*({"eights": 3, "rows": 24}, {**TF32, "batch": 22}), marks=pytest.mark.exhaustive),
        pytest.param(*({"split": 2}, {**TF32, "hidden_size": 64}), marks=pytest.mark.exhaustive),
        pytest.param(*({"split": 2}, {"hidden_size": 50, "cell": GRU(), **RAGGED}), marks=pytest.mark.exhaustive),
        pytest.param(*({"split": 4}, {"hidden_size": 72, "bidirectional": True}), marks=pytest.mark.exhaustive),
        pytest.param(*({}, {"hidden_size": 33, "cell": RNN("relu"), **RAGGED}), marks=pytest.mark.exhaustive),
        pytest.param(*({}, {"proj_size": 6, "bidirectional": True}), marks=pytest.mark.exhaustive),
        pytest.param(*({}, {"bias": False, "batch": 16}), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_values_and_gradients(cut, cuts, options):
    sources, problem = cut(**cuts), PROBLEM.replace(**options)
    check(sources, problem, tolerance_of(problem))
    # Gradients in float32 are exchanged in the memory of the gates.
    assert interleaved(sources) == {"forward.cu": True, "backward.cu": problem.dtype != torch.float32}


@pytest.mark.parametrize(
    "options",
    [
        {"dropout": 0.4, **RAGGED},
        {**FP16, "hidden_size": 21},
        *exhaustive({"cell": GRU(), "resets": True}, {**EXACT, "batch": 12}),
    ],
    ids=str,
)
def test_layers_in_pairs(monkeypatch, cut, options):
    sources, problem = cut(), PROBLEM.replace(num_layers=2, **options)
    monkeypatch.setattr(layer_pairs, "stacked_cut", layer_pairs.room_for_two)
    check(sources, problem, tolerance_of(problem))
    assert sources.launched.count("recurrent_forward") == sources.launched.count("recurrent_backward") == 1
    assert interleaved(sources) == {"forward.cu": True, "backward.cu": problem.dtype != torch.float32}


@pytest.mark.parametrize(
    ("batch", "beyond"), [(48, (0, 0)), (41, (1, 1)), (40, (0, 2)), (33, (0, 2))], ids=["none", "some", "eight", "more"]
)
def test_which_rows_beyond_the_batch_are_left_out(cut, batch, beyond):
    cut(eights=2, rows=24)
    for make, expected in zip((compiled.forward_launch, compiled.backward_launch), beyond, strict=True):
        launch = make(PROBLEM.replace(batch=batch), batch, 1, False, DEVICE)
        assert dict(launch.source[2])["SKIPPED_BEYOND"] == expected


def test_rows_that_begin_and_end_anywhere(cut):
    """In the reverse direction, each row finds its initial states at its own end; an empty one keeps them."""
    problem = PROBLEM.replace(time=6, bidirectional=True, **RAGGED)
    check(cut(), problem, tolerance_of(problem), lengths=[6, 3, 4, 2, 0, 6, 1, 2, 5])


def test_groups_of_rows_in_turn(monkeypatch):
    monkeypatch.setattr(memory, "_LEAST_INTERLEAVED", {"forward": (2, 0), "backward": (5, 0)})
    monkeypatch.setattr(tiling, "_LEAST_PADDED_BYTES", 0)
    one = Device.named("a100").replace(multiprocessors=1)
    sources, problem = launch_on_cpu(monkeypatch, one), PROBLEM.replace(batch=70, hidden_size=8, **RAGGED)
    launch = compiled.forward_launch(problem, problem.batch, 1, True, one)
    assert launch.interleaved
    assert launch.tiling.groups > launch.tiling.together
    check(sources, problem, tolerance_of(problem))
    assert all(interleaved(sources).values())


@pytest.mark.parametrize("options", [BF16, *exhaustive(TF32, EXACT)], ids=str)
def test_nan_stays_in_its_row(cut, options):
    cut()
    check_nan_stays_in_its_row(PROBLEM.replace(**options))


def test_a_slow_block_is_waited_for(cut):
    sources = cut()
    sources.slow = 1
    check(sources, PROBLEM, tolerance_of(PROBLEM))


def test_plain_rows_where_interleaved_ones_cost_memory_or_gain_nothing(cut):
    for batch, of_passes in ((1, [False, False]), (4, [True, False])):
        sources, few = cut(), PROBLEM.replace(batch=batch)
        check(sources, few, tolerance_of(few))
        assert list(interleaved(sources).values()) == of_passes
    for problem in (PROBLEM.replace(lean=True), PROBLEM.replace(lean=True, needs_grad=False), PROBLEM.replace(time=1)):
        for backward in (False, True):
            assert not memory.interleaves_rows(problem, backward=backward)
    assert not memory.interleaves_rows(PROBLEM.replace(**TF32), backward=True)


@pytest.mark.parametrize("options", [RAGGED, *exhaustive({"resets": True, "bidirectional": True})], ids=str)
def test_recurrent_dropout_keeps_the_hidden_states_that_enter_products(cut, options):
    sources, problem = cut(), PROBLEM.replace(**DROPOUT, **options)
    check(sources, problem, tolerance_of(problem))
    assert interleaved(sources) == {"forward.cu": False, "backward.cu": True}


def test_gradients_take_the_place_of_gates_unless_a_call_is_compiled(cut):
    cut()
    inputs = testing.make_inputs(PROBLEM)
    above = testing.make_gradients(PROBLEM, inputs)
    for traced in (False, True):
        problem = PROBLEM.replace(traced=traced)
        assert persistent.single_use(problem) != traced
        assert compiled.backward_launch(problem, problem.batch, 1, False, DEVICE).interleaved != traced
        result = persistent.forward(problem, inputs)
        gates = result.kept[0].clone()
        persistent.backward(problem, inputs, result, above, Needs())
        assert torch.equal(result.kept[0], gates) == traced


def test_the_exchange_has_whole_groups_of_rows():
    device = Device.named("h200")
    problem = Problem(35, 20, 1500, 1500, dtype=torch.bfloat16, needs_grad=True)
    for name, make in (("forward", compiled.forward_launch), ("backward", compiled.backward_launch)):
        launch = make(problem, problem.batch, 1, False, device)
        assert launch.interleaved
        directions, steps, rows, width = launch.exchange_shape(2, problem.time)
        assert (directions, steps) == (2, 36 if name == "forward" else 35)
        assert rows == launch.tiling.groups * launch.tiling.rows >= problem.batch
        assert width % 32 == 0
        assert width >= problem.hidden_size * (1 if name == "forward" else 4)
    several = problem.replace(batch=33, input_size=1024, hidden_size=1024)  # the example of docs/memory.md
    assert compiled.backward_launch(several, 33, 1, False, device).exchange_shape(1, 35)[2] == 48
