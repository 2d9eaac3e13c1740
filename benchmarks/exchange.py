"""The step of `gatewise train lm` with gatewise's exchange of gradients, and with DistributedDataParallel around it.

    torchrun --nproc-per-node 2 benchmarks/exchange.py [--batch 8] [--rounds 40]     # adds to results/exchange.jsonl

All steps are of one model in the same processes, on CPUs over gloo, and are timed in turn, one step at a time. Beside
the times, the record has the bytes that the network interfaces of the machine sent meanwhile, the least of all rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import time
from pathlib import Path

from gatewise.benchmarks.cases import LANGUAGE_MODELS
from gatewise.benchmarks.precision import PRECISIONS
from gatewise.benchmarks.record import Run
from gatewise.benchmarks.scale.language_model import LanguageModelTraining
from gatewise.benchmarks.scale.step import in_turn
from gatewise.benchmarks.scale.ways import Way
from gatewise.files import append_line
from gatewise.training.processes import ALONE, join_processes

RESULTS = Path(__file__).parent / "results" / "exchange.jsonl"
VOCABULARY = 10_000
OWN = "gatewise"
WAYS = {
    "none": Way("none"),
    OWN: Way(OWN),
    "DDP": Way("DDP", parallel=True),
    "DDP, static graph and views": Way("DDP, static", parallel=True, static=True),
    "DDP, static graph and views, bfloat16": Way("DDP, static, bfloat16", parallel=True, static=True, bfloat16=True),
    "gatewise, bfloat16": Way("bfloat16", bfloat16=True),
    "gatewise, rows": Way("rows", rows=True),
    "gatewise, rows, bfloat16": Way("rows, bfloat16", rows=True, bfloat16=True),
}


def main() -> None:
    """Time the steps, print and record the medians."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--batch", type=int, default=8, help="sequences of each process (8)")
    parser.add_argument("--rounds", type=int, default=40, help="steps of each way (40)")
    parser.add_argument("--record", type=Path, default=RESULTS, help="file that a line of JSON is added to")
    given = parser.parse_args()
    case = dataclasses.replace(LANGUAGE_MODELS["small"], batch=given.batch)
    with join_processes("cpu") as processes, contextlib.ExitStack() as held:
        command = f"torchrun --nproc-per-node {processes.count} benchmarks/exchange.py --rounds {given.rounds}"
        about = dataclasses.replace(Run.now(processes.device), command=f"{command} --batch {given.batch}")
        training = LanguageModelTraining(case, VOCABULARY)
        start = training.starting_weights(processes.device, 1)
        batches = training.batches(4, processes.device, processes.rank)
        steps = {}
        for name, way in WAYS.items():
            group = ALONE if name == "none" else processes
            step, _ = held.enter_context(training.step(way, start, PRECISIONS["fp32"], group, dropout=0.0))
            steps[name] = in_turn(step, batches, training.first_state(processes.device))
            for _ in range(3):
                steps[name]()
        seconds = {name: [] for name in WAYS}
        sent = {name: [] for name in WAYS}
        for _ in range(given.rounds):
            for name, step in steps.items():
                processes.barrier()
                before, began = sent_bytes(), time.perf_counter()
                step()
                seconds[name].append(time.perf_counter() - began)
                processes.barrier()
                sent[name].append(sent_bytes() - before)
        if processes.first:
            found = {
                name: {
                    "median_ms": round(1e3 * statistics.median(seconds[name]), 1),
                    "over_gatewise": round(
                        statistics.median(one / own for one, own in zip(seconds[name], seconds[OWN], strict=True)), 3
                    ),
                    "sent_mb": round(min(sent[name]) / 1e6, 1),
                }
                for name in WAYS
            }
            record = {
                "run": dataclasses.asdict(about),
                "settings": dataclasses.asdict(case) | {"vocabulary": VOCABULARY, "processes": processes.count},
                "rounds": given.rounds,
                "load": os.getloadavg()[0],
                "gradients_mb": round(sum(each.nbytes for each in start) / 1e6, 1),
                "ways": found,
            }
            print(json.dumps(found, indent=1))
            append_line(given.record, json.dumps(record))


def sent_bytes() -> int:
    """Return the bytes that all network interfaces of this machine have sent."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.partition(":")[2].split()[8]) for line in lines)


if __name__ == "__main__":
    main()
