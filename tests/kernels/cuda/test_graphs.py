"""Replays of recorded work: at the same addresses, at others, and never with a wrong one."""

import ctypes
import threading

import pytest
import torch

from gatewise.kernels.cuda import graphs
from gatewise.kernels.cuda.nodes import Words

SIZE = 64  # values of a tensor; with 8 bytes each, twice the alignment that counts


class Node:
    """Adds `number` to what lies at its first word and writes it where its second points."""

    def __init__(self, source, target, number, identity="add"):
        self.words = (ctypes.c_uint64 * 3)(source, target, number)
        self.written = list(self.words)
        self.identity, self.has_gaps = identity, False

    def copy(self):
        return Words(tuple(self.words), self.identity, self.has_gaps)


class Graph:
    """As `driver.Graph`: what was written to it is what is launched."""

    def __init__(self, nodes):
        self.nodes, self.refuses = nodes, False

    def launch(self, stream, device):
        for node in self.nodes or []:
            source, target, number = node.written
            values = [(ctypes.c_double * SIZE).from_address(address) for address in (source, target)]
            values[1][:] = [value + number for value in values[0]]

    def write(self, numbers):
        for number in numbers:
            self.nodes[number].written = list(self.nodes[number].words)
        return not self.refuses


class Studio:
    """Records what `issue` says it would launch."""

    known = True

    def of(self, stream):
        return self

    def record(self, issue):
        graph = Graph(None)
        graph.nodes = issue.launches() if self.known else None
        return graph


@pytest.fixture
def studio(monkeypatch):
    found = Studio()
    monkeypatch.setattr(graphs, "_studios", lambda index: found)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    return found


class Work:
    """Writes x + 1 to y by way of z."""

    def __init__(self, x, y, z):
        self.tensors = x, y, z

    def launches(self):
        x, y, z = (tensor.data_ptr() for tensor in self.tensors)
        return [Node(x, z, 3), Node(z, y, 1)]

    def __call__(self):
        x, y, z = self.tensors
        z.copy_(x + 3)
        y.copy_(z + 1)


_held = []


def new(shift=0):
    """Return a tensor on a multiple of 256 bytes, or `shift` bytes behind, where none lay before."""
    memory = torch.empty(2 * SIZE + 64, dtype=torch.float64)
    _held.append(memory)
    start = (-memory.data_ptr() % 256 + shift) // 8
    return memory[start : start + SIZE]


def call(replays, x, y, z, settings=()):
    x.normal_()
    y.zero_()
    replays.play(settings, (x, None, y, z), torch.device("cuda", 0), Work(x, y, z))
    assert torch.equal(y, x + 3 + 1)


def counts(replays):
    return replays.recorded, replays.replayed, replays.relocated


def test_the_same_addresses_are_replayed_from_the_third_call_on(studio):
    replays, tensors = graphs.Replays(16), [new() for _ in range(3)]
    for expected in ((0, 0, 0), (1, 0, 0), (1, 1, 0), (1, 2, 0)):
        call(replays, *tensors)
        assert counts(replays) == expected


def test_addresses_that_never_come_back_are_replayed_too(studio):
    replays = graphs.Replays(16)
    for _ in range(graphs._OFTEN + 1):
        call(replays, new(), new(), new())
    assert counts(replays) == (2, 0, 0)
    for number in range(20):
        call(replays, new(), new(), new())
        assert counts(replays) == (2, number + 1, number + 1)


def test_relocation_can_be_left_out(studio):
    replays = graphs.Replays(16, relocates=False)
    for _ in range(graphs._OFTEN + 8):
        call(replays, new(), new(), new())
    assert counts(replays) == (0, 0, 0)


def test_what_was_not_seen_to_move_is_recorded_once_more_when_it_does(studio):
    replays, x = graphs.Replays(16), new()
    for _ in range(graphs._OFTEN + 4):
        call(replays, x, new(), new())
    assert counts(replays) == (2, 3, 3)
    call(replays, new(), new(), new())
    assert counts(replays) == (3, 3, 3)
    for _ in range(3):
        call(replays, new(), new(), new())
    assert counts(replays) == (3, 6, 6)


def test_other_settings_and_alignments_are_other_work(studio):
    replays = graphs.Replays(16)
    for _ in range(graphs._OFTEN + 2):
        call(replays, new(), new(), new())
    before = counts(replays)
    call(replays, new(), new(), new(), settings=("other",))
    call(replays, new(shift=8), new(), new())
    assert counts(replays) == before


def test_tensors_that_overlap_are_not_relocated(studio):
    replays = graphs.Replays(16)
    for _ in range(20):
        memory = new()[: SIZE // 2]
        memory = torch.as_strided(memory, (SIZE,), (1,))
        x, y = memory, new()
        replays.play((), (x, x[1:], y, new()), torch.device("cuda", 0), Work(x, y, new()))
    assert replays.relocated == 0


def test_work_whose_words_are_unknown_is_replayed_where_it_was(studio):
    studio.known = False
    replays, tensors = graphs.Replays(16), [new() for _ in range(3)]
    for _ in range(20):
        replays.play((), [new() for _ in range(3)], torch.device("cuda", 0), Work(*tensors))
    assert counts(replays)[1:] == (0, 0)
    assert replays.recorded == 1


def test_a_graph_that_cannot_be_changed_is_given_up(studio):
    replays = graphs.Replays(16)
    for _ in range(graphs._OFTEN + 2):
        call(replays, new(), new(), new())
    for recording in replays._graphs.values():
        recording.graph.refuses = True
    before = counts(replays)
    for _ in range(5):
        call(replays, new(), new(), new())
    assert counts(replays) == before


def test_threads_share_recordings(studio):
    replays, failures = graphs.Replays(16), []

    def work():
        try:
            for _ in range(100):
                call(replays, new(), new(), new())
        except AssertionError as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert replays.relocated > 100
