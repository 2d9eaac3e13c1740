"""One step of training: forward, loss, backward, averaging, clipping, update. Nothing in it waits for the device."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import nn

from gatewise.training.carried import detach, flatten
from gatewise.training.finite_guard import FiniteGuard, joined
from gatewise.training.optimizers import clipped_update, gradient_size
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


class Measured(NamedTuple):
    """What a step on one batch gave, without its update.

    Attributes:
        loss: Mean loss of the batch.
        gradients: Their norm where they are clipped by it, otherwise their largest absolute value.
        state: Largest absolute value in the state for the next batch; 0 without a state.
    """

    loss: float
    gradients: float
    state: float

    @property
    def finite(self) -> bool:
        """Whether all are finite."""
        return all(map(math.isfinite, self))


class Step:
    """Trains on one batch, unless its loss, a gradient or the state after it is not finite.

    From the first such step on, calls change neither weights nor moments, buffers or state: see `FiniteGuard`.

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

    Attributes:
        guard: Says whether a step was not finite, the same in all processes.
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
        self.guard = FiniteGuard(device)

    def __call__(self, batch: Any, state: Any) -> tuple[torch.Tensor, Any]:
        """Return the mean loss of the batch before the update, and the state for the next, both without history.

        The gradients stay until the next step, for whoever looks at them.
        """
        guard, buffers = self.guard, list(self._mean_loss.buffers())
        self._processes.spread(buffers)
        copies = guard.copies(buffers)
        loss, after = self._with_gradients(batch, state)
        observed = self._average_gradients(guard.observe(loss, after))
        clipped_update(self._optimizer, self._clip, self._clip_value, guard, observed)
        guard.put_back(copies)
        return loss, guard.state(state, after)

    def measure(self, batch: Any, state: Any) -> Measured:
        """Return what the step gives in this process alone, without an update; wait for it."""
        loss, after = self._with_gradients(batch, state)
        size = gradient_size(self._optimizer, self._clip, self._clip_value)
        self._optimizer.zero_grad(set_to_none=True)
        leaves = [leaf.abs().max().double() for leaf in flatten(after)[0] if leaf.numel()]
        return Measured(
            loss=loss.item(),
            gradients=0.0 if size is None else size.item(),
            state=torch.stack(leaves).max().item() if leaves else 0.0,
        )

    def _with_gradients(self, batch: Any, state: Any) -> tuple[torch.Tensor, Any]:
        self._optimizer.zero_grad(set_to_none=True)
        with autocast(self._precision, self._device):
            loss, after = self._mean_loss(batch, state)
        # A second thread for backward would save nothing on one device, and handing over to it takes time.
        with torch.autograd.set_multithreading_enabled(False):
            loss.backward()
        return loss.detach(), detach(after)

    def _average_gradients(self, observed: list[torch.Tensor]) -> list[torch.Tensor]:
        """Average the gradients over the processes, and return scalars that are finite where those of all are."""
        if self._processes.count == 1:
            return observed
        weights = [weight for group in self._optimizer.param_groups for weight in group["params"]]
        for weight in weights:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        # It travels in the row of the small gradients.
        mean = joined(observed).to(weights[-1].dtype)
        self._processes.average([*(weight.grad for weight in weights), mean])
        return [mean]
