"""The step of `gatewise train lm` where processes send the factors of gradients, and where they send the gradients.

    torchrun --nproc-per-node 2 benchmarks/factor_exchange.py [--batch 20 --batch 40]   # needs a GPU for each process

A line of results/factor_exchange.jsonl has the times of a step of PTB-large, replayed as a CUDA graph, with whole
gradients, and with the factors of all gradients that can be left as factors: the limit on their cost is not applied.
`share` is the cost of these factors as a share of the bytes of their gradients, which that limit is for.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from gatewise.benchmarks.cases import LANGUAGE_MODELS
from gatewise.benchmarks.precision import PRECISIONS
from gatewise.benchmarks.record import Run
from gatewise.benchmarks.scale.language_model import LanguageModelTraining
from gatewise.benchmarks.scale.ways import Way
from gatewise.files import append_line
from gatewise.training import exchange, factor_exchange
from gatewise.training.factor_exchange import Candidate
from gatewise.training.processes import Processes, join_processes

RESULTS = Path(__file__).parent / "results" / "factor_exchange.jsonl"
VOCABULARY = 10_000
_BEFORE, _STEPS, _SAMPLES = 15, 40, 7


class Shares:
    """The costs of the factors that are sent, as shares of the bytes of their gradients."""

    def __init__(self) -> None:
        self.found: list[float] = []

    @contextlib.contextmanager
    def without_limit(self) -> Iterator[None]:
        """Send all factors that can be sent."""
        usual = exchange.chosen

        def chosen(found: Sequence[Candidate], count: int, **options: Any) -> list[Candidate]:
            with mock.patch.object(factor_exchange, "_MOST_OF_GRADIENTS", float("inf")):
                taken = usual(found, count, **options)
            self.found.append(factor_exchange.share(taken, count, bfloat16=options["bfloat16"]))
            return taken

        with mock.patch.object(exchange, "chosen", chosen):
            yield


def microseconds(training: LanguageModelTraining, processes: Processes, way: Way) -> float:
    """Return the median time of a step."""
    device = processes.device
    start = training.starting_weights(device, 1)
    (batch,) = training.batches(1, device, processes.rank)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found = []
    with training.step(way, start, PRECISIONS["bf16-autocast"], processes, dropout=0.0) as (step, _):
        state = training.first_state(device)
        for _ in range(_BEFORE):
            _, state = step(batch, state)
        for _ in range(_SAMPLES):
            processes.barrier()
            begin.record()
            for _ in range(_STEPS):
                _, state = step(batch, state)
            end.record()
            torch.cuda.synchronize(device)
            found.append(1000 * begin.elapsed_time(end) / _STEPS)
    return statistics.median(found)


def main() -> None:
    """Time the steps, print and record the medians."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--batch", type=int, action="append", help="sequences of each process; repeatable (20)")
    parser.add_argument("--record", type=Path, default=RESULTS, help="file that lines of JSON are added to")
    given = parser.parse_args()
    with join_processes("cuda") as processes:
        for batch in given.batch or [20]:
            case = dataclasses.replace(LANGUAGE_MODELS["large"], batch=batch)
            training, shares = LanguageModelTraining(case, VOCABULARY), Shares()
            whole = microseconds(training, processes, Way("whole gradients", factors=False))
            with shares.without_limit():
                factors = microseconds(training, processes, Way("factors"))
            line = {
                "batch": batch,
                "processes": processes.count,
                "share": round(shares.found[-1], 3),
                "us_whole": round(whole, 1),
                "us_factors": round(factors, 1),
            }
            if processes.first:
                command = f"torchrun --nproc-per-node {processes.count} benchmarks/factor_exchange.py --batch {batch}"
                about = dataclasses.replace(Run.now(processes.device), command=command)
                print(line, flush=True)
                append_line(given.record, json.dumps(line | {"run": dataclasses.asdict(about)}))


if __name__ == "__main__":
    main()
