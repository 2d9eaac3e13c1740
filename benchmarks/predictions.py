"""How well times are predicted that no prediction was fitted to: random shapes, measured on every kernel that accepts.

    python benchmarks/predictions.py                     # 200 training calls under a CUDA graph, at most 240 s
    python benchmarks/predictions.py --seed 7 --seconds 600
    python benchmarks/predictions.py --summary           # of the last run in the record

Several GPUs of one kind share the shapes, each process with a part of them and a file of its own, and are then merged:

    CUDA_VISIBLE_DEVICES=0 python benchmarks/predictions.py --part 1/2 --record 1.jsonl
    CUDA_VISIBLE_DEVICES=1 python benchmarks/predictions.py --part 2/2 --record 2.jsonl
    python benchmarks/predictions.py --merge 1.jsonl 2.jsonl

Shapes are drawn with a seed that no file of measured times was drawn with. A line of the record is one shape: the
measured and the predicted time of each kernel, and which one is chosen. The last line of a run is its summary: the
share of predictions within 25 %, the share of choices within 5 % of the fastest kernel, and the worst of both.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from gatewise.benchmarks import layer_times, shapes
from gatewise.benchmarks.record import Run
from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from gatewise.files import append_line
from gatewise.selection import points, predicted
from gatewise.selection.points import Point, Record

RESULTS = Path(__file__).parent / "results" / "predictions.jsonl"
SEED = 20261122
PREDICTED_WITHIN, CHOSEN_WITHIN = 0.25, 0.05

Row = dict[str, Any]


def judged(problem: Problem, found: Sequence[Point], device: Device) -> Row:
    """Return a shape's line: measured and predicted seconds of each kernel that was measured, and the choice."""
    decision = predicted(problem, device)
    kernels = {}
    for point in found:
        verdict = decision.verdict(point.kernel)
        kernels[point.kernel] = {"seconds": point.graph, "predicted": verdict.seconds, "known": verdict.known}
    return {
        "problem": str(problem),
        "sizes": [problem.time, problem.batch, problem.input_size, problem.hidden_size, problem.num_layers],
        "directions": problem.num_directions,
        "precision": points.precision_of(problem),
        "chosen": decision.chosen,
        "kernels": kernels,
    }


def rows(problems: Iterable[Problem], device: torch.device, record: Record, **options: Any) -> Iterator[Row]:
    """Measure problems until the time is over, and yield the line of each that any kernel computed."""
    for found in layer_times.measured(problems, device, record, **options):
        if found:
            yield judged(found[0].problem, found, record.device)


def summary(found: Sequence[Row]) -> dict[str, Any]:
    """Return the shares of a run, over all kernels, for each kernel, and for the kernels that are chosen."""
    misses: dict[str, list[tuple[float, str]]] = collections.defaultdict(list)
    slower: list[tuple[float, str]] = []
    for row in found:
        for name, times in row["kernels"].items():
            miss = times["predicted"] / times["seconds"], f"{name}: {row['problem']}"
            misses["all"].append(miss)
            misses[name].append(miss)
            if name == row["chosen"]:
                misses["chosen"].append(miss)
        if row["chosen"] in row["kernels"]:
            least = min(times["seconds"] for times in row["kernels"].values())
            slower.append((row["kernels"][row["chosen"]]["seconds"] / least, f"{row['chosen']}: {row['problem']}"))
    shares: dict[str, Any] = {"shapes": len(found), "predicted": {}}
    for name, ratios in misses.items():
        within = sum(abs(ratio - 1) <= PREDICTED_WITHIN for ratio, _ in ratios)
        worst = max(ratios, key=lambda each: max(each[0], 1 / each[0]))
        shares["predicted"][name] = {"calls": len(ratios), "within": within / len(ratios), "worst": worst}
    if slower:
        within = sum(ratio <= 1 + CHOSEN_WITHIN for ratio, _ in slower)
        shares["choices"] = {"calls": len(slower), "within": within / len(slower), "worst": max(slower)}
    return shares


