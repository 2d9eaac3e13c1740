"""Products of a few rows in float32, for which cuBLAS chooses slow kernels and cuBLASLt does not.

If neither factor is transposed, or the right one alone, cuBLAS 13 computes exact float32 products of 7 to 16 rows and
about 100 to 800 terms in 25 to 55 us on an H100, and those of 17 rows in 4 to 10 us. PyTorch computes the product plus
a vector by cuBLASLt instead, which takes 3 to 14 us for as few rows: so a vector of zeros is added
(`benchmarks/few_rows.py`). Products in TF32 are left to cuBLAS.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gatewise.kernels.cuda.scratch import Allocator

MOST_ROWS = 16  # with more rows, cuBLASLt takes longer than cuBLAS
LEAST_TERMS, MOST_TERMS = 80, 768  # with fewer terms cuBLAS is fast, and with more of them cuBLASLt is not


def is_faster_with_zeros(left: Tensor, out: Tensor | None = None) -> bool:
    """Return whether `torch.addmm(zeros, left, right)` takes less time on a GPU than `torch.mm(left, right)`.

    Args:
        left: The left factor [M, K].
        out: The tensor for the product [M, N]; None for a new one.
    """
    rows, terms = left.shape
    if left.dtype != torch.float32 or not 1 < rows <= MOST_ROWS:
        return False
    # PyTorch uses cuBLASLt for results that are contiguous. A factor whose rows are not is a transposed one.
    in_rows = left.stride(1) == 1 and (out is None or out.is_contiguous())
    return in_rows and LEAST_TERMS <= terms <= MOST_TERMS


def zeros_for(out: Tensor, memory: Allocator) -> Tensor:
    """Return as many zeros as a product [..., N] has columns."""
    return memory.new_empty(out.shape[-1], dtype=out.dtype).zero_()
