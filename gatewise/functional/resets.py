"""The resets of a call, which divide its sequences into episodes: checked, and copied for the call.

A caller may write over its resets after the call, as buffers of experience are, before the backward pass reads them
again, so the call keeps a copy. Values are never read on the CPU; every integer but 0 is a reset.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gatewise.cells import Cell
from gatewise.contract.errors import ArgumentError, DeviceError, DtypeError, ShapeError, sentence
from gatewise.functional.initial_states import initial_states


def copied_resets(resets: Any, x_shape: Sequence[int], device: torch.device, *, packed: bool) -> Tensor:
    """Return a copy of resets as bool [T, B].

    Args:
        resets: The resets as the caller gave them.
        x_shape: The shape of the input; its first two sizes are T and B.
        device: The device of the input.
        packed: Whether the input is a packed batch, which takes no resets.

    Raises:
        ArgumentError: `resets` is not a dense tensor, or the input is packed.
        DtypeError: The dtype is neither bool nor an integer type.
        ShapeError: The shape is not [T, B].
        DeviceError: The tensor is on another device than the input.
    """
    if packed:
        refuse_packed(resets)
    _check_resets_of(x_shape, device, resets)
    return resets.detach().to(torch.bool, copy=True, memory_format=torch.contiguous_format)


def reset_before_one_step(
    resets: Any, x: Tensor, state: tuple[Tensor, ...] | None, cell: Cell, bidirectional: bool
) -> tuple[tuple[Tensor, ...] | None, Any]:
    """Return the initial states of a call of one time step without the rows that are reset, and None for the resets.

    Without resets, more kernels accept the call. The reverse direction begins at this step with the given states, which
    a reset before the step does not change. States that do not fit are returned as they are, with the resets, for the
    call to refuse.

    Args:
        resets: The resets as the caller gave them.
        x: The input [1, B, I].
        state: The hidden state [L*D, B, R] and the other states side by side [L*D, B, S*H], as far as the cell has
            them; None for the states of a new episode.
        cell: The cell.
        bidirectional: Whether every layer has a reverse direction.

    Raises:
        ArgumentError: `resets` is not a dense tensor.
        DtypeError: The dtype is neither bool nor an integer type.
        ShapeError: The shape is not [1, B].
        DeviceError: The tensor is on another device than the input.
    """
    _check_resets_of(x.shape, x.device, resets)
    if state is None:
        return None, None
    layers = state[0].shape[0] if state[0].dim() else 0
    sizes = [(*each.shape[:-1], each.device) for each in state]
    if set(sizes) != {(layers, x.shape[1], x.device)} or layers % (1 + bidirectional):
        return state, resets
    rows = [resets.detach().to(torch.bool, copy=True)]  # the caller may write over its own before the backward pass
    rows += [torch.zeros_like(rows[0])] if bidirectional else []
    begin = torch.cat(rows * (layers // len(rows))).unsqueeze(-1)  # [L*D, B, 1]
    if not cell.initial_states:
        return tuple([each.masked_fill(begin, 0) for each in state]), None
    zeros = [torch.zeros_like(each) for each in (state[0], state[-1])]
    initial = initial_states(cell, *zeros)
    return tuple([torch.where(begin, first, each) for first, each in zip(initial, state, strict=False)]), None


def _check_resets_of(x_shape: Sequence[int], device: torch.device, resets: Any) -> None:
    check_resets(resets, x_shape[:2], "[T, B]")
    if resets.device != device:
        advice = "Move it with .to(x.device)."
        raise DeviceError(sentence("resets", f"on {device} like x", f"one on {resets.device}", advice))


def check_resets(resets: Any, shape: Sequence[int], form: str, name: str = "resets") -> None:
    """Check the kind, dtype and shape of resets.

    Args:
        resets: The resets as the caller gave them.
        shape: The shape that they must have.
        form: The letters of that shape, for the error.
        name: The name of the argument, for the error.

    Raises:
        ArgumentError: `resets` is not a dense tensor.
        DtypeError: The dtype is neither bool nor an integer type.
        ShapeError: The shape is another one.
    """
    if not isinstance(resets, Tensor):
        advice = "torch.as_tensor makes one of an array or a list."
        raise ArgumentError(sentence(name, "a tensor", type(resets).__name__, advice))
    if resets.layout is not torch.strided:
        raise ArgumentError(sentence(name, "a dense tensor", f"one of {resets.layout}", "Call .to_dense() on it."))
    if resets.dtype.is_floating_point or resets.dtype.is_complex:
        advice = "Convert it with .bool()."
        raise DtypeError(sentence(name, "bool or integers", resets.dtype, advice))
    if tuple(resets.shape) != tuple(shape):
        each = "step" if name == "resets" else "sequence"
        raise ShapeError(sentence(name, f"one value for each {each}, {form} = {list(shape)}", list(resets.shape)))


def refuse_packed(resets: object) -> None:
    """Raise the error for resets of a packed batch, unless `resets` is None.

    Raises:
        ArgumentError: `resets` is given.
    """
    if resets is not None:
        advice = "Give the padded batch with `lengths` and `resets`."
        raise ArgumentError(sentence("resets", "None for a packed batch", type(resets).__name__, advice))
