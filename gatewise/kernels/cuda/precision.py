"""Select the precision of PyTorch's matrix products within a block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from gatewise.contract.problem import Problem


@contextlib.contextmanager
def products_in_tf32(problem: Problem) -> Iterator[None]:
    """Let `torch.mm` use TF32 in the block exactly if the problem allows it.

    The precision of `nn.LSTM` is determined by `torch.backends.cudnn.allow_tf32` (True by default), that of `torch.mm`
    by `torch.backends.cuda.matmul` (no TF32 by default). The setting applies to the whole process: while the block
    issues its launches, float32 products of other threads may use TF32 as well.

    Args:
        problem: The problem; for dtypes other than float32 nothing changes.
    """
    matmul = torch.backends.cuda.matmul
    if problem.dtype != torch.float32:
        yield
        return
    # `fp32_precision` exists from PyTorch 2.9 on. Once a user has set it, reading `allow_tf32` raises an error.
    if hasattr(matmul, "fp32_precision"):
        setting, wanted = "fp32_precision", "tf32" if problem.allow_tf32 else "ieee"
    else:
        setting, wanted = "allow_tf32", problem.allow_tf32
    before = getattr(matmul, setting)
    if before == wanted:
        yield
        return
    setattr(matmul, setting, wanted)
    try:
        yield
    finally:
        setattr(matmul, setting, before)


@contextlib.contextmanager
def sums_in_float32() -> Iterator[None]:
    """Let `torch.mm` add up float16 products in float32 in the block, also where the user allows sums in float16.

    Float16 sums overflow at 65504. As in `products_in_tf32`, the setting applies to the whole process.
    """
    # PyTorch 2.6 does not have the setting, and adds up in float32.
    before = hasattr(torch._C, "_get_cublas_allow_fp16_accumulation") and torch._C._get_cublas_allow_fp16_accumulation()
    if not before:
        yield
        return
    torch._C._set_cublas_allow_fp16_accumulation(False)
    try:
        yield
    finally:
        torch._C._set_cublas_allow_fp16_accumulation(before)
