"""One time step of one layer by PyTorch's operators for the cells that it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

OPERATORS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "LSTM": torch.lstm_cell,
        "GRU": torch.gru_cell,
        "RNN_TANH": torch.rnn_tanh_cell,
        "RNN_RELU": torch.rnn_relu_cell,
    }
)
"""The operators of a step by the `mode` of PyTorch's layer; that of the LSTM takes and returns a pair of states."""
