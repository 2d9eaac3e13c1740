"""`gatewise tune` on an invented GPU with a stopwatch that is none."""

import dataclasses
import json

import pytest
import torch

from gatewise.benchmarks import layer_times, shapes
from gatewise.benchmarks.layer_times import Times
from gatewise.contract.device import Device
from gatewise.selection import correction, estimate, explain, kernel_named, points, predicted
from gatewise.selection.points import Record

INVENTED = Device.named("a100").replace(name="An Invented GPU 9000")
RECORD = Record("tune", INVENTED, "gatewise tune", "0123456789", "2026-11-22", "2.11.0")
SLOWER = {"persistent": 3.0, "cudnn": 0.5, "stepwise": 2.0, "aten": 1.0, "eager": 1.5}


def stopwatch(kernel, problem, device):
    """Every kernel takes so many times what is estimated, and twice that from Python."""
    estimated = estimate.busy(kernel_named(kernel).work(problem, INVENTED), problem, INVENTED)
    return Times(SLOWER[kernel] * estimated, 20 * SLOWER[kernel] * estimated)


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """An empty cache folder, and nothing remembered of another."""
    monkeypatch.setenv("GATEWISE_CACHE", str(tmp_path / "cache"))

    def forget():
        points.points.cache_clear()
        correction._fitted.cache_clear()
        predicted.cache_clear()

    forget()
    yield tmp_path / "cache"
    forget()


@pytest.fixture
def on_invented_gpu(fresh, monkeypatch):
    """`gatewise tune` finds the invented GPU, and a clock that the first shapes use up."""
    measured = layer_times.measured

    def few(problems, device, record, **options):
        times = iter(range(1000))
        return measured(problems, device, record, watch=stopwatch, clock=lambda: float(next(times)), **options)

    monkeypatch.setattr("gatewise.cli.tune.device_named", lambda name: torch.device("cuda"))
    monkeypatch.setattr(Device, "probe", classmethod(lambda cls, device: INVENTED))
    monkeypatch.setattr("gatewise.cli.tune.Run.now", lambda device: type("Run", (), {"commit": "0123456789abcdef"}))
    monkeypatch.setattr(layer_times, "build", lambda problems, device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(layer_times, "measured", few)
    monkeypatch.setattr(correction, "_MEASURED", "none")  # the invented times are parts of estimates
    correction._fitted.cache_clear()
    return fresh / "rates" / "an-invented-gpu-9000.jsonl"


def verdicts(captured=True):
    layer = torch.nn.LSTM(512, 512, device="meta", dtype=torch.bfloat16)
    return explain(layer, (100, 64, 512), device=INVENTED, captured=captured)


def test_explain_says_measured_afterwards_and_chooses_by_it(gatewise, on_invented_gpu):
    before = verdicts()
    assert before.chosen == "persistent"
    assert "times    estimated, not measured on this GPU" in str(before)
    answer = gatewise("tune", "--seconds", 40)
    assert answer.status == 0, answer.err
    correction._fitted.cache_clear()
    predicted.cache_clear()
    after = verdicts()
    assert after.chosen == "cudnn"
    assert after.evidence == "predicted from measured calls on this GPU"
    for verdict, old in zip(after.verdicts, before.verdicts, strict=True):
        assert verdict.seconds / old.seconds == pytest.approx(SLOWER[verdict.kernel], rel=0.05)
    eager = verdicts(captured=False).verdict("cudnn")
    assert eager.seconds > 3 * after.verdict("cudnn").seconds


def test_what_is_written_is_shown_in_80_columns(gatewise, on_invented_gpu):
    assert "nothing is measured" in gatewise("tune", "--show").out
    assert not on_invented_gpu.exists()
    answer = gatewise("tune", "--seconds", 40)
    assert json.loads(on_invented_gpu.read_text().splitlines()[0]) == {"format": points.FORMAT}
    shown = gatewise("tune", "--show").out
    assert shown == answer.out
    assert max(map(len, shown.replace(str(on_invented_gpu), "").splitlines())) <= 80
    assert "An Invented GPU 9000" in shown
    assert "commit 0123456789" in shown
    line = next(line for line in shown.splitlines() if line.split()[:2] == ["cudnn", "training"])
    assert "0.50 (0.50 to 0.50)" in line


def test_a_file_that_gatewise_did_not_write_stays(gatewise, on_invented_gpu):
    on_invented_gpu.parent.mkdir(parents=True)
    on_invented_gpu.write_text("mine\n")
    answer = gatewise("tune", "--seconds", 40)
    assert answer.status == 1
    assert "must be one that gatewise wrote" in " ".join(answer.err.split())
    assert on_invented_gpu.read_text() == "mine\n"


def test_a_folder_that_cannot_be_written_is_an_error_before_anything_is_measured(
    gatewise, on_invented_gpu, tmp_path, monkeypatch
):
    (tmp_path / "mine").write_text("mine\n")
    monkeypatch.setenv("GATEWISE_CACHE", str(tmp_path / "mine"))
    monkeypatch.setattr(layer_times, "measured", lambda *args, **options: pytest.fail("measured"))
    answer = gatewise("tune", "--seconds", 40)
    assert answer.status == 1
    assert "cannot be written: Not a directory. Set GATEWISE_CACHE" in " ".join(answer.err.split())
    assert (tmp_path / "mine").read_text() == "mine\n"


def test_the_help_is_plain_and_narrow(gatewise):
    answer = gatewise("tune", "--help")
    assert "gatewise tune --show" in answer.out
    assert max(map(len, answer.out.splitlines())) <= 80


@pytest.mark.parametrize("seconds", ["0", "1e9"])
def test_a_time_out_of_range_is_one_sentence(gatewise, on_invented_gpu, seconds):
    answer = gatewise("tune", "--seconds", seconds)
    assert answer.refused
    assert "--seconds" in answer.err


def test_a_cpu_is_measured_too(fresh):
    numbers = Device.named("cpu")
    record = dataclasses.replace(RECORD, device=numbers)
    small = (
        problem for problem in shapes.designed(numbers) if problem.time * problem.batch * problem.hidden_size < 1e4
    )
    (found,) = list(layer_times.measured(small, torch.device("cpu"), record, seconds=1e-9, clock=ticks()))
    assert {point.kernel for point in found} <= {"aten", "eager"}
    assert all(point.graph > 0 and point.eager is None for point in found)
    assert [dataclasses.replace(point, record=record) for point in points.read(points.lines(found))] != []


def ticks():
    """Return a clock by which there is time for one problem."""
    times = iter([0.0, 0.0, 0.0, 1.0, 1.0, 1.0])
    return lambda: next(times)
