"""Stacks whose layers are calls of their own, so that each is an autograd node; see `gatewise.for_data_parallel`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from gatewise.cells import Cell
from gatewise.functional.weights import forms_of, structure_of

Call = Callable[..., tuple[Tensor, Tensor, Tensor]]
"""A call from (x, state, weights) to (y, h_n, c_n)."""


def separate_layers(state: Sequence[Tensor] | None, flat: Sequence[Tensor], bidirectional: bool, cell: Cell) -> int:
    """Return the number of layers that a call in `for_data_parallel` computes one by one; 1 without grad mode.

    Args:
        state: The initial states [L*D, B, ...], or None.
        flat: The weights in torch's flat order.
        bidirectional: Whether every layer has a reverse direction.
        cell: The cell.
    """
    if not torch.is_grad_enabled():
        return 1
    layers = structure_of(forms_of(flat), bidirectional, len(cell.gates), len(cell.parameters)).num_layers
    rows = layers * (1 + bidirectional)
    # A call of the whole stack raises the error for states of other sizes.
    return layers if state is None or all(each.dim() == 3 and len(each) == rows for each in state) else 1


def layer_by_layer(
    call: Call,
    layers: int,
    x: Tensor,
    state: Sequence[Tensor] | None,
    flat: tuple[Tensor, ...],
    dropout: float,
    *,
    hidden_alone: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a stack by one call for each layer, with dropout between them.

    Args:
        call: The call of a layer.
        layers: The number of layers.
        x: The input [T, B, I], or [N, I] when packed.
        state: The initial states [L*D, B, ...], or None for zeros.
        flat: The weights in torch's flat order.
        dropout: The probability of dropping an output between layers.
        hidden_alone: Whether the cell has no state other than the hidden one; c_n then means nothing.
    """
    weights, finals = len(flat) // layers, []
    for layer in range(layers):
        if layer and dropout:
            x = functional.dropout(x, dropout)
        own = None if state is None else tuple(each.chunk(layers)[layer] for each in state)
        x, *final = call(x, own, flat[layer * weights : (layer + 1) * weights])
        finals.append(final)
    h_n = torch.cat([final[0] for final in finals])
    return x, h_n, h_n if hidden_alone else torch.cat([final[1] for final in finals])
