"""A run of the benchmark: its rows and their contents."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import pytest
import torch

import gatewise
from gatewise.benchmarks.cases import LSTMCase
from gatewise.benchmarks.cells import row, run
from gatewise.benchmarks.cells.cases import TINY, chosen_cells, measured_cells
from gatewise.benchmarks.cells.record import (
    CELL,
    LIBRARY,
    LOOP,
    OPTIONAL,
    PLAIN,
    RECURRENT_DROPOUT,
    RESETS,
    STEP,
    WEIGHT_DROPOUT,
    WHOLE,
    WITH_MASKS,
    ZONEOUT,
    CellRecord,
    Measurement,
)
from gatewise.benchmarks.cells.side import layer_side, loop_side
from gatewise.benchmarks.precision import LAYER_PRECISIONS
from tests.pairwise import exhaustive


def records_of(settings: run.Settings, observer, **changes: object) -> list[CellRecord]:
    kept: list[CellRecord] = []
    outcome = run.run(dataclasses.replace(settings, **changes), observer, kept.append)
    assert kept == outcome.records
    assert not outcome.interrupted
    return kept


def spoiled(monkeypatch: pytest.MonkeyPatch, spoil, name: str = "layer_side") -> None:
    """Change the results of all sides of gatewise, or of all loops that are not in float64."""
    right_of = {"layer_side": layer_side, "loop_side": loop_side}[name]

    def side(call, dtype, *arguments, **options):
        right = right_of(call, dtype, *arguments, **options)
        return right if dtype == torch.float64 else dataclasses.replace(right, call=lambda: spoil(*right.call()))

    monkeypatch.setattr(run, name, side)


def statuses(record: CellRecord) -> dict[str, str]:
    return {name: way.status for name, way in record.ways.items()}


def test_a_measured_row(tiny, observer) -> None:
    (found,) = records_of(tiny, observer)
    assert (found.cell, found.case, found.dtype, found.direction) == ("gru", "tiny", "fp32", "train")
    assert statuses(found) == dict.fromkeys((LOOP, CELL, RESETS, LIBRARY, PLAIN), "measured")
    for name, way in found.ways.items():
        assert set(way.times) == {"eager"}
        timing = way.times["eager"]
        assert timing.q20 <= timing.median <= timing.q80
        # Further samples are taken on a fast machine, until their time is over; the loop has as many as it is told.
        assert timing.runs == 3 if name == LOOP else tiny.sampling.least <= timing.runs <= tiny.sampling.most
        assert bool(way.ran) == (name in (CELL, RESETS, PLAIN))
        assert 0 < way.errors["dx"] < 1e-5
        assert way.peak_bytes is None
        assert way.owned_bytes > 0
    assert set(found.ways[CELL].errors) == {"y", "h_n", "dx", "dh0"} | {
        f"d{kind}_{of}" for kind in ("weight", "bias") for of in ("ih", "hh")
    }
    assert set(found.ways[LIBRARY].errors) == set(found.ways[CELL].errors) | {"c_n", "dc0"}
    assert found.ways[CELL].error_ratio < 5
    assert "within the allowed" in found.ways[CELL].note
    assert found.ways[LOOP].note == ""
    assert found.settings["reset_rate"] == 0.03


# Other tests of this file run some rows.
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("count", "names", "directions"),
    [
        (1, ("fp32",), ("train",)),
        pytest.param(1, ("bf16",), ("inference",), marks=pytest.mark.exhaustive),
        pytest.param(2, ("fp32", "bf16"), ("train", "inference"), marks=pytest.mark.exhaustive),
    ],
)
def test_every_cell_case_precision_and_direction_is_a_row(tiny, observer, count, names, directions) -> None:
    precisions = tuple(LAYER_PRECISIONS[name] for name in names)
    changes = {"cells": measured_cells(), "cases": TINY[:count], "precisions": precisions, "directions": directions}
    rows = records_of(tiny, observer, ways=(RESETS,), **changes)
    found = [(each.cell, each.case, each.dtype, each.direction) for each in rows]
    assert len(set(found)) == len(found) == len(measured_cells()) * count * len(names) * len(directions)
    assert observer.announced == len(observer.steps) == len(found)
    for each in rows:
        assert statuses(each) == {CELL: "measured", RESETS: "measured"}, f"{each.cell}: {each.ways[CELL].note}"


def test_a_single_step_is_a_row(tiny, observer) -> None:
    cells, directions = chosen_cells(["gru", "layer_norm_lstm"]), ("train", "inference")
    rows = records_of(tiny, observer, cells=cells, cases=TINY[1:], directions=directions, ways=(RESETS,))
    assert [statuses(each) for each in rows] == [{CELL: "measured", RESETS: "measured"}] * 4


def test_the_lstm_is_not_compared_with_itself(tiny, observer) -> None:
    (found,) = records_of(tiny, observer, cells=chosen_cells(["lstm"]))
    assert set(found.ways) == {LOOP, CELL, RESETS, LIBRARY}


@pytest.mark.parametrize("cell", ["lstm", *exhaustive("gru", "slstm"), "rnn_tanh"])
def test_ways_with_masks(tiny, observer, cell: str) -> None:
    (found,) = records_of(tiny, observer, cells=chosen_cells([cell]), ways=WITH_MASKS)
    masks = WITH_MASKS if cell != "rnn_tanh" else WITH_MASKS[:3]  # which has no candidate
    assert statuses(found) == dict.fromkeys((CELL, *masks), "measured")
    for way in masks:
        assert found.ways[way].ran
        assert 0 < found.ways[way].errors["y"] < 1e-6
        assert set(found.ways[way].errors) == set(found.ways[CELL].errors)


def test_masks_are_for_training_alone(tiny, observer) -> None:
    (found,) = records_of(tiny, observer, directions=("inference",), ways=WITH_MASKS)
    assert set(found.ways) == {CELL}


def test_calls_with_other_masks_than_those_of_the_truth_are_wrong(tiny, observer, monkeypatch) -> None:
    monkeypatch.setattr(row.Way, "begin", lambda self: None)
    (found,) = records_of(tiny, observer, ways=WITH_MASKS)
    assert statuses(found) == {CELL: "measured"} | dict.fromkeys(WITH_MASKS, "wrong")


# Other ways of the benchmark take the same code.
@pytest.mark.exhaustive
def test_compiled_ways(tiny, observer, traced_only, monkeypatch) -> None:
    monkeypatch.setattr("gatewise.benchmarks.cells.run.WHOLE_TIME", 9)  # tracing 32 steps takes seconds
    case = LSTMCase("whole", 9, 2, 4)
    short, long = records_of(tiny, observer, cases=(TINY[0], case), ways=OPTIONAL)
    assert (STEP in short.ways, WHOLE in short.ways) == (True, False)
    assert (long.ways[STEP].status, long.ways[WHOLE].status) == ("measured", "measured")
    assert long.ways[WHOLE].first_seconds > 0


class NormedLSTM(gatewise.Cell):
    """A cell whose step reads all units at once, which is ordinary PyTorch on tensors."""

    gates = ("i", "f", "g", "o")
    states = ("c",)
    parameters: ClassVar = {"gain": 1.0}

    def step(self, gate, state, parameter):
        def normed(z):
            return torch.nn.functional.layer_norm(z, z.shape[-1:])

        c = torch.sigmoid(normed(gate.f)) * state.c + torch.sigmoid(normed(gate.i)) * torch.tanh(normed(gate.g))
        return torch.sigmoid(normed(gate.o)) * torch.tanh(parameter.gain * normed(c)), {"c": c}


# Other tests of this file run other cells.
@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.*NormedLSTM")
def test_a_cell_with_statistics_over_units(tiny, observer, traced_only) -> None:
    (found,) = records_of(tiny, observer, cells=(NormedLSTM(),), ways=OPTIONAL)
    masks = (WEIGHT_DROPOUT, RECURRENT_DROPOUT, ZONEOUT)  # its step marks no candidate
    assert statuses(found) == dict.fromkeys((LOOP, CELL, RESETS, *masks, STEP, LIBRARY, PLAIN), "measured")
    assert "dgain" in found.ways[CELL].errors


def test_a_rival_that_cannot_run_is_recorded_and_fails_nothing(tiny, observer, monkeypatch) -> None:
    def broken(function, **options):
        raise RuntimeError("backend='inductor' raised:\nNo compiler\nMore")

    monkeypatch.setattr(torch, "compile", broken)
    (found,) = records_of(tiny, observer, ways=(STEP, LOOP))
    assert statuses(found) == {LOOP: "measured", CELL: "measured", STEP: "failed"}
    assert found.ways[STEP].note == "backend='inductor' raised: No compiler"
    assert found.ways[STEP].times == {}
    assert found.status == "measured"


def test_a_loop_that_runs_out_of_memory_leaves_nothing_to_compare_with(tiny, observer, monkeypatch) -> None:
    def full(*outputs):
        raise torch.OutOfMemoryError("CUDA out of memory.\nMuch more")

    spoiled(monkeypatch, full, "loop_side")
    (found,) = records_of(tiny, observer)
    assert found.ways[LOOP] == Measurement("failed", "CUDA out of memory.")
    assert found.ways[CELL].status == "failed"
    assert found.ways[CELL].note == "not compared: loop: CUDA out of memory."
    assert found.ways[PLAIN].status == "measured"
    assert found.status == "failed"


def test_out_of_memory_in_float64_is_a_row(tiny, observer, monkeypatch) -> None:
    def full(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory.\nMuch more")

    monkeypatch.setattr(run, "loop_side", full)
    (found,) = records_of(tiny, observer, ways=OPTIONAL)
    assert statuses(found) == dict.fromkeys((CELL, *OPTIONAL[:-1]), "failed")
    assert found.ways[CELL].note == "float64: CUDA out of memory."


@pytest.mark.parametrize("direction", ["train", "inference"])
def test_a_wrong_layer_gets_no_time(tiny, observer, monkeypatch, direction: str) -> None:
    spoiled(monkeypatch, lambda y, h: (y, 1.1 * h))
    (found,) = records_of(tiny, observer, directions=(direction,))
    assert (found.ways[CELL].status, found.ways[CELL].times, found.status) == ("wrong", {}, "wrong")
    assert "more than the allowed" in found.ways[CELL].note
    assert found.ways[LOOP].status == "measured"


def test_a_call_that_is_wrong_later_gets_no_time(tiny, observer, monkeypatch) -> None:
    calls = []

    def spoil(y, h):
        calls.append(y)
        return (y, h) if len(calls) < 4 else (1.1 * y, h)

    spoiled(monkeypatch, spoil)
    (found,) = records_of(tiny, observer, ways=())
    assert (found.ways[CELL].status, found.ways[CELL].times) == ("wrong", {})


def test_other_orders_of_sums_are_allowed_and_their_errors_reported(tiny, observer, monkeypatch) -> None:
    """An error of ten roundings of float32 is no bug, however small that of the loop is; one of a thousand is."""
    statuses = {}
    for roundings in (10, 1000):
        spoiled(monkeypatch, lambda y, h, share=roundings * 2.0**-24: (y * (1 + share), h))
        (found,) = records_of(tiny, observer, ways=(), directions=("inference",))
        statuses[roundings] = found.ways[CELL].status
        assert found.ways[CELL].error_ratio > 3
    assert statuses == {10: "measured", 1000: "wrong"}


def test_not_a_number_is_wrong_and_can_be_recorded(tiny, observer, monkeypatch) -> None:
    spoiled(monkeypatch, lambda y, h: (y * torch.nan, h))
    (found,) = records_of(tiny, observer, directions=("inference",))
    assert found.ways[CELL].status == "wrong"
    assert found.ways[CELL].errors["y"] is None


def captures(monkeypatch: pytest.MonkeyPatch, replay=lambda step: step) -> None:
    """Replace CUDA graphs by calls of the captured function."""

    def captured(step, *, warmups: int):
        for _ in range(warmups + 1):
            step()
        return replay(step)

    monkeypatch.setattr(row, "has_graphs", lambda device: True)
    monkeypatch.setattr(row, "captured", captured)


@pytest.mark.parametrize("direction", ["train", "inference"])
def test_graphs_are_timed_and_checked(tiny, observer, monkeypatch, direction: str) -> None:
    captures(monkeypatch)
    (found,) = records_of(tiny, observer, directions=(direction,))
    for way in found.ways.values():
        assert way.status == "measured"
        assert set(way.times) == {"eager", "graph"}
    assert found.ways[CELL].ran_captured


def test_the_masks_of_a_checked_replay_are_those_of_the_truth(tiny, observer, monkeypatch) -> None:
    def in_the_same_memory(step):
        closure = dict(zip(step.__code__.co_freevars, step.__closure__, strict=True))
        side, outputs = closure["side"].cell_contents, closure["outputs"].cell_contents

        def results():
            return [*outputs, *(leaf.grad for leaf in side.leaves)]

        written = results()

        def replay():
            step()
            for tensor, found in zip(written, results(), strict=True):
                tensor.copy_(found)

        return replay

    captures(monkeypatch, in_the_same_memory)
    (found,) = records_of(tiny, observer, ways=WITH_MASKS)
    for way in WITH_MASKS:
        assert (found.ways[way].status, set(found.ways[way].times)) == ("measured", {"eager", "graph"})


@pytest.mark.parametrize("direction", ["train", "inference"])
def test_a_wrong_replay_gets_no_time(tiny, observer, monkeypatch, direction: str) -> None:
    def spoiling(step):
        # The tensors that the step returns, and the gradients that it leaves, are those of the graph.
        tensors = list(step.__closure__[[*step.__code__.co_freevars].index("outputs")].cell_contents)
        return lambda: tensors[0].mul_(1.5)

    captures(monkeypatch, spoiling)
    (found,) = records_of(tiny, observer, directions=(direction,), ways=())
    assert (found.ways[CELL].status, found.ways[CELL].times) == ("wrong", {})
    assert "y is" in found.ways[CELL].note


@pytest.mark.parametrize("late", [False, True], ids=["capture", "replay"])
def test_a_graph_that_fails_leaves_the_eager_time(tiny, observer, monkeypatch, late: bool) -> None:
    def captured(step, *, warmups: int):
        def replay():
            raise RuntimeError("operation not permitted when stream is capturing")

        step()
        return replay if late else replay()

    monkeypatch.setattr(row, "has_graphs", lambda device: True)
    monkeypatch.setattr(row, "captured", captured)
    (found,) = records_of(tiny, observer)
    assert set(found.ways[CELL].times) == {"eager"}
    for way in found.ways.values():
        assert way.status == "measured"
        assert way.note.endswith("No CUDA graph: operation not permitted when stream is capturing.")


@pytest.mark.parametrize(("seconds", "runs"), [(0.01, 4), (0.4, 3), (1.5, 1)])
def test_what_takes_long_is_called_few_times(tiny, seconds: float, runs: int) -> None:
    budget = 1e9 if seconds < 0.1 else 0.0
    sampling = dataclasses.replace(tiny.sampling, seconds=budget, sample=0.005)
    one = row.Row({}, 0.0, True, sampling, lambda error: 0.0)
    calls = []
    (timing,) = one._timed({(LOOP, "eager"): lambda: calls.append(1)}, seconds).values()
    assert timing.runs == runs
    assert len(calls) <= runs + 1
    if runs == 1:
        assert (timing.median, calls) == (seconds, [])


def test_layers_are_timed_in_turn_and_loops_alone() -> None:
    seconds = {(CELL, "eager"): 0.01, (LOOP, "eager"): 0.01, (PLAIN, "eager"): 0.01, (LIBRARY, "eager"): 0.2}
    assert list(row._groups(seconds)) == [
        [(CELL, "eager"), (PLAIN, "eager")],
        [(LOOP, "eager")],
        [(LIBRARY, "eager")],
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("cell", measured_cells(), ids=lambda cell: cell.name)
def test_on_a_gpu_all_ways_are_measured_under_a_graph_with_memory(tiny, observer, cell) -> None:
    cases = (*TINY, LSTMCase("32-8-64", 32, 8, 64)) if cell.name in ("lstm", "slstm") else TINY
    rows = records_of(
        tiny,
        observer,
        cells=(cell,),
        cases=cases,
        precisions=(LAYER_PRECISIONS["bf16"], LAYER_PRECISIONS["tf32"]),
        directions=("train", "inference"),
        sampling=dataclasses.replace(tiny.sampling, device=torch.device("cuda")),
        ways=OPTIONAL,
    )
    for record in rows:
        for name, way in record.ways.items():
            where = f"{record.case}, {record.dtype}, {record.direction}, {name}"
            assert way.status == "measured", f"{where}: {way.note}"
            assert set(way.times) == {"eager", "graph"}, f"{where}: {way.note}"
            assert way.peak_bytes > 0
