"""A model without any LSTM, and data for it, because training must not depend on the model."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from gatewise.training import RunFolder, TrainingOptions, fit
from gatewise.training.processes import Processes

ALONE = Processes(rank=0, count=1, device=torch.device("cpu"))


class EchoModel(nn.Module):
    """A model that predicts y from x and a leaky sum of earlier x; it has dropout, a bias and a shared weight."""

    def __init__(self, size: int = 6, dropout: float = 0.2) -> None:
        super().__init__()
        self.inner = nn.Linear(size, size)
        self.outer = nn.Linear(size, size)
        self.outer.weight = self.inner.weight
        self.dropout = nn.Dropout(dropout)

    def loss(self, batch: Batch, state: tuple[torch.Tensor, None] | None = None):
        memory = torch.zeros_like(batch.x) if state is None else state[0]
        memory = 0.5 * memory + torch.tanh(self.inner(batch.x))
        error = self.outer(self.dropout(memory)) - batch.y
        return error.square().mean(), (memory, None)


class Batch(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor

    @property
    def count(self) -> int:
        return len(self.x)


class Echoes:
    """Data with twenty batches per epoch, different ones in each epoch."""

    def __init__(
        self, rows: int = 8, size: int = 6, length: int = 20, part: slice = slice(None), seed: int = 0
    ) -> None:
        self.rows, self.size, self.length, self.part, self.seed = rows, size, length, part, seed

    def __len__(self) -> int:
        return self.length

    def windows(self, epoch: int = 0, start: int = 0):
        generator = torch.Generator().manual_seed(self.seed * 1000 + epoch)
        x = torch.randn(self.length, self.rows, self.size, generator=generator)
        y = torch.sin(x.roll(1, 0)) + 0.1 * torch.randn(x.shape, generator=generator)
        for index in range(start, self.length):
            yield Batch(x[index, self.part], y[index, self.part])


class Diary:
    """An observer that stores all notifications."""

    def __init__(self) -> None:
        self.starts, self.reports, self.evaluations, self.remarks = [], [], [], []

    def started(self, step, history):
        self.starts.append((step, len(history)))

    def progressed(self, progress):
        self.reports.append(progress)

    def evaluated(self, evaluation):
        self.evaluations.append(evaluation)

    def remarked(self, sentence):
        self.remarks.append(sentence)


def echo_model(seed: int = 0, **sizes) -> EchoModel:
    torch.manual_seed(seed)
    return EchoModel(**sizes)


def train(
    folder,
    model=None,
    data=None,
    valid=None,
    *,
    processes=ALONE,
    observers=(),
    identity=None,
    score=None,
    record_step=None,
    reference=None,
    **options,
):
    """Fit an `EchoModel` in a folder; return the outcome and the model."""
    model = model or echo_model()
    torch.manual_seed(1)
    run = RunFolder(folder)
    if processes.first:
        run.prepare(0)
    outcome = fit(
        model,
        data or Echoes(),
        valid or Echoes(length=5, seed=1),
        TrainingOptions(**({"epochs": 3, "learning_rate": 0.02} | options)),
        run,
        processes,
        identity={"data": "echoes"} if identity is None else identity,
        model_facts={"made": "for a test"},
        observers=observers,
        score=score,
        record_step=record_step,
        reference=reference,
    )
    return outcome, model
