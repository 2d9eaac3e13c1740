"""The initial states of a call that gives none."""

from __future__ import annotations

import torch
from torch import Tensor

from gatewise.cells import Cell


def initial_states(
    cell: Cell, x: Tensor, rows: tuple[int, int], state_size: int, hidden_size: int
) -> tuple[Tensor, Tensor]:
    """Return the initial hidden state [L*D, B, R] and the other states side by side [L*D, B, S*H].

    They are zero, or what `Cell.initial_states` says. Nothing may write to them, because one tensor can be both.

    Args:
        cell: The cell.
        x: A tensor of their dtype on their device.
        rows: L*D and B.
        state_size: R, the number of features of the hidden state.
        hidden_size: H, the number of hidden units.
    """
    if not cell.initial_states:
        hidden = x.new_zeros(*rows, state_size)
        size = len(cell.states) * hidden_size
        return hidden, hidden if size == state_size else x.new_zeros(*rows, size)
    values = [float(cell.initial_states.get(name, 0.0)) for name in ("h", *cell.states)]
    hidden, *others = (
        x.new_full((*rows, size), value)
        for value, size in zip(values, (state_size, *[hidden_size] * len(cell.states)), strict=True)
    )
    return hidden, torch.cat(others, -1) if others else x.new_zeros(*rows, 0)
