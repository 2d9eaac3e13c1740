"""The layers, and the functions that replace and check the layers of an existing model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gatewise.nn.acceleration import Swap, accelerate, planned_swaps, restore
from gatewise.nn.cell import LSTMCell
from gatewise.nn.comparison import Comparison, compare
from gatewise.nn.graphed_step import GraphedStep, make_graphed_step
from gatewise.nn.gru import GRU, GRUCell
from gatewise.nn.lstm import LSTM
from gatewise.nn.recurrent import Recurrent
from gatewise.nn.recurrent_cell import RecurrentCell
from gatewise.nn.registration import register
from gatewise.nn.rnn import RNN, RNNCell
from gatewise.nn.stream import Stream
from gatewise.nn.verification import Verification, verify

if TYPE_CHECKING:
    from gatewise.nn.attention import Attention

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "Attention",
    "Comparison",
    "GRUCell",
    "GraphedStep",
    "LSTMCell",
    "RNNCell",
    "Recurrent",
    "RecurrentCell",
    "Stream",
    "Swap",
    "Verification",
    "accelerate",
    "compare",
    "make_graphed_step",
    "planned_swaps",
    "restore",
    "verify",
]

register()


def __getattr__(name: str) -> type[Attention]:
    # Most programs use no attention and should not have to wait for its import.
    if name == "Attention":
        from gatewise.nn.attention import Attention

        return Attention
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
