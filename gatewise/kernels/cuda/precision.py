"""Library products in the precision that nn.LSTM has them in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from gatewise.contract.problem import Problem


@contextlib.contextmanager
def products_in_tf32(problem: Problem) -> Iterator[None]:
    """Let `torch.mm` round float32 operands to TF32 where the problem allows it, and only there.

    nn.LSTM takes its precision from `torch.backends.cudnn.allow_tf32` (True by default), `torch.mm` from
    `torch.backends.cuda.matmul` (exact by default). The setting belongs to the process: for as long as the products are
    being launched, another thread's float32 products may be rounded too.
    """
    matmul = torch.backends.cuda.matmul
    if problem.dtype != torch.float32:
        yield
        return
    # From PyTorch 2.9 on; there, reading the older setting fails once a user has chosen by the newer one.
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
