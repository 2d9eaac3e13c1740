"""Reports show the contents of records, in 80 columns and in Markdown."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from gatewise.benchmarks.lstm import picture, record, report
from gatewise.benchmarks.lstm.record import LayerRecord
from gatewise.contract.errors import ArgumentError
from gatewise.selection.timing import Timing


def faster(row: LayerRecord, factor: float, **changes: object) -> LayerRecord:
    """Return the same row with gatewise's times divided."""
    times = {
        how: sides | {"gatewise": Timing(*(value / factor for value in dataclasses.astuple(sides["gatewise"])[:3]), 20)}
        for how, sides in row.times.items()
    }
    return dataclasses.replace(row, times=times, **changes)


def printed(rows: list[LayerRecord], *, colour: bool = False) -> str:
    stream = io.StringIO()
    Console(file=stream, width=80, force_terminal=colour, color_system="standard" if colour else None).print(
        report.on_screen(rows)
    )
    return stream.getvalue()


@pytest.fixture
def rows(cell: LayerRecord) -> list[LayerRecord]:
    ragged = {"case": "speech_ragged", "settings": cell.settings | {"name": "speech_ragged", "ragged": True}}
    ragged["settings"]["tokens"] = 10_000
    refused = {"status": "refused", "times": {}, "floor": None, "peak_bytes": {}, "error_ratio": None, "ran": ""}
    return [
        cell,
        faster(cell, 0.25, case="decode_64_1024"),
        faster(cell, 1.25, **ragged),
        dataclasses.replace(cell, **refused, case="a", note="hidden_size is 9, allowed: 8"),
        dataclasses.replace(cell, **refused, case="b", note="hidden_size is 9, allowed: 8"),
        dataclasses.replace(cell, **refused | {"status": "wrong"}, case="c", note="dx is off"),
        faster(cell, 2, direction="inference"),
        faster(cell, 4, dtype="fp16"),
    ]


def test_figures_of_a_row(cell: LayerRecord) -> None:
    assert (cell.speed_up("eager"), cell.speed_up("graph"), cell.over_floor) == pytest.approx((4, 2, 2))
    assert cell.memory_ratio == pytest.approx(0.5)
    assert cell.extra_bytes("gatewise") == 20 << 20
    smaller = dataclasses.replace(cell, peak_bytes={"gatewise": 5 << 20, "nn.LSTM": 50 << 20})
    assert smaller.extra_bytes("gatewise") == 0
    assert dataclasses.replace(cell, settings=cell.settings | {"time": 1}).memory_ratio is None


def test_without_a_graph_the_eager_time_is_shown(cell: LayerRecord) -> None:
    eager = dataclasses.replace(cell, times={"eager": cell.times["eager"], "graph": {}})
    assert eager.seconds == 1.5e-3
    assert eager.speed_up("graph") is None
    lost = dataclasses.replace(eager, note=f"{cell.note} No CUDA graph of nn.LSTM: out of memory.")
    text = " ".join(printed([lost]).split())
    assert "speech: No CUDA graph of nn.LSTM: out of memory." in text
    assert "within the allowed" not in text


def test_a_record_survives_its_file(cell: LayerRecord) -> None:
    assert LayerRecord.from_line(json.dumps(dataclasses.asdict(cell))) == cell
    of_before_grus = dataclasses.asdict(cell)
    del of_before_grus["cell"]
    assert LayerRecord.from_line(json.dumps(of_before_grus)) == cell


def test_screen(rows: list[LayerRecord]) -> None:
    text = printed(rows)
    assert max(map(len, text.splitlines())) <= 80
    lines = [line.split() for line in text.splitlines()]
    assert ["speech", "2", "4.00x", "2.00x", "2.00", "0.50", "1.04", "persistent"] in lines
    assert ["decode_64_1024", "8", "1.00x", "0.50x", "8.00", "0.50", "1.04", "persistent"] in lines
    assert ["a", "refused"] in lines
    assert ["c", "wrong"] in lines
    whole = " ".join(text.split())
    assert "a, b: refused. hidden_size is 9, allowed: 8" in whole
    assert "c: wrong. dx is off" in whole
    assert "Below 1.00x, bf16, train step, CUDA graph: decode_64_1024 0.50x." in whole
    assert "speech_ragged: 62% of the tokens of speech in 80% of its time, 1.28x a token." in whole
    assert "NVIDIA H200; PyTorch 2.9.0, gatewise 0.1.0, CUDA 12.8, cuDNN 9.19.0" in whole


