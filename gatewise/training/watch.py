"""How the host learns that a step was not finite, and what it needs to repeat that step."""

from __future__ import annotations

import collections

import torch

from gatewise.training.finite_guard import FiniteGuard
from gatewise.training.randomness import random_states

EVERY = {"cpu": 1, "cuda": 25}
"""Steps between two looks at the flag, by kind of device; for a CPU nobody waits."""


class Watch:
    """Looks at the flag of a guard without waiting for the device.

    On a GPU, a copy of the flag sets out every so many steps and is read the same number of steps later, when it has
    long arrived. Which steps these are depends on their number alone, and the flags of several processes are equal, so
    that all of them find the same at the same step without asking each other.

    Args:
        guard: Of the steps.
        device: Where the model is.
    """

    def __init__(self, guard: FiniteGuard, device: torch.device) -> None:
        self._guard, self._device = guard, device
        self._every = EVERY[device.type]
        # Enough for the first step that was not finite when it is found as late as can be.
        self._random: collections.deque[dict[str, torch.Tensor]] = collections.deque(maxlen=2 * self._every + 1)
        self._copy: torch.Tensor | None = None
        self._arrived: torch.cuda.Event | None = None

    def begin(self) -> None:
        """Remember the random states that a step begins with."""
        self._random.append(random_states(self._device))

    def skipped(self, step: int) -> int:
        """Return how many steps have changed nothing, 0 when none is known of yet.

        Args:
            step: Steps done.
        """
        if step % self._every:
            return 0
        if self._device.type == "cpu":
            return self.skipped_now()
        known = 0.0
        if self._arrived is not None and self._copy is not None:
            self._arrived.synchronize()
            known = self._copy.item()
        else:
            self._copy = torch.zeros((), device="cpu", pin_memory=True)
            self._arrived = torch.cuda.Event()
        assert self._copy is not None
        self._copy.copy_(self._guard.skipped, non_blocking=True)
        self._arrived.record()
        return self.skipped_now() if known else 0

    def skipped_now(self) -> int:
        """Wait for the device, and return how many steps have changed nothing."""
        return int(self._guard.skipped.item())

    def random_before(self, skipped: int) -> dict[str, torch.Tensor]:
        """Return the random states before the first of so many steps."""
        return self._random[-skipped]
