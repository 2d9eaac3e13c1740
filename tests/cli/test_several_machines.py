"""`torchrun --nnodes`: agents of several machines, which are here several agents on one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("typer")

import torch

from gatewise.training import RunFolder, read_tensors
from gatewise.training.loop import MODEL
from gatewise.training.processes import Processes
from tests.programs import Program, free_port, of_several

AGENT = [sys.executable, "-m", "torch.distributed.run"]
TRAIN = ["-m", "gatewise", "train", "lm", "--device", "cpu", "--tokens", "word", "--batch-size", "4", "--window", "6"]
TRAIN += ["--hidden-size", "8", "--embedding-size", "8", "--set", "sample.length=2", "--set", "checkpoint_steps=1"]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n".join(" ".join(f"w{(i * i + j) % 17}" for j in range(8)) for i in range(150)))
    return path


@contextlib.contextmanager
def agents(folder, text, workers, *words, restarts=0, seconds=150.0):
    """Start two agents; yield them, and end them with their workers at the end."""
    port = free_port()
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-id", "test", "--rdzv-endpoint", f"localhost:{port}"]
    # Agents wait this long for others to join them.
    rendezvous += ["--rdzv-conf", "join_timeout=20,last_call_timeout=1"]
    command = [*AGENT, "--nnodes", "2", "--nproc-per-node", str(workers), "--max-restarts", str(restarts), *rendezvous]
    started = []
    try:
        for name in ("a", "b"):
            with (folder / f"{name}.log").open("w") as log:
                options = {"cwd": folder, "env": os.environ | {"OMP_NUM_THREADS": "1"}, "stdout": log, "stderr": log}
                started.append(
                    subprocess.Popen([*command, *TRAIN, "--text", str(text), *words], **options, start_new_session=True)
                )
            if name == "a":
                time.sleep(0.5)  # so that the first one is the host of the store
        yield started
    finally:
        workers_of = [worker for agent in started for worker in children(agent.pid)]
        for number in (*(agent.pid for agent in started), *workers_of):
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        for agent in started:
            agent.wait()


def children(number):
    found = subprocess.run(["pgrep", "-P", str(number)], capture_output=True, text=True, check=False)
    return [int(each) for each in found.stdout.split()]


def printed(folder):
    return "\n".join((folder / f"{name}.log").read_text() for name in ("a", "b"))


def ended(started, folder, seconds=150.0):
    """Return the exit statuses, after a time at most."""
    end = time.monotonic() + seconds
    try:
        return [agent.wait(max(0.1, end - time.monotonic())) for agent in started]
    except subprocess.TimeoutExpired:
        pytest.fail(f"did not end within {seconds} seconds:\n{printed(folder)}")


def one_agent(folder, text, count, *words):
    """Train with one agent on the same number of processes."""
    command = [*AGENT, "--standalone", "--nproc-per-node", str(count), *TRAIN, "--text", str(text), *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    answer = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=150, check=False
    )
    assert answer.returncode == 0, answer.stderr


def weights(folder):
    return read_tensors(RunFolder(folder).model, MODEL)[0]


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def until(found, started, seconds=60.0):
    end = time.monotonic() + seconds
    while not found() and time.monotonic() < end and all(agent.poll() is None for agent in started):
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_two_agents_train_as_one(tmp_path, text, workers):
    words = ["--epochs", "2"]
    with agents(tmp_path, text, workers, *words, "--output", "two") as started:
        assert ended(started, tmp_path) == [0, 0], printed(tmp_path)
    one_agent(tmp_path, text, 2 * workers, *words, "--output", "one")
    assert same(weights(tmp_path / "one"), weights(tmp_path / "two"))
    files = [sorted(each.name for each in (tmp_path / name).iterdir()) for name in ("one", "two")]
    assert files[0] == files[1]
    assert not [name for name in files[1] if name.startswith(".")]
    assert printed(tmp_path).count("recipe   lm") == 1, "only the first process reports"
    assert f"{2 * workers} processes" in printed(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1])
def test_a_killed_worker_of_one_agent_costs_the_steps_since_the_checkpoint(tmp_path, text, which):
    words = ["--epochs", "6"]
    with agents(tmp_path, text, 1, *words, "--output", "run", restarts=1) as started:
        folder = RunFolder(tmp_path / "run")
        until(folder.model.exists, started)
        assert not folder.result.exists(), "the run must not have ended"
        (worker,) = children(started[which].pid)
        os.kill(worker, signal.SIGKILL)
        # One restart is enough: no attempt is lost because the two agents count differently.
        assert ended(started, tmp_path) == [0, 0], printed(tmp_path)
    assert "resumed after" in printed(tmp_path)
    one_agent(tmp_path, text, 2, *words, "--output", "whole")
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1])
def test_when_a_machine_is_gone_the_other_ends(tmp_path, text, which):
    with agents(tmp_path, text, 1, "--epochs", "1000", "--output", "run", restarts=3) as started:
        folder = RunFolder(tmp_path / "run")
        until(folder.model.exists, started)
        gone, rest = started[which], started[1 - which]
        for number in (gone.pid, *children(gone.pid)):
            os.kill(number, signal.SIGKILL)
        (status,) = ended([rest], tmp_path, seconds=90.0)
        assert status != 0
        assert not children(rest.pid)
    assert folder.checkpoint.exists()
    assert not folder.result.exists()


@pytest.mark.parametrize("option", [[], ["--overwrite"]], ids=["new run", "--overwrite"])
def test_a_folder_that_only_one_machine_has_is_refused(tmp_path, text, option):
    """Two processes with folders of their own and the same relative path, as on machines without a shared disk."""
    machines = [tmp_path / str(rank) for rank in range(2)]
    for machine in machines:
        machine.mkdir()
    words = [*TRAIN[2:], "--text", text, "--output", "run", "--epochs", "1"]
    if option:
        assert Program(words, machines[0], threads=1).ended().status == 0
    earlier = files_in(machines[0] / "run")
    assert bool(earlier) == bool(option)
    port = free_port()
    programs = []
    for rank, machine in enumerate(machines):
        environment = of_several(rank, 2, port) | {"GROUP_WORLD_SIZE": "2"}
        programs.append(Program([*words, *option, "--seed", "5"], machine, environment, 1))
    first, second = (program.ended() for program in programs)
    assert (first.status, second.status) == (1, 1)
    assert "must be a folder on a file system that all machines share, got" in " ".join(first.err.split())
    assert "which process 1 does not have" in " ".join(first.err.split())
    assert second.err.strip() == ""
    assert not [path for path in tmp_path.rglob("*") if "shared" in path.name]
    assert files_in(machines[0] / "run") == earlier
    assert not files_in(machines[1] / "run")


def files_in(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_command_that_resumes_is_complete_for_one_machine_only():
    cpu = torch.device("cpu")
    assert Processes(0, 1, cpu).launcher == ""
    assert Processes(0, 4, cpu).launcher == "torchrun --nproc-per-node 4 -m "
    # Three processes on two machines, say two and one.
    assert Processes(0, 3, cpu, 2).launcher == "torchrun <the same options on each machine as before> -m "
