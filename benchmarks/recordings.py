"""What replaying eager calls gains: training steps of the grid with recordings, without them, and of nn.LSTM.

    python benchmarks/recordings.py                      # needs a GPU; a line in benchmarks/results/recordings.jsonl

Each figure is the median of samples of four steps, in seconds a step; that with recordings is the better of two, one
before and one after the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import gatewise
from gatewise.benchmarks.cases import LSTM_GRID, LSTMCase
from gatewise.benchmarks.precision import LAYER_PRECISIONS
from gatewise.benchmarks.record import Run
from gatewise.files import append_line
from gatewise.kernels.persistent import replay
from gatewise.kernels.stepwise import backward_loop, forward_loop

RESULTS = Path(__file__).parent / "results" / "recordings.jsonl"
_SECONDS, _STEPS, _LEAST = 0.12, 4, 5


@contextlib.contextmanager
def launched() -> Iterator[None]:
    """Let no call of the block be recorded, or replayed."""

    @contextlib.contextmanager
    def nothing(*given: object) -> Iterator[None]:
        yield None

    before = replay._MOST_GRAPHS, forward_loop.recorder, backward_loop.recorder
    replay._MOST_GRAPHS, forward_loop.recorder, backward_loop.recorder = 0, nothing, nothing
    _forget()
    try:
        yield
    finally:
        replay._MOST_GRAPHS, forward_loop.recorder, backward_loop.recorder = before
        _forget()


def _forget() -> None:
    replay._replays.cache_clear()
    replay.stack_of.cache_clear()


def training_step(kind: type, case: LSTMCase, dtype: torch.dtype) -> Callable[[], None]:
    """Return a training step of a layer on its own data."""
    made = {"device": "cuda", "dtype": dtype}
    layer = kind(case.hidden_size, case.hidden_size, case.num_layers, bidirectional=case.directions == 2, **made)
    x = torch.randn(case.time, case.batch, case.hidden_size, **made, requires_grad=True)
    above = torch.randn(case.time, case.batch, case.hidden_size * case.directions, **made)
    lengths = torch.randint(case.time // 4, case.time + 1, (case.batch,), device="cuda")
    given = {"lengths": lengths} if case.ragged and kind is gatewise.LSTM else {}

    def step() -> None:
        for leaf in (x, *layer.parameters()):
            leaf.grad = None
        layer(x, **given)[0].backward(above)

    return step


def seconds(step: Callable[[], None]) -> float:
    """Return the median time of a step."""
    for _ in range(2 * _STEPS):
        step()
    torch.cuda.synchronize()
    samples, end = [], time.perf_counter() + _SECONDS
    while time.perf_counter() < end or len(samples) < _LEAST:
        began = time.perf_counter()
        for _ in range(_STEPS):
            step()
        torch.cuda.synchronize()
        samples.append((time.perf_counter() - began) / _STEPS)
    return float(f"{statistics.median(samples):.5g}")


def main() -> None:
    """Measure bfloat16 and TF32, print each row and append the record."""
    rows = []
    for precision in (LAYER_PRECISIONS["bf16"], LAYER_PRECISIONS["tf32"]):
        for case in (case for case in LSTM_GRID if not case.name.startswith("decode")):
            with precision.applied():
                ours, theirs = (training_step(kind, case, precision.dtype) for kind in (gatewise.LSTM, torch.nn.LSTM))
                recorded, rival = seconds(ours), seconds(theirs)
                with launched():
                    without = seconds(ours)
                recorded = min(recorded, seconds(ours))
            rows.append({"dtype": precision.name, "case": case.name, "recorded": recorded, "launched": without})
            rows[-1]["nn.LSTM"] = rival
            print(*rows[-1].values(), flush=True)
    about = dataclasses.asdict(Run.now(torch.device("cuda")))
    append_line(RESULTS, json.dumps({"benchmark": "recordings", "run": about, "rows": rows}))


if __name__ == "__main__":
    main()
