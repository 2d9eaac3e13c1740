"""Graphs are replayed for calls with the same addresses, stream and settings, and only for these."""

import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from gatewise.contract.device import Device
from gatewise.kernels.cuda import driver, graphs, static_tensors
from gatewise.kernels.cuda.static_tensors import CallTensors
from tests.kernels.copies import copy_on_cpu

LARGE = 2**17 + 1  # values, which take more than 1 MiB
SCRATCH = torch.empty(2 * LARGE, dtype=torch.float64)


class CaptureStream:
    """A capture stream that records the names of the launches."""

    can_record = True

    def __init__(self):
        self.asked = 0
        self.graphs = []

    def of(self, stream):
        return self

    def record(self, issue):
        self.asked += 1
        if not self.can_record:
            return None
        self.graphs.append(Graph(issue))
        return self.graphs[-1]


class Graph:
    """A stand-in for `driver.Graph`: it replays launches."""

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
    copy_on_cpu(monkeypatch)
    return found


def new(size=8):
    return torch.empty(size, dtype=torch.float64)


def add_one(tensors):
    """The work of a call: the first half of the scratch memory is x + 1, and so is y."""
    (x, _), (y,), scratch, _ = tensors
    torch.add(x, 1, out=scratch[: len(x)])
    y.copy_(scratch[: len(x)])


def call(replays, x, y, settings=(), scratch=SCRATCH):
    x.normal_()
    y.zero_()
    given = x.clone()
    replays.play(settings, CallTensors((x, None), (y,), scratch), torch.device("cuda", 0), add_one)
    assert torch.equal(y, given + 1)
    assert torch.equal(x, given)


def counts(replays):
    return replays.recorded, replays.replayed


def test_the_same_addresses_are_replayed_from_the_third_call_on(stream):
    replays, x, y = graphs.Replays(16, 1000), new(), new()
    for expected in ((0, 0), (1, 0), (1, 1), (1, 2)):
        call(replays, x, y)
        assert counts(replays) == expected


def test_new_addresses_are_launched(stream):
    replays, held = graphs.Replays(16, 1000), []
    for _ in range(20):
        held.append((new(), new()))
        call(replays, *held[-1])
    assert counts(replays) == (0, 0)


def test_settings_are_part_of_the_key(stream):
    replays, x, y = graphs.Replays(16, 1000), new(), new()
    for _ in range(4):
        call(replays, x, y)
    before = counts(replays)
    call(replays, x, y, settings=("other",))
    assert counts(replays) == before


def test_the_least_recently_used_graph_is_discarded(stream):
    replays = graphs.Replays(2, 1000)
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
    replays, x, y = graphs.Replays(16, 1000), new(), new()
    for _ in range(20):
        call(replays, x, y)
    assert counts(replays) == (0, 0)
    assert stream.asked == graphs._MOST_FAILURES


def test_the_stream_is_part_of_the_key(stream, monkeypatch):
    replays, x, y = graphs.Replays(16, 1000), new(), new()
    for _ in range(4):
        call(replays, x, y)
    before = counts(replays)
    monkeypatch.setattr(driver, "current_stream", lambda device: 1)
    call(replays, x, y)
    assert counts(replays) == before


def test_in_a_capture_of_the_caller_the_work_is_launched(stream, monkeypatch):
    replays, x, y = graphs.Replays(16, 1000), new(), new()
    for _ in range(4):
        call(replays, x, y)
    before = counts(replays)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    call(replays, x, y)
    assert counts(replays) == before


def test_with_no_graphs_allowed_all_work_is_launched(stream):
    replays, x, y = graphs.Replays(0, 1000), new(), new()
    for _ in range(4):
        call(replays, x, y)
    assert stream.asked == 0


def in_threads(work):
    """Run work in four threads, and raise what it raised."""
    with ThreadPoolExecutor(4) as threads:
        for one in [threads.submit(work) for _ in range(4)]:
            one.result()


