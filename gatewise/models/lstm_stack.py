"""LSTM layers of different sizes, one after the other."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import nn

from gatewise.contract.errors import ArgumentError, sentence
from gatewise.nn import LSTM

StackState = tuple[tuple[torch.Tensor, torch.Tensor], ...]
"""For each layer the hidden and the cell state, each [1, B, H] with the layer's own H."""


class LSTMStack(nn.Module):
    """LSTM layers whose numbers of units differ, or between which the dropout is another module than `LSTM` has.

    Args:
        sizes: The size of the input, then the number of units of each layer.
        dropout: The module through which the output of each layer but the last one goes.
        weight_dropout: The probability of dropping an element of a recurrent matrix in training mode.
        kernel: The kernel of the layers.
        device: The device of the parameters.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        dropout: nn.Module,
        *,
        weight_dropout: float = 0.0,
        kernel: str = "auto",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        options = {"weight_dropout": weight_dropout, "kernel": kernel, "device": device}
        self.layers = nn.ModuleList(LSTM(before, after, **options) for before, after in itertools.pairwise(sizes))
        self.dropout = dropout

    def forward(self, x: torch.Tensor, state: StackState | None = None) -> tuple[torch.Tensor, StackState]:
        """Compute the output of the last layer [T, B, H] and the states after the last step; None means zeros.

        Raises:
            ArgumentError: There are states for another number of layers.
        """
        if state is not None and (not isinstance(state, (tuple, list)) or len(state) != len(self.layers)):
            got = f"{len(state)} of them" if isinstance(state, (tuple, list)) else type(state).__name__
            raise ArgumentError(sentence("state", f"a pair (h, c) for each of {len(self.layers)} layers", got))
        finals = []
        for number, layer in enumerate(self.layers):
            x, final = layer(self.dropout(x) if number else x, None if state is None else state[number])
            finals.append(final)
        return x, tuple(finals)

    def reset_parameters(self) -> None:
        """Reset the weights of all layers."""
        for layer in self.layers:
            layer.reset_parameters()  # type: ignore[operator]
