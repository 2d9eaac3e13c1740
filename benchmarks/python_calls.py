"""How much of a training call from Python is autograd's own time: calls beside a function that computes nothing.

    python benchmarks/python_calls.py      # needs a GPU; a line in benchmarks/results/python_calls.jsonl

The function that computes nothing is an autograd function in Python with the inputs, outputs and gradients of the call.
It allocates them, and launches no kernel. No layer whose passes are called from Python can take less time. Each way is
timed with autograd's second thread, in which `backward` runs by default, and inside
`torch.autograd.set_multithreading_enabled(False)`. A sample is 20 steps without synchronisation between them. A figure
is the median of nine samples, which are taken in turn, in microseconds a step.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gatewise
from gatewise.benchmarks.cases import LSTM_GRID, LSTMCase
from gatewise.benchmarks.precision import LAYER_PRECISIONS
from gatewise.benchmarks.record import Run
from gatewise.files import append_line

RESULTS = Path(__file__).parent / "results" / "python_calls.jsonl"
CASES = "decode_64_512", "ptb_small", "100-16-256", "tagger"
_STEPS, _SAMPLES, _WARMUPS = 20, 9, 40

Step = Callable[[], object]


class Nothing(torch.autograd.Function):
    """A layer's inputs, outputs and gradients, without any computation."""

    @staticmethod
    def forward(ctx: Any, size: int, x: Tensor, h0: Tensor, c0: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        """Allocate the outputs; `size` is the number of features of y."""
        y = x.new_empty(x.shape[0], x.shape[1], size)
        ctx.save_for_backward(x, h0, c0, *weights, y)
        ctx.set_materialize_grads(False)
        return y, torch.empty_like(h0), torch.empty_like(c0)

    @staticmethod
    def backward(ctx: Any, *above: Tensor | None) -> tuple[Tensor | None, ...]:
        """Allocate the gradients, those of the weights as views of one tensor."""
        x, h0, c0, *weights, _ = ctx.saved_tensors
        together, first, views = x.new_empty(sum([weight.numel() for weight in weights])), 0, []
        for weight in weights:
            views.append(together.as_strided(weight.shape, weight.stride(), first))
            first += weight.numel()
        return None, torch.empty_like(x), torch.empty_like(h0), torch.empty_like(c0), *views


def steps(case: LSTMCase, dtype: torch.dtype, device: torch.device) -> dict[str, Step]:
    """Return a training step of each way to call a layer of a case."""
    made = {"device": device, "dtype": dtype}
    sizes = case.hidden_size, case.hidden_size, case.num_layers
    shape = case.num_layers * case.directions, case.batch, case.hidden_size
    x, h0, c0 = (
        torch.randn(of, **made, requires_grad=True) for of in ((case.time, case.batch, case.hidden_size), shape, shape)
    )
    above = torch.randn(case.time, case.batch, case.hidden_size * case.directions, **made)

    def step_of(layer: torch.nn.Module, call: Callable[[], Tensor]) -> Step:
        leaves = [x, h0, c0, *layer.parameters()]
        return lambda: torch.autograd.grad(call(), leaves, above)

    theirs, ours = (kind(*sizes, bidirectional=case.directions == 2, **made) for kind in (torch.nn.LSTM, gatewise.LSTM))
    weights, size = list(theirs.parameters()), above.shape[2]
    return {
        "nothing": step_of(theirs, lambda: Nothing.apply(size, x, h0, c0, *weights)[0]),
        "gatewise": step_of(ours, lambda: ours(x, (h0, c0))[0]),
        "nn.LSTM": step_of(theirs, lambda: theirs(x, (h0, c0))[0]),
    }


def measured(ways: dict[str, Step], wait: Callable[[], None]) -> dict[str, dict[str, float]]:
    """Return the microseconds of a step of each way, with two threads and with one."""
    samples: dict[tuple[str, str], list[float]] = {}
    for several in (True, False):
        with torch.autograd.set_multithreading_enabled(several):
            for step in ways.values():
                for _ in range(_WARMUPS):
                    step()
            for _ in range(_SAMPLES):
                for name, step in ways.items():
                    wait()
                    began = time.perf_counter()
                    for _ in range(_STEPS):
                        step()
                    wait()
                    own = samples.setdefault((name, "two threads" if several else "one thread"), [])
                    own.append((time.perf_counter() - began) / _STEPS)
    found: dict[str, dict[str, float]] = {}
    for (name, threads), seconds in samples.items():
        found.setdefault(name, {})[threads] = float(f"{1e6 * statistics.median(seconds):.4g}")
    return found


def main() -> None:
    """Measure the cases in bfloat16, print each row and append the record."""
    device, rows = torch.device("cuda"), []
    precision = LAYER_PRECISIONS["bf16"]
    for case in (case for case in LSTM_GRID if case.name in CASES):
        with precision.applied():
            found = measured(steps(case, precision.dtype, device), torch.cuda.synchronize)
        rows.append({"dtype": precision.name, "case": case.name, "us": found})
        print(rows[-1], flush=True)
    about = dataclasses.asdict(Run.now(device))
    append_line(RESULTS, json.dumps({"benchmark": "python_calls", "run": about, "rows": rows}))


if __name__ == "__main__":
    main()
