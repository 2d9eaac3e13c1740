"""A run of the benchmark: its rows and their contents."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gatewise.benchmarks.cases import LSTM_TINY
from gatewise.benchmarks.lstm import grid
from gatewise.benchmarks.lstm.call import Call
from gatewise.benchmarks.lstm.record import LayerRecord
from gatewise.benchmarks.lstm.side import Side, gatewise_side
from gatewise.benchmarks.precision import LAYER_PRECISIONS
from gatewise.contract import capture
from gatewise.contract.device import Device


def records_of(settings: grid.Settings, observer, **changes: object) -> list[LayerRecord]:
    kept: list[LayerRecord] = []
    outcome = grid.run(dataclasses.replace(settings, **changes), observer, kept.append)
    assert kept == outcome.records
    assert not outcome.interrupted
    return kept


def spoiled(monkeypatch: pytest.MonkeyPatch, spoil) -> None:
    """Change the results of all sides of gatewise."""

    def side(call: Call, dtype: torch.dtype, kernel: str) -> Side:
        right = gatewise_side(call, dtype, kernel)
        return dataclasses.replace(right, call=lambda: spoil(*right.call()))

    monkeypatch.setattr(grid, "gatewise_side", side)


def test_a_measured_row(tiny, observer) -> None:
    (row,) = records_of(tiny, observer)
    assert (row.status, row.case, row.dtype, row.direction, row.kernel) == ("measured", "tiny", "fp32", "train", "auto")
    assert row.ran in ("aten", "eager")
    assert row.predicted > 0
    assert row.predicted_bytes > 0
    assert row.settings["tokens"] == 18
    assert set(row.times) == {"eager"}
    for timing in row.times["eager"].values():
        assert timing.q20 <= timing.median <= timing.q80
        assert timing.runs == tiny.least
    assert set(row.errors) == {"y", "h_n", "c_n", "dx", "dh0", "dc0"} | {
        f"d{kind}_{of}" for kind in ("weight", "bias") for of in ("ih", "hh")
    }
    assert 0 < row.errors["dx"]["nn.LSTM"] < 1e-5
    assert (row.floor, row.peak_bytes) == (None, {})
    assert row.owned_bytes["gatewise"] > 0


def test_a_row_of_a_gru(tiny, observer) -> None:
    (row,) = records_of(tiny, observer, benchmark="gru_quick", cell="gru")
    assert (row.status, row.cell, row.rival) == ("measured", "gru", "nn.GRU")
    assert set(row.times["eager"]) == set(row.owned_bytes) == {"gatewise", "nn.GRU"}
    assert set(row.errors) == {"y", "h_n", "dx", "dh0"} | {
        f"d{kind}_{of}" for kind in ("weight", "bias") for of in ("ih", "hh")
    }
    assert 0 < row.errors["dx"]["nn.GRU"] < 1e-5
    assert row.speed_up("eager") == row.median("eager", "nn.GRU") / row.median("eager")


def test_a_gru_that_is_wrong_turns_red(tiny, observer, monkeypatch) -> None:
    spoiled(monkeypatch, lambda y, h: (y, 1.1 * h))
    (row,) = records_of(tiny, observer, cell="gru")
    assert (row.status, row.times) == ("wrong", {})


# A run of some rows is tested in test_command.py.
@pytest.mark.exhaustive
@pytest.mark.parametrize("count", [2, 4])
def test_every_case_precision_direction_and_kernel_is_a_row(tiny, observer, count) -> None:
    precisions = (LAYER_PRECISIONS["fp32"], LAYER_PRECISIONS["bf16"])
    changes = {"directions": ("train", "inference"), "kernels": ("auto", "eager"), "precisions": precisions}
    rows = records_of(tiny, observer, cases=LSTM_TINY[:count], **changes)
    found = [(row.case, row.dtype, row.direction, row.kernel) for row in rows]
    assert len(set(found)) == len(found) == count * 2 * 2 * 2
    assert {row.status for row in rows} == {"measured"}
    assert {row.ran for row in rows if row.kernel == "eager"} == {"eager"}
    assert observer.announced == len(observer.steps) == 4 * count


def test_inference_makes_no_gradients(tiny, observer) -> None:
    (row,) = records_of(tiny, observer, directions=("inference",))
    assert set(row.errors) == {"y", "h_n", "c_n"}


def test_a_refused_row_says_why_and_does_not_stop_the_others(tiny, observer) -> None:
    refused, measured = records_of(tiny, observer, kernels=("cudnn", "eager"))
    assert (refused.status, refused.times, refused.ran) == ("refused", {}, "")
    assert "allowed: a CUDA GPU" in refused.note
    assert measured.status == "measured"


@pytest.mark.parametrize("direction", ["train", "inference"])
def test_a_wrong_kernel_turns_red_and_gets_no_speed(tiny, observer, monkeypatch, direction: str) -> None:
    spoiled(monkeypatch, lambda y, h, c: (y, h, 1.1 * c))
    (row,) = records_of(tiny, observer, directions=(direction,))
    assert (row.status, row.times) == ("wrong", {})
    assert row.speed_up("eager") is None
    assert "c_n is " in row.note or "d" in row.note
    assert "more than the allowed" in row.note
    assert row.errors["c_n"]["gatewise"] > 0.05


def test_a_wrong_gradient_turns_only_training_red(tiny, observer, monkeypatch) -> None:
    spoiled(monkeypatch, lambda y, h, c: (y.detach() + 0 * y, h, c))
    train, inference = records_of(tiny, observer, directions=("train", "inference"))
    assert (train.status, inference.status) == ("wrong", "measured")


@pytest.mark.parametrize("wrong", [False, True])
def test_another_choice_in_a_graph_is_checked_too(tiny, observer, monkeypatch, wrong: bool) -> None:
    explain, announced = grid.explain, []

    def on_gpu(*call, captured: bool = False, **options):
        decision = explain(*call, **options)
        return dataclasses.replace(
            decision, device=Device.named("h200"), chosen="eager" if captured else decision.chosen
        )

    def spoil(y, h, c):
        announced.append(bool(capture._announced.get()))
        return (y, h, 1.1 * c) if wrong and announced[-1] else (y, h, c)

    monkeypatch.setattr(grid, "explain", on_gpu)
    spoiled(monkeypatch, spoil)
    (row,) = records_of(tiny, observer)
    assert announced[:2] == [False, True]
    assert (row.ran, row.ran_captured) == ("aten", "eager")
    assert row.predicted_captured > row.predicted
    assert row.status == ("wrong" if wrong else "measured")


def test_not_a_number_is_wrong_and_can_be_recorded(tiny, observer, monkeypatch) -> None:
    spoiled(monkeypatch, lambda y, h, c: (y * torch.nan, h, c))
    (row,) = records_of(tiny, observer, directions=("inference",))
    assert row.status == "wrong"
    assert row.errors["y"]["gatewise"] is None


def test_out_of_memory_is_a_row(tiny, observer, monkeypatch) -> None:
    def full(*outputs):
        raise torch.OutOfMemoryError("CUDA out of memory.\nMuch more")

    spoiled(monkeypatch, full)
    rows = records_of(tiny, observer, cases=LSTM_TINY[:2])
    assert [(row.status, row.note, row.times) for row in rows] == [("failed", "CUDA out of memory.", {})] * 2


def test_little_memory_is_a_row(tiny, observer) -> None:
    ordinary, lean = records_of(tiny, observer, kernels=("auto", "lean"))
    assert (ordinary.status, lean.status) == ("measured", "measured")
    assert lean.ran == "eager"  # on a CPU all others keep more, and refuse
    assert ordinary.ran != "eager"


def test_a_rival_that_fails_is_a_row(tiny, observer, monkeypatch) -> None:
    def full(call, dtype):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(grid, "rival_side", full)
    rows = records_of(tiny, observer, kernels=("auto", "eager"))
    assert [(row.status, row.note) for row in rows] == [("failed", "nn.LSTM: CUDA out of memory.")] * 2


def test_interrupted_keeps_the_finished_rows(tiny, observer, monkeypatch) -> None:
    def step(doing: str) -> None:
        if doing.startswith("tiny_stack,"):
            raise KeyboardInterrupt

    monkeypatch.setattr(observer, "step", step)
    kept: list[LayerRecord] = []
    outcome = grid.run(dataclasses.replace(tiny, cases=LSTM_TINY), observer, kept.append)
    assert outcome.interrupted
    assert [row.case for row in outcome.records] == [row.case for row in kept] == ["tiny"]


def test_samples_end_with_their_time_but_not_before_the_least(tiny, observer) -> None:
    (short,) = records_of(tiny, observer, seconds=0.0, least=3, most=9)
    (long,) = records_of(tiny, observer, seconds=1e9, least=3, most=9)
    assert [row.times["eager"]["gatewise"].runs for row in (short, long)] == [3, 9]


def test_a_sample_is_as_many_calls_as_fit(tiny, observer, monkeypatch) -> None:
    calls = []
    spoiled(monkeypatch, lambda *outputs: calls.append(outputs) or outputs)
    records_of(tiny, observer, sample=0.0)
    few = len(calls)
    (row,) = records_of(tiny, observer, sample=0.02)
    assert len(calls) - few > 2 * few
    # Seconds a call, not a sample.
    assert row.times["eager"]["gatewise"].median < 0.01
    assert row.settings["seconds_a_sample"] == 0.02


def test_the_precision_is_applied_while_it_is_measured(tiny, observer, monkeypatch) -> None:
    """TF32 is allowed for "tf32" and not for "fp32", and the setting is as before afterwards."""
    seen = []

    def noted(*outputs):
        seen.append(torch.backends.cudnn.allow_tf32)
        return outputs

    spoiled(monkeypatch, noted)
    before = torch.backends.cudnn.allow_tf32
    for name in ("tf32", "fp32"):
        records_of(tiny, observer, precisions=(LAYER_PRECISIONS[name],))
        assert set(seen) == {name == "tf32"}
        seen.clear()
    assert torch.backends.cudnn.allow_tf32 == before


@pytest.mark.gpu
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_on_a_gpu_both_are_measured_under_a_graph_with_floor_and_memory(tiny, observer, cell: str) -> None:
    changes = {"directions": ("train", "inference"), "precisions": tuple(LAYER_PRECISIONS.values()), "cell": cell}
    rows = records_of(tiny, observer, cases=LSTM_TINY, device=torch.device("cuda"), **changes)
    assert len(rows) == 4 * 2 * 4
    for row in rows:
        assert row.status == "measured", f"{row.case}, {row.dtype}, {row.direction}: {row.note}"
        assert {how: set(sides) for how, sides in row.times.items()} == {
            how: {"gatewise", row.rival} for how in ("eager", "graph")
        }
        assert row.ran_captured
        assert row.predicted_captured <= row.predicted
        assert row.floor.loop > 0
        assert row.floor.around > 0
        assert row.peak_bytes["gatewise"] > 0
        assert row.peak_bytes[row.rival] > 0
