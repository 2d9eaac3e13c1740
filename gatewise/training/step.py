"""A training step: forward, loss, backward, averaging, clipping, update; without synchronising with the device."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import nn

from gatewise.contract.data_parallel import for_data_parallel
from gatewise.training.carried import detach, flatten
from gatewise.training.exchange import GradientExchange
from gatewise.training.finite_guard import FiniteGuard, joined
from gatewise.training.optimizers import GradientSize, clipped_update, gradient_size
from gatewise.training.precision import autocast
from gatewise.training.processes import ALONE, Processes


def _alone(loss: torch.Tensor, weights: list[nn.Parameter]) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


class MeanLoss(nn.Module):
    """`model.loss` as the forward of a module, as `Step` takes it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any, state: Any) -> tuple[torch.Tensor, Any]:
        """Return the mean loss of a batch, and the state after it."""
        return self.model.loss(batch, state)  # type: ignore[operator]


class Measured(NamedTuple):
    """The result of a step on one batch, without its update.

    Attributes:
        loss: The mean loss of the batch.
        gradients: The norm of the gradients if they are clipped by it, otherwise their largest absolute value.
        state: The largest absolute value in the state for the next batch; 0 without a state.
    """

    loss: float
    gradients: float
    state: float

    @property
    def finite(self) -> bool:
        """Whether all values are finite."""
        return all(map(math.isfinite, self))


class Step:
    """A step that trains on one batch, unless its loss, a gradient or the state after it is not finite.

    From the first such step on, calls do not change weights, moments, buffers or state; see `FiniteGuard`.

    Everything that a step reads or writes is on the device, including the learning rate, so that its work can be
    captured and replayed (see `gatewise.training.graph.ReplayedStep`).

    Several processes run a step together, each with its part of a batch. They start with the buffers of the first
    process, and update with the mean of their gradients, so that their weights stay bitwise equal; a weight that a
    process did not use has a gradient of zeros there. This replaces `torch.nn.parallel.DistributedDataParallel`, which
    can be captured in a CUDA graph only after eleven steps.

    Args:
        mean_loss: A module from (batch, state) to (mean loss, state), such as `MeanLoss`; the state is None, a tensor,
            or tuples of these.
        optimizer: The optimizer from `build_optimizer`.
        clip: The largest norm of all gradients together; 0 for no clipping.
        precision: The precision, as in `TrainingOptions`.
        device: The device of the model.
        clip_value: The largest absolute value of each gradient, clipped before the norm is computed; 0 for no clipping.
        processes: The processes of the distributed training.
        exchange_bfloat16: Whether processes send gradients in bfloat16; see `GradientExchange`.
        exchange_rows: Whether processes send only those rows of the gradients of embeddings that occur in their
            batches; see `GradientExchange`.
        exchange_factors: Whether processes send the factors of gradients instead of the gradients, on GPUs and where
            that is estimated to take less time; see `GradientExchange`.

    Attributes:
        guard: The guard whose flag is set if a step was not finite, the same in all processes.
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
        *,
        exchange_bfloat16: bool = False,
        exchange_rows: bool = False,
        exchange_factors: bool = True,
    ) -> None:
        self._mean_loss = mean_loss
        self._optimizer = optimizer
        self._clip = clip
        self._clip_value = clip_value
        self._precision = precision
        self._device = device
        self._processes = processes
        self._exchange = GradientExchange(
            processes,
            mean_loss,
            bfloat16=exchange_bfloat16,
            rows=exchange_rows,
            factors=exchange_factors and device.type == "cuda",
        )
        self.guard = FiniteGuard(device)

    def __call__(self, batch: Any, state: Any) -> tuple[torch.Tensor, Any]:
        """Return the mean loss of the batch before the update, and the state for the next batch, both detached.

        The gradients are kept until the next step, for observers.
        """
        guard, buffers = self.guard, list(self._mean_loss.buffers())
        self._processes.broadcast_tensors(buffers)
        copies = guard.copies(buffers)
        loss, after = self._with_gradients(batch, state, self._exchange.during_backward)
        observed, size = self._average_gradients(guard.observe(loss, after))
        clipped_update(self._optimizer, self._clip, self._clip_value, guard, observed, size)
        guard.put_back(copies)
        return loss, guard.state(state, after)

    def expect(self, shapes: Hashable) -> None:
        """Announce the shapes of all processes' batches in the next step; see `GradientExchange.expect`."""
        self._exchange.expect(shapes)

    def measure(self, batch: Any, state: Any) -> Measured:
        """Return the result of the step in this process alone, without an update; this synchronises with the device."""
        loss, after = self._with_gradients(batch, state)
        size = gradient_size(self._optimizer, self._clip, self._clip_value)
        self._optimizer.zero_grad(set_to_none=True)
        leaves = [leaf.abs().max().double() for leaf in flatten(after)[0] if leaf.numel()]
        return Measured(
            loss=loss.item(),
            gradients=0.0 if size is None else size.item(),
            state=torch.stack(leaves).max().item() if leaves else 0.0,
        )

    def _with_gradients(
        self, batch: Any, state: Any, during_backward: Callable[..., contextlib.AbstractContextManager[None]] = _alone
    ) -> tuple[torch.Tensor, Any]:
        self._optimizer.zero_grad(set_to_none=True)
        # Around the backward pass too, because activation checkpointing repeats parts of the forward pass there.
        with self._for_processes():
            with autocast(self._precision, self._device):
                loss, after = self._mean_loss(batch, state)
            # On one device, a second thread for the backward pass would save nothing, and switching to it takes time.
            with torch.autograd.set_multithreading_enabled(False), during_backward(loss, self._weights()):
                loss.backward()
        return loss.detach(), detach(after)

    def _for_processes(self) -> contextlib.AbstractContextManager[None]:
        # Gradients are exchanged during the backward pass.
        if self._processes.count == 1:
            return contextlib.nullcontext()
        return for_data_parallel(self._processes.nccl_multiprocessors)

    def _weights(self) -> list[nn.Parameter]:
        return [weight for group in self._optimizer.param_groups for weight in group["params"]]

    def _average_gradients(self, observed: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Average the gradients over the processes.

        Returns:
            Numbers that are finite if all gradients are, and the size of the gradients if it is known.
        """
        if self._processes.count == 1:
            return observed, None
        weights = self._weights()
        # The scalar is averaged in one collective with the small gradients.
        mean = joined(observed).to(weights[-1].dtype)
        size = GradientSize(self._clip, self._clip_value)
        self._exchange.average(weights, [mean], size.add)
        return [mean], size.of(weights)
