"""One training step of a model, as its program writes it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from gatewise.benchmarks.models.workload import Batch, Workload


class TrainingStep:
    """Forward, loss, backward, clipping and update on the next batch, all of which is timed.

    Args:
        workload: The model with its optimizer and precision.
        model: The model, on its device.
        batches: The batches on the same device, used in turn.
        capturable: Whether the optimizer is fused and can be captured in a CUDA graph; otherwise it is as by default.
    """

    def __init__(
        self, workload: Workload, model: nn.Module, batches: Iterable[Batch], *, capturable: bool = False
    ) -> None:
        self.model = model
        self._workload = workload
        self._batches = itertools.cycle(batches)
        self._parameters = list(model.parameters())
        self._device = self._parameters[0].device
        options = {"fused": True, "capturable": True} if capturable else {}
        self._optimizer = workload.optimizer(self._parameters, **options)
        self._scaler = torch.amp.GradScaler(self._device.type, enabled=workload.autocast is torch.float16)

    def __call__(self) -> Tensor:
        """Train on the next batch, and return its loss before the update; gradients are freed at the end."""
        loss = self.loss()
        self._scaler.scale(loss).backward()
        self._scaler.unscale_(self._optimizer)
        nn.utils.clip_grad_norm_(self._parameters, self._workload.clip_norm)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad()
        return loss.detach()

    def loss(self) -> Tensor:
        """Run the model on the next batch and return the loss."""
        with autocasting(self._workload, self._device):
            return self.model(*next(self._batches))


class InferenceStep:
    """The output on the next batch, in evaluation mode and without gradients; arguments are those of `TrainingStep`."""

    def __init__(self, workload: Workload, model: nn.Module, batches: Iterable[Batch]) -> None:
        self.model = model.eval()
        self._workload = workload
        self._batches = itertools.cycle(batches)
        self._device = next(model.parameters()).device

    def __call__(self) -> Tensor:
        """Return the output on the next batch."""
        with torch.no_grad(), autocasting(self._workload, self._device):
            return self.model.predict(*next(self._batches))  # type: ignore[operator]


def autocasting(workload: Workload, device: torch.device) -> torch.autocast:
    """Return the context of autocast of the forward pass."""
    return torch.autocast(device.type, workload.autocast or torch.bfloat16, enabled=workload.autocast is not None)
