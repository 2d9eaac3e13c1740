"""The time of training until the loss falls below a given value."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

_LOOK = 5
"""The number of steps over which the mean loss is computed and checked; each check synchronises with the device."""


def seconds_to_loss(
    step: Callable[[], Tensor], loss: float, most: int, device: torch.device
) -> tuple[float, int] | None:
    """Train until the mean loss of a few steps is below a given value.

    Args:
        step: A function that trains on the next batch and returns its loss.
        loss: The value to reach, in nats per token.
        most: The largest number of steps.
        device: The device of the training.

    Returns:
        The time in seconds and the number of steps; None if the value was not reached.
    """
    _wait(device)
    began = time.perf_counter()
    for done in range(_LOOK, most + 1, _LOOK):
        total = torch.zeros((), device=device, dtype=torch.float64)
        for _ in range(_LOOK):
            # Added in each step, because a replayed step overwrites its loss in the next replay.
            total += step()
        if float(total) / _LOOK < loss:
            return time.perf_counter() - began, done
    return None


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
