"""Programs that start in a moment: their processes are forked from one that has imported all and computed nothing."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

# One server is started by whoever asks first; what it has imported serves everybody who asks later.
IMPORTED = (
    *("gatewise.models", "gatewise.data", "gatewise.training", "torch._dynamo", "pytest"),
    *("gatewise.cli.application", "gatewise.cli.train", "gatewise.cli.language_model_run"),
    *("gatewise.cli.classifier_run", "gatewise.cli.nmt_run", "torch.utils.tensorboard", "matplotlib.figure"),
)


def processes_that_start_fast():
    """Return a context of `multiprocessing` whose processes are forked from that server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*IMPORTED])
    return context


def begun_picture(figure, path, **options) -> None:
    """Write only the beginning of a picture: drawing the curves takes most of the time of a small run."""
    path.write_bytes(b"\x89PNG")


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def of_several(rank: int, count: int, port: int) -> dict[str, str]:
    """Return what torchrun tells a process by its environment."""
    return {
        "WORLD_SIZE": str(count),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }


class Program:
    """`gatewise` with words, in a process of its own.

    Args:
        words: As on the command line.
        folder: The folder in which it runs.
        environment: What is changed of this process's environment.
        threads: Of PyTorch; as many as here by default, for the same bits.
        change: A function, known by its module, that is called in the process first.

    Attributes:
        process: What runs.
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
        """Wait for its end, and make one where it does not come."""
        self.process.join(seconds)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
            raise AssertionError(f"did not end within {seconds} seconds; printed {self.out}{self.err}")
        return self

    @property
    def status(self) -> int | None:
        """The exit status, less than 0 for a signal; None as long as it runs."""
        return self.process.exitcode

    @property
    def out(self) -> str:
        """What it has printed on standard output."""
        return self._printed[0].read_text("utf-8")

    @property
    def err(self) -> str:
        """What it has printed on standard error."""
        return self._printed[1].read_text("utf-8")


def together(words: Sequence[object], folder: Path, change: Callable[[], None] | None = None) -> list[Program]:
    """Run a command in two processes that train together, each on one thread; return them when they have ended.

    There is no launcher to end one because of the other: they end by themselves or not at all.
    """
    port = free_port()
    programs = [Program(words, folder, of_several(rank, 2, port), 1, change) for rank in range(2)]
    return [program.ended() for program in programs]


def _run(words, folder, environment, threads, change, printed):
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, path in enumerate(printed, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    torch.set_num_threads(threads)
    from matplotlib.figure import Figure

    from gatewise.cli import main

    Figure.savefig = begun_picture
    if change:
        change()
    sys.argv = ["gatewise", *words]
    main()
