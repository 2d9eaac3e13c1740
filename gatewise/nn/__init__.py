"""The layers, and how a finished model gets them."""

from gatewise.nn.acceleration import Swap, accelerate, planned_swaps
from gatewise.nn.cell import LSTMCell
from gatewise.nn.lstm import LSTM

__all__ = ["LSTM", "LSTMCell", "Swap", "accelerate", "planned_swaps"]