def test_geometric_means_are_over_measured_cells(rows: list[LayerRecord]) -> None:
    lines = [" ".join(line.split()) for line in printed(rows).splitlines()]
    means = lines[lines.index("geometric means") :]
    # 4, 1 and 5 eager, 2, 0.5 and 2.5 under a graph
    assert any(line.startswith("bf16, train step 3 2.71x 1.36x") for line in means)
    assert any(line.startswith("bf16, inference 1 8.00x 4.00x") for line in means)


def test_predictions(cell: LayerRecord) -> None:
    near = dataclasses.replace(cell, predicted=1.8e-3, predicted_bytes=31 << 20)
    far = dataclasses.replace(cell, predicted=3e-3, predicted_bytes=60 << 20, case="far")
    assert report.predictions([near, far]) == (
        "time predicted within 25 % in 1 of 2 cells, furthest far with 2.00x of it; "
        "peak memory within 10 % in 1, furthest far with 2.00x of it."
    )
    inside = dataclasses.replace(near, predicted_captured=1.2e-3), dataclasses.replace(far, predicted_captured=1.3e-3)
    assert "with 2.00x of it; in a CUDA graph in 1 of 2; peak memory" in report.predictions(inside)
    low = dataclasses.replace(cell, predicted=3e-4, predicted_bytes=None, case="low")
    assert report.predictions([low]) == "time predicted within 25 % in 0 of 1 cells, furthest low with 0.20x of it."
    assert report.predictions([dataclasses.replace(cell, predicted=None)]) == ""
    assert "bf16, train step: time predicted within 25 %" in " ".join(printed([near]).split())


def test_another_kernel_in_a_graph_is_named(cell: LayerRecord) -> None:
    same, other = (dataclasses.replace(cell, ran_captured=name) for name in ("persistent", "stepwise"))
    assert "in a graph" not in report.report([cell])
    assert "in a graph" not in report.report([same])
    assert "| persistent (forward: 8 units), in a graph stepwise |" in report.report([other])
    assert "stepwise" in printed([other])


def test_a_choice_that_was_not_the_fastest_is_named(cell: LayerRecord) -> None:
    others = [faster(cell, 1.5, kernel="cudnn"), faster(cell, 1.2, kernel="stepwise")]
    elsewhere = faster(cell, 9, kernel="cudnn", direction="inference")
    (line,) = report.missed_choices([cell, *others, elsewhere])
    assert line == "bf16, train step, speech: cudnn is 1.50x as fast as the choice."
    assert report.missed_choices([cell, faster(cell, 1.04, kernel="cudnn")]) == []
    assert " ".join(line.split()) in " ".join(printed([cell, *others]).split())


def test_larger_errors_than_the_rivals_are_named(cell: LayerRecord) -> None:
    coarse = dataclasses.replace(cell, case="coarse", error_ratio=1.21)
    assert "Errors above 1.20x of nn.LSTM's, bf16, train step: coarse 1.21x." in printed([cell, coarse])
    assert "Errors above" not in printed([cell])


def test_only_wrong_rows_are_red(rows: list[LayerRecord]) -> None:
    red = [line for line in printed(rows, colour=True).splitlines() if "\x1b[1;31m" in line]
    assert len(red) == 1
    assert "wrong" in red[0]


def test_nothing_finished() -> None:
    assert printed([]).strip() == "No row was finished."


def test_markdown(rows: list[LayerRecord]) -> None:
    lines = report.markdown(rows).splitlines()
    assert lines[0] == "Times as fast as `torch.nn.LSTM`, geometric means over 6 shapes (`gatewise bench lstm`):"
    assert "| bf16 | 2.71x | 1.36x | 8.00x | 4.00x | 0.50x |" in lines
    assert any(line.endswith("Single shapes are 0.50 to 16.0 times as fast.") for line in lines)
    assert "| fp16 | 16.00x | 8.00x |  |  | 0.50x |" in lines
    found = "Slower than `torch.nn.LSTM`, by more than the 3% that runs differ by: bf16, train step, CUDA graph:"
    assert f"{found} decode_64_1024 0.50x." in lines


