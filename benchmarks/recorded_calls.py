"""Training calls of cells on a CPU, recorded by autograd and by the explicit passes of `eager`: which takes less time.

    OMP_NUM_THREADS=1 taskset -c 0 python -m benchmarks.recorded_calls --seed 1 --calls 200
    OMP_NUM_THREADS=1 taskset -c 0 python -m benchmarks.recorded_calls --seed 2 --calls 100 --judge

Cells and sizes are drawn at random. Both forms of a call alternate in one process, as `benchmarks.pairs` does it. The
first command fits the weights of the ranking "eager recorded" to the differences, and prints them; the second one says
how much time is lost by the choices of the ranking as it is. Both append their calls to the record.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import random
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.choices import report
from benchmarks.pairs import Step, compare
from gatewise.benchmarks.cells.cases import chosen_cells
from gatewise.benchmarks.record import Run
from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from gatewise.files import append_line
from gatewise.functional import execution, plan
from gatewise.kernels.eager.kernel import eager
from gatewise.kernels.eager.plain_call import RANKINGS, is_recorded, ranking_of, recorded
from gatewise.testing import make_inputs

RESULTS = Path(__file__).parent / "results" / "recorded_calls.jsonl"
CELLS = "coupled_lstm", "capped_lstm", "peephole_lstm", "mgu", "slstm", "own_lstm", "layer_norm_lstm", "layer_norm_gru"
LONGEST = 300_000_000  # nanoseconds


def drawn(generator: random.Random) -> Problem:
    """Draw a training call that takes less than about a tenth of a second."""
    while True:
        ranges = (1, 200), (1, 512), (8, 768)
        T, B, H = (round(math.exp(generator.uniform(*map(math.log, ends)))) for ends in ranges)
        cell = chosen_cells([generator.choice(CELLS)])[0]
        if T * B * H * (25 * len(cell.gates) + H) < 1.5e9 and T * H * H < 3e7:
            return Problem(T, B, H, H, needs_grad=True, cell=cell)


def steps_of(problem: Problem) -> tuple[Step, Step]:
    """Return the training step by the explicit passes, and the recorded one."""
    inputs = make_inputs(problem)
    leaves = [tensor.requires_grad_() for tensor in (inputs.x, inputs.h0, inputs.c0, *inputs.weights)]
    own, ones = inputs._replace(weights=tuple(leaves[3:])), torch.ones(problem.time, problem.batch, problem.hidden_size)
    shapes = tuple(inputs.h0.shape), tuple(inputs.c0.shape)
    explicit = plan.Plan(problem, eager.name, eager, *shapes, records=False, single_use=False)
    of_autograd = recorded(problem)

    def step(call: Step) -> None:
        for leaf in leaves:
            leaf.grad = None
        call()[0].backward(ones)  # type: ignore[index]

    return (
        functools.partial(step, lambda: execution._apply(explicit, own, own.x, own.h0, own.c0, *own.weights)),
        functools.partial(step, lambda: of_autograd(own.x, own.h0, own.c0, own.weights, None)),
    )


def quantities(row: dict[str, Any]) -> dict[str, float]:
    """Return the quantities that the weights multiply: calls, elements, and negative steps and added elements."""
    T, B, H = row["T"], row["B"], row["H"]
    return {"calls": 1.0, "elements": T * B * H, "steps": -T, "added": -(T - 1) * row["gates"] * H * H}


def main() -> int:
    """Measure, fit or judge, and append the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, required=True, help="the seed of the drawn calls")
    parser.add_argument("--calls", type=int, default=100, help="the number of calls (default: 100)")
    parser.add_argument("--seconds", type=float, default=0.3, help="the time for each call (default: 0.3)")
    parser.add_argument("--judge", action="store_true", help="judge the ranking as it is, and fit nothing")
    given = parser.parse_args()
    torch.set_num_threads(1)
    generator, rows, device = random.Random(given.seed), [], Device.probe("cpu")
    for _ in range(given.calls):
        problem = drawn(generator)
        found = compare(*steps_of(problem), given.seconds, LONGEST)
        if found is None:
            continue
        sizes = {"T": problem.time, "B": problem.batch, "H": problem.hidden_size, "gates": len(problem.cell.gates)}
        chosen = is_recorded(problem, device)
        rows.append(
            {"ranking": ranking_of(problem.cell), "cell": problem.cell.name, **sizes, **found, "chosen": chosen}
        )
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    for name in RANKINGS:
        own = [row for row in rows if row["ranking"] == name]
        report(name, own, [*map(quantities, own)], ("the explicit passes", "recording"), fits=not given.judge)
    run = dataclasses.asdict(Run.now(torch.device("cpu")))
    record = {"benchmark": "recorded_calls", "run": run, "seed": given.seed, "judged": given.judge, "rows": rows}
    append_line(RESULTS, json.dumps(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
