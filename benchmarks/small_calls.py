"""Small calls on a CPU: the layers and cells of gatewise against those of torch.nn, in many forms and sizes.

    OMP_NUM_THREADS=1 taskset -c 0 python -m benchmarks.small_calls

Calls of both alternate in one process, as `benchmarks.pairs` does it. A case above the target is measured again, for
four times as long, and only that counts. Calls with lengths are compared with packing, layer and padding of PyTorch.
Calls that take torch.nn longer than 20 ms are left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import gatewise
from benchmarks.pairs import Step, compare
from gatewise.benchmarks.record import Run
from gatewise.files import append_line

RESULTS = Path(__file__).parent / "results" / "small_calls.jsonl"
ALLOWED = 1.03

LAYERS, CELLS = ("LSTM", "GRU", "RNN"), ("LSTMCell", "GRUCell", "RNNCell")
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "state": {},
    "lengths": {},
    "packed": {},
    "bidirectional": {"bidirectional": True},
    "stacked": {"num_layers": 2},
    "projected": {},
}
BATCHES, HIDDEN, TIMES = (1, 4, 64), (8, 64, 512), (1, 5, 50)


class Case(NamedTuple):
    """A class, the form of its call, and sizes; T is 1 for a cell."""

    kind: str
    form: str
    mode: str
    T: int
    B: int
    H: int


def cases() -> Iterator[Case]:
    """All cases."""
    for kind, form, mode in itertools.product(LAYERS, FORMS, ("inference", "training")):
        if form != "projected" or kind == "LSTM":
            for sizes in itertools.product(TIMES, BATCHES, HIDDEN):
                yield Case(kind, form, mode, *sizes)
    for kind, form, mode, *sizes in itertools.product(
        CELLS, ("plain", "state"), ("inference", "training"), (1,), BATCHES, HIDDEN
    ):
        yield Case(kind, form, mode, *sizes)


def steps_of(case: Case) -> tuple[Step, Step]:
    """The calls of torch.nn and of gatewise, with the same weights and inputs."""
    torch.manual_seed(0)
    kind, form, mode, T, B, H = case
    options = {"proj_size": H // 2} if form == "projected" else FORMS[form]
    theirs, ours = getattr(torch.nn, kind)(H, H, **options), getattr(gatewise, kind)(H, H, **options)
    ours.load_state_dict(theirs.state_dict())
    is_cell, training = kind in CELLS, mode == "training"
    x = torch.randn(*((B, H) if is_cell else (T, B, H)), requires_grad=training)
    lengths = torch.tensor([T - row * 3 % B * T // (2 * B) for row in range(B)])  # from T / 2 up to T, in no order
    arguments: tuple = (x,)
    if form == "state":
        state = torch.randn(*((B, H) if is_cell else (1, B, H)))
        arguments = x, (state, state.clone()) if kind.startswith("LSTM") else state
    if form == "packed":
        packed = pack_padded_sequence(x.detach(), lengths, enforce_sorted=False)
        x = packed.data.requires_grad_(training)
        arguments = (packed._replace(data=x),)

    def padded() -> object:
        y, state = theirs(pack_padded_sequence(x, lengths, enforce_sorted=False))
        return pad_packed_sequence(y, total_length=T)[0], state

    calls = (lambda: theirs(*arguments)), (lambda: ours(*arguments))
    if form == "lengths":
        calls = padded, lambda: ours(x, lengths=lengths)
    ones = torch.ones_like(_first(calls[0]()))
    first, second = ((x, *module.parameters()) for module in (theirs, ours))
    return _step(calls[0], first, training, ones), _step(calls[1], second, training, ones)


def _step(call: Callable[[], object], leaves: tuple[Tensor, ...], training: bool, ones: Tensor) -> Step:
    def train() -> None:
        for leaf in leaves:
            leaf.grad = None
        _first(call()).backward(ones)

    def infer() -> None:
        with torch.no_grad():
            call()

    return train if training else infer


def _first(found: Any) -> Tensor:
    while not isinstance(found, Tensor):
        found = found[0]
    return found


def measure(case: Case, seconds: float) -> dict[str, Any] | None:
    """Time one case; returns its row of the record, or None for a call that is not small."""
    found = compare(*steps_of(case), seconds)
    return None if found is None else {**case._asdict(), **found}


def main() -> int:
    """Measure, print a table, append the record; the status is 1 when a ratio is above what is allowed."""
    parser = argparse.ArgumentParser(description="Small calls on a CPU: gatewise against torch.nn.")
    parser.add_argument("--seconds", type=float, default=0.4, help="the time for each case (default: 0.4)")
    parser.add_argument("--no-record", action="store_true", help=f"do not append to {RESULTS.name}")
    given = parser.parse_args()
    torch.set_num_threads(1)
    run, rows = Run.now(torch.device("cpu")), []
    for case in cases():
        row = measure(case, given.seconds)
        if row is not None and row["ratio"] > ALLOWED:  # for longer, since the machine may have been disturbed
            row = measure(case, 4 * given.seconds) or row
        if row is not None:
            rows.append(row)
    print(f"{run.device}, PyTorch {run.torch}, one thread: time of gatewise / time of torch.nn\n")
    print(f"{'class':<10}{'form':<15}{'mode':<11}{'cases':>6}{'least':>8}{'median':>8}{'most':>8}  above {ALLOWED}")
    for (kind, form, mode), group in itertools.groupby(rows, key=lambda row: (row["kind"], row["form"], row["mode"])):
        own = list(group)
        ratios = sorted(row["ratio"] for row in own)
        above = [f"T {row['T']} B {row['B']} H {row['H']}: {row['ratio']}" for row in own if row["ratio"] > ALLOWED]
        numbers = f"{len(own):>6}{ratios[0]:>8.3f}{ratios[len(ratios) // 2]:>8.3f}{ratios[-1]:>8.3f}"
        print(f"{kind:<10}{form:<15}{mode:<11}{numbers}  {'; '.join(above)}")
    if not given.no_record:
        append_line(RESULTS, json.dumps({"benchmark": "small_calls", "run": dataclasses.asdict(run), "rows": rows}))
    return int(any(row["ratio"] > ALLOWED for row in rows))


if __name__ == "__main__":
    sys.exit(main())
