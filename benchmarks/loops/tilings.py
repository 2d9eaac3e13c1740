"""Times of the loops of `persistent` in many tilings, and the weights by which tilings are ranked, fitted to them.

    python -m benchmarks.loops.tilings --record FILE               # needs a GPU; adds lines to FILE
    python -m benchmarks.loops.tilings --record FILE --dtype tf32 --case 35-128-1500 --most 12
    python -m benchmarks.loops.tilings --fit FILE                   # without a GPU: weights, and what they would choose

For each case and pass, the tilings that rank best by the present weights are forced in turn, and the kernel of the loop
is timed in replays of a CUDA graph of a training step of one layer. A line of the record has the quantities of a tiling
(`Tiling.quantities`), its time, and its rank. `--fit` prints the lines for `gatewise/selection/rates/rankings`, and how
much longer the loops of the present and of the new choices take than the fastest measured ones, also for weights that
were fitted without the case that they choose for.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from gatewise.benchmarks.precision import PRECISIONS, Precision
from gatewise.contract.capture import for_cuda_graph
from gatewise.contract.device import Device
from gatewise.contract.errors import ArgumentError, GatewiseError, sentence
from gatewise.contract.problem import Problem
from gatewise.contract.ranking import weights as present_weights
from gatewise.files import append_line
from gatewise.kernels.persistent.launches import Launch, compiled
from gatewise.kernels.persistent.launches.builds import building, launches_of
from gatewise.kernels.persistent.sizes.exactness import exact_products
from gatewise.kernels.persistent.sizes.tilings import Tiling, candidates
from gatewise.nn import LSTM
from gatewise.selection.timing import captured

CASES = (
    *("100-16-128", "100-16-256", "100-64-256", "50-256-256", "200-8-512", "100-64-512", "50-128-512", "50-256-512"),
    *("35-20-650", "35-128-650", "70-80-1150", "100-16-1024", "100-64-1024", "50-256-1024", "35-20-1500"),
    *("35-64-1500", "35-128-1500", "100-64-2048"),
)
PASSES = {"forward": False, "backward": True}
_REPLAYS, _WORKERS = 5, 15
_ENTRY = "recurrent_"
_NOT_ADDED = "few_warps"  # a share of the clock cycles instead of a part of them; see `Tiling.step_clocks`


class Choice(NamedTuple):
    """The loops of one case and pass that were timed.

    Attributes:
        case: The case and the pass, by name.
        clocks: The measured clock cycles of each tiling.
        quantities: The quantities of each tiling.
        presently: The index of the tiling that ranks first by the present weights.
    """

    case: str
    clocks: list[float]
    quantities: list[dict[str, float]]
    presently: int


def main() -> None:
    """Measure or fit."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--record", type=Path, help="file that lines of JSON are added to")
    parser.add_argument("--fit", type=Path, help="record to fit weights to")
    parser.add_argument("--case", action="append", metavar="T-B-H", help="a case (all of CASES)")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "tf32", "fp32"), default="bf16")
    parser.add_argument("--most", type=int, default=8, help="tilings of each case and pass (8)")
    given = parser.parse_args()
    if given.fit:
        print("\n".join(report([json.loads(line) for line in given.fit.read_text().splitlines()])))
        return
    precision, device = PRECISIONS[given.dtype], torch.device("cuda", 0)
    with precision.applied():
        for line in measured(given.case or CASES, precision, given.most, device):
            print(json.dumps({name: line[name] for name in ("case", "pass", "rank", "us_a_step", "predicted_clocks")}))
            if given.record:
                append_line(given.record, json.dumps(line))


def problem_of(case: str, precision: Precision) -> Problem:
    """Return the problem of a case "T-B-H": training of one layer with as many features as units.

    Raises:
        ArgumentError: The case is not of this form.
    """
    try:
        time, batch, size = map(int, case.split("-"))
    except ValueError:
        raise ArgumentError(sentence("--case", "T-B-H, such as 100-64-512", repr(case))) from None
    return Problem(time, batch, size, size, dtype=precision.dtype, needs_grad=True, allow_tf32=precision.tf32)


def ranked(problem: Problem, device: Device, *, backward: bool, most: int) -> list[Tiling]:
    """Return the tilings of a pass that rank best, in this order."""
    number = problem.element_bytes, exact_products(problem)
    found = candidates(problem.hidden_size, problem.batch, 1, device, backward, *number)
    return sorted(found, key=lambda cut: cut.step_clocks(device))[:most]


