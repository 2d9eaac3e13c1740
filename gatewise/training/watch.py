"""How the host detects a step that was not finite, and keeps the random states for repeating it."""

from __future__ import annotations

import collections

import torch

from gatewise.training.finite_guard import FiniteGuard
from gatewise.training.randomness import random_states

EVERY = {"cpu": 1, "cuda": 25}
"""The number of steps between two checks of the flag, by kind of device; on a CPU the check costs nothing."""


class Watch:
    """Checks of the flag of a guard, without synchronising with the device.

    On a GPU, an asynchronous copy of the flag starts every `EVERY` steps and is read the same number of steps later,
    when it has long arrived. The steps of these checks depend only on their number, and the flags of several processes
    are equal, so all processes find the same at the same step without communication.

    Args:
        guard: The guard of the steps.
        device: The device of the model.
    """

    def __init__(self, guard: FiniteGuard, device: torch.device) -> None:
        self._guard, self._device = guard, device
        self._every = EVERY[device.type]
        # As many random states as needed if the first step that was not finite is found as late as possible.
        self._random: collections.deque[dict[str, torch.Tensor]] = collections.deque(maxlen=2 * self._every + 1)
        self._copy: torch.Tensor | None = None
        self._arrived: torch.cuda.Event | None = None

    def begin(self) -> None:
        """Store the random states at the start of a step."""
        self._random.append(random_states(self._device))

    def skipped(self, step: int) -> int:
        """Return the number of steps without effect, as far as it is known; 0 otherwise.

        Args:
            step: The number of completed steps.
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
        """Synchronise with the device, and return the number of steps without effect."""
        return int(self._guard.skipped.item())

    def random_before(self, skipped: int) -> dict[str, torch.Tensor]:
        """Return the random states before the first of the given number of last steps."""
        return self._random[-skipped]
