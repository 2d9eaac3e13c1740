"""`python -m gatewise.benchmarks.trajectories`: train real models on every kernel and compare their losses."""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from gatewise.benchmarks.record import Run
from gatewise.benchmarks.trajectories.cases import CASES, Case
from gatewise.benchmarks.trajectories.run import run_case
from gatewise.contract.errors import ArgumentError, sentence
from gatewise.contract.ranges import COUNT
from gatewise.files import append_line

_KINDS = ("auto", "persistent", "stepwise", "cudnn", "aten", "eager", "lean")


def main(arguments: list[str] | None = None) -> int:
    """Train all cases; return 1 if a loss leaves the spread of nn.LSTM's."""
    given = _parsed(arguments)
    device = torch.device(given.device)
    gpus = torch.cuda.device_count() if device.type == "cuda" else given.processes
    cases = [case for case in CASES if not given.case or case.name in given.case]
    skipped = [case for case in cases if case.processes > gpus]
    cases = [case for case in cases if case not in skipped]
    began, wrong = time.monotonic(), 0
    about = Run.now(device)
    for rows in _each(cases, given, device):
        for row in rows:
            wrong += bool(row["note"]) and not row["refused"]
            said = f"refused: {row['note']}" if row["refused"] else row["note"] or "within the spread"
            print(f"{row['case']:24} {row['kind']:11} {row['worst'] or 0:6.2f}  {said}", flush=True)
            if given.record is not None:
                line = {"benchmark": "trajectories", **row, "run": _described(about)}
                append_line(given.record, json.dumps(line, allow_nan=False))
    for case in skipped:
        print(f"{case.name:24} not run: it takes {case.processes} GPUs, and there are {gpus}")
    print(f"{len(cases)} models in {time.monotonic() - began:.0f} s, {wrong} trajectories wrong")
    return 1 if wrong else 0


def _parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = _parser()
    given = parser.parse_args(arguments)
    unknown = sorted(set(given.case or ()) - {case.name for case in CASES})
    try:
        for name in ("steps", "jobs", "processes"):
            COUNT.check(f"--{name}", getattr(given, name))
        if unknown:
            raise ArgumentError(sentence("--case", f"one of {', '.join(case.name for case in CASES)}", unknown[0]))
    except ArgumentError as error:
        parser.error(str(error))
    return given


def _each(cases: list[Case], given: argparse.Namespace, device: torch.device) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of each case when it is complete; concurrent cases are distributed over the GPUs."""
    gpus = torch.cuda.device_count() if device.type == "cuda" and given.jobs > 1 else 1
    devices = [torch.device(device.type, number) for number in range(gpus)] if gpus > 1 else [device]
    tasks = [
        (case, given.kind or _KINDS, given.steps, devices[number % len(devices)]) for number, case in enumerate(cases)
    ]
    if given.jobs == 1:
        yield from (run_case(*task) for task in tasks)
        return
    with ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(run_case, *task) for task in tasks]):
            yield done.result()


def _described(about: Run) -> dict[str, object]:
    return {name: getattr(about, name) for name in ("date", "device", "torch", "cudnn", "gatewise", "commit", "dirty")}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gatewise.benchmarks.trajectories", description=main.__doc__)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default, help=f"where ({default})")
    parser.add_argument("--steps", type=int, default=500, help="steps of training (500)")
    parser.add_argument("--case", action="append", help="a model; several times for several (all)")
    parser.add_argument("--kind", action="append", choices=_KINDS, help="a kernel; several times for several (all)")
    parser.add_argument("--jobs", type=int, default=1, help="models trained concurrently (1)")
    parser.add_argument("--processes", type=int, default=2, help="on a CPU, the processes of distributed training (2)")
    parser.add_argument("--record", type=Path, help="file to which a line of JSON is appended for each trajectory")
    return parser


if __name__ == "__main__":
    warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
    sys.exit(main())