def test_threads_may_call_at_the_same_time(stream):
    replays = graphs.Replays(16, 1000)

    def work():
        x, y, scratch = new(), new(), new()
        for _ in range(100):
            call(replays, x, y, scratch=scratch)

    in_threads(work)
    assert replays.replayed == 4 * 98


def test_a_loop_of_many_addresses_is_replayed_when_it_comes_back(stream):
    replays, held = graphs.Replays(512, 1000), [(new(), new()) for _ in range(100)]
    replayed = []
    for _ in range(12):
        for pair in held:
            call(replays, *pair)
        replayed.append(replays.replayed - sum(replayed))
    assert replayed[:2] == [0, 0]
    assert replayed[-1] == len(held)  # each capture but the first few waits for a replay


def test_calls_whose_small_tensors_move_are_replayed_with_memory_of_the_graph(stream):
    replays, held = graphs.Replays(16, 8), []
    for index in range(20):
        held.append((new(), new()))
        call(replays, *held[-1])
        assert counts(replays) == ((0, 0) if index < 8 else (1, index - 8))


def test_no_tensor_of_a_call_is_held(stream):
    """Otherwise the next call would get other memory for its large tensors, and be no replay."""

    def copy(tensors):
        (x, state), (y,), _, _ = tensors
        y[0] = x[0] + state[0]

    replays, held = graphs.Replays(16, 8), []
    x, y, scratch = new(LARGE).fill_(1), new(LARGE), new(LARGE)
    for index in range(12):
        held.append(new().fill_(index))
        replays.play((), CallTensors((x, held[-1]), (y,), scratch), torch.device("cuda", 0), copy)
        assert y[0] == 1 + index
    assert counts(replays) == (1, 3)
    for graph in stream.graphs:  # which holds the work itself, as no real graph does
        graph._issue = None
    seen = [weakref.ref(tensor) for tensor in (x, y, scratch, *held)]
    del x, y, scratch
    held.clear()
    assert not [each for each in seen if each() is not None]


def test_two_tensors_may_be_one_in_some_calls(stream):
    def add(tensors):
        (left, right), (total,), _, _ = tensors
        torch.add(left, right, out=total)

    replays = graphs.Replays(16, 8)
    for index in range(30):
        left, total = torch.randn(8), torch.empty(8)
        right = left if index < 15 else torch.randn(8)
        replays.play((), CallTensors((left, right), (total,), SCRATCH), torch.device("cuda", 0), add)
        assert torch.equal(total, left + right)
    assert counts(replays) == (1, 21)


def test_neighbours_in_an_allocation_stay_neighbours(stream):
    """Work may compute neighbours together, which must not depend on whether it is replayed, nor on other calls."""
    issued = []

    def add(tensors):
        (left, right, alone), (total,), _, _ = tensors
        issued.append(left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr())
        assert left.data_ptr() < right.data_ptr() or not issued[-1]
        torch.add(left, right, out=total).add_(alone)

    replays, held = graphs.Replays(16, 8), []
    for number in range(40):
        buffer, alone, total = torch.randn(100), torch.randn(8), torch.empty(8)
        left, right = buffer[4:12], buffer[90:98]
        together = number % 2 == 0
        if not together:
            right = right.clone()
        held.append((buffer, right, alone, total))
        tensors = CallTensors((left, right, alone), (total,), SCRATCH, neighbours=2)
        replays.play((), tensors, torch.device("cuda", 0), add)
        assert torch.equal(total, left + right + alone)
        assert issued[-1] == together
    assert counts(replays) == (2, 2 * 11)
    assert sum(static_tensors._held_by_graphs(SCRATCH.device).values()) < 2**14


def test_parts_of_an_allocation_that_overlap_are_launched(stream):
    def add(tensors):
        (left, right), (total,), _, _ = tensors
        torch.add(left, right, out=total)

    replays, held = graphs.Replays(16, 8), []
    for _ in range(20):
        buffer, total = torch.randn(100), torch.empty(8)
        held.append((buffer, total))
        tensors = CallTensors((buffer[:8], buffer[4:12]), (total,), SCRATCH, neighbours=2)
        replays.play((), tensors, torch.device("cuda", 0), add)
        assert torch.equal(total, buffer[:8] + buffer[4:12])
    assert counts(replays) == (0, 0)


