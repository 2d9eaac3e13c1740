"""Library products in the precision that nn.LSTM has them in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from gatewise.contract.problem import Problem

_REDUCED = {
    torch.float16: "allow_fp16_reduced_precision_reduction",
    torch.bfloat16: "allow_bf16_reduced_precision_reduction",
}


def as_in_nn_lstm(problem: Problem) -> contextlib.AbstractContextManager[None]:
    """Let `torch.mm` be as precise in the block as the products of nn.LSTM are.

    Float32 operands are rounded to TF32 where the problem allows it, and only there: nn.LSTM takes its precision from
    `torch.backends.cudnn.allow_tf32` (True by default), `torch.mm` from `torch.backends.cuda.matmul` (exact by
    default). Sums over many tokens are added up in float32: by default `torch.mm` may add parts of a sum in 16 bits,
    which makes the gradients of the recurrent weights of a long sequence up to sixty times less exact than cuDNN's.

    The settings belong to the process: for as long as the products are being launched, those of other threads are
    computed so, too.
    """
    if problem.dtype == torch.float32:
        return _in_tf32(problem.allow_tf32)
    if problem.dtype in _REDUCED:
        return _with(_REDUCED[problem.dtype], False)
    return contextlib.nullcontext()


def _in_tf32(wanted: bool) -> contextlib.AbstractContextManager[None]:
    # From PyTorch 2.9 on; there, reading the older setting fails once a user has chosen by the newer one.
    if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        return _with("fp32_precision", "tf32" if wanted else "ieee")
    return _with("allow_tf32", wanted)


@contextlib.contextmanager
def _with(setting: str, wanted: object) -> Iterator[None]:
    matmul = torch.backends.cuda.matmul
    before = getattr(matmul, setting)
    if before == wanted:
        yield
        return
    # Of the settings of reductions PyTorch reads one of a pair, and sets both: the other one is not to change.
    other = getattr(matmul, f"{setting}_split_k", None)
    setattr(matmul, setting, wanted if other is None else (wanted, other))
    try:
        yield
    finally:
        setattr(matmul, setting, before if other is None else (before, other))
