"""Where the time of the benchmark's training steps goes, beside the floor: kernels of a step, cycles of the loops.

    python -m benchmarks.loops.above_floor --record FILE    # needs a GPU; adds lines to FILE
    python -m benchmarks.loops.above_floor --dtype tf32 --case ptb_large --case 50-128-512

The shapes are those of `gatewise bench lstm` with more than one time step, on the kernel `persistent`. A line of
the record has the time of a training step in a CUDA graph, the time of each kernel in it, the parts of the floor, and
the clock cycles of the phases of both loops, which another process counts (`benchmarks.loops.phases`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks.loops.phases import Counts
from benchmarks.loops.rows import Found, counting_in, print_counts, read, times_in_graph
from gatewise.benchmarks.cases import LSTM_GRID, LSTMCase
from gatewise.benchmarks.lstm.call import draw
from gatewise.benchmarks.lstm.floor import Floor, Products, floor
from gatewise.benchmarks.lstm.side import Side, gatewise_side
from gatewise.benchmarks.precision import LAYER_PRECISIONS, Precision
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.files import append_line
from gatewise.kernels.persistent.launches.builds import building, copies_of, launches_of

CASES = {case.name: case for case in LSTM_GRID if case.time > 1}
_GATES = 4
_WORKERS = 15  # threads that compile
_ENTRY = "recurrent_"  # with the name of a pass the name of its kernel

PARTS = {
    "arrival": ("waits",),
    "products": ("product",),
    "sums of blocks": ("barrier", "send", "await"),
    "cells": ("slopes", "cells"),
    "stores and next loads": ("store", "loads", "masks", "keep", "pause", "begin"),
}
"""Parts of a step of a loop, each with its phases: the waits for what other blocks store, loads and products without
these waits, barriers and the exchange of sums in a cluster, the cell's arithmetic, and stores with the loads of later
steps. Where blocks exchange values in clusters, the waits are among the stores and loads."""


def main() -> None:
    """Measure all shapes, or those named, and record them."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--record", type=Path, help="file that lines of JSON are added to")
    parser.add_argument("--case", action="append", choices=tuple(CASES), help="a shape (all)")
    parser.add_argument("--dtype", choices=tuple(LAYER_PRECISIONS), default="bf16", help="the precision (bf16)")
    parser.add_argument("--count", action="store_true", help=argparse.SUPPRESS)  # the process with marks
    given = parser.parse_args()
    cases, device = [CASES[name] for name in given.case or CASES], torch.device("cuda", 0)
    precision = LAYER_PRECISIONS[given.dtype]
    with precision.applied():
        count(cases, precision, device) if given.count else measure(cases, precision, given.record, device)


def problem_of(case: LSTMCase, precision: Precision) -> Problem:
    """Return the problem of a shape, as far as its passes depend on it."""
    sizes = case.time, case.batch, case.hidden_size, case.hidden_size
    layout = Layout.DEVICE_LENGTHS if case.ragged else Layout.DENSE
    return Problem(
        *sizes,
        num_layers=case.num_layers,
        bidirectional=case.directions == 2,
        dtype=precision.dtype,
        needs_grad=True,
        allow_tf32=precision.tf32,
        layout=layout,
    )


def side_of(case: LSTMCase, precision: Precision, device: torch.device) -> Side:
    """Return the layer of a shape with its arguments, those of `gatewise bench lstm`."""
    side = gatewise_side(draw(case, device), precision.dtype, "persistent")
    side.prepare(True)
    return side


def count(cases: Sequence[LSTMCase], precision: Precision, device: torch.device) -> None:
    """Run the passes of shapes with marks, which print what they count, with a line of JSON before each shape."""
    probed = Device.probe(device)
    with tempfile.TemporaryDirectory() as folder, counting_in(Path(folder)) as counting:
        launches = {case: launches_of(problem_of(case, precision), probed) for case in cases}
        with building([launch for each in launches.values() for launch in each], _WORKERS, device):
            pass
        for index, case in enumerate(cases):
            print_counts(index, side_of(case, precision, device), launches[case], counting, training=True)


def measure(cases: Sequence[LSTMCase], precision: Precision, record: Path | None, device: torch.device) -> None:
    """Time the shapes, count their cycles in another process, print a table and record both."""
    probed, products = Device.probe(device), Products(device, precision)
    problems = [problem_of(case, precision) for case in cases]
    needed = [each for problem in problems for each in (*launches_of(problem, probed), *copies_of(problem, probed))]
    with building(needed, _WORKERS, device):
        pass
    timed, floors = {}, {}
    for case in cases:
        timed[case] = times_in_graph(side_of(case, precision, device), case.time, training=True)
        floors[case] = floor_of(case, precision, probed, products)
    command = [sys.executable, "-m", "benchmarks.loops.above_floor", "--count", f"--dtype={precision.name}"]
    command += [f"--case={case.name}" for case in cases]
    found = read(cases, subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout)
    for case in cases:
        line = line_of(case, precision, timed[case], floors[case], found.get(case, ({}, {})))
        print(f"{case.name}: {json.dumps(line['us_a_step'])} {json.dumps(line['loops'])}", flush=True)
        if record:
            append_line(record, json.dumps(line))


def floor_of(case: LSTMCase, precision: Precision, device: Device, products: Products) -> Floor:
    """Return the floor of a training step of a shape."""
    tokens = draw(case, torch.device("cpu")).tokens if case.ragged else case.time * case.batch
    return floor(case, tokens, precision, device, gates=_GATES, training=True, product_seconds=products.seconds)


def line_of(
    case: LSTMCase, precision: Precision, times: Mapping[str, float], bound: Floor, found: Found
) -> dict[str, object]:
    """Return the line of the record of a shape."""
    counts, left_out = found
    loops = {name.removeprefix(_ENTRY): time for name, time in times.items() if name.startswith(_ENTRY)}
    others = sum(time for name, time in times.items() if name != "all") - sum(loops.values())
    per_step = 1e6 / case.time
    return {
        "benchmark": "above_floor",
        "case": case.name,
        "dtype": precision.name,
        "us_a_step": {"all": times["all"], **loops, "other kernels": round(others, 4)},
        "floor": {"loops": round(bound.loop * per_step, 4), "products": round(bound.around * per_step, 4)},
        "kernels": dict(times),
        "loops": {name: parts_of(threads[0], left_out.get(name, [])) for name, threads in counts.items()},
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def parts_of(counts: Counts, left_out: Sequence[str]) -> dict[str, float]:
    """Return the clock cycles of a step in each of `PARTS`; waits that had no mark are part of the products."""
    cycles = {**counts.phases, "waits": counts.waits}
    found = {part: sum(cycles.get(name, 0.0) for name in names) for part, names in PARTS.items()}
    found["products"] -= counts.waits
    if "waits" in left_out:
        del found["arrival"]
    return {part: round(cycles) for part, cycles in found.items()} | {"reloads": round(counts.reloads, 2)}


if __name__ == "__main__":
    main()