def test_absent_tensors_are_part_of_the_key(stream):
    """A gradient that a step does not have is not one that may be anywhere."""

    def add(tensors):
        (x, more), (y,), _, _ = tensors
        torch.add(x, 0 if more is None else more, out=y)

    for present in ([False] * 15 + [True] * 15, [True] * 15 + [False] * 15, [False, True] * 15):
        replays, held = graphs.Replays(16, 8), []
        for more in present:
            x, other, y = new().normal_(), new().normal_(), new()
            held.append((x, other, y))
            tensors = CallTensors((x, other if more else None), (y,), SCRATCH)
            replays.play((), tensors, torch.device("cuda", 0), add)
            assert torch.equal(y, x + other if more else x)
        assert counts(replays) == (2, 12)


def test_devices_have_graphs_of_their_own(stream):
    """Default streams of all devices have the same handle."""
    replays, held = graphs.Replays(16, 8), []
    for number in range(30):
        x, y = new().normal_(), new()
        held.append((x, y))
        tensors = CallTensors((x, None), (y,), new())
        replays.play((), tensors, torch.device("cuda", number % 2), add_one)
        assert torch.equal(y, x + 1)
    assert counts(replays) == (2, 12)
    assert stream.asked == 2


def test_captures_that_are_rarely_replayed_end(stream):
    """As where many layers of one size have each their own large weights."""
    replays, layers, held = graphs.Replays(2, 8), [new(LARGE).fill_(number) for number in range(8)], []

    def add(tensors):
        (weight, x), (y,), _, _ = tensors
        torch.add(x, weight[:8], out=y)

    for _ in range(100):
        for number, weight in enumerate(layers):
            x, y = new().normal_(), new()
            held.append((x, y))
            replays.play((), CallTensors((weight, x), (y,), SCRATCH), torch.device("cuda", 0), add)
            assert torch.equal(y, x + number)
    assert replays.recorded <= 16  # of 800 calls


def test_calls_that_cannot_have_memory_are_captured_where_addresses_come_back(stream, monkeypatch):
    monkeypatch.setattr(static_tensors, "_MOST_BYTES", 100)
    replays, held = graphs.Replays(16, 8), [(new(), new()) for _ in range(12)]
    for _ in range(40):
        for pair in held:
            call(replays, *pair)
    assert replays.recorded == 12
    assert replays.replayed > 300


def test_the_memory_of_all_graphs_is_limited(stream, monkeypatch):
    monkeypatch.setattr(static_tensors, "_SHARE_OF_ALL", 3 * 1024 / Device.probe("cpu").memory_bytes)
    static_tensors._held_by_graphs.cache_clear()
    kinds, held = [graphs.Replays(16, 8) for _ in range(5)], []
    for _ in range(20):
        for replays in kinds:
            held.append((new(), new()))
            call(replays, *held[-1])
    assert [counts(replays) for replays in kinds] == [(1, 11)] * 3 + [(0, 0)] * 2
    for each in kinds[:3]:  # their memory is that of others then
        each._static_graphs = graphs.StaticGraphs(16, 8)
    for _ in range(20):
        held.append((new(), new()))
        call(kinds[4], *held[-1])
    assert kinds[4].replayed > 0


def test_a_fifth_stream_takes_no_memory(stream, monkeypatch):
    monkeypatch.setattr(CaptureStream, "of", lambda self, number: None)
    monkeypatch.setattr(graphs, "static_tensors", lambda tensors: pytest.fail("it took memory"))
    replays, held = graphs.Replays(16, 8), []
    for _ in range(20):
        held.append((new(), new()))
        call(replays, *held[-1])
    assert counts(replays) == (0, 0)


def test_large_tensors_are_part_of_the_key(stream):
    replays, held = graphs.Replays(16, 8), []
    for _ in range(20):
        held.append((new(LARGE), new(LARGE)))
        call(replays, *held[-1])
    assert counts(replays) == (0, 0)


