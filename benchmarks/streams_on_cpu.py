"""Streams on a CPU against loops over torch.nn.LSTMCell or GRUCell, step by step.

    OMP_NUM_THREADS=1 taskset -c 0 python -m benchmarks.streams_on_cpu

Calls of both alternate in one process, as `benchmarks.pairs` does it. Both read the same Parameter objects, so that
neither finds more of its weights in the caches.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import gatewise
from benchmarks.pairs import compare
from gatewise.benchmarks.record import Run
from gatewise.files import append_line

RESULTS = Path(__file__).parent / "results" / "streams_on_cpu.jsonl"
KINDS, BATCHES, HIDDEN, LAYERS = ("LSTM", "GRU"), (1, 8), (64, 256, 512), (1, 2)
MODES = {"inference_mode": torch.inference_mode, "no_grad": torch.no_grad}

Step = Callable[[], Tensor]


def steps_of(kind: str, batch: int, size: int, layers: int) -> tuple[Step, Step]:
    """The steps of a loop over torch.nn's cells and of a stream, with the same weights; their outputs are compared."""
    torch.manual_seed(0)
    layer = getattr(gatewise, kind)(size, size, layers)
    cells = [getattr(torch.nn, f"{kind}Cell")(size, size) for _ in range(layers)]
    for number, cell in enumerate(cells):
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            setattr(cell, name, getattr(layer, f"{name}_l{number}"))
    x, states = torch.randn(batch, size), [None] * layers

    def pairs() -> Tensor:
        y = x
        for number, cell in enumerate(cells):
            states[number] = found = cell(y, states[number])
            y = found[0]
        return y

    def singles() -> Tensor:
        y = x
        for number, cell in enumerate(cells):
            states[number] = y = cell(y, states[number])
        return y

    stream = layer.stream(batch)
    theirs = pairs if kind == "LSTM" else singles
    for _ in range(8):
        torch.testing.assert_close(stream(x), theirs(), rtol=1e-5, atol=1e-5)
    return theirs, lambda: stream(x)


def main() -> None:
    """Measure, print a table and append the record."""
    parser = argparse.ArgumentParser(description="Streams on a CPU against loops over cells of torch.nn.")
    parser.add_argument("--seconds", type=float, default=1.0, help="the time for each case (default: 1)")
    parser.add_argument("--no-record", action="store_true", help=f"do not append to {RESULTS.name}")
    given = parser.parse_args()
    torch.set_num_threads(1)
    run, rows = Run.now(torch.device("cpu")), []
    print(f"{run.device}, PyTorch {run.torch}, one thread: microseconds a step of torch.nn's cells and of a stream\n")
    for kind, mode, *sizes in itertools.product(KINDS, MODES, BATCHES, HIDDEN, LAYERS):
        with MODES[mode]():
            found = compare(*steps_of(kind, *sizes), given.seconds)
        if found is not None:
            rows.append({"cell": kind, "mode": mode, **dict(zip("BHL", sizes, strict=True)), **found})
            print(kind, mode, *sizes, *found["us"], found["ratio"], flush=True)
    if not given.no_record:
        append_line(RESULTS, json.dumps({"benchmark": "streams_on_cpu", "run": dataclasses.asdict(run), "rows": rows}))


if __name__ == "__main__":
    main()
