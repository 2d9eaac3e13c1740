"""Memory that a pass needs only while it runs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

_ALIGNMENT = 512  # as PyTorch's own allocator rounds


def bytes_together(sizes: Iterable[int]) -> int:
    """Return the bytes that an allocation must have for tensors of so many bytes, one behind the other."""
    return sum(_rounded(size) for size in sizes)


def _rounded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class Scratch:
    """Hands out tensors from one allocation, one behind the other; beyond its end, and without one, from PyTorch.

    The work of a pass that takes all it needs from here lies at the same addresses whenever this allocation does.

    Args:
        like: Gives device and dtype.
        memory: The allocation, in bytes; None to ask PyTorch for every tensor.

    Attributes:
        needed: Bytes that an allocation must have for all that was taken so far.
    """

    def __init__(self, like: Tensor, memory: Tensor | None = None) -> None:
        self.needed = 0
        self._like = like
        self._memory = memory
        self._used = 0

    def new_empty(self, *shape: int | Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """Return an unwritten tensor, as `Tensor.new_empty` does."""
        sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
        dtype = dtype or self._like.dtype
        count = math.prod(sizes) * dtype.itemsize  # type: ignore[arg-type]
        start, self._used = self._used, self._used + _rounded(count)
        self.needed = max(self.needed, self._used)
        if self._memory is None or self._used > self._memory.numel():
            return self._like.new_empty(sizes, dtype=dtype)  # type: ignore[arg-type]
        return self._memory[start : start + count].view(dtype).view(sizes)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def frame(self) -> Iterator[None]:
        """Give back at the end of the block what is taken in it; no tensor from it may be read after it."""
        before = self._used
        try:
            yield
        finally:
            self._used = before
