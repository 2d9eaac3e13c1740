"""If one of several processes raises, is killed or computes NaN, all exit with its reason, and nothing is lost."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import sys
import time

import pytest
from echo_model import Echoes, train
from faulty_model import faulty_model
from several import COUNT, together
from test_resumption import files_of

from gatewise.contract.errors import KernelFault, ProcessFailed, TrainingDiverged
from gatewise.training import RunFolder, failure_channel, read_tensors
from gatewise.training.failure_channel import FailureChannel
from gatewise.training.loop import CHECKPOINT
from gatewise.training.processes import join_processes
from gatewise.training.recorded_step import read_step
from tests.pairwise import exhaustive_unless
from tests.programs import free_port, of_several, processes_that_start_fast

FAILING = [("raises", 0), ("killed", 1)]
KILLED = "it exited without a message, as if it was killed"


class Ending(Echoes):
    """Data that raises or kills its process before batch number `last`."""

    def __init__(self, how, last, **kind):
        super().__init__(**kind)
        self.how, self.last = how, last

    def windows(self, epoch=0, start=0):
        for number, batch in enumerate(super().windows(epoch, start), start):
            if (epoch, number) == (1, self.last):
                if self.how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ValueError("the data is broken")
            yield batch


def fitted(processes, folder, how="", rank=1, number=None, epoch=0, **options):
    """Train together on the two halves of each batch; only process `rank` fails."""
    own = slice(4 * processes.rank, 4 * processes.rank + 4)
    ours = processes.rank == rank
    data = Ending(how, 9, part=own) if how and ours else Echoes(part=own)
    model = faulty_model(number if ours else None, epoch, data=data)
    valid = Echoes(length=5, seed=1, part=own)
    return train(folder, model, data, valid, processes=processes, reference=model.reference(), **options)[0].step


def refused(processes, error, **options):
    """Return the text of the error with which training ends in this process."""
    with pytest.raises(error) as raised:
        fitted(processes, **options)
    return str(raised.value)


def _work(rank, port, folder, how, failing):
    """Run as one of the processes; write its output, and the error that it raised, to files."""
    os.environ.update(of_several(rank, COUNT, port))
    os.dup2(os.open(folder / f"printed.{rank}", os.O_WRONLY | os.O_CREAT), sys.stderr.fileno())
    if how == "busy":
        failure_channel.GRACE_SECONDS = 0.5
    try:
        with join_processes("cpu") as processes:
            if how == "busy":
                if rank == failing:
                    raise ValueError("the data is broken")
                time.sleep(60)
            fitted(processes, folder / "run", how, failing)
    except (ValueError, ProcessFailed) as error:
        (folder / f"told.{rank}").write_text(f"{type(error).__name__}: {error}")
        raise SystemExit(1) from None


def ended(folder, how, failing):
    """Return by rank how the processes ended: exit status, the first printed error, and the raised one."""
    context = processes_that_start_fast()
    port = free_port()
    workers = [context.Process(target=_work, args=(rank, port, folder, how, failing)) for rank in range(COUNT)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
        assert worker.exitcode is not None, "hangs"
    found = []
    for rank, worker in enumerate(workers):
        printed = [line for line in (folder / f"printed.{rank}").read_text().splitlines() if line.startswith("error: ")]
        told = folder / f"told.{rank}"
        found.append((worker.exitcode, printed, told.read_text() if told.exists() else ""))
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run without failures."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    together(tmp_path_factory.mktemp("results"), {"whole": (fitted, {"folder": folder})})
    return folder


@pytest.mark.parametrize(
    ("how", "failing"), exhaustive_unless(FAILING, itertools.product(["raises", "killed"], [0, 1]))
)
def test_a_process_that_fails_ends_all_and_the_run_goes_on_in_the_same_bits(tmp_path, whole, how, failing):
    found = ended(tmp_path, how, failing)
    reason = KILLED if how == "killed" else "ValueError: the data is broken"
    words = f"process {failing} failed: {reason}"
    assert found[1 - failing] == (1, [f"error: {words}"], f"ProcessFailed: {words}")
    assert found[failing] == ((-signal.SIGKILL, [], "") if how == "killed" else (1, [], reason))
    assert read_tensors(RunFolder(tmp_path / "run").checkpoint, CHECKPOINT)[1]["step"] == 20
    if (how, failing) == ("killed", 1):
        together(tmp_path, {"rest": (fitted, {"folder": tmp_path / "run"})})
        assert files_of(tmp_path / "run") == files_of(whole)


def test_a_process_that_does_not_listen_is_ended_after_some_seconds(tmp_path):
    found = ended(tmp_path, "busy", 1)
    assert found[0] == (1, ["error: process 1 failed: ValueError: the data is broken"], "")


def test_a_fault_or_divergence_in_one_process_is_told_by_all(tmp_path, whole):
    run, options = tmp_path / "run", {"optimizer": "sgd", "learning_rate": 1e30, "clip": 0.0, "schedule": "constant"}
    jobs = {
        "fault": (refused, {"error": KernelFault, "folder": run, "number": 8, "epoch": 1}),
        "rest": (fitted, {"folder": run}),
        "diverges": (refused, {"error": TrainingDiverged, "folder": tmp_path / "other", **options}),
    }
    (tmp_path / "results").mkdir()
    found = together(tmp_path / "results", jobs)
    first, second = found["fault"]
    assert first == second
    assert "step 29 of training (epoch 2, batch 9) was not finite" in first
    assert "(loss nan, gradients nan in process 1 when it was repeated there)" in first
    steps, _, facts = read_step(RunFolder(run).fault, "cpu")
    assert sorted(steps) == [0, 1]
    assert facts["again"][0]["loss"] == facts["on the reference"][0]["loss"]
    assert facts["again"][1]["loss"] is None
    assert found["rest"] == [60, 60]
    RunFolder(run).fault.unlink()
    assert files_of(run) == files_of(whole)
    first, second = found["diverges"]
    assert first == second
    assert "training diverged" in first


class Star:
    """A first process and two others, in this process."""

    def __init__(self):
        pairs = [socket.socketpair() for _ in range(2)]
        self.released = []
        connections = [{1: pairs[0][0], 2: pairs[1][0]}, {0: pairs[0][1]}, {0: pairs[1][1]}]
        self.channels = [
            FailureChannel(rank, each, lambda rank=rank: self.released.append(rank))
            for rank, each in enumerate(connections)
        ]
        self.sockets = [list(each.values()) for each in connections]

    def die(self, rank):
        self.channels[rank]._left.set()
        for each in self.sockets[rank]:
            each.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def star():
    found = Star()
    yield found
    for channel in found.channels:
        channel.leave()


@pytest.mark.parametrize("failing", range(3))
def test_all_hear_of_a_failure(star, capsys, failing):
    star.channels[failing].tell("it\nbroke")
    others = [rank for rank in range(3) if rank != failing]
    for rank in others:
        assert star.channels[rank].heard(5) == (failing, "it\nbroke")
    assert star.channels[failing].heard() is None
    assert capsys.readouterr().err.count(f"error: process {failing} failed: it\nbroke\n") == 2
    star.die(failing)
    for rank in others:
        star.channels[rank].give_way()
        assert star.channels[rank]._gone.is_set()
    end = time.monotonic() + 5
    while len(star.released) < 2 and time.monotonic() < end:
        time.sleep(0.001)
    assert sorted(star.released) == others


@pytest.mark.parametrize("failing", range(3))
def test_all_hear_of_a_death(star, failing):
    star.die(failing)
    for rank in range(3):
        if rank != failing:
            assert star.channels[rank].heard(5) == (failing, KILLED)


def test_nobody_hears_of_a_process_that_is_done(star, capsys):
    star.channels[2].leave()
    star.channels[0].leave()
    star.channels[1].leave()
    assert [channel.heard() for channel in star.channels] == [None] * 3
    assert not star.released
    assert not capsys.readouterr().err


def test_strangers_are_turned_away(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "localhost")

    def told(value):
        port, token = value
        stranger = socket.create_connection(("localhost", port))
        stranger.sendall(b"guess 1\n")
        friend = socket.create_connection(("localhost", port))
        friend.sendall(f"{token} 1\nand more".encode())
        peers.extend((stranger, friend))

    peers = []
    found = failure_channel._connections(0, 2, told)
    assert found.keys() == {1}
    assert found[1].getpeername() == peers[1].getsockname()
    assert found[1].recv(100) == b"and more"
    assert peers[0].recv(1) == b""
    for each in (*peers, *found.values()):
        each.close()


def test_a_connection_that_fails_is_named(monkeypatch, capsys):
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    with socket.socket() as nobody:
        nobody.bind(("localhost", 0))
        port = nobody.getsockname()[1]
        with pytest.raises(ProcessFailed, match="process 1 must be able to connect to process 0 at localhost"):
            failure_channel._connections(1, 2, lambda value: (port, "token"))
    assert capsys.readouterr().err.startswith("error: process 1 must be able to connect to process 0 at localhost")
