"""An allocator for the workspace of a pass: its temporary tensors are in one buffer."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from gatewise.contract.device import Device

_ALIGNMENT = 512  # bytes, as in PyTorch's allocator


def bytes_together(sizes: Iterable[int]) -> int:
    """Return the size of a buffer for consecutive tensors of the given sizes, in bytes."""
    return sum(_rounded(size) for size in sizes)


def _rounded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


@functools.lru_cache(maxsize=4096)
def _strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides = [1]
    for size in reversed(sizes[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides[: len(sizes)]))


class Allocator(Protocol):
    """An object that allocates tensors, such as a tensor, or one that provides memory of its own."""

    def new_empty(self, *shape: Any, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor."""
        ...


class Scratch:
    """An allocator of temporary tensors from one buffer, one after another.

    Tensors beyond the end of the buffer, or without one, are allocated by PyTorch. If a pass allocates all its
    temporary tensors here, their addresses are the same whenever the address of the buffer is.

    Args:
        like: A tensor with the device and the default dtype.
        memory: The buffer, a tensor of bytes; None to allocate every tensor with PyTorch.
        device: The properties of the device to compute for; None for those of the device of `like`.

    Attributes:
        needed: The size in bytes of a buffer that could have provided all tensors so far.
    """

    def __init__(self, like: Tensor, memory: Tensor | None = None, device: Device | None = None) -> None:
        self.needed = 0
        self._device = device
        self._like = like
        self._memory = memory
        self._words: dict[torch.dtype, tuple[Tensor, int]] = {}  # the buffer in other dtypes, and where it begins
        self._used = 0

    @property
    def device(self) -> Device:
        """The properties of the device that the tensors are for."""
        return self._device or Device.probe(self._like.device)

    def new_empty(self, *shape: int | Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """Return an uninitialized tensor, as `Tensor.new_empty` does."""
        sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
        dtype = dtype or self._like.dtype
        count = math.prod(sizes) * dtype.itemsize  # type: ignore[arg-type]
        start, self._used = self._used, self._used + _rounded(count)
        self.needed = max(self.needed, self._used)
        if self._memory is None or self._used > self._memory.numel():
            return self._like.new_empty(sizes, dtype=dtype)  # type: ignore[arg-type]
        # One operator: a pass allocates dozens of tensors, and the CPU's time for them is that of the call.
        words, first = self._words.get(dtype) or self._in_words(dtype, self._memory)
        return words.as_strided(sizes, _strides(sizes), first + start // dtype.itemsize)  # type: ignore[arg-type]

    def _in_words(self, dtype: torch.dtype, memory: Tensor) -> tuple[Tensor, int]:
        words = memory[: memory.numel() // _ALIGNMENT * _ALIGNMENT].view(dtype)
        self._words[dtype] = words, int(words.storage_offset())
        return self._words[dtype]

    @contextlib.contextmanager
    def frame(self) -> Iterator[None]:
        """Free all tensors that are allocated in the block at its end; they must not be used afterwards."""
        before = self._used
        try:
            yield
        finally:
            self._used = before
