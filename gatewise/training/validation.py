"""The loss of a model over data, and the cause if it is not finite."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator
from typing import Any

import torch
from torch import nn

from gatewise.contract.errors import NotFinite
from gatewise.training.carried import flatten
from gatewise.training.fault import Inquiry
from gatewise.training.precision import arithmetic, autocast
from gatewise.training.processes import Processes
from gatewise.training.protocols import Batches
from gatewise.training.randomness import random_states
from gatewise.training.recorded_step import RecordedStep
from gatewise.training.step import Measured


def evaluate(model: nn.Module, batches: Batches, processes: Processes, precision: str = "float32") -> float:
    """Return the mean loss of a model over one epoch of batches, in evaluation mode, with a carried state.

    Args:
        model: The model, a `Trainable`.
        batches: The data; with several processes, each reads its own part.
        processes: The processes of the distributed evaluation; all of them get the same result.
        precision: The precision, as in `TrainingOptions`.

    Returns:
        The loss in nats per token.
    """
    total, count = torch.zeros(2, dtype=torch.float64, device=processes.device), 0
    for batch, _, loss in _losses(model, batches, processes, precision):
        total[0].add_(loss, alpha=batch.count)
        count += batch.count
    total[1] = count
    loss_sum, tokens = processes.all_reduce_sum(total).tolist()
    return loss_sum / tokens


def evaluation_error(inquiry: Inquiry, batches: Batches, what: str, kept: str, **facts: Any) -> NotFinite:
    """Return the error for a loss of `evaluate` that is not finite; all processes must call it.

    Args:
        inquiry: The search for the cause.
        batches: The data of the loss.
        what: The name of the loss, as the beginning of a sentence.
        kept: A sentence about the state in which the run was saved.
        facts: Further information for the record, as JSON values.
    """
    model, processes, precision = inquiry.model, inquiry.processes, inquiry.options.precision
    own = first_not_finite(model, batches, processes, precision)
    repeat = functools.partial(measured, model, precision, processes.device)
    return inquiry.error(what, own, repeat, kept, training=False, **facts)


def first_not_finite(model: nn.Module, batches: Batches, processes: Processes, precision: str) -> RecordedStep | None:
    """Evaluate again, and return the first batch in this process whose loss is not finite; None if there is none."""
    random = random_states(processes.device)
    with contextlib.closing(_losses(model, batches, processes, precision)) as losses:
        for batch, state, loss in losses:
            if not loss.isfinite():
                return RecordedStep(batch, state, random)
    return None


def measured(model: nn.Module, precision: str, device: torch.device, batch: Any, state: Any) -> Measured:
    """Return the result of a batch in evaluation mode; this synchronises with the device."""
    was_training = model.training
    model.eval()
    with torch.no_grad(), arithmetic(precision), autocast(precision, device):
        loss, after = model.loss(batch, state)  # type: ignore[operator]
    model.train(was_training)
    leaves = [leaf.abs().max().double() for leaf in flatten(after)[0] if leaf.numel()]
    return Measured(loss.item(), 0.0, torch.stack(leaves).max().item() if leaves else 0.0)


def _losses(
    model: nn.Module, batches: Batches, processes: Processes, precision: str
) -> Generator[tuple[Any, Any, torch.Tensor], None, None]:
    """Yield each batch, the state before it and its loss, in evaluation mode."""
    was_training, state = model.training, None
    model.eval()
    try:
        for batch in batches.windows():
            before = state
            with torch.no_grad(), arithmetic(precision), autocast(precision, processes.device):
                loss, state = model.loss(batch, before)  # type: ignore[operator]
            yield batch, before, loss
    finally:
        model.train(was_training)
