"""One run of the program of a client, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from clients.environment import Failed, last_line
from clients.record import ROOT


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
    # One thread, so that the order of summation, and with it every digit, is the same in every run.
    settings = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    settings["GATEWISE_KERNEL"] = "eager" if way == "eager" else "auto"
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        # -P: without the current folder, in which the libraries may look for modules that are named as ours are.
        command = [str(python), "-P", "-m", f"clients.programs.{client.replace('-', '_')}", way, str(report)]
        try:
            answer = subprocess.run(
                command,
                cwd=folder,
                env=os.environ | settings,
                text=True,
                timeout=timeout,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        except subprocess.TimeoutExpired as error:
            raise Failed(f"{way}: not finished after {timeout:.0f} seconds") from error
        if answer.returncode:
            print(answer.stdout, flush=True)
            raise Failed(f"{way}: {last_line(answer.stdout)}")
        return json.loads(report.read_text("utf-8"))
