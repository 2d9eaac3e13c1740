"""How long training takes to start: the first epoch of `gatewise train`, with empty and with full caches of kernels.

    python -m benchmarks.starts tatoeba -- train nmt --recipe tatoeba-deu-eng --data FOLDER
    python -m benchmarks.starts wikitext2 -- train lm --recipe wikitext2-medium --train train.txt --valid ... --test ...

The words after `--` are a training command. It runs in processes of one epoch each, the first with empty caches, the
others with what it left there. A line of the record has all of them: the seconds of the first epoch with its validation
by training's own clock, those of the whole process, those before training, and the number of compiled kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gatewise.files import append_line

RESULTS = Path(__file__).parent / "results" / "starts.jsonl"
CACHES = {
    "GATEWISE_CACHE": "gatewise",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "CUDA_CACHE_PATH": "cuda",
}


def measured(result: dict[str, Any], began: float, described: float, ended: float) -> dict[str, float]:
    """Return the seconds of a run of one epoch.

    Args:
        result: The content of the run's result.json.
        began: The time at which the process started.
        described: The time at which the run wrote its recipe, which is just before training.
        ended: The time at which the process ended.
    """
    (evaluation,) = result["evaluations"]
    first = 60 * evaluation["minutes"]
    return {
        "first_epoch": first,
        "process": ended - began,
        "before": described - began,
        "after": ended - described - first,
    }


def run(command: Sequence[str], folder: Path, caches: Path) -> tuple[dict[str, float], dict[str, Any]]:
    """Run a training command for one epoch, and return its seconds and its environment.

    Args:
        command: The words after `gatewise`.
        folder: The folder of the run, which does not exist yet.
        caches: The folder of all caches.

    Raises:
        CalledProcessError: The command failed.
    """
    words = [sys.executable, "-m", "gatewise", *command, "--set", "training.epochs=1", "--output", str(folder)]
    places = {name: str(caches / each) for name, each in CACHES.items()}
    began = time.time()  # the clock of the file system
    subprocess.run(words, env=os.environ | places, stdout=sys.stderr, check=True)
    ended = time.time()
    result = json.loads((folder / "result.json").read_text("utf-8"))
    found = measured(result, began, (folder / "recipe.toml").stat().st_mtime, ended)
    return {**found, "kernels": len(list(caches.rglob("*.cubin")))}, result["run"]


def text(name: str, runs: Sequence[dict[str, float]]) -> str:
    """Return a line for each run."""
    return "\n".join(
        f"{name}, {'caches full' if number else 'caches empty':<12} first epoch {each['first_epoch']:6.2f} s, "
        f"process {each['process']:6.2f} s: {each['before']:.2f} s before training, {each['after']:.2f} s after the "
        f"epoch; {each['kernels']:g} compiled kernels"
        for number, each in enumerate(runs)
    )


def main(words: Sequence[str] | None = None) -> int:
    """Run the script."""
    parser = argparse.ArgumentParser(description="Measure how long training takes to start.")
    parser.add_argument("name", help="of the case")
    parser.add_argument("command", nargs="+", help="the words after `gatewise`, after `--`")
    parser.add_argument("--cached", type=int, default=2, help="how many runs with full caches (default: 2)")
    parser.add_argument("--record", type=Path, default=RESULTS, help="file that a line is appended to")
    given = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as temporary:
        folders = [Path(temporary, str(number)) for number in range(given.cached + 1)]
        found = [run(given.command, folder, Path(temporary, "caches")) for folder in folders]
    runs, environments = [each for each, _ in found], [each for _, each in found]
    told = {"benchmark": "starts", "case": given.name, "runs": runs}
    environment = environments[0] | {"command": shlex.join(["gatewise", *given.command])}
    append_line(given.record, json.dumps(told | {"run": environment}))
    print(text(given.name, runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
