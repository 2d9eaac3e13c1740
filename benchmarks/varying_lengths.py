"""A tagger in a plain training loop whose batches have varying numbers of steps, as sentences have.

    python benchmarks/varying_lengths.py                # needs a GPU; lines in benchmarks/results/varying_lengths.jsonl

The model is written for `torch.nn.LSTM`, and `gatewise.accelerate` replaces its layer. Each batch has one of
1, 10 or 40 numbers of steps, drawn at random. In the rows "packed", every sentence has a length of its own, and the
model packs the batch for its layer, as is usual. The losses of the first steps are compared with those of
`torch.nn.LSTM`; then the steps of both are timed in turn. A line has the seconds of a step.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import gatewise
from gatewise.benchmarks.record import Run
from gatewise.files import append_line
from gatewise.selection.timing import time_side_by_side

RESULTS = Path(__file__).parent / "results" / "varying_lengths.jsonl"
LENGTHS = {1: (40,), 10: tuple(range(20, 60, 4)), 40: tuple(range(20, 60))}
BATCH, WORDS, TAGS = 32, 20_000, 20
_COMPARED, _BEFORE, _STEPS, _ROUNDS = 8, 200, 20, 12
_ALLOWED = {True: 0.02, False: 1e-3}  # of the loss; True in bfloat16 under autocast


class Tagger(nn.Module):
    """An embedding, two bidirectional layers and a tag for each word.

    Args:
        packed: Whether the layers get packed batches.
    """

    def __init__(self, packed: bool) -> None:
        super().__init__()
        self.packed = packed
        self.embedding = nn.Embedding(WORDS, 100)
        self.layers = nn.LSTM(100, 256, 2, bidirectional=True)
        self.head = nn.Linear(512, TAGS)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        """Return the logits of all tags [T*B, 20]; `lengths` is on the CPU."""
        x = self.embedding(words)
        if self.packed:
            y, _ = self.layers(pack_padded_sequence(x, lengths, enforce_sorted=False))
            y, _ = pad_packed_sequence(y, total_length=len(words))
        else:
            y, _ = self.layers(x)
        return self.head(y).flatten(0, 1)


def batches_of(lengths: tuple[int, ...]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return words, lengths and tags of a batch for each number of steps."""
    found = []
    for time in lengths:
        own = torch.randint(time // 2, time + 1, (BATCH,))
        own[0] = time
        found.append((torch.randint(WORDS, (time, BATCH)).cuda(), own, torch.randint(TAGS, (time * BATCH,)).cuda()))
    return found


def trainer(model: nn.Module, batches: list[tuple[Tensor, Tensor, Tensor]], autocast: bool) -> Callable[[], Tensor]:
    """Return a training step on the next batch, drawn at random in the same order for every model."""
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, fused=True)
    draw = random.Random(0)

    def step() -> Tensor:
        words, lengths, tags = draw.choice(batches)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = nn.functional.cross_entropy(model(words, lengths), tags)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def measure(count: int, packed: bool, autocast: bool) -> dict[str, object]:
    """Time the steps with so many lengths; return the line's part that is not about the machine."""
    torch.manual_seed(0)
    batches, first = batches_of(LENGTHS[count]), Tagger(packed).cuda()
    second = gatewise.accelerate(copy.deepcopy(first), verbose=False)
    steps = {name: trainer(model, batches, autocast) for name, model in (("nn.LSTM", first), ("gatewise", second))}
    losses = [torch.stack([step() for _ in range(_COMPARED)]).double().cpu() for step in steps.values()]
    difference = ((losses[1] - losses[0]) / losses[0]).abs().max().item()
    if not difference <= _ALLOWED[autocast]:
        raise SystemExit(f"{count} lengths: the losses differ by {difference:.1e} of their size")
    for _ in range(_BEFORE):
        steps["gatewise"]()
    timings = time_side_by_side(steps, device="cuda", runs=_ROUNDS, warmups=5, calls=_STEPS)
    return {
        "lengths": count,
        "packed": packed,
        "dtype": "bf16-autocast" if autocast else "fp32",
        "seconds": {name: dataclasses.asdict(timing) for name, timing in timings.items()},
        "loss_difference": float(f"{difference:.1e}"),
    }


def main() -> None:
    """Measure all rows, print them and add them to the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, default=RESULTS, help="file that lines of JSON are added to")
    given = parser.parse_args()
    run = dataclasses.asdict(Run.now(torch.device("cuda")))
    run["command"] = " ".join(["python benchmarks/varying_lengths.py", *sys.argv[1:]])
    for autocast in (True, False):
        for count, packed in ((1, False), (10, False), (40, False), (40, True)):
            row = measure(count, packed, autocast)
            append_line(given.record, json.dumps({"benchmark": "varying_lengths", **row, "run": run}))
            theirs, ours = (timing["median"] for timing in row["seconds"].values())  # type: ignore[attr-defined]
            what = f"{count} lengths{', packed' if packed else ''}, {row['dtype']}"
            print(f"{what:<34}{1e3 * theirs:>7.2f} ms {1e3 * ours:>7.2f} ms {theirs / ours:>6.2f}x", flush=True)


if __name__ == "__main__":
    main()
