"""A Keras 3 layer for the torch backend: `keras.layers.LSTM`, computed by gatewise's kernels."""

from gatewise.interop.keras.lstm import LSTM, SlowerKernelWarning

__all__ = ["LSTM", "SlowerKernelWarning"]