@contextlib.contextmanager
def forced(cuts: Mapping[bool, Tiling]) -> Iterator[None]:
    """Have passes launched in these tilings, given by whether it is the backward pass."""
    chosen = compiled.tiling

    def instead(hidden_size: int, batch: int, directions: int, device: Device, backward: bool, *rest: Any) -> Any:
        return cuts[backward]

    compiled.tiling = instead  # type: ignore[assignment]
    compiled.launch_of.cache_clear()
    try:
        yield
    finally:
        compiled.tiling = chosen
        compiled.launch_of.cache_clear()


def measured(
    cases: Sequence[str], precision: Precision, most: int, device: torch.device
) -> Iterator[dict[str, object]]:
    """Yield the lines of the record."""
    probed = Device.probe(device)
    problems = {case: problem_of(case, precision) for case in cases}
    plans = {
        case: {name: ranked(problem, probed, backward=backward, most=most) for name, backward in PASSES.items()}
        for case, problem in problems.items()
    }
    needed: list[Launch] = []
    for case, plan in plans.items():
        for cuts in in_pairs(plan):
            with forced(cuts):
                needed += launches_of(problems[case], probed)
    with building(needed, _WORKERS, device):
        pass
    for case, plan in plans.items():
        for rank, cuts in enumerate(in_pairs(plan)):
            try:
                with forced(cuts):
                    times = loops_of(problems[case], device)
            except (RuntimeError, GatewiseError) as error:
                print(f"{case}, rank {rank} failed: {error}", flush=True)
                continue
            for name, backward in PASSES.items():
                if rank < len(plan[name]) and f"{_ENTRY}{name}" in times:
                    yield line_of(case, name, rank, cuts[backward], times[f"{_ENTRY}{name}"], precision, probed)


def in_pairs(plan: Mapping[str, list[Tiling]]) -> Iterator[dict[bool, Tiling]]:
    """Yield a tiling of each pass at a time; a pass with fewer tilings repeats its last one."""
    forward, backward = plan["forward"], plan["backward"]
    for rank in range(max(len(forward), len(backward)) if forward and backward else 0):
        yield {False: forward[min(rank, len(forward) - 1)], True: backward[min(rank, len(backward) - 1)]}


def loops_of(problem: Problem, device: torch.device) -> dict[str, float]:
    """Return the microseconds of each of gatewise's kernels in a training step, by the name of the kernel."""
    torch.manual_seed(0)
    layer = LSTM(problem.input_size, problem.hidden_size, device=device, dtype=problem.dtype, kernel="persistent")
    x = torch.randn(problem.time, problem.batch, problem.input_size, device=device, dtype=problem.dtype)
    x.requires_grad_()
    dy = torch.randn(problem.time, problem.batch, problem.hidden_size, device=device, dtype=problem.dtype)

    def step() -> None:
        y, _ = layer(x)
        torch.autograd.grad(y, [x, *layer.parameters()], dy)

    with for_cuda_graph():
        replay = captured(step, warmups=2)
    for _ in range(3):
        replay()
    torch.cuda.synchronize()
    samples: dict[str, list[float]] = collections.defaultdict(list)
    with profile(activities=[ProfilerActivity.CUDA]) as observed:
        for _ in range(_REPLAYS):
            replay()
        torch.cuda.synchronize()
    for event in observed.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA and event.name.startswith(_ENTRY):
            samples[event.name].append(event.time_range.elapsed_us())
    return {name: statistics.median(times) for name, times in samples.items()}


def line_of(
    case: str, name: str, rank: int, cut: Tiling, microseconds: float, precision: Precision, device: Device
) -> dict[str, object]:
    """Return a line of the record; the clock cycles of a step are those at the largest clock of the GPU."""
    steps = int(case.split("-")[0])
    return {
        "benchmark": "tilings",
        "case": case,
        "dtype": precision.name,
        "pass": name,
        "ranking": cut.ranking,
        "rank": rank,
        "tiling": {
            field.name: getattr(cut, field.name) for field in dataclasses.fields(cut) if field.name != "cell_size"
        },
        "rounds": cut.rounds,
        "quantities": cut.quantities(),
        "few_warps": cut.warps == 4 and cut.spans > 4,
        "us_a_step": round(microseconds / steps, 4),
        "predicted_clocks": round(cut.step_clocks(device)),
        "device": device.name,
        "torch": torch.__version__,
        "date": datetime.now(UTC).date().isoformat(),
    }


