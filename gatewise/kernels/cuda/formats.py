"""The macro DTYPE, by which the CUDA sources are compiled for a dtype, and the dtypes that tensor cores support."""

from __future__ import annotations

from collections.abc import Iterable

import torch

NUMBERS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2, torch.float64: 3}
"""The value of the macro DTYPE for each dtype, as in `numbers.cuh`."""

TENSOR_CORE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""The dtypes that `matrix.cuh` multiplies on tensor cores."""


def macros(dtype: torch.dtype) -> dict[str, int]:
    """Return the macro that selects the number format of a dtype."""
    return {"DTYPE": NUMBERS[dtype]}


def names(dtypes: Iterable[torch.dtype]) -> str:
    """Return the names of dtypes, separated by commas."""
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
