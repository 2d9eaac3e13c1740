"""cuDNN's LSTM, GRU and RNN, through PyTorch's own operators."""

from gatewise.kernels.cudnn.kernel import cudnn

__all__ = ["cudnn"]
