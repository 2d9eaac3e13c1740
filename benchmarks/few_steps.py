"""LSTMs of a few steps on a CPU, by oneDNN and by PyTorch's native loop: which takes less time.

    OMP_NUM_THREADS=1 taskset -c 0 python -m benchmarks.few_steps --seed 1 --calls 300
    OMP_NUM_THREADS=1 taskset -c 0 python -m benchmarks.few_steps --seed 2 --calls 150 --judge

Sizes and modes are drawn at random. Both forms of a call alternate in one process, as `benchmarks.pairs` does it. The
first command fits the weights of the rankings "aten onednn inference" and "aten onednn training" to the differences,
and prints them; the second one says how much time is lost by the choices of the rankings as they are. Both append their
calls to the record.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.choices import report
from benchmarks.pairs import Step, compare
from gatewise.benchmarks.record import Run
from gatewise.contract.device import Device
from gatewise.contract.kernel import Operator
from gatewise.contract.problem import Problem
from gatewise.files import append_line
from gatewise.kernels import operators
from gatewise.kernels.aten.native import native_loop
from gatewise.kernels.aten.onednn import RANKINGS, is_slower
from gatewise.testing import make_inputs

RESULTS = Path(__file__).parent / "results" / "few_steps.jsonl"
PART = 0.9  # of oneDNN's time: only calls that the native loop makes clearly faster are to take it
LONGEST = 300_000_000  # nanoseconds


def drawn(generator: random.Random) -> Problem:
    """Draw a call that takes less than about a tenth of a second."""
    while True:
        ranges = (1, 12), (1, 256), (8, 1024), (8, 1024)
        T, B, H, features = (round(math.exp(generator.uniform(*map(math.log, ends)))) for ends in ranges)
        problem = Problem(
            T,
            B,
            generator.choice((H, features)),
            H,
            num_layers=generator.choice((1, 1, 2)),
            bidirectional=generator.choice((False, False, True)),
            needs_grad=generator.choice((False, True)),
        )
        if problem.matmul_flops * (3 if problem.needs_grad else 1) < 2e9:
            return problem


def steps_of(problem: Problem) -> tuple[Step, Step]:
    """Return the call, or the training step, by oneDNN and by the native loop."""
    x, h0, c0, weights, *_ = make_inputs(problem)
    leaves = [tensor.requires_grad_(problem.needs_grad) for tensor in (x, *weights)]
    ones = torch.ones(problem.time, problem.batch, problem.output_size)

    def step(call: Operator) -> Step:
        def train() -> None:
            for leaf in leaves:
                leaf.grad = None
            call(x, h0, c0, weights, None)[0].backward(ones)

        def infer() -> None:
            with torch.no_grad():
                call(x, h0, c0, weights, None)

        return train if problem.needs_grad else infer

    return step(operators.operator_of(problem)), step(native_loop(problem))


def quantities(problem: Problem) -> dict[str, float]:
    """Return the quantities that the weights multiply: those of a call, and, negative, those of all steps."""
    T, directions, elements = problem.time, problem.num_layers * problem.num_directions, problem.parameter_count
    states = directions * problem.batch * problem.hidden_size
    steps = {"steps": -T * directions, "weights in steps": -T * elements, "states in steps": -T * states}
    return {"calls": directions, "weights": elements, **steps}


def main() -> int:
    """Measure, fit or judge, and append the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, required=True, help="the seed of the drawn calls")
    parser.add_argument("--calls", type=int, default=100, help="the number of calls (default: 100)")
    parser.add_argument("--seconds", type=float, default=0.3, help="the time for each call (default: 0.3)")
    parser.add_argument("--judge", action="store_true", help="judge the rankings as they are, and fit nothing")
    given = parser.parse_args()
    torch.set_num_threads(1)
    generator, device = random.Random(given.seed), Device.probe("cpu")
    problems: list[Problem] = []
    rows: list[dict[str, Any]] = []
    for _ in range(given.calls):
        problem = drawn(generator)
        found = compare(*steps_of(problem), given.seconds, LONGEST)
        if found is None:
            continue
        sizes = {"T": problem.time, "B": problem.batch, "I": problem.input_size, "H": problem.hidden_size}
        stack = {"layers": problem.num_layers, "directions": problem.num_directions}
        problems.append(problem)
        rows.append(
            {"ranking": RANKINGS[problem.needs_grad], **sizes, **stack, **found, "chosen": is_slower(problem, device)}
        )
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    for name in RANKINGS:
        own = [row for row in rows if row["ranking"] == name]
        counted = [quantities(problem) for problem, row in zip(problems, rows, strict=True) if row["ranking"] == name]
        report(name, own, counted, ("oneDNN", "the native loop"), fits=not given.judge, part=PART)
    run = dataclasses.asdict(Run.now(torch.device("cpu")))
    record = {"benchmark": "few_steps", "run": run, "seed": given.seed, "judged": given.judge, "rows": rows}
    append_line(RESULTS, json.dumps(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
