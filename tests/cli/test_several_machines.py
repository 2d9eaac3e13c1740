"""`torchrun --nnodes`: agents of several machines, which are here several agents on one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time

import pytest

pytest.importorskip("typer")

import torch

from gatewise.training import RunFolder, read_tensors
from gatewise.training.loop import MODEL
from gatewise.training.processes import Processes
from tests.programs import (
    Agent,
    Program,
    free_port,
    of_several,
    program_of_torchrun,
    under_torchrun,
)

TRAIN = ["train", "lm", "--device", "cpu", "--tokens", "word", "--batch-size", "4", "--window", "6"]
TRAIN += ["--hidden-size", "8", "--embedding-size", "8", "--set", "sample.length=2", "--set", "checkpoint_steps=1"]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n".join(" ".join(f"w{(i * i + j) % 17}" for j in range(8)) for i in range(150)))
    return path


@contextlib.contextmanager
def agents(folder, text, workers, *words, restarts=0, join_seconds=20):
    """Start two agents; yield them, and end them with their workers at the end.

    Agents wait for others to join them for `join_seconds`.
    """
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-id", "test", "--rdzv-endpoint", f"localhost:{free_port()}"]
    rendezvous += ["--rdzv-conf", f"join_timeout={join_seconds},last_call_timeout=1"]
    options = ["--nnodes", "2", "--nproc-per-node", str(workers), "--max-restarts", str(restarts), *rendezvous]
    started = []
    try:
        for name in ("a", "b"):
            given = program_of_torchrun, [*TRAIN, "--text", text, *words], folder
            started.append(Agent(options, folder / f"{name}.log", *given))
            if name == "a":
                time.sleep(0.5)  # so that the first one is the host of the store
        yield started
    finally:
        for each in started:
            each.kill()
            each.wait()


def numbers(option, agent):
    """Return the numbers of processes: with `-P` those of the workers of an agent, with `-g` those of its group."""
    found = subprocess.run(["pgrep", option, str(agent.pid)], capture_output=True, text=True, check=False)
    return [int(each) for each in found.stdout.split()]


def printed(folder):
    return "\n".join(path.read_text() for kind in ("*.log", "printed.*", "errors.*") for path in folder.glob(kind))


def ended(started, folder, seconds=150.0):
    """Return the exit statuses, after a time at most."""
    end = time.monotonic() + seconds
    try:
        return [agent.wait(max(0.1, end - time.monotonic())) for agent in started]
    except subprocess.TimeoutExpired:
        pytest.fail(f"did not end within {seconds} seconds:\n{printed(folder)}")


def one_agent(folder, text, count, *words):
    """Train with one agent on the same number of processes."""
    folder.mkdir()
    under_torchrun(program_of_torchrun, [*TRAIN, "--text", text, *words], folder, count=count)


def weights(folder):
    return read_tensors(RunFolder(folder).model, MODEL)[0]


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def assert_same_files(one, other):
    files = [sorted(each.name for each in folder.iterdir()) for folder in (one, other)]
    assert files[0] == files[1]
    assert not [name for name in files[1] if name.startswith(".")]


def until(found, started, seconds=60.0):
    end = time.monotonic() + seconds
    while not found() and time.monotonic() < end and all(agent.poll() is None for agent in started):
        time.sleep(0.02)


# The test below compares two agents with one, too.
@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_two_agents_train_as_one(tmp_path, text, workers):
    words = ["--epochs", "1"]
    with agents(tmp_path, text, workers, *words, "--output", "two") as started:
        assert ended(started, tmp_path) == [0, 0], printed(tmp_path)
    one_agent(tmp_path / "alone", text, 2 * workers, *words, "--output", "one")
    folders = tmp_path / "alone" / "one", tmp_path / "two"
    assert same(*map(weights, folders))
    assert_same_files(*folders)
    assert printed(tmp_path).count("recipe   lm") == 1, "only the first process reports"
    assert f"{2 * workers} processes" in printed(tmp_path)


# In `make test` torchrun starts the processes of one agent again: tests/cli/test_train_lm.py.
@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1])
def test_a_killed_worker_of_one_agent_costs_the_steps_since_the_checkpoint(tmp_path, text, which):
    words = ["--epochs", "3"]
    with agents(tmp_path, text, 1, *words, "--output", "run", restarts=1) as started:
        folder = RunFolder(tmp_path / "run")
        until(folder.model.exists, started)
        assert not folder.result.exists(), "the run must not have ended"
        (worker,) = numbers("-P", started[which])
        os.kill(worker, signal.SIGKILL)
        # One restart is enough: no attempt is lost because the two agents count differently.
        assert ended(started, tmp_path) == [0, 0], printed(tmp_path)
    assert "resumed after" in printed(tmp_path)
    assert "2 processes" in printed(tmp_path)
    said = {path.name: path.read_text() for path in tmp_path.glob("printed.*")}
    assert {name for name, each in said.items() if each} == {name for name in said if name.startswith("printed.0.")}
    assert all(each.count("recipe   lm") == 1 for each in said.values() if each), "only the first process reports"
    one_agent(tmp_path / "alone", text, 2, *words, "--output", "whole")
    folders = tmp_path / "alone" / "whole", tmp_path / "run"
    assert same(*map(weights, folders))
    assert_same_files(*folders)


# Its processes end because one of them is gone, as in tests/training/test_failures.py; then its agent waits for others.
@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1])
def test_when_a_machine_is_gone_the_other_ends(tmp_path, text, which):
    with agents(tmp_path, text, 1, "--epochs", "1000", "--output", "run", restarts=3, join_seconds=5) as started:
        folder = RunFolder(tmp_path / "run")
        until(folder.model.exists, started)
        gone, rest = started[which], started[1 - which]
        gone.kill()
        (status,) = ended([rest], tmp_path, seconds=90.0)
        assert status != 0
        assert not numbers("-g", rest)
    assert folder.checkpoint.exists()
    assert not folder.result.exists()


@pytest.mark.parametrize(
    "option", [[], pytest.param(["--overwrite"], marks=pytest.mark.exhaustive)], ids=["new run", "--overwrite"]
)
def test_a_folder_that_only_one_machine_has_is_refused(tmp_path, text, option):
    """Two processes with folders of their own and the same relative path, as on machines without a shared disk."""
    machines = [tmp_path / str(rank) for rank in range(2)]
    for machine in machines:
        machine.mkdir()
    words = [*TRAIN, "--text", text, "--output", "run", "--epochs", "1"]
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
    assert (first.status, second.status) == (2, 2)
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
