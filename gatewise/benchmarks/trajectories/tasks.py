"""Tasks that can be learnt in some hundred steps, and plain models for them, as users write them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from gatewise.benchmarks.trajectories.cases import Case
from gatewise.benchmarks.trajectories.layers import State, layer

_WORDS, _SUCCESSORS, _CLASSES, _FEATURES = 200, 8, 5, 6


class Batch(NamedTuple):
    """A batch.

    Attributes:
        inputs: The tokens [T, B], or features [T, B, F].
        targets: The tokens [T, B], classes [B], or numbers [T, B].
        lengths: The number of steps of each sequence [B]; None if all have T.
    """

    inputs: Tensor
    targets: Tensor
    lengths: Tensor | None = None


class Words(nn.Module):
    """A language model; its state is carried from batch to batch."""

    def __init__(self, case: Case, kind: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_WORDS, case.hidden)
        self.lstm = layer(kind, case.hidden, case.hidden, case.layers, dropout=case.dropout, proj_size=case.projection)
        self.drop = nn.Dropout(case.dropout)
        self.output = nn.Linear(case.projection or case.hidden, _WORDS)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)

    def forward(self, batch: Batch, state: State | None) -> tuple[Tensor, State]:
        """Return the loss, and the detached state."""
        y, (h, c) = self.lstm(self.drop(self.embedding(batch.inputs)), state)
        scores = self.output(self.drop(y)).flatten(0, 1).float()
        return functional.cross_entropy(scores, batch.targets.flatten()), (h.detach(), c.detach())


class Classes(nn.Module):
    """A classifier of sequences, which averages the outputs over time."""

    def __init__(self, case: Case, kind: str) -> None:
        super().__init__()
        options = {"dropout": case.dropout, "bidirectional": case.bidirectional}
        self.lstm = layer(kind, _FEATURES, case.hidden, case.layers, **options)
        self.output = nn.Linear(case.hidden * (1 + case.bidirectional), _CLASSES)

    def forward(self, batch: Batch, state: None) -> tuple[Tensor, None]:
        """Return the loss, and no state."""
        y, _ = self.lstm(batch.inputs, None, batch.lengths)
        assert batch.lengths is not None
        mean = y.float().sum(0) / batch.lengths[:, None]
        return functional.cross_entropy(self.output(mean).float(), batch.targets), None


class Series(nn.Module):
    """A model that predicts a number for each step."""

    def __init__(self, case: Case, kind: str) -> None:
        super().__init__()
        self.lstm = layer(kind, _FEATURES, case.hidden, case.layers, bidirectional=case.bidirectional)
        self.output = nn.Linear(case.hidden * (1 + case.bidirectional), 1)

    def forward(self, batch: Batch, state: None) -> tuple[Tensor, None]:
        """Return the loss, and no state."""
        y, _ = self.lstm(batch.inputs)
        return functional.mse_loss(self.output(y).squeeze(2).float(), batch.targets), None


class Pairs(nn.Module):
    """A model that reverses a sentence: an encoder, a decoder with teacher forcing, and attention."""

    def __init__(self, case: Case, kind: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_WORDS, case.hidden)
        half = case.hidden // 2
        self.encoder = layer(kind, case.hidden, half, case.layers, bidirectional=case.bidirectional)
        self.decoder = layer(kind, case.hidden, case.hidden, case.layers)
        self.output = nn.Linear(2 * case.hidden, _WORDS)

    def forward(self, batch: Batch, state: None) -> tuple[Tensor, None]:
        """Return the loss, and no state."""
        read, _ = self.encoder(self.embedding(batch.inputs), None, batch.lengths)
        given = functional.pad(batch.targets[:-1], (0, 0, 1, 0))
        written, _ = self.decoder(self.embedding(given))
        weights = torch.einsum("tbh,sbh->bts", written, read).softmax(2)
        seen = torch.einsum("bts,sbh->tbh", weights, read)
        scores = self.output(torch.cat([written, seen], 2)).flatten(0, 1).float()
        return functional.cross_entropy(scores, batch.targets.flatten()), None


MODELS: dict[str, Callable[[Case, str], nn.Module]] = {
    "words": Words,
    "classes": Classes,
    "series": Series,
    "pairs": Pairs,
}


def batches(case: Case, seed: int, device: torch.device) -> Iterator[Batch]:
    """Yield batches without end; a seed gives the same batches."""
    generator = torch.Generator().manual_seed(seed)
    make = {"words": _words, "classes": _classes, "series": _series, "pairs": _pairs}[case.task]
    for batch in make(case, generator):
        lengths = None if batch.lengths is None else batch.lengths.to(device)
        yield Batch(batch.inputs.to(device), batch.targets.to(device), lengths)


def _words(case: Case, generator: torch.Generator) -> Iterator[Batch]:
    # Each word has a few possible next words, which are the same for all seeds, so that there is something to learn.
    following = torch.randint(_WORDS, (_WORDS, _SUCCESSORS), generator=torch.Generator().manual_seed(0))
    last = torch.randint(_WORDS, (case.batch,), generator=generator)
    while True:
        rows = [last]
        for _ in range(case.time):
            which = (torch.rand(case.batch, generator=generator) ** 2 * _SUCCESSORS).long()
            rows.append(following[rows[-1], which])
        tokens = torch.stack(rows)
        last = tokens[-1]
        yield Batch(tokens[:-1], tokens[1:])


def _classes(case: Case, generator: torch.Generator) -> Iterator[Batch]:
    steps = torch.arange(case.time)[:, None]
    while True:
        targets = torch.randint(_CLASSES, (case.batch,), generator=generator)
        lengths = torch.randint(case.time // 4, case.time + 1, (case.batch,), generator=generator)
        inputs = torch.randn(case.time, case.batch, _FEATURES, generator=generator)
        inputs[..., 0] += torch.sin(steps * (targets + 1) * 0.3)
        inputs[steps.expand(-1, case.batch) >= lengths] = torch.nan  # padding must not be read
        yield Batch(inputs, targets, lengths)


def _series(case: Case, generator: torch.Generator) -> Iterator[Batch]:
    while True:
        inputs = torch.randn(case.time, case.batch, _FEATURES, generator=generator)
        targets, store = torch.zeros(case.time, case.batch), torch.zeros(case.batch)
        for step in range(case.time):  # a leaky integrator
            store = 0.9 * store + inputs[step, :, 0].relu()
            targets[step] = 0.3 * store + 0.2 * inputs[step, :, 1]
        yield Batch(inputs, targets)


def _pairs(case: Case, generator: torch.Generator) -> Iterator[Batch]:
    while True:
        source = torch.randint(1, _WORDS // 8, (case.time, case.batch), generator=generator)
        lengths = torch.full((case.batch,), case.time)
        yield Batch(source, source.flip(0), lengths)
