"""Launching the Triton kernel of `softmax_program`; this module imports without Triton."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gatewise.contract import triton_kernels

# In a trial on an H200 this was faster than a program that holds a row of 17,192 logits in registers.
_BLOCK, _WARPS = 2048, 8


def launch(scores: Tensor, targets: Tensor, losses: Tensor, smoothing: float, *, gradient: bool) -> None:
    """Write the loss of each row and, with `gradient`, overwrite the logits by their gradient.

    Args:
        scores: The logits [N, V], float32 or 16 bits, with any stride between rows.
        targets: The target tokens, int64 [N].
        losses: The tensor for the losses, float32 [N].
        smoothing: The fraction of the target distribution that is spread evenly over all tokens.
        gradient: Whether to overwrite the logits by their gradient.
    """
    count, vocabulary = scores.shape
    triton_kernels.launch(
        _FUNCTION, (count,), (scores, targets, losses, vocabulary, scores.stride(0), smoothing),
        num_warps=_WARPS, SMOOTH=smoothing > 0, GRADIENT=gradient, BLOCK=_BLOCK,
    )  # fmt: skip


def launches(
    vocabulary: int, width: int, dtype: torch.dtype, smoothing: float, *, gradient: bool
) -> list[triton_kernels.TritonLaunch]:
    """Return the launches of a call of `launch` on a GPU, for compiling them ahead of it.

    Args:
        vocabulary: The number of logits of a row, V.
        width: The number of elements from one row to the next.
        dtype: The dtype of the logits.
        smoothing: As for `launch`.
        gradient: As for `launch`.
    """
    scores = torch.empty(1, width, dtype=dtype, device="meta")[:, :vocabulary]
    targets, losses = (torch.empty(1, dtype=each, device="meta") for each in (torch.int64, torch.float32))
    with triton_kernels.noted() as found:
        launch(scores, targets, losses, smoothing, gradient=gradient)
    return found


def _load() -> Any:
    from gatewise.models.softmax_program import softmax_program

    return softmax_program


_FUNCTION = triton_kernels.TritonFunction(_load)
