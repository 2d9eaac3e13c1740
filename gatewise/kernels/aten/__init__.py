"""The kernel `aten`: PyTorch without cuDNN, that is oneDNN's LSTM on the CPU, and the native loop otherwise."""

from gatewise.kernels.aten.in_place import GRUStep, LSTMStep
from gatewise.kernels.aten.kernel import aten
from gatewise.kernels.aten.one_step import OPERATORS

__all__ = ["OPERATORS", "GRUStep", "LSTMStep", "aten"]
