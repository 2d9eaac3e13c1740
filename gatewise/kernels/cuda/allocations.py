"""Measure how much memory a function would allocate, by running it on tensors of the device "meta"."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _pop_mode, _push_mode

from gatewise.contract.device import Device
from gatewise.kernels.cuda.scratch import Scratch, bytes_together

_Found = TypeVar("_Found")


def counting_scratch(dtype: torch.dtype, device: Device | None = None) -> Scratch:
    """Return a workspace that hands out tensors of the device "meta"; its `needed` is the result of a dry run.

    Args:
        dtype: The default dtype.
        device: The properties of the device to compute for; they are not needed if nothing asks for them.
    """
    endless = torch.empty(1 << 60, dtype=torch.uint8, device="meta")
    return Scratch(endless.new_empty(0, dtype=dtype), endless, device)


def run_dry(function: Callable[[], _Found]) -> _Found:
    """Return the result of a function that computes with tensors of the device "meta".

    It runs in a thread of its own, because modes of PyTorch, which belong to a thread, would take part otherwise: those
    of a compiler, of `torch.func`, or a count of operations by the user.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="gatewise-dry-run") as thread:
        return thread.submit(function).result()


class Allocations:
    """The bytes of the tensors that operators allocate in a block, as PyTorch's allocator for CUDA rounds them.

    Operators that only write to tensors which exist are not executed: they allocate nothing, and PyTorch's checks of
    their arguments take longer than everything else in a dry run.

    Attributes:
        now: The bytes of the tensors that exist at present.
        peak: The largest number of bytes that existed at the same time.
    """

    # Entering a `TorchDispatchMode` sets flags of the process, which threads that compile at the same time may restore
    # in the wrong order. This is a mode of the thread alone.

    def __init__(self) -> None:
        self.now = self.peak = 0

    def __enter__(self) -> Self:
        _push_mode(self)  # type: ignore[arg-type]
        return self

    def __exit__(self, *error: object) -> None:
        _pop_mode()

    def __torch_dispatch__(
        self, operator: Any, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        written, allocates = _effects(operator)
        if written is not None:
            place, name = written
            return args[place] if place < len(args) else given[name]
        found = operator(*args, **given)
        if allocates:
            for tensor in (found,) if isinstance(found, Tensor) else found:
                self._add(tensor)
        return found

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        size = bytes_together([storage.nbytes()])
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.now -= size


@functools.cache
def _effects(operator: Any) -> tuple[tuple[int, str] | None, bool]:
    """Return the only argument that an operator writes to, as its place and name, or None; and whether it allocates."""
    schema = operator._schema
    written = [
        (place, own.name)
        for place, own in enumerate(schema.arguments)
        if own.alias_info is not None and own.alias_info.is_write
    ]
    allocates = any(own.alias_info is None and "Tensor" in str(own.type) for own in schema.returns)
    return written[0] if len(written) == 1 else None, allocates
