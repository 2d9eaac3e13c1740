"""`benchmarks/predictions.py`: how predictions are held to random shapes."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from gatewise.benchmarks import layer_times, shapes
from gatewise.benchmarks.layer_times import Times
from gatewise.contract.device import Device
from gatewise.selection import predicted

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "predictions.py"


@pytest.fixture
def predictions():
    specification = importlib.util.spec_from_file_location("predictions", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def row(chosen, **kernels):
    times = {
        name: {"seconds": measured, "predicted": said, "known": True} for name, (measured, said) in kernels.items()
    }
    return {"problem": "a problem", "chosen": chosen, "kernels": times}


def test_shares_are_counted_over_calls_and_over_choices(predictions):
    rows = [
        row("cudnn", cudnn=(1.0, 1.2), aten=(2.0, 1.0)),
        row("cudnn", cudnn=(1.1, 1.0), aten=(1.0, 1.05)),
    ]
    shares = predictions.summary(rows)
    assert shares["predicted"]["all"]["within"] == 0.75
    assert shares["predicted"]["all"]["worst"] == (0.5, "aten: a problem")
    assert shares["predicted"]["chosen"] == {"calls": 2, "within": 1.0, "worst": (1.2, "cudnn: a problem")}
    assert shares["choices"] == {"calls": 2, "within": 0.5, "worst": (1.1, "cudnn: a problem")}
    assert "75.0% of    4" in predictions.text(shares)


@pytest.fixture
def small_shapes(monkeypatch):
    drawn = shapes.drawn
    monkeypatch.setattr(
        shapes,
        "drawn",
        lambda *given, **options: (
            each for each in drawn(*given, **options) if each.time * each.batch * each.hidden_size < 1e4
        ),
    )


def run(predictions, record, *words):
    words = "--device", "cpu", "--seconds", "60", "--record", str(record), *words
    return predictions.main(words)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# It draws many shapes.
@pytest.mark.exhaustive
@pytest.mark.usefixtures("small_shapes")
def test_parts_are_merged_to_the_shapes_of_the_whole_run(predictions, tmp_path):
    whole, one, two, record = (tmp_path / f"{name}.jsonl" for name in ("whole", "one", "two", "record"))
    assert run(predictions, whole, "--shapes", "3") == 0
    assert run(predictions, one, "--shapes", "3", "--part", "1/2") == 0
    assert run(predictions, two, "--shapes", "3", "--part", "2/2") == 0
    assert predictions.main(["--merge", str(one), str(two), "--record", str(record)]) == 0
    *merged, last = lines(record)
    *expected, _ = lines(whole)
    assert [line["problem"] for line in lines(two)[:-1]] == [expected[1]["problem"]]
    assert [line["problem"] for line in merged] == [expected[n]["problem"] for n in (0, 2, 1)]
    assert last["summary"]["shapes"] == 3
    assert last["parts"] == 2
    for files in ([one], [one, one], [whole, one]):
        with pytest.raises(ValueError, match="not the parts of one run"):
            predictions.merged(files)


@pytest.mark.parametrize("word", ["0/2", "3/2", "2", "one/two"])
def test_a_part_that_does_not_exist_is_refused(predictions, word):
    with pytest.raises(SystemExit):
        predictions.main(["--part", word])


@pytest.mark.usefixtures("small_shapes")
def test_a_tiny_run_writes_each_shape_and_a_summary(predictions, tmp_path, capsys):
    record = tmp_path / "predictions.jsonl"
    assert run(predictions, record, "--shapes", "2") == 0
    first, second, last = lines(record)
    for line in (first, second):
        assert line["kernels"][line["chosen"]]["seconds"] > 0
        assert line["kernels"][line["chosen"]]["predicted"] > 0
    assert last["summary"]["shapes"] == 2
    assert last["run"]["torch"] == torch.__version__
    text = capsys.readouterr().out.strip("\r")
    assert predictions.main(["--summary", "--record", str(record)]) == 0
    assert capsys.readouterr().out == text


def test_a_kernel_that_fails_leaves_the_others(monkeypatch):
    device = Device.named("cpu")
    record = layer_times.Record("test", device, "", "", "", "")

    def watch(kernel, problem, where):
        if kernel == "aten":
            raise RuntimeError("out of memory")
        return Times(1e-3, None)

    problems = shapes.drawn(3, device, training=True)
    times = iter([0.0, 0.0, 0.0, 1.0, 1.0])
    (found,) = layer_times.measured(
        problems, torch.device("cpu"), record, seconds=0.5, watch=watch, clock=lambda: next(times)
    )
    assert [point.kernel for point in found] == ["eager"]


def test_shapes_are_those_of_their_seed():
    device = Device.named("h200")
    draw = lambda seed: [problem for problem, _ in zip(shapes.drawn(seed, device), range(4), strict=False)]  # noqa: E731
    assert draw(1) == draw(1) != draw(2)
    training = shapes.drawn(1, device, training=True)
    assert all(next(training).needs_grad for _ in range(3))


@pytest.mark.parametrize("name", ["h200", pytest.param("l4", marks=pytest.mark.exhaustive), "cpu"])
def test_designed_shapes_cover_every_precision_and_pass_soon(name):
    device = Device.named(name)
    designed = shapes.designed(device)
    first = [next(designed) for _ in range(64)]
    kinds = {(problem.dtype, problem.allow_tf32, problem.needs_grad) for problem in first}
    assert len(kinds) == 2 * len(shapes.precisions_of(device))
    assert any(problem.num_layers > 1 for problem in first)
    assert any(problem.bidirectional for problem in first)
    assert all(min(each.seconds for each in predicted(one, device).verdicts if each.accepted) <= 0.015 for one in first)
