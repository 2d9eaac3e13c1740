"""Times of the loops of `persistent` with several pauses between the stores of a step and the loads of the next.

    python -m benchmarks.loops.pauses --record FILE --pause 0 --pause 400        # needs a GPU; adds lines to FILE
    python -m benchmarks.loops.pauses --record FILE --dtype tf32 --drawn 20 --seed 8 --pause 0 --pause 900

For each case, the kernels of the loops are timed in replays of a CUDA graph of a training step of one layer. The pause
of a line is that of both passes; without `--pause` it is "chosen", which stands for the pauses of the rankings. With
`--plain` there are further lines of rows that are not interleaved, with the pauses that were chosen for these. In
benchmarks/results, "before" stands for the kernels of commit fa666290, whose rows of exchanged states were not padded,
and a line of interleaved.jsonl may have a pause for each pass, which changes the time of that pass alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks.loops import tilings
from gatewise.benchmarks.precision import PRECISIONS, Precision
from gatewise.contract.device import Device
from gatewise.files import append_line
from gatewise.kernels.persistent.launches import compiled
from gatewise.kernels.persistent.launches.builds import launches_of
from gatewise.kernels.persistent.sizes import memory

_WORKERS = 15
_CHOSEN, _PLAIN = "chosen", "plain"


def main() -> None:
    """Time loops with several pauses."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--record", type=Path, required=True, help="file that lines of JSON are added to")
    parser.add_argument("--case", action="append", default=[], metavar="T-B-H", help="a case")
    parser.add_argument("--drawn", type=int, default=0, metavar="N", help="N further cases drawn at random")
    parser.add_argument("--seed", type=int, default=1, help="of the cases that are drawn (1)")
    parser.add_argument("--dtype", choices=tuple(PRECISIONS), default="bf16")
    parser.add_argument(
        "--pause", type=int, action="append", default=[], help="clock cycles; several times for several"
    )
    parser.add_argument("--plain", action="store_true", help="time plain rows, too")
    given = parser.parse_args()
    precision, device = PRECISIONS[given.dtype], torch.device("cuda", 0)
    probed = Device.probe(device)
    with precision.applied():
        cases = [*given.case, *drawn(given.drawn, given.seed, precision, probed)]
        pauses = [*(given.pause or [_CHOSEN]), *[_PLAIN] * given.plain]
        for pause in pauses:
            with forced(pause):
                needed = [
                    launch for case in cases for launch in launches_of(tilings.problem_of(case, precision), probed)
                ]
                with ThreadPoolExecutor(_WORKERS) as workers:
                    list(workers.map(lambda launch: launch.compile(), needed))
        for case in cases:
            for pause in pauses:
                with forced(pause):
                    append_line(given.record, json.dumps(line_of(case, pause, precision, probed, device)))


def drawn(count: int, seed: int, precision: Precision, device: Device) -> list[str]:
    """Return cases of 60 steps drawn at random whose blocks exchange values through the second-level cache."""
    generator, found = random.Random(seed), []
    while len(found) < count:
        kinds = 8 * generator.randint(33, 256), 32 * generator.randint(9, 64), generator.randint(264, 1600)
        case = f"60-{round(2 ** generator.uniform(0, 7.5))}-{generator.choice(kinds)}"
        problem = tilings.problem_of(case, precision)
        if all(tilings.ranked(problem, device, backward=back, most=1) for back in tilings.PASSES.values()):
            found.append(case)
    return found


@contextlib.contextmanager
def forced(pause: str | int) -> Iterator[None]:
    """Have passes launched with a pause of so many clock cycles, as they are chosen, or with plain rows."""
    chosen, apart = compiled._pause, memory.interleaves_rows
    if pause == _PLAIN:
        memory.interleaves_rows = lambda problem, *, backward: False
    elif pause != _CHOSEN:
        compiled._pause = lambda cut, interleaved, device: int(pause)
    compiled.launch_of.cache_clear()
    try:
        yield
    finally:
        compiled._pause, memory.interleaves_rows = chosen, apart
        compiled.launch_of.cache_clear()


def line_of(
    case: str, pause: str | int, precision: Precision, probed: Device, device: torch.device
) -> dict[str, object]:
    """Return a line of the record."""
    problem = tilings.problem_of(case, precision)
    cuts = [
        make(problem, problem.batch, 1, False, probed).tiling
        for make in (compiled.forward_launch, compiled.backward_launch)
    ]
    (times,) = tilings.loops_of([tilings.training_step(problem, device)])
    found = {name: round(times[f"recurrent_{name}"] / problem.time, 4) for name in tilings.PASSES}
    shapes = {
        name: {own: getattr(cut, own) for own in ("blocks", "groups", "together", "rows", "units", "warps", "split")}
        for name, cut in zip(tilings.PASSES, cuts, strict=True)
    }
    return {
        "benchmark": "pauses",
        "set": "loops",
        "case": case,
        "dtype": precision.name,
        "pause": pause,
        "us_a_step": found,
        "tilings": shapes,
        "device": probed.name,
        "torch": torch.__version__,
        "date": datetime.now(UTC).date().isoformat(),
    }


if __name__ == "__main__":
    main()
