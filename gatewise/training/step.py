"""One step of training: forward, loss, backward, averaging, clipping, update. Nothing in it waits for the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gatewise.training.carried import detach
from gatewise.training.optimizers import clipped_update
from gatewise.training.precision import autocast
from gatewise.training.processes import ALONE, Processes


class MeanLoss(nn.Module):
    """`model.loss` as the forward of a module, the form in which a `Step` takes it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any, state: Any) -> tuple[torch.Tensor, Any]:
        """Return the mean loss of a batch, and the state after it."""
        return self.model.loss(batch, state)  # type: ignore[operator]


class Step:
    """Trains on one batch.

    Everything that a step reads or writes lies on the device, the learning rate too, so that its work can be captured
    once and replayed (see `gatewise.training.graph.ReplayedStep`).

    Several processes take it together, each with its share of a batch. They begin it with the buffers of the first one,
    and update by the mean of their gradients, so that equal weights stay equal to the bit; a weight that had no part in
    the share of a process has a gradient of zeros there. That takes the place of
    `torch.nn.parallel.DistributedDataParallel`, which a graph can hold only after eleven steps.

    Args:
        mean_loss: A module from (batch, state) to (mean loss, state), as `MeanLoss` makes it; the state is None, a
            tensor, or tuples of these.
        optimizer: As `build_optimizer` makes it.
        clip: Largest norm of all gradients together; 0 does not clip.
        precision: As in `TrainingOptions`.
        device: Where the model is.
        clip_value: Largest absolute value of each gradient, before their norm is taken; 0 does not clip.
        processes: Who takes the step together.
    """

    def __init__(
        self,
        mean_loss: nn.Module,
        optimizer: torch.optim.Optimizer,
        clip: float,
        precision: str,
        device: torch.device,
        clip_value: float = 0.0,
        processes: Processes = ALONE,
    ) -> None:
        self._mean_loss = mean_loss
        self._optimizer = optimizer
        self._clip = clip
        self._clip_value = clip_value
        self._precision = precision
        self._device = device
        self._processes = processes

    def __call__(self, batch: Any, state: Any) -> tuple[torch.Tensor, Any]:
        """Return the mean loss of the batch before the update, and the state for the next, both without history.

        The gradients stay until the next step, for whoever looks at them.
        """
        self._optimizer.zero_grad(set_to_none=True)
        self._processes.spread(self._mean_loss.buffers())
        with autocast(self._precision, self._device):
            loss, state = self._mean_loss(batch, state)
        # A second thread for backward would save nothing on one device, and handing over to it takes time.
        with torch.autograd.set_multithreading_enabled(False):
            loss.backward()
        self._average_gradients()
        clipped_update(self._optimizer, self._clip, self._clip_value)
        return loss.detach(), detach(state)

    def _average_gradients(self) -> None:
        if self._processes.count == 1:
            return
        weights = [weight for group in self._optimizer.param_groups for weight in group["params"]]
        for weight in weights:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        self._processes.average([weight.grad for weight in weights])