def test_small_tensors_move_beside_large_ones_that_stay(stream):
    replays, x, held = graphs.Replays(16, 8), new(LARGE), []

    def add_sum(tensors):
        (x, state), (after,), _, _ = tensors
        torch.add(state, x[:8], out=after)

    for index in range(20):
        state, after = new().normal_(), new()
        held.append((state, after))
        replays.play((), CallTensors((x.fill_(index), state), (after,), SCRATCH), torch.device("cuda", 0), add_sum)
        assert torch.equal(after, state + index)
    assert counts(replays) == (1, 11)


def test_scratch_memory_that_moves(stream):
    replays, held = graphs.Replays(16, 8), []
    for size, expected in ((16, (1, 11)), (2 * LARGE, (1, 11))):
        for _ in range(20):
            held.append((new(), new(), new(size)))
            call(replays, *held[-1][:2], scratch=held[-1][2])
        assert counts(replays) == expected


def test_other_settings_or_streams_wait_as_long(stream, monkeypatch):
    replays, held = graphs.Replays(16, 8), []

    def some(count, settings=()):
        for _ in range(count):
            held.append((new(), new()))
            call(replays, *held[-1], settings=settings)

    some(12)
    before = counts(replays)
    some(8, ("other",))
    assert counts(replays) == before
    monkeypatch.setattr(driver, "current_stream", lambda device: 1)
    some(8)
    assert counts(replays) == before
    some(2)
    assert counts(replays) == (before[0] + 1, before[1] + 1)


def test_the_memory_of_a_graph_is_limited(stream, monkeypatch):
    monkeypatch.setattr(static_tensors, "_MOST_BYTES", 1000)
    replays, held = graphs.Replays(16, 8), []
    for _ in range(20):
        held.append((new(64), new(64)))  # 512 bytes each
        call(replays, *held[-1])
    assert counts(replays) == (0, 0)


@pytest.mark.parametrize(
    ("part", "error"),
    [("in_static_memory", torch.OutOfMemoryError("none is left")), ("_code", RuntimeError("no compiler"))],
    ids=["no memory", "no compiler"],
)
def test_a_graph_without_memory_or_copies_is_not_captured(stream, monkeypatch, part, error):
    def fail(given):
        raise error

    monkeypatch.setattr(static_tensors, part, fail)
    replays, held = graphs.Replays(16, 8), []
    for _ in range(20):
        held.append((new(), new()))
        call(replays, *held[-1])
    assert counts(replays) == (0, 0)
    assert stream.asked == 0


def test_values_in_the_order_of_rows(stream):
    def double(tensors):
        (x,), (y,), _, _ = tensors
        assert x.stride() == y.stride() == (2, 8, 1)
        torch.mul(x, 2, out=y)

    replays, held = graphs.Replays(16, 8), []
    for _ in range(20):
        x, y = (torch.randn(3, 4, 2).transpose(0, 1) for _ in range(2))
        held.append((x, y))
        replays.play((), CallTensors((x,), (y,), SCRATCH), torch.device("cuda", 0), double)
        assert torch.equal(y, 2 * x)
    assert counts(replays) == (1, 11)


def test_more_tensors_than_one_launch_copies(stream):
    def reverse(tensors):
        for source, target in zip(tensors.read, reversed(tensors.written), strict=True):
            target.copy_(source)

    replays, held = graphs.Replays(16, 8), []
    for _ in range(12):
        read, written = (tuple(torch.randn(5) for _ in range(70)) for _ in range(2))
        held.append((read, written))
        replays.play((), CallTensors(read, written, SCRATCH), torch.device("cuda", 0), reverse)
        assert all(map(torch.equal, read, reversed(written)))
    assert counts(replays) == (1, 3)


def test_threads_may_move_small_tensors_at_the_same_time(stream):
    replays = graphs.Replays(16, 8)

    def work():
        for _ in range(100):
            call(replays, new(), new(), scratch=new())

    in_threads(work)
    assert replays.replayed > 300
