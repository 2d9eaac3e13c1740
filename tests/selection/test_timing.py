"""Timing, with a clock that only the timed functions advance."""

from __future__ import annotations

import pytest
import torch

from gatewise.contract.errors import ArgumentError, DeviceError
from gatewise.selection.timing import (
    Timing,
    captured,
    clock_for,
    peak_memory,
    sample_in_turn,
    time_callable,
    time_side_by_side,
)


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0
        self.began = 0.0

    def start(self) -> None:
        self.began = self.now

    def stop(self) -> float:
        return self.now - self.began


class Work:
    """A function with given times, one per call and the last one for all others; it writes its name into a diary."""

    def __init__(self, clock: FakeClock, *seconds: float, name: str = "", diary: list[str] | None = None) -> None:
        self.clock, self.seconds, self.name, self.diary = clock, list(seconds), name, diary
        self.calls = 0

    def __call__(self) -> None:
        self.clock.now += self.seconds[min(self.calls, len(self.seconds) - 1)]
        self.calls += 1
        if self.diary is not None:
            self.diary.append(self.name)


def test_median_and_quantiles() -> None:
    assert Timing.of([5.0, 1.0, 3.0, 2.0, 4.0, 6.0]) == Timing(median=3.5, q20=2.0, q80=5.0, runs=6)
    assert Timing.of([2.0]) == Timing(2.0, 2.0, 2.0, 1)


def test_warm_up_is_not_timed() -> None:
    clock = FakeClock()
    work = Work(clock, 100.0, 100.0, 1.0)
    timing = time_callable(work, runs=5, warmups=2, calls=1, budget=None, clock=clock)
    assert timing == Timing(1.0, 1.0, 1.0, 5)
    assert work.calls == 7


def test_a_sample_is_the_mean_of_its_calls() -> None:
    clock = FakeClock()
    timing = time_callable(Work(clock, 1.0, 3.0, 5.0), runs=1, warmups=0, calls=3, clock=clock)
    assert timing.median == pytest.approx(3.0)


@pytest.mark.parametrize(("seconds", "calls"), [(1e-4, 10), (3e-4, 4), (1.0, 1), (1e-9, 1000), (0.0, 1000)])
def test_short_functions_are_called_until_a_millisecond_has_passed(seconds: float, calls: int) -> None:
    clock = FakeClock()
    work = Work(clock, seconds)
    time_callable(work, runs=1, warmups=0, clock=clock)
    assert work.calls == 1 + calls  # one call to determine the number of calls


def test_several_are_sampled_in_turn() -> None:
    clock, diary = FakeClock(), []
    functions = {name: Work(clock, seconds, name=name, diary=diary) for name, seconds in (("a", 1.0), ("b", 2.0))}
    timings = time_side_by_side(functions, runs=3, warmups=1, calls=2, clock=clock)
    assert "".join(diary) == "ab" + "aabb" * 3
    assert (timings["a"].median, timings["b"].median) == (1.0, 2.0)


def test_drift_hits_all_alike() -> None:
    clock = FakeClock()
    slower = [1.0 + 0.1 * step for step in range(50)]
    timings = time_side_by_side(
        {"a": Work(clock, *slower), "b": Work(clock, *slower)}, runs=10, warmups=0, calls=1, clock=clock
    )
    assert timings["a"] == timings["b"]


def test_budget_ends_the_runs_but_not_before_three() -> None:
    def runs(budget: float | None) -> int:
        clock = FakeClock()
        return time_callable(Work(clock, 1.0), runs=20, calls=1, budget=budget, clock=clock).runs

    assert (runs(None), runs(7.5), runs(0.5)) == (20, 8, 3)


def test_samples_can_be_read_as_they_come() -> None:
    clock = FakeClock()
    samples = sample_in_turn({"a": Work(clock, 1.0), "b": Work(clock, 2.0)}, runs=9, calls=1, clock=clock)
    assert [next(samples) for _ in range(3)] == [("a", 1.0), ("b", 2.0), ("a", 1.0)]


def test_calls_by_name_and_calls_before_a_sample_that_are_not_timed() -> None:
    clock, diary = FakeClock(), []
    functions = {
        "a": Work(clock, 9.0, 9.0, 1.0, 1.0, 1.0, 9.0, 9.0, 1.0, name="a", diary=diary),
        "b": Work(clock, 2.0, name="b", diary=diary),
    }
    samples = sample_in_turn(functions, runs=2, warmups=0, calls={"a": 3, "b": 1}, leads={"a": 2}, clock=clock)
    assert list(samples) == [("a", 1.0), ("b", 2.0)] * 2
    assert "".join(diary) == "aaaaab" * 2


@pytest.mark.parametrize("option", [{"runs": 0}, {"warmups": -1}, {"calls": 0}])
def test_counts_out_of_range(option: dict[str, int]) -> None:
    (name,) = option
    with pytest.raises(ArgumentError, match=f"`{name}` must be at least"):
        time_callable(lambda: None, **option)


def test_no_sample_is_an_error() -> None:
    with pytest.raises(ArgumentError, match="at least one time"):
        Timing.of([])


def test_real_callable_on_the_cpu() -> None:
    count = 0

    def work() -> None:
        nonlocal count
        count += 1
        torch.ones(64).sum()

    timing = time_callable(work, device="cpu", runs=4, warmups=2, calls=3)
    assert count == 2 + 4 * 3
    assert 0 < timing.q20 <= timing.median <= timing.q80


def test_cpu_memory_is_not_counted_but_the_function_runs() -> None:
    calls = []
    assert peak_memory(lambda: calls.append(1), "cpu") is None
    assert calls == [1]


def test_other_devices_have_no_clock() -> None:
    with pytest.raises(DeviceError, match="got 'meta'"):
        clock_for("meta")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_graph_needs_a_gpu() -> None:
    with pytest.raises(DeviceError, match="CUDA graph needs a CUDA device"):
        captured(lambda: None)


@pytest.mark.gpu
def test_events_wait_for_the_gpu() -> None:
    a = torch.randn(4096, 4096, device="cuda")
    timing = time_callable(lambda: a @ a, device="cuda", runs=5)
    seconds = 2 * 4096**3 / 1e15  # no GPU of today does more than 1 PFLOP/s in float32
    assert timing.median > seconds


@pytest.mark.gpu
def test_peak_memory_is_what_one_call_adds() -> None:
    kept = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    found = peak_memory(lambda: torch.empty(3 << 20, dtype=torch.uint8, device="cuda"), "cuda")
    assert 3 << 20 <= found <= 4 << 20  # the allocator does not split off less than a mebibyte of a cached block
    del kept


@pytest.mark.gpu
def test_a_captured_function_replays() -> None:
    x = torch.zeros(8, device="cuda")
    replay = captured(lambda: x.add_(1.0), warmups=2)
    replay()
    replay()
    assert x.tolist() == [4.0] * 8  # two warm-ups, two replays; the capture itself runs nothing
