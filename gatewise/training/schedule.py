"""Learning rate schedules."""

from __future__ import annotations

import math
from typing import Any

import torch

from gatewise.training.options import TrainingOptions


class Schedule:
    """A schedule that sets the learning rate of an optimizer before each step.

    ``rate = learning_rate * min(1, (step + 1) / warmup_steps) * shape(step)``, where the shape is 1 if constant; ``(1 +
    cos(pi * progress)) / 2`` after the warm-up for cosine; `plateau_factor` to the power of the number of plateaus. The
    rate of a step is also multiplied by the number of tokens in its batch divided by `rate_tokens`, if that is set.

    Args:
        optimizer: The optimizer; its learning rate is a tensor, as `build_optimizer` makes it.
        options: The training options, with the schedule.
        total_steps: The number of steps in the whole run, for ``"cosine"``.

    Attributes:
        prepared: The learning rate of the last step that was prepared; NaN before the first.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, options: TrainingOptions, total_steps: int) -> None:
        # Not `torch.optim.lr_scheduler`: it computes in the float32 of the tensor, with kernels in every step and
        # mostly from the previous rate, and cannot return the rate of an earlier step, which the record of a step
        # needs.
        self._optimizer = optimizer
        self._kind = options.schedule
        self._peak = options.learning_rate
        self._warmup = options.warmup_steps
        self._total = total_steps
        self._rate_tokens = options.rate_tokens
        self._factor = options.plateau_factor
        self._patience = options.plateau_patience
        self._best = math.inf
        self._failures = 0
        self._reductions = 0
        self.prepared = math.nan

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0, for a batch of `rate_tokens` tokens."""
        rate = self._peak * self._factor**self._reductions
        if step < self._warmup:
            return rate * (step + 1) / self._warmup
        if self._kind == "cosine":
            progress = (step - self._warmup) / max(1, self._total - self._warmup)
            rate *= (1 + math.cos(math.pi * min(1.0, progress))) / 2
        return rate

    def prepare(self, step: int, tokens: int) -> None:
        """Set the optimizer's learning rate for this step, in its tensors.

        Args:
            step: The number of the step, counted from 0.
            tokens: The number of tokens of its batch, over all processes.
        """
        rate = self.rate(step) * (tokens / self._rate_tokens if self._rate_tokens else 1.0)
        if rate == self.prepared:
            return
        self.prepared = rate
        for group in self._optimizer.param_groups:
            group["lr"].fill_(rate)

    def evaluated(self, loss: float) -> None:
        """Update the schedule with a validation loss."""
        if loss < self._best:
            self._best, self._failures = loss, 0
            return
        self._failures += 1
        if self._kind == "plateau" and self._failures > self._patience:
            self._failures = 0
            self._reductions += 1

    def facts(self) -> dict[str, float | None]:
        """Return the state, as JSON values."""
        return {
            "best": self._best if math.isfinite(self._best) else None,
            "failures": self._failures,
            "reductions": self._reductions,
        }

    def restore(self, facts: dict[str, Any]) -> None:
        """Restore the state that `facts()` returned."""
        self._best = math.inf if facts["best"] is None else float(facts["best"])
        self._failures, self._reductions = int(facts["failures"]), int(facts["reductions"])