def report(lines: Sequence[Mapping[str, Any]], ghz: float = 1.98) -> Iterator[str]:
    """Yield the fitted weights of each ranking as lines of data, and how good the choices are.

    Args:
        lines: The lines of a record.
        ghz: The clock rate in GHz at which microseconds are clock cycles.
    """
    for ranking, rows in groups(lines, "ranking").items():
        device = Device.named("h200").replace(name=rows[0]["device"])
        present = present_weights(device, ranking)
        names = [name for name in present if name != _NOT_ADDED]
        few_warps = present.get(_NOT_ADDED, 0.0)
        cases = groups([{**row, "choice": f"{row['case']} {row['dtype']}"} for row in rows], "choice")
        choices = [choice_of(case, of_case, few_warps, ghz) for case, of_case in cases.items()]
        fitted = fit(choices, names)
        apart = [slower(choice, fit([other for other in choices if other is not choice], names)) for choice in choices]
        kept = [choice.clocks[choice.presently] / min(choice.clocks) for choice in choices]
        chosen = [slower(choice, fitted) for choice in choices]
        misses = [
            clocks_by(fitted, quantities) / clocks
            for choice in choices
            for clocks, quantities in zip(choice.clocks, choice.quantities, strict=True)
        ]
        yield f"{ranking}: {len(misses)} loops of {len(choices)} cases"
        for label, ratios in (("present", kept), ("fitted", chosen), ("fitted without the case", apart)):
            worst = max(range(len(ratios)), key=ratios.__getitem__)
            most = f"{ratios[worst]:.2f} ({choices[worst].case})"
            yield f"  {label}: {geometric(ratios):.3f} of the fastest, at most {most}"
        spread = math.exp(statistics.pstdev(map(math.log, misses)))
        yield f"  clock cycles by the fitted weights: within a factor of {spread:.2f} (one standard deviation)"
        kept_share = {_NOT_ADDED: few_warps} if _NOT_ADDED in present else {}
        yield json.dumps({"ranking": ranking, "device": rows[0]["device"], "weights": fitted | kept_share})


def choice_of(case: str, rows: Sequence[Mapping[str, Any]], few_warps: float, ghz: float) -> Choice:
    """Return the loops of a case and pass; the weights count for each of a step's rounds.

    Args:
        case: The case.
        rows: The lines of its loops.
        few_warps: The share of the clock cycles that is added where few warps take many spans.
        ghz: The clock rate in GHz.
    """
    clocks = [1e3 * ghz * row["us_a_step"] for row in rows]
    factors = [row["rounds"] * (1 + few_warps * row["few_warps"]) for row in rows]
    scaled = [
        {name: factor * number for name, number in row["quantities"].items()}
        for row, factor in zip(rows, factors, strict=True)
    ]
    return Choice(case, clocks, scaled, min(range(len(rows)), key=lambda index: rows[index]["rank"]))


def fit(choices: Sequence[Choice], names: Sequence[str]) -> dict[str, float]:
    """Return weights of at least zero with the least squares of relative errors.

    Args:
        choices: The measured loops.
        names: The quantities that have a weight.
    """
    pairs = [pair for choice in choices for pair in zip(choice.clocks, choice.quantities, strict=True)]
    rows = np.array([[quantities[name] / clocks for name in names] for clocks, quantities in pairs])
    sizes = np.maximum(np.abs(rows).max(axis=0), 1e-30)
    kept = list(range(len(names)))
    while True:  # quantities with a negative weight are left out, the most negative one first
        found, *_ = np.linalg.lstsq(rows[:, kept] / sizes[kept], np.ones(len(rows)), rcond=1e-8)
        if len(kept) == 1 or found.min() >= 0:
            break
        del kept[int(found.argmin())]
    weights = dict.fromkeys(names, 0.0)
    weights |= {names[place]: float(f"{weight / sizes[place]:.4g}") for place, weight in zip(kept, found, strict=True)}
    return weights


def clocks_by(weights: Mapping[str, float], quantities: Mapping[str, float]) -> float:
    """Return the clock cycles of a step by weights."""
    return sum(weight * quantities[name] for name, weight in weights.items())


def slower(choice: Choice, weights: Mapping[str, float]) -> float:
    """Return the measured time of the tiling that weights choose, over that of the fastest."""
    first = min(range(len(choice.clocks)), key=lambda index: clocks_by(weights, choice.quantities[index]))
    return choice.clocks[first] / min(choice.clocks)


def groups(rows: Sequence[Mapping[str, Any]], name: str) -> dict[str, list[Mapping[str, Any]]]:
    """Return rows by the value of a field, in the order of their first occurrence."""
    values = dict.fromkeys(row[name] for row in rows)
    return {value: [row for row in rows if row[name] == value] for value in values}


def geometric(ratios: Sequence[float]) -> float:
    """Return the geometric mean."""
    return math.exp(statistics.fmean(map(math.log, ratios)))


if __name__ == "__main__":
    main()
