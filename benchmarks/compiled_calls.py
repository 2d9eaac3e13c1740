"""Calls under torch.compile on a CPU: models with gatewise's layers against the same models with those of torch.nn.

    OMP_NUM_THREADS=1 taskset -c 0 python -m benchmarks.compiled_calls

Both models are compiled with the default options, and their calls alternate in one process, as `benchmarks.pairs` does
it. The form "alone" is the layer by itself; "model" has a linear layer with tanh before it and another one after it.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import gatewise
from benchmarks.pairs import Step, compare
from gatewise.benchmarks.record import Run
from gatewise.files import append_line

RESULTS = Path(__file__).parent / "results" / "compiled_calls.jsonl"

KINDS, FORMS, MODES = ("LSTM", "GRU"), ("alone", "model"), ("inference", "training")
SIZES = ((1, 1, 16), (1, 16, 512), (8, 1, 32), (8, 16, 64), (50, 4, 64), (100, 64, 128))
LONGEST = 10**9  # nanoseconds


class Case(NamedTuple):
    """A class of layers, the form of the model, the mode of its calls, and sizes."""

    kind: str
    form: str
    mode: str
    T: int
    B: int
    H: int


class Model(nn.Module):
    """A layer, alone or between two linear layers."""

    def __init__(self, layer: nn.Module, size: int, form: str) -> None:
        super().__init__()
        self.layer = layer
        self.before, self.after = (nn.Linear(size, size), nn.Linear(size, size)) if form == "model" else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of all steps."""
        if self.before is None or self.after is None:
            return self.layer(x)[0]
        return self.after(self.layer(self.before(x).tanh())[0].tanh())


def measure(case: Case, seconds: float) -> dict[str, Any] | None:
    """Time one case; returns its row of the record."""
    torch.manual_seed(0)
    torch.compiler.reset()
    kind, form, mode, T, B, H = case
    theirs, ours = (Model(getattr(of, kind)(H, H), H, form) for of in (nn, gatewise))
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(T, B, H)
    first, second = (_step(torch.compile(model), model, x, mode) for model in (theirs, ours))
    found = compare(first, second, seconds, LONGEST)
    return None if found is None else {**case._asdict(), **found}


def _step(call: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor, mode: str) -> Step:
    def infer() -> None:
        with torch.no_grad():
            call(x)

    def train() -> None:
        model.zero_grad()
        call(x).sum().backward()

    return infer if mode == "inference" else train


def main() -> None:
    """Measure, print a table and append the record."""
    parser = argparse.ArgumentParser(description="Calls under torch.compile on a CPU: gatewise against torch.nn.")
    parser.add_argument("--seconds", type=float, default=2.0, help="the time for each case (default: 2)")
    parser.add_argument("--no-record", action="store_true", help=f"do not append to {RESULTS.name}")
    given = parser.parse_args()
    torch.set_num_threads(1)
    run, rows = Run.now(torch.device("cpu")), []
    print(f"{run.device}, PyTorch {run.torch}, one thread: microseconds of torch.nn and of gatewise, and their ratio\n")
    for kind, form, mode, sizes in itertools.product(KINDS, FORMS, MODES, SIZES):
        row = measure(Case(kind, form, mode, *sizes), given.seconds)
        if row is not None:
            rows.append(row)
            print(" ".join(str(value) for value in row.values()), flush=True)
    if not given.no_record:
        append_line(RESULTS, json.dumps({"benchmark": "compiled_calls", "run": dataclasses.asdict(run), "rows": rows}))


if __name__ == "__main__":
    main()
