"""The states of a layer of any cell: as callers give and get them, and side by side as calls take them."""

from __future__ import annotations

import torch
from torch import Tensor

from gatewise.cells import Cell
from gatewise.contract.errors import ArgumentError, DeviceError, DtypeError, ShapeError, sentence

States = Tensor | tuple[Tensor, ...]
"""The states of a layer: h; with other states of the cell a tuple of h and of them, in the cell's order."""


def checked_states(cell: Cell, hx: object) -> tuple[Tensor, ...]:
    """Return the initial states that a caller gives as a tuple, checked for their kinds and number.

    Args:
        cell: The cell.
        hx: A tensor for a cell with the hidden state alone, otherwise a tuple of the hidden state and the others.

    Raises:
        ArgumentError: There is another number of states, or one is not a tensor.
    """
    names = ("h", *cell.states)
    if len(names) == 1:
        found: tuple[object, ...] = (hx,)
    elif isinstance(hx, (tuple, list)) and len(hx) == len(names):
        found = tuple(hx)
    else:
        got = f"{len(hx)} of them" if isinstance(hx, (tuple, list)) else type(hx).__name__
        raise ArgumentError(sentence("hx", f"a tuple ({', '.join(names)}) of tensors", got))
    for name, state in zip(names, found, strict=True):
        if not isinstance(state, Tensor):
            raise ArgumentError(sentence(f"hx, the state {name},", "a tensor", type(state).__name__))
    return found  # type: ignore[return-value] - all of them are tensors


def joined_states(cell: Cell, states: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Return the hidden state [L*D, B, H] and the S other states side by side [L*D, B, S*H].

    Args:
        cell: The cell.
        states: The hidden state and the others [L*D, B, H] each.

    Raises:
        ShapeError: A state has another shape than the hidden state.
        DtypeError: A state has another dtype than the hidden state, and autocast is off.
        DeviceError: A state is on another device than the hidden state.
    """
    h, *others = states
    for name, state in zip(cell.states, others, strict=True):
        label = f"hx, the state {name},"
        if state.shape != h.shape:
            expectation = f"of shape {list(h.shape)}, like the hidden state"
            raise ShapeError(sentence(label, expectation, list(state.shape)))
        if state.dtype != h.dtype and not torch._C._is_any_autocast_enabled():
            advice = "Convert one of them with .to(dtype)."
            raise DtypeError(sentence(label, f"{h.dtype} like the hidden state", state.dtype, advice))
        if state.device != h.device:
            advice = "Move one of them with .to(device)."
            raise DeviceError(sentence(label, f"on {h.device} like the hidden state", f"one on {state.device}", advice))
    return h, _joined(others) if others else h.new_zeros(*h.shape[:2], 0)


def separate_states(cell: Cell, h: Tensor, others: Tensor) -> tuple[Tensor, ...]:
    """Return the hidden state and each other state, from the S other states side by side [..., S*H].

    Args:
        cell: The cell.
        h: The hidden state [..., H].
        others: The other states [..., S*H].
    """
    # A `chunk` into one part would be an invalid operator in the models of ONNX that PyTorch 2.7 writes.
    if len(cell.states) == 1:
        return h, others
    return (h, *(others.chunk(len(cell.states), -1) if cell.states else ()))


def returned_states(states: tuple[Tensor, ...]) -> States:
    """Return states as callers get them: the hidden state alone, or the tuple of several."""
    first, *others = states
    return states if others else first


def _joined(states: list[Tensor]) -> Tensor:
    """Return states side by side, in their own dtype, which `torch.cat` refuses or changes under autocast."""
    if len(states) == 1:
        return states[0]
    with torch.autocast(states[0].device.type, enabled=False):
        return torch.cat(states, -1)
