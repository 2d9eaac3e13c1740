"""Layers of every cell on a CPU against a loop over time in plain PyTorch, as a user would write it.

    OMP_NUM_THREADS=1 taskset -c 0 python -m benchmarks.cells_on_cpu

The loop (`gatewise.benchmarks.cells.loop`) computes the input products of all steps at once, and calls the cell's own
step. Calls of both alternate in one process, as `benchmarks.pairs` does it. A case above the target is measured again,
for four times as long, and only that counts.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

import gatewise
from benchmarks.pairs import Step, compare
from gatewise.benchmarks.cells.cases import chosen_cells
from gatewise.benchmarks.cells.loop import CellLoop, loop_of, step_of
from gatewise.benchmarks.record import Run
from gatewise.cells import Cell
from gatewise.files import append_line

RESULTS = Path(__file__).parent / "results" / "cells_on_cpu.jsonl"
ALLOWED = 1.0
TIMES, BATCHES, HIDDEN = (1, 8, 50), (1, 16, 64), (64, 512)
LONGEST = 200_000_000  # nanoseconds


class Case(NamedTuple):
    """A cell, the mode and sizes."""

    cell: str
    mode: str
    T: int
    B: int
    H: int


def cases(names: list[str], modes: list[str]) -> Iterator[tuple[Cell, Case]]:
    """All cases of the cells."""
    for cell, mode, *sizes in itertools.product(chosen_cells(names), modes, TIMES, BATCHES, HIDDEN):
        yield cell, Case(cell.name, mode, *sizes)


def steps_of(cell: Cell, case: Case) -> tuple[Step, Step]:
    """The calls of the loop and of gatewise's layer, with the same weights, inputs and initial states."""
    torch.manual_seed(0)
    T, B, H = case[2:]
    layer = gatewise.Recurrent(cell, H, H, bias=True)
    loop = CellLoop(cell, dict(layer.named_parameters()), torch.float32, loop_of(cell, step_of(cell)))
    training = case.mode == "training"
    x = torch.randn(T, B, H, requires_grad=training)
    states = tuple(torch.full((B, H), cell.initial_value(name)) for name in ("h", *cell.states))
    expected, found = loop(x, states)[0], layer(x)[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    ones = torch.ones_like(expected)

    def step(call: Step, leaves: list[torch.Tensor]) -> Step:
        def train() -> None:
            for leaf in leaves:
                leaf.grad = None
            call()[0].backward(ones)

        def infer() -> None:
            with torch.no_grad():
                call()

        return train if training else infer

    return (
        step(lambda: loop(x, states), [x, *loop.parameters()]),
        step(lambda: layer(x), [x, *layer.parameters()]),
    )


def main() -> int:
    """Measure, print a table, append the record; the status is 1 when a ratio is above what is allowed."""
    parser = argparse.ArgumentParser(description="Cells on a CPU: gatewise against a loop in plain PyTorch.")
    parser.add_argument("--cell", action="append", default=[], help="a cell, or own_lstm; repeatable (default: all)")
    parser.add_argument("--mode", action="append", choices=("inference", "training"), help="default: both")
    parser.add_argument("--seconds", type=float, default=0.4, help="the time for each case (default: 0.4)")
    parser.add_argument("--no-record", action="store_true", help=f"do not append to {RESULTS.name}")
    given = parser.parse_args()
    torch.set_num_threads(1)
    run, rows = Run.now(torch.device("cpu")), []
    for cell, case in cases(given.cell, given.mode or ["inference", "training"]):
        steps = steps_of(cell, case)
        found = compare(*steps, given.seconds, LONGEST)
        if found is not None and found["ratio"] > ALLOWED:  # for longer, since the machine may have been disturbed
            found = compare(*steps, 4 * given.seconds, LONGEST)
        if found is not None:
            rows.append({**case._asdict(), **found})
            print(*case, *found["us"], found["ratio"], file=sys.stderr, flush=True)
    print(f"{run.device}, PyTorch {run.torch}, one thread: time of gatewise / time of a loop\n")
    print(f"{'cell':<20}{'mode':<11}{'T':>3}{'cases':>6}{'least':>8}{'median':>8}{'most':>8}  above {ALLOWED}")
    for (name, mode, T), group in itertools.groupby(rows, key=lambda row: (row["cell"], row["mode"], row["T"])):
        own = list(group)
        ratios = sorted(row["ratio"] for row in own)
        above = [f"B {row['B']} H {row['H']}: {row['ratio']}" for row in own if row["ratio"] > ALLOWED]
        numbers = f"{T:>3}{len(own):>6}{ratios[0]:>8.3f}{ratios[len(ratios) // 2]:>8.3f}{ratios[-1]:>8.3f}"
        print(f"{name:<20}{mode:<11}{numbers}  {'; '.join(above)}")
    if not given.no_record:
        append_line(RESULTS, json.dumps({"benchmark": "cells_on_cpu", "run": dataclasses.asdict(run), "rows": rows}))
    return int(any(row["ratio"] > ALLOWED for row in rows))


if __name__ == "__main__":
    sys.exit(main())
