"""How long training takes to come to a given loss."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

_LOOK = 5
"""Steps between two looks at the loss, whose mean over them counts; looking waits for the device."""


def seconds_to_loss(
    step: Callable[[], Tensor], loss: float, most: int, device: torch.device
) -> tuple[float, int] | None:
    """Train until the mean loss of a few steps is below a given one.

    Args:
        step: Trains on the next batch and returns its loss.
        loss: What to come to, nats a token.
        most: Steps after which it is given up.
        device: Where it works.

    Returns:
        Seconds and steps; None when it was given up.
    """
    _wait(device)
    began = time.perf_counter()
    for done in range(_LOOK, most + 1, _LOOK):
        total = torch.zeros((), device=device, dtype=torch.float64)
        for _ in range(_LOOK):
            # Added at once: a replayed step writes its next loss to the same place.
            total += step()
        if float(total) / _LOOK < loss:
            return time.perf_counter() - began, done
    return None


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
