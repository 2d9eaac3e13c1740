"""cuDNN's LSTM and GRU, through PyTorch's own operators."""

from gatewise.kernels.cudnn.kernel import cudnn

__all__ = ["cudnn"]
