"""What `torch.compile` and a strict `torch.export` say of an error in the code that they trace."""

import torch


def in_graph(message):
    """Return the pattern of an error with a message, of which PyTorch 2.7 and 2.8 tell only the class."""
    return "ArgumentError" if "2.7" <= torch.__version__ < "2.9" else message
