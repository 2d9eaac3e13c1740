"""Graphs are replayed for calls with the same addresses, stream and settings, and only for these."""

import threading

import pytest
import torch

from gatewise.kernels.cuda import driver, graphs


class CaptureStream:
    """A capture stream that records the names of the launches."""

    can_record = True

    def __init__(self):
        self.asked = 0

    def of(self, stream):
        return self

    def record(self, issue):
        self.asked += 1
        return Graph(issue) if self.can_record else None


class Graph:
    """A stand-in for `driver.Graph` that lists the launches it replays."""

    def __init__(self, issue):
        self._issue = issue

    def launch(self, stream, device):
        self._issue()


@pytest.fixture
def stream(monkeypatch):
    found = CaptureStream()
    monkeypatch.setattr(graphs, "capture_streams", lambda index: found)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(driver, "current_stream", lambda device: 0)
    return found


def new():
    return torch.empty(8, dtype=torch.float64)


def call(replays, x, y, settings=()):
    x.normal_()
    y.zero_()
    replays.play(settings, (x, None, y), torch.device("cuda", 0), lambda: y.copy_(x + 1))
    assert torch.equal(y, x + 1)


def counts(replays):
    return replays.recorded, replays.replayed


def test_the_same_addresses_are_replayed_from_the_third_call_on(stream):
    replays, x, y = graphs.Replays(16), new(), new()
    for expected in ((0, 0), (1, 0), (1, 1), (1, 2)):
        call(replays, x, y)
        assert counts(replays) == expected


def test_new_addresses_are_launched(stream):
    replays, held = graphs.Replays(16), []
    for _ in range(20):
        held.append((new(), new()))
        call(replays, *held[-1])
    assert counts(replays) == (0, 0)


def test_settings_are_part_of_the_key(stream):
    replays, x, y = graphs.Replays(16), new(), new()
    for _ in range(4):
        call(replays, x, y)
    before = counts(replays)
    call(replays, x, y, settings=("other",))
    assert counts(replays) == before


def test_the_least_recently_used_graph_is_discarded(stream):
    replays = graphs.Replays(2)
    first, second, third = [(new(), new()) for _ in range(3)]
    for pair in (first, second):
        for _ in range(3):
            call(replays, *pair)
    call(replays, *first)
    for _ in range(3):
        call(replays, *third)
    before = counts(replays)
    call(replays, *second)
    assert counts(replays) == before
    call(replays, *first)
    assert counts(replays) == (before[0], before[1] + 1)


def test_work_that_cannot_be_captured_is_launched(stream):
    stream.can_record = False
    replays, x, y = graphs.Replays(16), new(), new()
    for _ in range(20):
        call(replays, x, y)
    assert counts(replays) == (0, 0)
    assert stream.asked == graphs._MOST_FAILURES


def test_the_stream_is_part_of_the_key(stream, monkeypatch):
    replays, x, y = graphs.Replays(16), new(), new()
    for _ in range(4):
        call(replays, x, y)
    before = counts(replays)
    monkeypatch.setattr(driver, "current_stream", lambda device: 1)
    call(replays, x, y)
    assert counts(replays) == before


def test_in_a_capture_of_the_caller_the_work_is_launched(stream, monkeypatch):
    replays, x, y = graphs.Replays(16), new(), new()
    for _ in range(4):
        call(replays, x, y)
    before = counts(replays)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    call(replays, x, y)
    assert counts(replays) == before


def test_with_no_graphs_allowed_all_work_is_launched(stream):
    replays, x, y = graphs.Replays(0), new(), new()
    for _ in range(4):
        call(replays, x, y)
    assert stream.asked == 0


def test_threads_may_call_at_the_same_time(stream):
    replays, failures = graphs.Replays(16), []

    def work():
        x, y = new(), new()
        try:
            for _ in range(100):
                call(replays, x, y)
        except AssertionError as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert replays.replayed == 4 * 98


def test_a_loop_of_many_addresses_is_replayed_when_it_comes_back(stream):
    replays, held = graphs.Replays(512), [(new(), new()) for _ in range(100)]
    replayed = []
    for _ in range(12):
        for pair in held:
            call(replays, *pair)
        replayed.append(replays.replayed - sum(replayed))
    assert replayed[:2] == [0, 0]
    assert replayed[-1] == len(held)  # each capture but the first few waits for a replay
