"""The precisions of training: float32, TensorFloat-32, bfloat16."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def arithmetic(precision: str) -> Iterator[None]:
    """Allow or forbid TensorFloat-32 products inside the context, as `TrainingOptions.precision` says."""
    allowed = precision != "float32"
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """Return the autocast context of a forward pass, which does nothing unless the precision is bfloat16."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16")
