"""Plans of memory beside what is measured: an IWSLT-like translation model trained within budgets.

    python benchmarks/nmt_memory.py

Each row is a few training steps, replayed as a CUDA graph as in `gatewise train nmt`: the predicted and the measured
peak of what PyTorch allocates, what it reserves, and sentences a second. "largest" stands for the largest batch that
the plan says fits.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from gatewise.benchmarks.record import Run, append_line
from gatewise.contract.device import Device
from gatewise.data.pair_batches import PairBatch
from gatewise.models import Seq2Seq
from gatewise.planning import Batching, Planner, Shape, apply
from gatewise.planning.translation.step import CUBLAS_BYTES
from gatewise.training.graph import WARMUPS, ReplayedStep, cuda_graphs
from gatewise.training.optimizers import build_optimizer
from gatewise.training.options import TrainingOptions
from gatewise.training.precision import arithmetic
from gatewise.training.step import Step

RESULTS = Path(__file__).parent / "results" / "nmt_memory.jsonl"
SOURCE, TARGET, SIZE = 7710, 17_192, 512
LARGEST = 0


class Case(NamedTuple):
    """A row: tokens of both sides, pairs in a batch (`LARGEST`: as many as fit), precision, and the budget."""

    length: int
    batch: int
    precision: str
    budget: str


CASES = (
    Case(50, 128, "tf32", "auto"),
    Case(50, 128, "tf32", "1.1GB"),
    Case(50, LARGEST, "tf32", "8GB"),
    Case(100, 128, "tf32", "2.2GB"),
    Case(50, 128, "bfloat16", "auto"),
    Case(50, 128, "bfloat16", "900MB"),
    Case(50, LARGEST, "bfloat16", "8GB"),
    Case(25, 32, "tf32", "1GB"),
)


class MeanLoss(nn.Module):
    """`model.loss` as the forward of a module."""

    def __init__(self, model: Seq2Seq) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: PairBatch, state: None) -> tuple[torch.Tensor, None]:
        """Return the mean loss."""
        return self.model.loss(batch, state)


def random_batch(shape: Shape) -> PairBatch:
    """Return random pairs, half of them shorter than the longest."""
    steps, targets, rows = shape
    generator = torch.Generator().manual_seed(0)

    def tokens(length: int, vocabulary: int) -> torch.Tensor:
        return torch.randint(3, vocabulary, (length, rows), generator=generator)

    lengths = torch.randint(steps // 2, steps + 1, (rows,), generator=generator)
    lengths[0] = steps
    inputs = tokens(targets, TARGET)
    weight = torch.full((), 1 / (targets * rows))
    parts = (tokens(steps, SOURCE), lengths, inputs, inputs.roll(-1, 0), weight, torch.arange(rows))
    return PairBatch(*(part.cuda() for part in parts), count=targets * rows)


def measure(case: Case, steps: int) -> dict[str, Any]:
    """Plan a case, train a few steps as planned, and return its row."""
    training = TrainingOptions(precision=case.precision, optimizer="adam")
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    with arithmetic(case.precision):
        model = Seq2Seq(SOURCE, TARGET, SIZE, SIZE, dropout=0.2, layer_dropout=0.2, device="cuda")
        planner = Planner(model, training, Device.probe("cuda"))
        wanted = Batching("batch", case.batch or 128, lambda rows: [Shape(case.length, case.length, rows)])
        if case.batch == LARGEST:
            wanted = dataclasses.replace(wanted, size=planner.largest(wanted, case.budget) // 32 * 32)
        plan = planner.plan(wanted, case.budget)
        apply(plan, model)
        optimizer = build_optimizer(list(model.parameters()), training)
        step = Step(MeanLoss(model), optimizer, training.clip, case.precision, torch.device("cuda"))
        remarks: list[str] = []
        replayed = ReplayedStep(step, cuda_graphs(), remarks.append, list(model.parameters()))
        batch = random_batch(Shape(case.length, case.length, wanted.size))
        torch.cuda.reset_peak_memory_stats()
        for _ in range(WARMUPS + 1):
            replayed(batch, None)
        loss, _ = replayed(batch, None)
        seconds = statistics.median(timed(lambda: replayed(batch, None)) for _ in range(steps))
    if not torch.isfinite(loss):
        raise AssertionError(f"the loss is {loss.item()}")
    free, total = torch.cuda.mem_get_info()
    return {
        **case._asdict(),
        "batch": wanted.size,
        "largest": case.batch == LARGEST,
        "ways": {
            part.name: way.detail
            for part, way in zip(plan.choice.step.parts, plan.choice.ways, strict=True)
            if len(part.ways) > 1
        },
        "predicted_bytes": plan.peak_bytes,
        # What cuBLAS holds came with the first step of the process and stays.
        "measured_bytes": torch.cuda.max_memory_allocated() - before + CUBLAS_BYTES,
        "reserved_bytes": torch.cuda.memory_reserved(),
        "device_bytes": total - free,
        "replayed": remarks == ["steps are replayed as one CUDA graph"] or replayed.shapes == 1,
        "milliseconds": round(1e3 * seconds, 3),
        "sentences_per_second": round(wanted.size / seconds, 1),
    }


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that the device takes for a function."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def main() -> int:
    """Measure every case, print a table, append the record."""
    parser = argparse.ArgumentParser(description="Plans of memory beside what is measured.")
    parser.add_argument("--steps", type=int, default=5, help="steps that are timed (default: 5)")
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"default: {RESULTS.name}")
    given = parser.parse_args()
    run = Run.now(torch.device("cuda"))
    measure(Case(5, 8, "tf32", "auto"), 1)  # libraries and kernels load
    rows: list[dict[str, Any]] = []
    try:
        measure_all(rows, given.steps)
    finally:  # also of a run that somebody stopped
        append_line({"benchmark": "nmt_memory", "run": dataclasses.asdict(run), "rows": rows}, given.results)
    return 0


def measure_all(rows: list[dict[str, Any]], steps: int) -> None:
    """Measure every case, print its row, and add it."""
    for case in CASES:
        row = measure(case, steps)
        ratio = row["measured_bytes"] / row["predicted_bytes"]
        sizes = f"predicted {row['predicted_bytes'] / 1e6:7.0f} MB  measured {ratio:.3f} of it"
        reserved = f"reserved {row['reserved_bytes'] / 1e6:.0f} MB"
        print(
            f"T {case.length:<4} B {row['batch']:<5} {case.precision:<9} {case.budget:<6} {sizes}  {reserved}  "
            f"{row['milliseconds']:.2f} ms  {row['sentences_per_second']:.0f}/s  {'' if row['replayed'] else 'EAGER'}",
            flush=True,
        )
        rows.append(row)


if __name__ == "__main__":
    sys.exit(main())
