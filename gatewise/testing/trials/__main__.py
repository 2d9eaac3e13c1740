"""`python -m gatewise.testing.trials`: run random calls and compare each with float64."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import torch

from gatewise._version import __version__
from gatewise.contract.errors import ArgumentError
from gatewise.contract.ranges import COUNT, COUNT_OR_NONE, POSITIVE, SEED
from gatewise.files import append_line
from gatewise.testing.trials.session import Tally, run_session
from gatewise.testing.trials.times import PARTS
from gatewise.testing.trials.verdict import REFERENCES

_MOST_SHOWN = 5
_RANGES = {
    "seconds": POSITIVE,
    "most": COUNT_OR_NONE,
    "seed": SEED,
    "sizes": SEED,
    "processes": COUNT,
    "show": COUNT_OR_NONE,
    "grace": POSITIVE,
}
_MOST_KINDS = 8


def main(arguments: list[str] | None = None) -> int:
    """Run random calls and compare each with float64.

    The exit status is 1 if any result was wrong. Otherwise it is 0, or 130 if the run was interrupted by Ctrl-C, or 143
    if it was terminated by SIGTERM.
    """
    given = _parsed(arguments)
    began = time.monotonic()
    sizes = given.seed if given.sizes is None else given.sizes
    tally, interrupted = Tally(), 0
    try:
        with _terminated_as_interrupted():
            run_session(
                given.device,
                given.seed,
                given.seconds,
                given.most,
                given.processes,
                sizes,
                reference=given.reference,
                grace=given.grace,
                tally=tally,
            )
    except Terminated:
        interrupted = 128 + signal.SIGTERM
    except KeyboardInterrupt:
        interrupted = 128 + signal.SIGINT
    seconds = time.monotonic() - began
    for program, said in tally.wrong[: given.show]:
        print(f"\nWrong:\n  {said}\n\n{program}")
    for line in _summary(tally, seconds, given.processes):
        print(line)
    if interrupted:
        print("The run was interrupted before its time was over.")
    if given.record is not None:
        seeds = [given.seed, given.seed + given.processes - 1]
        _append(given, seeds, sizes, seconds, tally, interrupted=bool(interrupted))
    return 1 if tally.wrong else interrupted


class Terminated(KeyboardInterrupt):
    """The process got SIGTERM."""


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Raise `Terminated` at SIGTERM, as sent by `timeout`, so that results so far are printed."""

    def interrupt(*_: object) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _summary(tally: Tally, seconds: float, processes: int) -> list[str]:
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(tally.kinds.items()))
    total = max(seconds * processes, 1e-9)
    shares = ", ".join(f"{part} {tally.seconds[part] / total:.0%}" for part in PARTS)
    others = 1 - sum(tally.seconds.values()) / total
    costliest = sorted(tally.seconds_of_kinds.items(), key=lambda item: -item[1])[:_MOST_KINDS]
    costly = ", ".join(f"{kind} {own / total:.0%}" for kind, own in costliest)
    lines = [f"slow: {said}" for said in tally.slow] + [f"unfinished: {said}" for said in tally.unfinished]
    return [
        *lines,
        f"{tally.tried} settings, {len(tally.wrong)} wrong, {tally.refused} refused by the kernel they name, "
        f"{tally.unjudged} tensors in which PyTorch's own error is infinite, {tally.selected_otherwise} settings right "
        f"only for the other choice of selections ({kinds})",
        f"{tally.tried / seconds:.2f} settings a second in {seconds:.0f} s; time of the processes: {shares}, "
        f"others (their start and end) {others:.0%}; by kind: {costly}",
        f"{len(tally.slow)} settings took over 20 s, {len(tally.unfinished)} groups were not finished",
    ]


def _parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        for name, rule in _RANGES.items():
            if getattr(given, name) is not None:
                rule.check(f"--{name}", getattr(given, name))
    except ArgumentError as error:
        parser.error(str(error))
    return given


def _append(
    given: argparse.Namespace, seeds: list[int], sizes: int, seconds: float, tally: Tally, *, interrupted: bool
) -> None:
    device = given.device
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "devices": min(seeds[1] - seeds[0] + 1, torch.cuda.device_count()) if device == "cuda" else 1,
        "gatewise": __version__,
        "torch": torch.__version__,
        "commit": given.commit,
        "seeds": seeds,
        "sizes": sizes,
        "seconds": round(seconds, 1),
        "settings": tally.tried,
        "wrong": len(tally.wrong),
        "refused": tally.refused,
        "unjudged": tally.unjudged,
        "selected_otherwise": tally.selected_otherwise,
        "kinds": dict(sorted(tally.kinds.items())),
        "reference": given.reference,
        "seconds_of_parts": {part: round(tally.seconds[part], 1) for part in PARTS},
        "slow": tally.slow,
        "unfinished": tally.unfinished,
        "interrupted": interrupted,
        "failures": [said for _, said in tally.wrong],
    }
    append_line(given.record, json.dumps(record))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gatewise.testing.trials", description=main.__doc__)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--seconds", type=float, default=60.0, help="time after which no new setting is started (60)")
    parser.add_argument("--most", type=int, default=0, help="maximum number of settings (0 for any number)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first process; each further one adds 1 (0)")
    parser.add_argument("--sizes", type=int, help="seed of the sizes; equal sizes share compiled kernels (the seed)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default, help=f"device ({default})")
    parser.add_argument("--processes", type=int, default=1, help="number of processes that run in parallel (1)")
    parser.add_argument(
        "--reference",
        choices=REFERENCES,
        default="auto",
        help="device of the float64 reference; auto is the CPU for small steps and otherwise the device (auto)",
    )
    parser.add_argument(
        "--grace", type=float, default=30.0, help="seconds after --seconds that running settings have to end (30)"
    )
    parser.add_argument("--show", type=int, default=_MOST_SHOWN, help=f"failures to print at most ({_MOST_SHOWN})")
    parser.add_argument("--record", type=Path, help="file to which a line of JSON about the run is appended")
    parser.add_argument("--commit", default="", help="commit to name in the record")
    return parser


if __name__ == "__main__":
    sys.exit(main())
