"""`benchmarks/rates.py`: how calls are measured again or drawn, and how their times are written."""

import dataclasses
import importlib.util
import itertools
import json
import re
from pathlib import Path

import pytest
import torch

from gatewise.benchmarks import layer_times
from gatewise.benchmarks.layer_times import Times
from gatewise.cells import LSTM
from gatewise.contract.device import Device
from gatewise.selection import kernel_named, points

ROOT = Path(__file__).parents[2]
H200 = Device.named("h200")
PACKAGED = points.points(H200.name)


@pytest.fixture
def script():
    specification = importlib.util.spec_from_file_location("rates", ROOT / "benchmarks" / "rates.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture
def rates(tmp_path):
    found = [each for each in PACKAGED if each.kernel in ("persistent", "aten")][::40]
    (tmp_path / "nvidia-h200.jsonl").write_text("\n".join(points.lines(found)) + "\n")
    return tmp_path


def read(path):
    return points.read(path.read_text().splitlines())


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_calls_are_measured_and_written_in_their_place(script, rates, monkeypatch, capsys):
    before = read(rates / "nvidia-h200.jsonl")
    monkeypatch.setattr(points, "points", lambda name: before)
    monkeypatch.setattr(script.Device, "probe", lambda device: H200)
    monkeypatch.setattr(layer_times, "stopwatch", None)
    monkeypatch.setattr(
        script,
        "measured_again",
        lambda wanted, device, seconds: ((point, Times(2 * point.graph, 3 * point.graph)) for point in wanted),
    )
    options = ["--kernel", "persistent", "--precision", "tf32"]
    file = rates / "again.jsonl"
    assert script.main(["again", str(file), "--device", "cpu", *options]) == 0
    measured = read(file)
    wanted = [
        each
        for each in before
        if (each.kernel, points.precision_of(each.problem), each.problem.needs_grad) == ("persistent", "tf32", True)
        and type(each.problem.cell) is LSTM
    ]
    assert len(wanted) >= 2
    assert {each.problem for each in measured} == {each.problem for each in wanted}
    assert script.main(["write", str(file), "--rates", str(rates), *options]) == 0
    assert f"\nnvidia-h200.jsonl: {len(wanted)} of " in capsys.readouterr().out
    after = read(rates / "nvidia-h200.jsonl")
    for old, new in zip(before, after, strict=True):
        assert (new.kernel, new.problem, new.work) == (old.kernel, old.problem, old.work)
        if old not in wanted:
            assert new == old
            continue
        assert new.graph == pytest.approx(2 * old.graph, rel=1e-3)
        assert new.eager == pytest.approx(3 * old.graph, rel=1e-3)
        about = new.record
        assert about.name == f"{old.record.name.partition(', ')[0]}, again persistent {about.date} {about.commit}"
        assert about.source.startswith("benchmarks/rates.py: LSTM on the kernel persistent")
        assert new.record.torch == torch.__version__


def test_replays_are_replaced_alone(script, rates):
    before = [each for each in read(rates / "nvidia-h200.jsonl") if each.kernel == "persistent"]
    record = dataclasses.replace(before[0].record, name="again persistent", commit="1234567", date="2026-11-23")
    again = [
        dataclasses.replace(each, graph=2 * each.graph, eager=5 * each.graph, record=record) for each in before[:3]
    ]
    after = script.written(before, {(each.kernel, each.problem): each for each in again}, replays=True)
    for old, new in zip(before[:3], after[:3], strict=True):
        assert (new.graph, new.eager) == (2 * old.graph, old.eager)
        assert new.record.name == f"{old.record.name.partition(', ')[0]}, replays, again persistent 2026-11-23 1234567"
    assert after[3:] == before[3:]


def test_what_was_measured_is_not_measured_again(script, rates, monkeypatch, capsys):
    before = read(rates / "nvidia-h200.jsonl")
    monkeypatch.setattr(points, "points", lambda name: before)
    monkeypatch.setattr(script.Device, "probe", lambda device: H200)
    counts = []

    def measured(wanted, device, seconds):
        counts.append(len(wanted))
        return ((point, Times(point.graph, None)) for point in wanted[:3])

    monkeypatch.setattr(script, "measured_again", measured)
    for _ in range(2):
        script.main(["again", str(rates / "again.jsonl"), "--device", "cpu", "--kernel", "aten"])
    assert counts[0] - counts[1] == 3
    assert "1.000 of the former time" in capsys.readouterr().out


def test_a_call_that_fails_and_the_time_leave_the_other_calls(script, capsys):
    wanted, built = [each for each in PACKAGED if each.kernel in ("persistent", "aten")][:60:15], []

    def watch(kernel, problem, device):
        if problem == wanted[1].problem:
            raise RuntimeError("out of memory")
        return Times(1e-3, None)

    ticks = iter([0.0, 0.0, 1.0, 2.0, 9.0])
    found = list(
        script.measured_again(
            wanted,
            torch.device("cpu"),
            seconds=5.0,
            watch=watch,
            build=lambda problems, device: built.extend(problems),
            clock=lambda: next(ticks),
        )
    )
    assert [point for point, _ in found] == [wanted[0], wanted[2]]
    assert built == [point.problem for point in wanted if point.kernel == "persistent"]
    assert "out of memory" in capsys.readouterr().err


def test_rows_of_the_benchmark_replace_the_kernel_that_ran(script, rates, tmp_path, capsys):
    grid = [
        each
        for each in PACKAGED
        if each.record.name.startswith(("grid", "gru")) and points.precision_of(each.problem) == "tf32"
    ]
    (rates / "nvidia-h200.jsonl").write_text("\n".join(points.lines(grid)) + "\n")
    results = ROOT / "benchmarks" / "results"
    files = [str(results / "lstm.jsonl"), str(results / "gru.jsonl")]
    assert script.main(["write", *files, "--rates", str(rates), "--precision", "tf32"]) == 0
    after = read(rates / "nvidia-h200.jsonl")
    rows = {
        (row["cell"], row["case"]): row
        for name in files
        for row in lines_of(Path(name))
        if (row["dtype"], row["direction"], row["kernel"]) == ("tf32", "train", "auto") and "cell" in row
    }
    for cell, case, lengths in (("lstm", "tagger", False), ("gru", "tagger_ragged", True), ("lstm", "awd", False)):
        row = rows[cell, case]
        assert row["ran_captured"] == row["ran"] == "persistent"
        (point,) = [
            each
            for each in after
            if each.kernel == "persistent"
            and each.problem.needs_grad
            and each.problem.cell.name == cell
            and (each.problem.layout.name != "DENSE") == lengths
            and (each.problem.time, each.problem.batch, each.problem.hidden_size)
            == tuple(row["settings"][name] for name in ("time", "batch", "hidden_size"))
            and each.problem.num_layers == row["settings"]["num_layers"]
        ]
        for found, how in ((point.graph, "graph"), (point.eager, "eager")):
            assert found == pytest.approx(row["times"][how]["gatewise"]["median"], rel=1e-3)
        assert point.record.commit == row["run"]["commit"][:7]
        assert point.record.source == f"benchmarks/results/{cell}.jsonl"
    for old, new in zip(grid, after, strict=True):
        if old.kernel != "persistent":
            assert dataclasses.replace(new, record=old.record) == old


def test_drawn_shapes_are_added_once(script, rates, monkeypatch, capsys):
    before = read(rates / "nvidia-h200.jsonl")
    monkeypatch.setattr(script.Device, "probe", lambda device: H200.replace(memory_bytes=150 << 30))

    def measured(problems, device, record, *, seconds):
        for problem in itertools.islice(problems, 2):
            yield [points.Point("aten", problem, kernel_named("aten").work(problem, H200), 1e-4, 2e-4, record)]
        yield [dataclasses.replace(before[0], record=record)]

    monkeypatch.setattr(layer_times, "measured", measured)
    file = rates / "drawn.jsonl"
    assert script.main(["draw", str(file), "--device", "cpu", "--seed", "5", "--steps", "1", "8"]) == 0
    assert "3 shapes" in capsys.readouterr().out
    for further in (2, 0):
        assert script.main(["add", str(file), "--rates", str(rates)]) == 0
        assert f"{further} further calls" in capsys.readouterr().out
    after = read(rates / "nvidia-h200.jsonl")
    (name,) = {each.record.name for each in after[len(before) :]}
    assert re.fullmatch(r"drawn 5 with 1 to 8 steps, \d{4}-\d\d-\d\d [0-9a-f]*", name)
    new = [each for each in after if each.record.name == name]
    assert list(after) == [*before, *new]
    assert len(new) == 2
    assert all(each.problem.time * each.problem.num_layers * each.problem.num_directions <= 8 for each in new)
    assert all(each.record.device == before[-1].record.device for each in new)


def test_draws_of_one_seed_with_other_steps_or_commits_stay_apart(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script.Device, "probe", lambda device: H200)
    monkeypatch.setattr(
        layer_times,
        "measured",
        lambda problems, device, record, seconds: [
            [points.Point("aten", problem, kernel_named("aten").work(problem, H200), 1e-4, None, record)]
            for problem in itertools.islice(problems, 1)
        ],
    )
    run, file = script.Run.now(torch.device("cpu")), tmp_path / "drawn.jsonl"
    for commit, steps in (("1" * 40, ["--steps", "1", "8"]), ("1" * 40, []), ("2" * 40, [])):
        made = dataclasses.replace(run, commit=commit)
        monkeypatch.setattr(script.Run, "now", lambda device, made=made: made)
        assert script.main(["draw", str(file), "--device", "cpu", "--seed", "5", *steps]) == 0
    day = run.date[:10]
    assert [(point.record.name, point.record.commit) for point in read(file)] == [
        (f"drawn 5 with 1 to 8 steps, {day} 1111111", "1111111"),
        (f"drawn 5 with any number of steps, {day} 1111111", "1111111"),
        (f"drawn 5 with any number of steps, {day} 2222222", "2222222"),
    ]


def test_shapes_that_were_judged_are_added(script, rates, capsys):
    before = read(rates / "nvidia-h200.jsonl")
    file = ROOT / "benchmarks" / "results" / "predictions.jsonl"
    *rows, last = (row for row in lines_of(file) if row["seed"] == 20261123)
    times = {(row["problem"], name): each["seconds"] for row in rows for name, each in row["kernels"].items()}
    words = ["add", str(file), "--rates", str(rates)]
    for further in (len(times), 0):
        assert script.main([*words, "--seed", "20261123"]) == 0
        assert f"{further} further calls" in capsys.readouterr().out
    new = read(rates / "nvidia-h200.jsonl")[len(before) :]
    assert {(str(each.problem), each.kernel) for each in new} == {*times}
    for each in new:
        assert each.graph == pytest.approx(times[str(each.problem), each.kernel], rel=1e-3)
        assert each.eager is None
        assert (each.record.name, each.record.commit) == ("judged 20261123", last["run"]["commit"][:7])
    with pytest.raises(ValueError, match="0 runs with seed 5"):
        script.main([*words, "--seed", "5"])


def test_a_judged_shape_whose_sizes_are_others_is_refused(script, tmp_path):
    rows = [row for row in lines_of(ROOT / "benchmarks" / "results" / "predictions.jsonl") if row["seed"] == 20261123]
    rows[0]["sizes"][0] += 1
    file = tmp_path / "predictions.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match="has the sizes of"):
        list(script.of_predictions(file, 20261123))
