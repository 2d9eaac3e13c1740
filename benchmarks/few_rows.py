"""Products of few rows in exact float32, by `torch.mm` and by `torch.addmm` with zeros, and their errors.

    python benchmarks/few_rows.py     # needs a GPU; adds to results/few_rows.jsonl

The products are those of a layer: of its inputs x [M, K] and its weights [4 * H, K], and of the gradients [M, 4 * H]
and the weights. A line is one product: microseconds in a CUDA graph, and relative errors to float64 in the Frobenius
norm. The last line of a run is its summary: how much time zeros save where gatewise adds them, and elsewhere.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gatewise.benchmarks.record import Run
from gatewise.contract.problem import Problem
from gatewise.files import append_line
from gatewise.kernels.cuda.few_rows import is_faster_with_zeros
from gatewise.kernels.cuda.precision import products_in_tf32

RESULTS = Path(__file__).parent / "results" / "few_rows.jsonl"
ROWS = (2, 4, 6, 7, 8, 12, 16, 17, 24, 32)
UNITS = (24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256, 384, 512)
_CALLS, _REPLAYS = 12, 5


def microseconds(call: Callable[[], object]) -> float:
    """Return the shortest time of a call in replays of a CUDA graph of twelve."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(_CALLS):
                call()
        times = []
        for _ in range(_REPLAYS + 1):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / _CALLS)
    return min(times[1:])


def products(rows: int, units: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the products of a layer with as many input features as hidden units: their names and factors."""
    weights = torch.randn(4 * units, units, device="cuda") / math.sqrt(units)
    yield "input", torch.randn(rows, units, device="cuda"), weights.t()
    yield "gradient of the input", torch.randn(rows, 4 * units, device="cuda"), weights


def measured(left: Tensor, right: Tensor) -> dict[str, float]:
    """Return the times of a product and its relative errors."""
    out, zeros = left.new_empty(len(left), right.shape[1]), left.new_zeros(right.shape[1])
    exact = left.double() @ right.double()
    found = {}
    forms = {"mm": lambda: torch.mm(left, right, out=out), "zeros": lambda: torch.addmm(zeros, left, right, out=out)}
    for name, call in forms.items():
        found[f"{name}_us"] = round(microseconds(call), 2)
        found[f"{name}_error"] = float((out.double() - exact).norm() / exact.norm())
    return found


def text(found: list[dict[str, Any]]) -> str:
    """Return how long products take where zeros are added, and where they are not."""
    lines = []
    for chosen in (True, False):
        ratios = [line["zeros_us"] / line["mm_us"] for line in found if line["chosen"] == chosen]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        shares = f"{min(ratios):.2f} to {max(ratios):.2f} of the time of mm, in the geometric mean {mean:.2f}"
        lines.append(f"{len(ratios)} products {'with zeros' if chosen else 'by mm'}: addmm with zeros takes {shares}")
    return "\n".join(lines)


def main() -> None:
    """Time all products, record them, and print the summary."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--record", type=Path, default=RESULTS, help="file that lines of JSON are added to")
    given = parser.parse_args()
    torch.manual_seed(0)
    run, found = dataclasses.asdict(Run.now(torch.device("cuda"))), []
    with products_in_tf32(Problem(1, 1, 1, 1, allow_tf32=False)):
        for units in UNITS:
            for rows in ROWS:
                for name, left, right in products(rows, units):
                    sizes = {"product": name, "rows": rows, "terms": left.shape[1], "columns": right.shape[1]}
                    line = {**sizes, "chosen": is_faster_with_zeros(left), **measured(left, right)}
                    found.append(line)
    for line in found:
        append_line(given.record, json.dumps({"benchmark": "few_rows", **line}))
    append_line(given.record, json.dumps({"benchmark": "few_rows", "summary": text(found), "run": run}))
    print(text(found))


if __name__ == "__main__":
    main()
