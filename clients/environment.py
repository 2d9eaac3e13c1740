"""The environments of the clients: pinned versions, and gatewise from this checkout."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from clients.paths import ROOT


class Failed(Exception):
    """A step failed; the message is the last line that it printed."""


def uv(environments: Path) -> str:
    """Return the command `uv`, which links files that several environments share instead of copying them.

    Args:
        environments: The folder in which it is installed if the machine has none.
    """
    found = shutil.which("uv")
    if found is None:
        own = environments / "uv"
        found = str(own / "bin" / "uv")
        if not Path(found).exists():
            call(sys.executable, "-m", "venv", own)
            call(own / "bin" / "python", "-m", "pip", "install", "--quiet", "uv")
    return found


def environment(uv: str, folder: Path, requirements: Path) -> Path:
    """Make an environment or bring it up to date, and return its interpreter.

    Args:
        uv: The command `uv`.
        folder: The folder of the environment.
        requirements: The file with the pinned versions.
    """
    python = folder / "bin" / "python"
    if not python.exists():
        call(uv, "venv", "--quiet", "--python", sys.executable, folder)
    call(uv, "pip", "install", "--quiet", "--python", python, "--requirement", requirements, "--editable", ROOT)
    return python


def call(*words: object) -> None:
    """Run a command.

    Raises:
        Failed: Its exit status is not 0.
    """
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    if "PIP_FIND_LINKS" in clean:  # uv does not read the variables of pip
        clean.setdefault("UV_FIND_LINKS", clean["PIP_FIND_LINKS"])
    command = [str(word) for word in words]
    answer = subprocess.run(command, env=clean, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if answer.returncode:
        print(answer.stdout, flush=True)
        raise Failed(f"{shlex.join(command[:3])}: {last_line(answer.stdout)}")


def answer_of(
    command: Sequence[str], folder: Path, what: str, timeout: float, **settings: str
) -> subprocess.CompletedProcess[str]:
    """Run a command of a client on one thread and without a GPU, and return its status and output.

    Args:
        command: The command.
        folder: The current folder of the command.
        what: The name of the command in the error.
        timeout: The time after which it is ended, in seconds.
        settings: Further environment variables.

    Raises:
        Failed: The command takes too long.
    """
    # One thread, so that the order of summation, and with it every digit, is the same in every run.
    ours = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    try:
        answer = subprocess.run(
            command,
            cwd=folder,
            env=os.environ | ours | settings,
            text=True,
            timeout=timeout,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except subprocess.TimeoutExpired as error:
        raise Failed(f"{what}: not finished after {timeout:.0f} seconds") from error
    if answer.returncode:
        print(answer.stdout, flush=True)
    return answer


def last_line(text: str) -> str:
    """Return the last line of a text that is not empty; of a traceback, the first line of its error."""
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line[:1].isalpha() and ("Error" in line.split(":")[0] or "Failed" in line)]
    return (errors or lines or [""])[-1].strip()
