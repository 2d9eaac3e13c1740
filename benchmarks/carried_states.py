"""Training loops that carry a state from batch to batch, whose address moves: calls are replayed all the same.

    python benchmarks/carried_states.py                  # needs a GPU; lines in benchmarks/results/carried_states.jsonl

A language model trains in a plain loop. Each step starts from the states that the step before it returned. A model
with `torch.nn.LSTM` has trained before and stays in memory, so that PyTorch's allocator finds room for states in many
places, which come back after many steps only. A line has the seconds of a step with replays and without them, sampled
in turn, the share of the passes that were replayed, and the share of those by graphs with memory of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from gatewise.benchmarks.cases import LANGUAGE_MODELS, LanguageModelCase
from gatewise.benchmarks.precision import PRECISIONS
from gatewise.benchmarks.record import Run
from gatewise.benchmarks.rivals import ways
from gatewise.benchmarks.training_step import TrainingStep, new_model, starting_weights
from gatewise.data import TokenStream
from gatewise.files import append_line
from gatewise.kernels.cuda import graphs

RESULTS = Path(__file__).parent / "results" / "carried_states.jsonl"
OURS, OTHER = "gatewise persistent", "nn.LSTM"
_WORDS, _BATCHES = 10_000, 8
_BEFORE, _STEPS, _ROUNDS = 60, 20, 12  # steps before the first sample, steps of a sample, samples


class Count:
    """The passes of a block, which counts them, and what share was replayed."""

    def __init__(self) -> None:
        self.passes = self.replayed = self.static = 0

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count the passes of the block."""
        play, launch = graphs.Replays.play, graphs.StaticGraph.launch

        def counted(own: graphs.Replays, *given: Any) -> None:
            before = own.replayed
            play(own, *given)
            self.passes, self.replayed = self.passes + 1, self.replayed + own.replayed - before

        def counted_static(own: graphs.StaticGraph, *given: Any) -> None:
            self.static += 1
            launch(own, *given)

        with (
            mock.patch.multiple(graphs.Replays, play=counted),
            mock.patch.multiple(graphs.StaticGraph, launch=counted_static),
        ):
            yield


def launching() -> contextlib.AbstractContextManager[object]:
    """Return a block in which no pass is replayed."""
    return mock.patch.object(graphs.Replays, "play", lambda own, settings, tensors, device, issue: issue(tensors))


def training_step(case: LanguageModelCase, name: str, device: torch.device) -> TrainingStep:
    """Return a training step of the language model in bfloat16, without dropout."""
    (way,) = (each for each in ways() if each.name == name)
    precision, start = PRECISIONS["bf16"], starting_weights(case, _WORDS, device, 1)
    tokens = torch.randint(
        _WORDS, (case.batch * (_BATCHES * case.time + 1),), generator=torch.Generator().manual_seed(1)
    )
    windows = TokenStream(tokens, case.batch, case.time, device=device).windows()
    batches = list(itertools.islice(windows, _BATCHES))
    model = new_model(way, case, _WORDS, precision, device, dropout=0.0, start=start)
    return TrainingStep(model, batches, case, precision, way.loop)


def measure(case: LanguageModelCase, device: torch.device) -> dict[str, object]:
    """Time the loop of a model with and without replays; return its part of the record."""
    other, step = training_step(case, OTHER, device), training_step(case, OURS, device)
    for _ in range(_STEPS):
        other()
    for _ in range(_BEFORE):
        step()
    samples: dict[str, list[float]] = {"replayed": [], "launched": []}
    count = Count()
    for _ in range(_ROUNDS):
        for way, each in samples.items():
            with launching() if way == "launched" else count.counting():
                torch.cuda.synchronize()
                began = time.perf_counter()
                for _ in range(_STEPS):
                    step()
                torch.cuda.synchronize()
                each.append((time.perf_counter() - began) / _STEPS)
    return {
        "case": case.name,
        "dtype": "bf16",
        "seconds": {way: float(f"{statistics.median(each):.4g}") for way, each in samples.items()},
        "replayed": round(count.replayed / count.passes, 3),
        "replayed_with_own_memory": round(count.static / count.passes, 3),
    }


def main() -> None:
    """Measure all sizes, print them and add them to the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, default=RESULTS, help="file that lines of JSON are added to")
    given = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    run = dataclasses.asdict(Run.now(device))
    run["command"] = " ".join(["python benchmarks/carried_states.py", *sys.argv[1:]])
    for case in LANGUAGE_MODELS.values():
        with PRECISIONS["bf16"].applied():
            row = measure(case, device)
        append_line(given.record, json.dumps({"benchmark": "carried_states", **row, "run": run}))
        print(*row.values(), flush=True)


if __name__ == "__main__":
    main()
