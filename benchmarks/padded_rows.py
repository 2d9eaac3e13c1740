"""The kernel `stepwise` with sizes rounded up to multiples of 16 bytes, and with sizes as they are.

    python benchmarks/padded_rows.py     # needs a GPU; adds to results/padded_rows.jsonl

A line is one call of an LSTM layer of 20 steps: microseconds of a training step (forward and backward pass) or of
inference, in a CUDA graph, with the time on the kernel `persistent` beside them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from unittest import mock

import torch

import gatewise
from gatewise.benchmarks import layer_times
from gatewise.benchmarks.record import Run
from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from gatewise.files import append_line
from gatewise.functional.plan import plan_of
from gatewise.kernels.stepwise import padding

RESULTS = Path(__file__).parent / "results" / "padded_rows.jsonl"
STEPS = 20
CALLS = {
    torch.bfloat16: [(hidden, batch) for hidden in (260, 500, 650, 943, 1212, 1500) for batch in (8, 32, 128, 512)],
    torch.float32: [(hidden, batch) for hidden in (261, 650, 943, 1213) for batch in (8, 128, 512)],
}


def rounded(problem: Problem, device: Device) -> Problem | None:
    """Return the problem with rounded sizes, however few its steps are."""
    values = 16 // problem.element_bytes
    units = -(-problem.hidden_size // values) * values
    same = units == problem.hidden_size
    return None if same else problem.replace(hidden_size=units, input_size=units)


def as_they_are(problem: Problem, device: Device) -> Problem | None:
    """Return None for every problem: no sizes are rounded up."""
    return None


def microseconds(hidden: int, batch: int, dtype: torch.dtype, kernel: str, *, trains: bool) -> float | None:
    """Return the median time of a call in replays of a CUDA graph; None if the kernel refuses it."""
    tf32 = dtype == torch.float32
    problem = Problem(STEPS, batch, hidden, hidden, dtype=dtype, allow_tf32=tf32, needs_grad=trains)
    try:
        return round(1e6 * layer_times.stopwatch(kernel, problem, torch.device("cuda")).graph, 1)
    except gatewise.KernelRefused:
        return None


def main() -> None:
    """Time the calls, print and record them."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--record", type=Path, default=RESULTS, help="file that lines of JSON are added to")
    given = parser.parse_args()
    about = dataclasses.replace(Run.now(torch.device("cuda")), command="python benchmarks/padded_rows.py")
    run = dataclasses.asdict(about)
    for dtype, calls in CALLS.items():
        for hidden, batch in calls:
            for trains in (True, False):
                found = {}
                for name, form in (("rounded_us", rounded), ("plain_us", as_they_are)):
                    plan_of.cache_clear()
                    with mock.patch.object(padding, "padded", form):
                        found[name] = microseconds(hidden, batch, dtype, "stepwise", trains=trains)
                plan_of.cache_clear()
                found["persistent_us"] = microseconds(hidden, batch, dtype, "persistent", trains=trains)
                sizes = {"time": STEPS, "batch": batch, "hidden_size": hidden}
                line = {"dtype": str(dtype)[6:], "pass": "training" if trains else "inference", **sizes, **found}
                print(line, flush=True)
                append_line(given.record, json.dumps(line | {"run": run}))


if __name__ == "__main__":
    main()
