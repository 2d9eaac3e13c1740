"""One run of the program of a client, in a process of its own."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from clients.environment import Failed, answer_of, last_line


def run(python: Path, client: str, way: str, timeout: float) -> dict[str, Any]:
    """Run a program and return its report.

    Args:
        python: The interpreter of the environment of the client.
        client: The name of the client in the package index.
        way: One of `clients.trial.WAYS`.
        timeout: The time after which it is ended, in seconds.

    Raises:
        Failed: The program fails, or takes too long.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        # -P: without the current folder, in which the libraries may look for modules that are named as ours are.
        command = [str(python), "-P", "-m", f"clients.programs.{client.replace('-', '_')}", way, str(report)]
        kernel = "eager" if way == "eager" else "auto"
        answer = answer_of(command, Path(folder), way, timeout, GATEWISE_KERNEL=kernel)
        if answer.returncode:
            raise Failed(f"{way}: {last_line(answer.stdout)}")
        return json.loads(report.read_text("utf-8"))
