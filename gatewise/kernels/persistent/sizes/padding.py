"""The padding of hidden sizes."""

from __future__ import annotations

import math


def hidden_of(hidden_size: int) -> int:
    """Return the hidden size that the kernels see: a multiple of 8, the rest padded."""
    return math.ceil(hidden_size / 8) * 8
