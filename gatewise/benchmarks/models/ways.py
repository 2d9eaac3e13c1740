"""The ways to run a model: as it is written, after one line, and with what `torch.nn.LSTM` does not have."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from gatewise.benchmarks.models.workload import Workload
from gatewise.nn import accelerate

BEFORE, ACCELERATED = "before", "one line"


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """One way to run a model.

    Attributes:
        name: The name in tables.
        accelerated: Whether `gatewise.accelerate(model)` is called.
        adapted: Whether the model is the adapted one, see `Workload.adaptation`.
    """

    name: str
    accelerated: bool = False
    adapted: bool = False

    def model(self, workload: Workload, seed: int, device: torch.device, *, shorter: bool = False) -> nn.Module:
        """Return the model in training mode, with initial weights that depend on the seed alone.

        Args:
            workload: The model and how it is trained.
            seed: The seed.
            device: The device.
            shorter: Whether to take the sizes with which the loss is followed.
        """
        torch.manual_seed(seed)
        program = (shorter and workload.shorter) or workload.program
        with torch.device(device):
            model = program.build(self.adapted)
        return accelerate(model, verbose=False) if self.accelerated else model


def ways(workload: Workload) -> list[Way]:
    """Return the ways to run a model, that of plain PyTorch first."""
    found = [Way(BEFORE), Way(ACCELERATED, accelerated=True)]
    return [*found, Way(workload.adaptation, accelerated=True, adapted=True)] if workload.adaptation else found
