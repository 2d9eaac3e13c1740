"""A training step of a layer with float32 weights under autocast: gatewise.LSTM and torch.nn.LSTM.

    python benchmarks/autocast.py                     # needs a GPU; adds to results/autocast.jsonl
    python benchmarks/autocast.py --dtype bfloat16 --case ptb_medium

A step is a forward and a backward pass with the gradients of the input and of every weight. Both layers have the same
weights and are timed in turn, called from Python and as a CUDA graph. A line is one case in one dtype of autocast; it
also has the error of each gradient, beside nn.LSTM in float64, where it is largest. Under bfloat16 autocast,
torch.nn.LSTM computes in float16.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gatewise
from gatewise.benchmarks.cases import LSTM_GRID, LSTMCase
from gatewise.benchmarks.record import Run
from gatewise.files import append_line
from gatewise.selection.timing import Timing, captured, sample_in_turn, time_side_by_side

RESULTS = Path(__file__).parent / "results" / "autocast.jsonl"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
CASES = ("ptb_small", "ptb_medium", "ptb_large", "tagger", "nmt_encoder", "100-64-512", "50-128-512", "100-64-1024")
_SAMPLE = 0.01  # seconds


class Step:
    """A training step of a layer.

    Args:
        layer: The layer.
        x: The input [T, B, I].
        above: The gradient of the output [T, B, D * H].
        dtype: The dtype of autocast; None for no autocast.
    """

    def __init__(self, layer: nn.LSTM, x: Tensor, above: Tensor, dtype: torch.dtype | None) -> None:
        self._layer, self._above, self._dtype = layer, above, dtype
        self._x = x.clone().requires_grad_()

    def __call__(self) -> None:
        """Run the step; the gradients are afterwards those of the leaves."""
        for leaf in self.leaves:
            leaf.grad = None
        with torch.autocast("cuda", self._dtype, enabled=self._dtype is not None):
            y = self._layer(self._x)[0]
        y.backward(self._above.to(y.dtype))

    @property
    def leaves(self) -> list[Tensor]:
        """The input and the weights."""
        return [self._x, *self._layer.parameters()]


def errors(step: Step, exact: Sequence[Tensor]) -> float:
    """Return the largest relative distance of a step's gradients from exact ones, in the Frobenius norm."""
    step()
    pairs = zip(step.leaves, exact, strict=True)
    return max(float((leaf.grad.double() - one).norm() / one.norm()) for leaf, one in pairs if leaf.grad is not None)


def timed(functions: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, Any]:
    """Return the times of functions, sampled in turn; a sample is a loop of calls, as in training."""
    first = time_side_by_side(functions, device="cuda", runs=3, warmups=8, calls=1)
    calls = {name: max(1, round(_SAMPLE / timing.median)) for name, timing in first.items()}
    samples: dict[str, list[float]] = {name: [] for name in functions}
    # The first calls after those of the other layer find memory at other addresses, which a loop does not.
    in_turn = sample_in_turn(
        functions, device="cuda", runs=20, warmups=0, calls=calls, leads=dict.fromkeys(functions, 3), budget=seconds
    )
    for name, each in in_turn:
        samples[name].append(each)
    return {name: dataclasses.asdict(Timing.of(each)) for name, each in samples.items()}


def measured(case: LSTMCase, dtype: torch.dtype, seconds: float) -> dict[str, Any]:
    """Return the times and the errors of both layers in one case."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"num_layers": case.num_layers, "bidirectional": case.directions == 2, "device": "cuda"}
    theirs = nn.LSTM(case.hidden_size, case.hidden_size, **options)
    ours = gatewise.LSTM(case.hidden_size, case.hidden_size, **options)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(case.time, case.batch, case.hidden_size, device="cuda")
    above = torch.randn(case.time, case.batch, case.directions * case.hidden_size, device="cuda")
    wide = nn.LSTM(case.hidden_size, case.hidden_size, **options, dtype=torch.float64)
    wide.load_state_dict(theirs.state_dict())
    exact = Step(wide, x.double(), above.double(), None)
    exact()
    found = [leaf.grad for leaf in exact.leaves if leaf.grad is not None]
    steps = {"gatewise": Step(ours, x, above, dtype), "nn.LSTM": Step(theirs, x, above, dtype)}
    row: dict[str, Any] = {"errors": {name: errors(step, found) for name, step in steps.items()}}
    graphs: dict[str, Callable[[], object]] = {name: captured(step) for name, step in steps.items()}
    for way, functions in (("eager", dict(steps)), ("graph", graphs)):
        row[way] = timed(functions, seconds)
    return row


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description="Time training steps of LSTMs with float32 weights under autocast.")
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="default: both")
    parser.add_argument("--case", choices=CASES, action="append", help="default: all")
    parser.add_argument("--seconds", type=float, default=0.3, help="of samples of a case (default: 0.3)")
    parser.add_argument("--record", type=Path, default=RESULTS, help="file that lines are appended to")
    given = parser.parse_args()
    run = dataclasses.asdict(Run.now(torch.device("cuda")))
    run["command"] = " ".join(["python benchmarks/autocast.py", *sys.argv[1:]])
    cases = {case.name: case for case in LSTM_GRID}
    ratios: dict[str, list[float]] = {"eager": [], "graph": []}
    for dtype in given.dtype or DTYPES:
        for name in given.case or CASES:
            row = measured(cases[name], DTYPES[dtype], given.seconds)
            line = {"benchmark": "autocast", "case": name, "dtype": dtype, **row, "run": run}
            append_line(given.record, json.dumps(line))
            shown = []
            for way, found in ratios.items():
                found.append(row[way]["nn.LSTM"]["median"] / row[way]["gatewise"]["median"])
                shown.append(f"{way} {1e6 * row[way]['gatewise']['median']:8.1f} us, {found[-1]:5.2f}x")
            print(f"{dtype:<10}{name:<14}{', '.join(shown)}; error {row['errors']['gatewise']:.1e}", flush=True)
    means = {way: math.exp(sum(map(math.log, found)) / len(found)) for way, found in ratios.items()}
    print(f"geometric means: eager {means['eager']:.2f}x, graph {means['graph']:.2f}x")


if __name__ == "__main__":
    main()
