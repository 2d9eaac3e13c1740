"""`gatewise bench quality`: complete runs become records, and records a table."""

from __future__ import annotations

import json

import pytest
from matplotlib.figure import Figure

from gatewise.benchmarks import quality, quality_picture, record
from gatewise.training import perplexity


def read(folder="records"):
    return record.read_lines(record.path_of(record.Path(folder), quality.BENCHMARK), quality.QualityRecord)


def test_runs_of_a_language_model_become_records_and_a_table(gatewise, small, tmp_path):
    for seed in (1, 2):
        assert gatewise("train", "lm", *small, "--seed", seed, "--output", f"run{seed}").status == 0
    answer = gatewise("bench", "quality", "run1", "run2", "--results", "records")
    assert answer.status == 0, answer.err
    first, second = rows = read()
    assert [each.seed for each in rows] == [1, 2]
    assert first.settings == second.settings
    assert str(tmp_path) not in json.dumps(first.settings)
    result = json.loads((tmp_path / "run1" / "result.json").read_text())
    assert first.figure("test") == result["test_perplexity"]
    assert first.figure("valid") == min(each["valid_perplexity"] for each in first.evaluations)
    assert [each["epoch"] for each in first.evaluations] == [1, 2]
    minutes = [each["minutes"] for each in first.evaluations]
    assert 0 < minutes[0] < minutes[1] < first.minutes
    assert first.run.command.endswith("--seed 1 --output run1")
    assert f"lm, seed 1: validation {first.figure('valid'):.2f}, test {first.figure('test'):.2f}" in answer.out
    file = record.path_of(tmp_path / "records", quality.BENCHMARK)
    older, newer = map(json.loads, file.read_text().splitlines())
    assert older["settings"]["training"].pop("best_by") == "loss"  # as in records that are older than this option
    file.write_text(f"{json.dumps(older)}\n{json.dumps(newer)}\n")
    page = tmp_path / "page.md"
    page.write_text("<!-- benchmark: quality -->\n<!-- /benchmark: quality -->\n")
    words = ("--results", "records", "--reports", "reports", "--into", "page.md")
    answer = gatewise("bench", "report", "quality", *words)
    assert answer.status == 0, answer.err
    both = [each.figure("test") for each in rows]
    cell = f"{sum(both) / 2:.1f} ({min(both):.1f} to {max(both):.1f})"
    line = next(line for line in page.read_text().splitlines() if line.startswith("| `lm`"))
    assert cell in line
    assert line.endswith("| 1, 2 |")
    lines = (tmp_path / "reports" / "quality.md").read_text().splitlines()
    last = first.evaluations[-1]
    assert f"| 2 | {last['minutes']:.2f} | {last['valid_perplexity']:.2f} |" in lines


def test_the_curves_of_all_runs_are_drawn(gatewise, drawn, small, tmp_path):
    for seed in (1, 2):
        assert gatewise("train", "lm", *small, "--seed", seed, "--output", f"run{seed}").status == 0
    gatewise("bench", "quality", "run1", "run2", "--results", "records")
    (tmp_path / "page.md").write_text("<!-- benchmark: quality -->\n<!-- /benchmark: quality -->\n")
    words = ("--results", "records", "--reports", "reports", "--into", "page.md", "--plot", "images/quality")
    assert gatewise("bench", "report", "quality", *words).status == 0
    assert (tmp_path / "images" / "quality.png").stat().st_size > 1000
    assert "](images/quality.svg)" in (tmp_path / "page.md").read_text()
    axes = Figure().subplots(1, 1, squeeze=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "subplots", lambda *_, **__: axes)
        quality_picture.draw(read(), tmp_path / "again")
    for row, line in zip(read(), axes[0][0].lines, strict=True):
        expected = [(each["minutes"], each["valid_perplexity"]) for each in row.evaluations]
        assert list(zip(*line.get_data(), strict=True)) == expected
    assert [text.get_text() for text in axes[0][0].get_legend().get_texts()] == ["lm"]


def test_the_newest_records_of_a_recipe_count(gatewise, small):
    for number, epochs in enumerate((1, 2, 2)):
        words = ("--epochs", epochs, "--seed", 5, "--output", f"run{number}")
        assert gatewise("train", "lm", *small, *words).status == 0
        assert gatewise("bench", "quality", f"run{number}", "--results", "records").status == 0
    rows = read()
    assert quality.newest(rows) == rows[2:]
    assert len(rows[2].evaluations) == 2


def test_an_incomplete_run_is_refused_and_nothing_recorded(trained, tmp_path):
    (tmp_path / "run" / "result.json").unlink()
    answer = trained("bench", "quality", "run", "--results", "records")
    assert answer.refused
    said = " ".join(answer.err.split())
    assert "`FOLDERS` must be folders of complete runs of gatewise train lm or nmt with finite scores, got run" in said
    assert not (tmp_path / "records" / "quality.jsonl").exists()


def test_a_result_of_another_task_is_refused(trained, tmp_path):
    path = tmp_path / "run" / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"task": "classify"}))
    assert trained("bench", "quality", "run", "--results", "records").refused


@pytest.mark.parametrize(
    "change",
    [
        lambda result: [],
        lambda result: result | {"run": {}},
        lambda result: result | {"epochs": 1},
        lambda result: {name: value for name, value in result.items() if name != "minutes"},
        lambda result: result | {"minutes": [1.0]},
        lambda result: result | {"test_perplexity": None},
        lambda result: result | {"evaluations": [{"epoch": 1, "minutes": 1.0, "valid_perplexity": None}]},
    ],
    ids=[
        "a list",
        "no environment",
        "before it was resumed",
        "no minutes",
        "several minutes",
        "no finite score",
        "no finite evaluation",
    ],
)
def test_what_is_no_complete_result_is_refused_and_nothing_recorded(trained, tmp_path, change):
    path = tmp_path / "run" / "result.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    answer = trained("bench", "quality", "run", "--results", "records")
    assert (answer.status, "is missing or incomplete" in " ".join(answer.err.split())) == (2, True)
    assert not (tmp_path / "records" / "quality.jsonl").exists()


@pytest.mark.parametrize("field", ["train", "valid"])
def test_losses_are_recorded_as_perplexities(trained, tmp_path, field):
    evaluations = json.loads((tmp_path / "run" / "result.json").read_text())["evaluations"]
    assert all(1 < each[f"{field}_perplexity"] < perplexity(10) for each in evaluations)
