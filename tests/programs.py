"""Programs that start fast: they are forked from a server process that has imported everything and computed nothing."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch

# The first user starts the server; its imports determine those of all later processes.
IMPORTED = (
    "tests.server",
    *("gatewise.models", "gatewise.data", "gatewise.training", "torch._dynamo", "pytest"),
    *("gatewise.cli.application", "gatewise.cli.train", "gatewise.cli.language_model_run"),
    *("gatewise.cli.classifier_run", "gatewise.cli.nmt_run", "torch.utils.tensorboard", "matplotlib.figure"),
    *("typer._adapters", "rich.live", "safetensors.torch", "sacrebleu"),
)


def processes_that_start_fast():
    """Return a `multiprocessing` context whose processes are forked from that server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*IMPORTED])
    with contextlib.chdir(Path(__file__).parents[1]):  # where the server finds what it imports
        forkserver.ensure_running()
    return context


def begun_picture(figure, path, **options) -> None:
    """Write only the beginning of a plot: drawing the curves takes most of the time of a small run."""
    path.write_bytes(b"\x89PNG")


def begun_curves(path, history, *given, **options) -> None:
    """Write only the beginning of a plot of learning curves, whose axes take as long as many small runs do."""
    assert history
    begun_picture(None, path)


def begun_predictions(path, *given) -> None:
    """Write only the beginning of a plot of a classifier's predictions."""
    begun_picture(None, path)


def no_histogram(*given) -> None:
    """Write no histogram: those of all weights take a tenth of the time of a small run."""


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def of_several(rank: int, count: int, port: int) -> dict[str, str]:
    """Return the environment variables with which torchrun starts a process."""
    return {
        "WORLD_SIZE": str(count),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }


class Program:
    """The program `gatewise` in a separate process.

    Args:
        words: The words of the command line.
        folder: The folder in which it runs.
        environment: The changes to this process's environment variables.
        threads: The number of threads of PyTorch; by default that of this process, for the same bits.
        change: A function, found by its module and name, that the process calls first.

    Attributes:
        process: The process.
    """

    def __init__(
        self,
        words: Sequence[object],
        folder: Path,
        environment: dict[str, str] | None = None,
        threads: int | None = None,
        change: Callable[[], None] | None = None,
    ) -> None:
        self._printed = [folder / f"{name}.{time.monotonic_ns()}" for name in ("printed", "errors")]
        everything = os.environ | {"COLUMNS": "80"} | (environment or {})
        given = ([*map(str, words)], folder, everything, threads or torch.get_num_threads(), change, self._printed)
        self.process = processes_that_start_fast().Process(target=_run, args=given)
        self.process.start()

    def ended(self, seconds: float = 60.0) -> Program:
        """Wait for the process to end, and kill it if it does not."""
        self.process.join(seconds)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
            raise AssertionError(f"did not end within {seconds} seconds; printed {self.out}{self.err}")
        return self

    @property
    def status(self) -> int | None:
        """The exit status, negative for a signal; None while the process runs."""
        return self.process.exitcode

    @property
    def out(self) -> str:
        """The process's standard output."""
        return self._printed[0].read_text("utf-8")

    @property
    def err(self) -> str:
        """The process's standard error."""
        return self._printed[1].read_text("utf-8")


def together(words: Sequence[object], folder: Path, change: Callable[[], None] | None = None) -> list[Program]:
    """Run a command in two processes that train together, each on one thread; return them when they have ended.

    No launcher ends one process because of the other: they must exit by themselves.
    """
    port = free_port()
    programs = [Program(words, folder, of_several(rank, 2, port), 1, change) for rank in range(2)]
    return [program.ended() for program in programs]


def under_torchrun(function: Callable[..., None], *given: Any, count: int = 2, restarts: int = 0) -> None:
    """Call a function in processes of torchrun's agent, which runs in this process; raise an error if they fail.

    Args:
        function: The function, found by its module and name.
        given: Its arguments.
        count: The number of processes.
        restarts: The number of times that the agent starts the processes again.
    """
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    processes_that_start_fast()  # determines the modules that the server imports
    standalone = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "run_id": str(uuid.uuid4())}
    config = LaunchConfig(1, 1, count, max_restarts=restarts, start_method="forkserver", **standalone)
    replaced = {name: signal.getsignal(name) for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)}
    _without_names_of_methods()
    try:
        elastic_launch(config, function)(*given)
    finally:
        for name, handler in replaced.items():
            signal.signal(name, handler)


class Agent:
    """The agent that `torchrun OPTIONS` starts; its workers are forked from it, and call a function.

    It has methods of `subprocess.Popen`.

    Args:
        options: The options of torchrun.
        log: The file to which it prints.
        function: The function, found by its module and name.
        given: Its arguments.
    """

    def __init__(self, options: Sequence[object], log: str | Path, function: Callable[..., None], *given: Any) -> None:
        everything = ([*map(str, options)], str(log), os.environ | {"OMP_NUM_THREADS": "1"}, function, given)
        self._process = processes_that_start_fast().Process(target=_be_agent, args=everything)
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while the process runs."""
        return self._process.exitcode

    def wait(self, seconds: float = 60.0) -> int:
        """Wait for the process to end; return its exit status, or raise an error if it does not end in time."""
        self._process.join(seconds)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("torchrun", seconds)
        return self._process.exitcode

    def terminate(self) -> None:
        """Ask the process to end."""
        self._process.terminate()

    def kill(self) -> None:
        """End the process and its workers, as if their machine were switched off."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            self._process.kill()  # it has ended, or has not begun the group of its own


def _without_names_of_methods():
    """Let an agent record events without the name of the method, which it reads from the stack ten times a second."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    dynamic_rendezvous.get_method_name = lambda *given, **options: "method"


def _be_agent(options, log, environment, function, given):
    from torch.distributed import run

    os.setsid()  # so that a signal to the group of the agent reaches its workers, and them alone
    os.environ.clear()
    os.environ.update(environment)
    printed = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(printed, descriptor)
    found = run.get_args_parser().parse_args([*options, "--start-method", "fork", "-m", function.__module__])
    if found.standalone:
        found.rdzv_backend, found.rdzv_endpoint, found.rdzv_id = "c10d", "localhost:0", str(uuid.uuid4())
    config, _, _ = run.config_from_args(found)
    _without_names_of_methods()
    run.elastic_launch(config, _be_worker)(function, given)


def _be_worker(function, given):
    # Unlike processes that torchrun starts, those that it forks have its handlers.
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    function(*given)


def program_of_torchrun(words: Sequence[object], folder: Path, change: Callable[[], None] | None = None) -> None:
    """Run `gatewise` in this process, which torchrun's agent has started.

    It prints to `printed.RANK.RESTART` and `errors.RANK.RESTART` in the folder.
    """
    place = f"{os.environ['RANK']}.{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    printed = [folder / f"{name}.{place}" for name in ("printed", "errors")]
    try:
        _run([*map(str, words)], folder, os.environ | {"COLUMNS": "80"}, 1, change, printed)
    except SystemExit as leaving:  # the agent waits for a result
        if leaving.code:
            raise RuntimeError(f"`gatewise` ended with status {leaving.code}") from None


def _run(words, folder, environment, threads, change, printed):
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, path in enumerate(printed, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    torch.set_num_threads(threads)
    from matplotlib.figure import Figure
    from torch.utils.tensorboard import SummaryWriter

    from gatewise.cli import main

    Figure.savefig = begun_picture
    SummaryWriter.add_histogram = no_histogram
    if change:
        change()
    sys.argv = ["gatewise", *words]
    main()
