"""How long sequences are, from what a user gives to a tensor that is the call's own.

A caller may change its lengths after the call, before the backward pass reads them again: what is kept is a copy.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from gatewise.contract.errors import ArgumentError, DeviceError, DtypeError, ShapeError, sentence

_KINDS = "a tensor, an array or a sequence of integers"


def checked_lengths(lengths: Any, time: int, batch: int, device: torch.device) -> tuple[Tensor, int | None]:
    """Return lengths as int64, on x's GPU or on the CPU, and the longest one where it can be read without waiting.

    Args:
        lengths: As the user gave them.
        time: T, which none may exceed.
        batch: B, how many there must be.
        device: Of x.

    Raises:
        ArgumentError: They are neither a tensor, nor an array, nor a sequence.
        DtypeError: They are no integers.
        DeviceError: They are on another device than x and the CPU.
        ShapeError: There are more or less than B, or one is not in [0, T].
    """
    if not isinstance(lengths, Tensor):
        lengths = as_tensor(lengths)
    elif lengths.layout is not torch.strided:
        raise ArgumentError(
            sentence("lengths", "a dense tensor", f"one of {lengths.layout}", "Call .to_dense() on it.")
        )
    if lengths.dtype.is_floating_point or lengths.dtype == torch.bool or lengths.dtype.is_complex:
        raise DtypeError(sentence("lengths", "integers", lengths.dtype))
    if lengths.shape != (batch,):
        raise ShapeError(sentence("lengths", f"one integer a sequence, [{batch}]", list(lengths.shape)))
    if lengths.device != device and lengths.device.type != "cpu":
        if device.type != "cpu" or lengths.is_meta:
            where = f"on {device} like x, or on the CPU" if device.type != "cpu" else "on the CPU like x"
            raise DeviceError(sentence("lengths", where, f"on {lengths.device}"))
        lengths = lengths.cpu()
    lengths = lengths.detach().to(torch.int64, copy=True)
    if lengths.device.type != "cpu" or batch == 0:
        return lengths, None
    low, high = (int(bound) for bound in torch.aminmax(lengths))
    if low < 0 or high > time:
        raise ShapeError(sentence("lengths", f"between 0 and T = {time}", low if low < 0 else high))
    return lengths, high


def as_tensor(lengths: Any) -> Tensor:
    """Return lengths that are no tensor as one, on the CPU.

    Args:
        lengths: An array of any integers, or a sequence of them.

    Raises:
        ArgumentError: They are something else.
        DtypeError: One is no integer.
    """
    if hasattr(lengths, "__array__"):
        array = np.asarray(lengths)
        if array.dtype.kind in "iu":
            return torch.from_numpy(array.astype(np.int64))
        if array.dtype.kind != "O" or array.ndim != 1:
            raise DtypeError(sentence("lengths", "integers", f"an array of {array.dtype}"))
        lengths = array.tolist()
    if not isinstance(lengths, Sequence) or isinstance(lengths, str | bytes):
        raise ArgumentError(sentence("lengths", _KINDS, type(lengths).__name__))
    found = [_integer(length, place) for place, length in enumerate(lengths)]
    try:
        return torch.tensor(found, dtype=torch.int64, device="cpu")
    except (OverflowError, RuntimeError, ValueError):  # which of them depends on the version of PyTorch
        raise ShapeError(sentence("lengths", "integers of 64 bits", max(found, key=abs))) from None


def lie_beside(lengths: Tensor | Sequence[int], x: Tensor) -> TypeGuard[Tensor]:
    """Whether lengths are as kernels read them, on x's GPU, and can be wrong in their values alone."""
    return (
        isinstance(lengths, Tensor)
        and lengths.is_cuda
        and lengths.dtype is torch.int64
        and lengths.device == x.device
        and x.dim() == 3
        and lengths.shape == x.shape[1:2]
    )


def without_sync(lengths: Tensor, time: int, h0: Tensor) -> tuple[Tensor, Tensor]:
    """Return lengths on the GPU within [0, time], and h0 with NaN where they were not."""
    # Reading the values back would stop the GPU, so a length out of range cannot raise here. It must not pass for a
    # right one either: the row's state, and with it everything computed from it, becomes NaN.
    bounded = lengths.clamp(0, time)
    return bounded, torch.where((bounded == lengths)[:, None], h0, torch.nan)


def checked_batch_sizes(batch_sizes: object, tokens: int) -> Tensor:
    """Return the sizes of a packed batch as a tensor of the call's own.

    Args:
        batch_sizes: As the user gave them.
        tokens: N, their sum.

    Raises:
        ArgumentError: They are no tensor.
        DtypeError: They are not int64.
        DeviceError: They are not on the CPU.
        ShapeError: They are not one row of positive numbers that do not increase and whose sum is N.
    """
    if not isinstance(batch_sizes, Tensor):
        expectation = "a tensor, as `PackedSequence.batch_sizes`"
        raise ArgumentError(sentence("batch_sizes", expectation, type(batch_sizes).__name__))
    if batch_sizes.dtype != torch.int64:
        raise DtypeError(sentence("batch_sizes", "torch.int64", batch_sizes.dtype))
    if batch_sizes.device.type != "cpu":
        raise DeviceError(sentence("batch_sizes", "on the CPU", f"on {batch_sizes.device}"))
    if batch_sizes.dim() != 1:
        raise ShapeError(sentence("batch_sizes", "of rank 1, [T]", list(batch_sizes.shape)))
    sizes = batch_sizes.tolist()
    if sizes and (sizes[-1] < 1 or sizes != sorted(sizes, reverse=True)):
        raise ShapeError(sentence("batch_sizes", "positive numbers that do not increase", _few(sizes)))
    if sum(sizes) != tokens:
        expectation = f"numbers whose sum is N = {tokens}, the rows of x"
        raise ShapeError(sentence("batch_sizes", expectation, f"{_few(sizes)} with the sum {sum(sizes)}"))
    return batch_sizes.clone()


def _integer(length: Any, place: int) -> int:
    if not isinstance(length, bool | np.bool_) and not (isinstance(length, Tensor) and length.dtype == torch.bool):
        try:
            return operator.index(length)
        except TypeError:
            pass
    shown = str(length.dtype) if isinstance(length, Tensor | np.ndarray) else repr(length)
    raise DtypeError(sentence("lengths", "integers", f"{shown} at place {place}"))


def _few(sizes: list[int]) -> str:
    return str(sizes) if len(sizes) <= 8 else f"[{', '.join(map(str, sizes[:8]))}, ...]"