def text(shares: dict[str, Any]) -> str:
    """Return a summary as lines of text."""
    lines = [f"{shares['shapes']} shapes"]
    for name, each in shares["predicted"].items():
        ratio, what = each["worst"]
        lines.append(
            f"  predicted within {PREDICTED_WITHIN:.0%}, {name:<10} {each['within']:6.1%} of {each['calls']:4}; "
            f"worst {ratio:.2f} of the measured time ({what})"
        )
    if "choices" in shares:
        ratio, what = shares["choices"]["worst"]
        lines.append(
            f"  chosen within {CHOSEN_WITHIN:.0%} of the fastest {shares['choices']['within']:6.1%} of "
            f"{shares['choices']['calls']}; worst {ratio:.2f} of the fastest ({what})"
        )
    return "\n".join(lines)


def part(word: str) -> tuple[int, int]:
    """Parse "I/N", part I of N.

    Raises:
        ValueError: The word is not of this form, or there is no such part.
    """
    number, count = map(int, word.split("/"))
    if not 1 <= number <= count:
        raise ValueError(word)
    return number, count


def merged(files: Sequence[Path]) -> tuple[list[Row], dict[str, Any]]:
    """Return the lines of all shapes of the parts of one run, and its summary line.

    Raises:
        ValueError: The files are not the parts of one run, each once.
    """
    found, runs = [], []
    for file in files:
        for line in map(json.loads, file.read_text().splitlines()):
            (runs if "summary" in line else found).append(line)
    kinds = {(each["seed"], *(each["run"][name] for name in ("device", "torch", "commit"))) for each in runs}
    count = len(runs)
    if len(kinds) != 1 or sorted(each.get("part", "") for each in runs) != [f"{n + 1}/{count}" for n in range(count)]:
        raise ValueError(f"these are not the parts of one run: {', '.join(map(str, files))}")
    line = {"benchmark": "predictions", "seed": runs[0]["seed"], "parts": count, "summary": summary(found)}
    return found, line | {"run": runs[0]["run"]}


def main(words: Sequence[str] | None = None) -> int:
    """Run the script."""
    parser = argparse.ArgumentParser(description="Hold predictions to random shapes that they were not fitted to.")
    parser.add_argument("--shapes", type=int, default=200, help="how many shapes (default: 200)")
    parser.add_argument("--seed", type=int, default=SEED, help=f"of the shapes (default: {SEED})")
    parser.add_argument("--seconds", type=float, default=240.0, help="after which no shape begins (default: 240)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--record", type=Path, default=RESULTS, help="file that lines are appended to")
    parser.add_argument("--part", type=part, metavar="I/N", help="measure every Nth shape, beginning with the Ith")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FILE", help="append the parts of a run to the record")
    parser.add_argument("--summary", action="store_true", help="print the summary of the last run of the record")
    given = parser.parse_args(words)
    if given.merge:
        found, line = merged(given.merge)
        for each in (*found, line):
            append_line(given.record, json.dumps(each))
        print(text(line["summary"]))
        return 0
    if given.summary:
        lines = [json.loads(line) for line in given.record.read_text().splitlines()]
        print(text(next(line["summary"] for line in reversed(lines) if "summary" in line)))
        return 0
    device = torch.device(given.device)
    numbers, run = Device.probe(device), Run.now(device)
    record = Record("predictions", numbers, "benchmarks/predictions.py", run.commit, run.date, run.torch)
    number, count = given.part or (1, 1)
    problems = itertools.islice(shapes.drawn(given.seed, numbers, training=True), number - 1, given.shapes, count)
    found: list[Row] = []
    try:
        for row in rows(problems, device, record, seconds=given.seconds):
            found.append(row)
            append_line(given.record, json.dumps({"benchmark": "predictions", "seed": given.seed, **row}))
            print(f"\r{len(found)} shapes", end="", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("\ninterrupted: the summary is of the shapes that were measured", file=sys.stderr)
    if not found:
        print("no shape was measured", file=sys.stderr)
        return 1
    shares = summary(found)
    line = {"benchmark": "predictions", "seed": given.seed, "summary": shares, "run": dataclasses.asdict(run)}
    if given.part:
        line["part"] = f"{number}/{count}"
    append_line(given.record, json.dumps(line))
    print(f"\r{text(shares)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
