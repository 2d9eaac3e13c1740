"""A Keras 3 layer for the torch backend: `keras.layers.LSTM`, computed by gatewise's kernels."""

from gatewise.contract.errors import SlowerKernelWarning
from gatewise.interop.keras.lstm import LSTM

__all__ = ["LSTM", "SlowerKernelWarning"]