def test_markdown_names_cells_that_are_slower_when_called(cell: LayerRecord) -> None:
    slow = faster(cell, 0.2)
    (eager,), (graph,) = report.slower([slow], "eager"), report.slower([slow], "graph")
    found = f"bf16, train step, eager: {eager}; bf16, train step, CUDA graph: {graph}."
    assert found in report.markdown([slow])


def test_what_runs_differ_by_is_not_called_slower(cell: LayerRecord) -> None:
    near = [faster(cell, 0.49)]
    assert report.slower(near, "graph") == [f"{cell.case} 0.98x"]
    assert "Slower than" not in report.markdown(near)


def test_other_kernels_are_not_in_the_summary(rows: list[LayerRecord]) -> None:
    slow = faster(rows[0], 0.01, kernel="stepwise")
    assert report.markdown([*rows, slow]) == report.markdown(rows)


def test_whole_report(rows: list[LayerRecord]) -> None:
    text = report.report([*rows, faster(rows[0], 0.5, kernel="cudnn", ran="cudnn")])
    assert text.startswith("# `gatewise bench lstm`\n")
    assert f"- `{rows[0].run.command}`\n" in text
    assert "## bf16, train step, cudnn" in text
    assert (
        "| speech | 3 (2.85-3.3) | 2 (1.9-2.2) | 12 | 4 | 4.00x | 2.00x | 1 | 2.00 | 20 MiB (40 MiB) | 1.04 | "
        "persistent (forward: 8 units) | 2.2 |"
    ) in text
    assert "- a, b: refused. hidden_size is 9, allowed: 8" in text
    columns = {line.count("|") for line in text.split("## bf16, train step\n")[1].splitlines() if line.startswith("|")}
    assert len(columns) == 1


def test_the_newest_record_of_every_row(cell: LayerRecord) -> None:
    again, other = faster(cell, 2), dataclasses.replace(cell, dtype="fp16")
    slower = dataclasses.replace(cell, run=dataclasses.replace(cell.run, device="NVIDIA A100"))
    assert record.newest([cell, other, again]) == [again, other]
    assert record.newest([slower, cell, other]) == [cell, other]
    assert record.newest([slower, cell], "a100") == [slower]
    with pytest.raises(ArgumentError, match="part of a recorded device's name: NVIDIA H200, got 'mi300'"):
        record.newest([cell], "mi300")


def test_picture(rows: list[LayerRecord], tmp_path: Path) -> None:
    png, svg = picture.draw(rows, tmp_path / "new" / "lstm")
    assert png.read_bytes().startswith(b"\x89PNG")
    first = svg.read_bytes()
    assert first.startswith(b"<?xml")
    assert picture.draw(rows, tmp_path / "new" / "lstm")[1].read_bytes() == first
    assert picture.draw([faster(rows[0], 3), *rows[1:]], tmp_path / "new" / "lstm")[1].read_bytes() != first


def test_a_picture_has_one_row_for_each_case_ordered_by_size(rows: list[LayerRecord]) -> None:
    def sized(name: str, **sizes: object) -> LayerRecord:
        return dataclasses.replace(rows[0], case=name, settings=rows[0].settings | {"name": name} | sizes)

    measured = [
        sized("decode_4_64", hidden_size=64, batch=4, time=1),
        sized("wide", hidden_size=2000, num_layers=2, directions=2, batch=3, time=50, ragged=True),
        sized("9-3-64", hidden_size=64, batch=3, time=9),
    ]
    lines = picture.by_size([*measured, dataclasses.replace(measured[1], dtype="fp32")])
    assert [[record.dtype for record in line] for line in lines] == [["bf16"], ["bf16"], ["bf16", "fp32"]]
    assert [picture.label(line[0].settings) for line in lines] == [
        "64 units, batch 3, 9 steps",
        "64 units, batch 4, 1 step",
        "wide: 2000 units x 2 layers, bidirectional, batch 3, 50 steps at most",
    ]


def test_a_picture_shows_what_users_get(rows: list[LayerRecord]) -> None:
    named = dataclasses.replace(rows[0], kernel="cudnn")
    assert named not in picture.drawable([*rows, named])
    assert picture.drawable([named]) == [named]
    assert {row.direction for row in picture.drawable(rows, "inference")} == {"inference"}


def test_a_picture_needs_a_speed(rows: list[LayerRecord], tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="at least one measured row"):
        picture.draw(rows[3:6], tmp_path / "lstm")
