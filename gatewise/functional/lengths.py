"""The lengths of sequences and the batch sizes of packed batches: checked, and copied where they are read again.

A caller may change its lengths after the call, before a backward pass reads them; such a call keeps a copy.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gatewise.contract.errors import ArgumentError, DeviceError, DtypeError, ShapeError, sentence

_KINDS = "a tensor, an array or a sequence of integers"


def checked_lengths(lengths: Any, time: int, batch: int, device: torch.device) -> tuple[Tensor, int | None]:
    """Return lengths as int64, on the GPU of x or on the CPU, and the longest one where reading it waits for no GPU.

    Lengths on the CPU are copied. Lengths on the GPU are not, nor are their values checked: `bounded` does both.

    Args:
        lengths: The lengths as the caller gave them.
        time: T, the largest length that is valid.
        batch: B, the number of lengths.
        device: The device of x.

    Raises:
        ArgumentError: `lengths` is neither a tensor, nor an array, nor a sequence.
        DtypeError: The lengths are no integers.
        DeviceError: The lengths are on another device than x and the CPU.
        ShapeError: The number of lengths is not B, or a length is not in [0, T].
    """
    lengths = _checked_tensor(lengths, batch, device)
    if lengths.is_cuda:
        return lengths if lengths.dtype is torch.int64 else lengths.to(torch.int64), None
    lengths = lengths.to(torch.int64, copy=True)  # integers have no gradient, so nothing is recorded
    if lengths.device.type != "cpu" or batch == 0:
        return lengths, None
    if torch._C._are_functorch_transforms_active():  # their tensors have numbers, but no memory to make a list of
        ends = _ends(lengths)
        if ends is None:
            return lengths, None
        low, high = ends
    else:
        each = lengths.tolist()
        low, high = min(each), max(each)
    _check_range(low, high, time)
    return lengths, high


def read_lengths(lengths: Any, time: int, batch: int, device: torch.device) -> tuple[Tensor, int, int]:
    """Return lengths on a CPU as int64, the shortest and the longest; they may be the caller's own tensor.

    Args:
        lengths: The lengths as the caller gave them.
        time: T, the largest length that is valid.
        batch: B, the number of lengths, at least one.
        device: The device of x, a CPU.

    Raises:
        GatewiseError: The errors are those of `checked_lengths`.
    """
    lengths = _checked_tensor(lengths, batch, device)
    each = lengths.tolist()
    low, high = min(each), max(each)
    _check_range(low, high, time)
    return lengths if lengths.dtype is torch.int64 else lengths.to(torch.int64), low, high


def _ends(lengths: Tensor) -> tuple[int, int] | None:
    """Return the least and the largest length inside of `torch.func`; None if there are none.

    Inside of `vmap` every mapped call has lengths of its own. No call may read their values, but the tensor below the
    transforms, which has those of all calls, may be read.
    """
    while torch._C._functorch.is_functorch_wrapped_tensor(lengths):  # type: ignore[attr-defined]
        lengths = torch._C._functorch.get_unwrapped(lengths)  # type: ignore[attr-defined]
    if not lengths.numel():
        return None
    with torch._C._DisableFuncTorch():  # type: ignore[attr-defined]
        low, high = lengths.aminmax()
        return int(low), int(high)


def _checked_tensor(lengths: Any, batch: int, device: torch.device) -> Tensor:
    if not isinstance(lengths, Tensor):
        lengths = as_tensor(lengths)
    elif lengths.layout is not torch.strided:
        raise ArgumentError(
            sentence("lengths", "a dense tensor", f"one of {lengths.layout}", "Call .to_dense() on it.")
        )
    dtype = lengths.dtype
    if dtype is not torch.int64 and (dtype.is_floating_point or dtype == torch.bool or dtype.is_complex):
        raise DtypeError(sentence("lengths", "integers", dtype))
    if lengths.shape != (batch,):
        raise ShapeError(sentence("lengths", f"one integer per sequence, [{batch}]", list(lengths.shape)))
    if not lengths.is_cpu and lengths.device != device:
        if device.type != "cpu" or lengths.is_meta:
            where = f"on {device} like x, or on the CPU" if device.type != "cpu" else "on the CPU like x"
            raise DeviceError(sentence("lengths", where, f"on {lengths.device}"))
        lengths = lengths.cpu()
    return lengths


def _check_range(low: int, high: int, time: int) -> None:
    if low < 0 or high > time:
        raise ShapeError(sentence("lengths", f"between 0 and T = {time}", low if low < 0 else high))


def as_tensor(lengths: Any) -> Tensor:
    """Return lengths that are no tensor as a tensor on the CPU.

    Args:
        lengths: An array or a sequence of integers.

    Raises:
        ArgumentError: `lengths` is neither an array nor a sequence.
        DtypeError: A length is no integer.
        ShapeError: A length does not fit into 64 bits.
    """
    if hasattr(lengths, "__array__"):
        array = np.asarray(lengths)
        if array.dtype.kind in "iu":
            return torch.from_numpy(array.astype(np.int64))
        if array.dtype.kind != "O" or array.ndim != 1:
            raise DtypeError(sentence("lengths", "integers", f"an array of {array.dtype}"))
        lengths = array.tolist()
    if not isinstance(lengths, Sequence) or isinstance(lengths, (str, bytes)):
        raise ArgumentError(sentence("lengths", _KINDS, type(lengths).__name__))
    found = [_integer(length, place) for place, length in enumerate(lengths)]
    try:
        return torch.tensor(found, dtype=torch.int64, device="cpu")
    except (OverflowError, RuntimeError, ValueError):  # which of them depends on the version of PyTorch
        raise ShapeError(sentence("lengths", "integers of 64 bits", max(found, key=abs))) from None


def bounded(lengths: Tensor, time: int, h0: Tensor, nan: Tensor | float = torch.nan) -> tuple[Tensor, Tensor]:
    """Return a copy of lengths on the GPU within [0, time], and h0 with NaN in the rows whose length was not.

    Args:
        lengths: The lengths [B], int64 on the GPU.
        time: T, the number of steps.
        h0: The initial hidden state [L*D, B, R].
        nan: NaN, as a number or as a tensor [] of the dtype of h0.
    """
    # Reading the values on the CPU would wait for the GPU, so a length out of range cannot raise here. It must not pass
    # for a valid one either: the row's state, and with it everything computed from it, becomes NaN.
    found = lengths.clamp(0, time)
    return found, torch.where((found == lengths)[:, None], h0, nan)


def checked_batch_sizes(batch_sizes: object, tokens: int) -> tuple[int, int]:
    """Return the numbers of steps and sequences of a packed batch, T and B.

    Args:
        batch_sizes: The batch sizes as the caller gave them.
        tokens: N, the sum that they must have.

    Raises:
        ArgumentError: `batch_sizes` is no tensor.
        DtypeError: The dtype is not int64.
        DeviceError: The tensor is not on the CPU.
        ShapeError: The tensor is not one row of positive numbers that do not increase and whose sum is N.
    """
    if not isinstance(batch_sizes, Tensor):
        expectation = "a tensor, as `PackedSequence.batch_sizes`"
        raise ArgumentError(sentence("batch_sizes", expectation, type(batch_sizes).__name__))
    if batch_sizes.dtype != torch.int64:
        raise DtypeError(sentence("batch_sizes", "torch.int64", batch_sizes.dtype))
    if not batch_sizes.is_cpu:
        raise DeviceError(sentence("batch_sizes", "on the CPU", f"on {batch_sizes.device}"))
    if batch_sizes.dim() != 1:
        raise ShapeError(sentence("batch_sizes", "of rank 1, [T]", list(batch_sizes.shape)))
    sizes = batch_sizes.tolist()
    if sizes and (sizes[-1] < 1 or sizes != sorted(sizes, reverse=True)):
        raise ShapeError(sentence("batch_sizes", "positive numbers that do not increase", _few(sizes)))
    if sum(sizes) != tokens:
        expectation = f"numbers whose sum is N = {tokens}, the rows of x"
        raise ShapeError(sentence("batch_sizes", expectation, f"{_few(sizes)} with the sum {sum(sizes)}"))
    return len(sizes), sizes[0] if sizes else 0


def _integer(length: Any, place: int) -> int:
    if not isinstance(length, (bool, np.bool_)) and not (isinstance(length, Tensor) and length.dtype == torch.bool):
        try:
            return operator.index(length)
        except TypeError:
            pass
    shown = str(length.dtype) if isinstance(length, (Tensor, np.ndarray)) else repr(length)
    raise DtypeError(sentence("lengths", "integers", f"{shown} at place {place}"))


def _few(sizes: list[int]) -> str:
    return str(sizes) if len(sizes) <= 8 else f"[{', '.join(map(str, sizes[:8]))}, ...]"
