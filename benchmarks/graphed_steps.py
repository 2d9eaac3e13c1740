"""Training loops in plain PyTorch, called from Python and by `gatewise.make_graphed_step`.

    python benchmarks/graphed_steps.py       # needs a GPU; adds lines to benchmarks/results/graphed_steps.jsonl
    python benchmarks/graphed_steps.py --case classifier --compiled --one-thread

Each case is a whole training step: forward pass, loss, backward pass, clipping and update. The ways are nn.LSTM and
gatewise.LSTM, called and graphed; with `--compiled` also gatewise.LSTM in `torch.compile(mode="reduce-overhead")`, and
with `--one-thread` both called, with autograd in one thread. They are timed in turn. The losses of the first steps are
compared with those of torch.nn.LSTM, called.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import gatewise
from gatewise.benchmarks.record import Run
from gatewise.files import append_line
from gatewise.selection.timing import time_side_by_side

RESULTS = Path(__file__).parent / "results" / "graphed_steps.jsonl"
STEPS = 8  # of which losses are compared
ALLOWED = 0.02  # of the loss, in bfloat16
ONE_THREAD = "one thread"


class Labels(nn.Module):
    """An embedding, recurrent layers, and a label for each word: the next word, or a tag.

    Args:
        shape: The steps and sequences of a batch.
        words: The words.
        features: The features of a word.
        units: The hidden units of a layer and direction.
        labels: The labels.
        bidirectional: Whether the two layers read both directions.
    """

    def __init__(
        self, shape: tuple[int, int], words: int, features: int, units: int, labels: int, *, bidirectional: bool
    ) -> None:
        super().__init__()
        self.shape, self.words, self.labels = shape, words, labels
        self.embedding = nn.Embedding(words, features)
        self.layer = nn.LSTM(features, units, 2, bidirectional=bidirectional)
        self.head = nn.Linear((1 + bidirectional) * units, labels)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the labels."""
        return self.head(self.layer(self.embedding(x))[0]).flatten(0, 1)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return words and their labels."""
        return torch.randint(self.words, self.shape), torch.randint(self.labels, (self.shape[0] * self.shape[1],))


class Classifier(nn.Module):
    """One layer over a series of 16 features, and a class for each series."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(16, 128, batch_first=True), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the classes."""
        return self.head(self.layer(x)[1][0][-1])

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return series and classes."""
        return torch.randn(64, 100, 16), torch.randint(10, (64,))


# The "large" language model for the Penn Treebank, without dropout, so that losses can be compared, and two others.
CASES: dict[str, Callable[[], Labels | Classifier]] = {
    "ptb_large": lambda: Labels((35, 20), 10_000, 1500, 1500, 10_000, bidirectional=False),
    "tagger": lambda: Labels((40, 32), 20_000, 100, 256, 20, bidirectional=True),
    "classifier": Classifier,
}


def trainer(model: nn.Module, way: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the training step of a model, which trains with Adam under autocast to bfloat16."""
    rate = torch.tensor(1e-3, device="cuda")
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, fused=True, capturable=True)
    called = torch.compile(model, mode="reduce-overhead") if way.endswith("compiled") else model

    def step(x: Tensor, target: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = nn.functional.cross_entropy(called(x), target)
        with torch.autograd.set_multithreading_enabled(not way.endswith(ONE_THREAD)):
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return loss.detach()

    return gatewise.make_graphed_step(step, model, optimizer) if way.endswith("graphed") else step


def measure(case: str, ways: list[str], runs: int) -> dict[str, object]:
    """Time the ways of a case in turn; return its part of the record."""
    torch.manual_seed(0)
    first = CASES[case]().cuda()
    x, target = (each.cuda() for each in first.batch())
    steps, losses = {}, {}
    for way in ways:
        model = copy.deepcopy(first)
        if way.startswith("gatewise"):
            model = gatewise.accelerate(model, verbose=False)
        steps[way] = step = trainer(model, way)
        losses[way] = torch.stack([step(x, target).clone() for _ in range(STEPS)]).double().cpu()
    expected = losses[ways[0]]
    worst = {way: ((found - expected) / expected).abs().max().item() for way, found in losses.items()}
    timings = time_side_by_side(
        {way: lambda step=step: step(x, target) for way, step in steps.items()}, device="cuda", runs=runs, warmups=5
    )
    return {
        "case": case,
        "dtype": "bf16-autocast",
        "optimizer": "Adam, fused, clipped",
        "tokens": x.shape[0] * x.shape[1],
        "seconds": {way: dataclasses.asdict(timing) for way, timing in timings.items()},
        "loss_difference": {way: round(value, 5) for way, value in worst.items()},
        "equal": all(value <= ALLOWED for value in worst.values()),
    }


def main() -> None:
    """Measure the cases, print them and add them to the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=CASES, help="a case (all)")
    parser.add_argument("--compiled", action="store_true", help="also in torch.compile")
    parser.add_argument("--one-thread", action="store_true", help="also called, with autograd in one thread")
    parser.add_argument("--runs", type=int, default=20, help="samples of each way (20)")
    parser.add_argument("--record", type=Path, default=RESULTS, help="file that lines of JSON are added to")
    given = parser.parse_args()
    ways = ["nn.LSTM, called", "nn.LSTM, graphed", "gatewise, called", "gatewise, graphed"]
    ways += ["gatewise, compiled"] if given.compiled else []
    ways += [f"nn.LSTM, {ONE_THREAD}", f"gatewise, {ONE_THREAD}"] if given.one_thread else []
    run = dataclasses.asdict(Run.now(torch.device("cuda")))
    run["command"] = " ".join(["python benchmarks/graphed_steps.py", *sys.argv[1:]])
    for case in given.case or CASES:
        row = measure(case, ways, given.runs)
        append_line(given.record, json.dumps({"benchmark": "graphed_steps", **row, "run": run}))
        medians = {way: timing["median"] for way, timing in row["seconds"].items()}  # type: ignore[attr-defined]
        print(f"{case}{'' if row['equal'] else ': LOSSES DIFFER'}", flush=True)
        for way, seconds in medians.items():
            print(f"  {way:<22}{1e6 * seconds:>9.0f} us {medians[ways[0]] / seconds:>6.2f}x", flush=True)


if __name__ == "__main__":
    main()
