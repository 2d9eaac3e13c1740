"""The kernel `aten`: PyTorch without cuDNN, that is oneDNN's LSTM on the CPU, and the native loop otherwise."""

from gatewise.kernels.aten.kernel import aten

__all__ = ["aten"]
