"""Times of the loops of `persistent` in many tilings.

    python -m benchmarks.loops.tilings --record FILE               # needs a GPU; adds lines to FILE
    python -m benchmarks.loops.tilings --record FILE --dtype tf32 --case 35-128-1500 --most 12
    python -m benchmarks.loops.tilings --record FILE --drawn 40 --weights NEW.jsonl

For each case and pass, the tilings that rank best by the present weights are forced in turn, and the kernel of the loop
is timed in replays of a CUDA graph of a training step of one layer. A line of the record has the quantities of a tiling
(`Tiling.quantities`), its time, and its rank. With `--weights`, the tiling that present weights choose is timed beside
the one that other weights choose, where they differ. `benchmarks.loops.tiling_weights` fits weights to such records.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from gatewise.benchmarks.precision import PRECISIONS, Precision
from gatewise.contract.capture import for_cuda_graph
from gatewise.contract.device import Device
from gatewise.contract.errors import ArgumentError, GatewiseError, sentence
from gatewise.contract.problem import Problem
from gatewise.files import append_line
from gatewise.kernels.persistent.launches import Launch, compiled
from gatewise.kernels.persistent.launches.builds import building, launches_of
from gatewise.kernels.persistent.sizes.exactness import exact_products
from gatewise.kernels.persistent.sizes.tiling import Tiling
from gatewise.kernels.persistent.sizes.tiling_choice import candidates
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


def main() -> None:
    """Time loops in many tilings."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--record", type=Path, help="file that lines of JSON are added to")
    parser.add_argument("--case", action="append", metavar="T-B-H", help="a case (all of CASES)")
    parser.add_argument("--drawn", type=int, metavar="N", help="N cases drawn at random in place of those of CASES")
    parser.add_argument("--seed", type=int, default=1, help="of the cases that are drawn (1)")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "tf32", "fp32"), default="bf16")
    parser.add_argument("--pass", choices=tuple(PASSES), dest="of", help="the pass whose tilings are timed (both)")
    parser.add_argument("--most", type=int, default=8, help="tilings of each case and pass (8)")
    parser.add_argument("--weights", type=Path, help="rankings whose choices are timed beside the present ones")
    given = parser.parse_args()
    precision, device = PRECISIONS[given.dtype], torch.device("cuda", 0)
    probed = Device.probe(device)
    most = {name: given.most if given.of in (name, None) else 1 for name in PASSES}
    drawn = drawn_cases(given.drawn, given.seed, precision, probed) if given.drawn else ()
    with precision.applied():
        plans = {
            case: planned(problem_of(case, precision), probed, most, given.weights)
            for case in given.case or drawn or CASES
        }
        for line in measured(plans, precision, device):
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


def drawn_cases(count: int, seed: int, precision: Precision, device: Device) -> list[str]:
    """Return cases drawn at random for which both passes have tilings, the same for a seed."""
    generator, found = random.Random(seed), []
    while len(found) < count:
        time, batch = generator.randint(20, 80), round(2 ** generator.uniform(0, 9))
        case = f"{time}-{batch}-{8 * round(2 ** generator.uniform(3, 8))}"
        problem = problem_of(case, precision)
        if all(ranked(problem, device, backward=backward, most=1) for backward in PASSES.values()):
            found.append(case)
    return found


def ranked(
    problem: Problem, device: Device, *, backward: bool, most: int, weights: Mapping[str, Any] | None = None
) -> list[Tiling]:
    """Return the tilings of a pass that rank best, in this order.

    Args:
        problem: The problem.
        device: The device.
        backward: Whether the pass is the backward pass.
        most: The largest number of tilings.
        weights: Weights by the name of a ranking; the present ones are used for rankings that it has not.
    """
    number, given = (problem.element_bytes, exact_products(problem)), weights or {}
    found = candidates(problem.hidden_size, problem.batch, 1, device, backward, *number)

    def clocks(cut: Tiling) -> float:
        return cut.clocks_by(given[cut.ranking]) if cut.ranking in given else cut.step_clocks(device)

    return sorted(found, key=clocks)[:most]


