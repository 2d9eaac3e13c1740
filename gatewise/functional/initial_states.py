"""The initial states of a call that gives none."""

from __future__ import annotations

import torch
from torch import Tensor

from gatewise.cells import Cell


def initial_states(cell: Cell, h0: Tensor, c0: Tensor) -> tuple[Tensor, Tensor]:
    """Return the initial hidden state and the other states side by side, as `Cell.initial_states` says.

    Args:
        cell: The cell.
        h0: The hidden state [L*D, B, R], zero.
        c0: The other states [L*D, B, S*H], zero.
    """
    if not cell.initial_states:
        return h0, c0
    parts = c0.chunk(len(cell.states), -1) if cell.states else ()
    others = [torch.full_like(part, cell.initial_value(name)) for name, part in zip(cell.states, parts, strict=True)]
    return torch.full_like(h0, cell.initial_value("h")), torch.cat(others, -1) if others else c0
