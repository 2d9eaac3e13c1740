"""What PyTorch ships without cuDNN: oneDNN's LSTM on the CPU, otherwise the native loop."""

from gatewise.kernels.aten.kernel import aten

__all__ = ["aten"]