def planned(
    problem: Problem, device: Device, most: Mapping[str, int], rankings: Path | None
) -> dict[str, list[Tiling]]:
    """Return the tilings of each pass that are timed.

    Args:
        problem: The problem.
        device: The device.
        most: The largest number of tilings of each pass, by the name of the pass.
        rankings: A file of rankings: the first tilings by the present weights and by these are timed, if they differ.
    """
    if rankings is None:
        return {name: ranked(problem, device, backward=back, most=most[name]) for name, back in PASSES.items()}
    others = {row["ranking"]: row["weights"] for row in map(json.loads, rankings.read_text().splitlines())}
    first = {
        name: [ranked(problem, device, backward=back, most=1, weights=each)[0] for each in ({}, others)]
        for name, back in PASSES.items()
    }
    return {name: list(dict.fromkeys(pair)) for name, pair in first.items()}


@contextlib.contextmanager
def forced(cuts: Mapping[bool, Tiling]) -> Iterator[None]:
    """Have passes launched in these tilings, given by whether it is the backward pass."""
    chosen = compiled.tiling

    def instead(
        hidden_size: int, batch: int, directions: int, device: Device, backward: bool, *rest: Any, **options: Any
    ) -> Any:
        return cuts[backward]

    compiled.tiling = instead  # type: ignore[assignment]
    compiled.launch_of.cache_clear()
    try:
        yield
    finally:
        compiled.tiling = chosen
        compiled.launch_of.cache_clear()


def measured(
    plans: Mapping[str, Mapping[str, list[Tiling]]], precision: Precision, device: torch.device
) -> Iterator[dict[str, object]]:
    """Yield the lines of the record of cases, by the tilings of their passes; a case of one tiling each has none."""
    probed = Device.probe(device)
    plans = {case: plan for case, plan in plans.items() if max(map(len, plan.values())) > 1}
    problems = {case: problem_of(case, precision) for case in plans}
    needed: list[Launch] = []
    for case, plan in plans.items():
        for cuts in in_pairs(plan):
            with forced(cuts):
                needed += launches_of(problems[case], probed)
    with building(needed, _WORKERS, device):
        pass
    for case, plan in plans.items():
        steps = []
        for rank, cuts in enumerate(in_pairs(plan)):
            try:
                with forced(cuts):
                    steps.append((rank, cuts, training_step(problems[case], device)))
            except (RuntimeError, GatewiseError) as error:
                print(f"{case}, rank {rank} failed: {error}", flush=True)
        for (rank, cuts, _), times in zip(steps, loops_of([step for _, _, step in steps]), strict=True):
            for name, backward in PASSES.items():
                if rank < len(plan[name]):
                    yield line_of(case, name, rank, cuts[backward], times[f"{_ENTRY}{name}"], precision, probed)


def in_pairs(plan: Mapping[str, list[Tiling]]) -> Iterator[dict[bool, Tiling]]:
    """Yield a tiling of each pass at a time; a pass with fewer tilings repeats its last one."""
    forward, backward = plan["forward"], plan["backward"]
    for rank in range(max(len(forward), len(backward)) if forward and backward else 0):
        yield {False: forward[min(rank, len(forward) - 1)], True: backward[min(rank, len(backward) - 1)]}


def training_step(problem: Problem, device: torch.device) -> Callable[[], None]:
    """Return a function that replays a training step of one layer, which has run before."""
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
    replay()
    torch.cuda.synchronize()
    return replay


def loops_of(steps: Sequence[Callable[[], None]]) -> list[dict[str, float]]:
    """Return the microseconds of each of gatewise's kernels in training steps, by the name of the kernel."""
    with profile(activities=[ProfilerActivity.CUDA]) as observed:
        for step in steps:
            for _ in range(_REPLAYS):
                step()
        torch.cuda.synchronize()
    events = [event for event in observed.events() or () if event.device_type == torch.autograd.DeviceType.CUDA]
    found: dict[str, list[float]] = collections.defaultdict(list)
    for event in sorted(events, key=lambda event: event.time_range.start):
        if event.name.startswith(_ENTRY):
            found[event.name].append(event.time_range.elapsed_us())
    # A kernel is launched as many times in each step, so that none of the launches may be missing.
    shares = {name: len(times) // len(steps) for name, times in found.items()}
    if any(len(times) % (_REPLAYS * len(steps)) for times in found.values()):
        raise RuntimeError(f"the profiler saw {dict(zip(found, map(len, found.values()), strict=True))} launches")
    return [
        {
            name: statistics.median(times[number * shares[name] : (number + 1) * shares[name]])
            for name, times in found.items()
        }
        for number in range(len(steps))
    ]


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


if __name__ == "__main__":
    main()
