"""The initialisation of recurrent layers."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from gatewise.cells.cell import Initial


def uniform_(parameters: Iterable[Tensor], hidden_size: int) -> None:
    r"""Fill the parameters of a recurrent layer in place, as `torch.nn.LSTM` does.

    Every element is drawn from $\mathcal{U}(-1/\sqrt{H}, 1/\sqrt{H})$, tensor by tensor in the order given, so that the
    same seed gives the same numbers as PyTorch.

    Args:
        parameters: The weights and biases.
        hidden_size: H, the number of hidden units.
    """
    bound = 1.0 / math.sqrt(hidden_size) if hidden_size > 0 else 0.0
    for parameter in parameters:
        torch.nn.init.uniform_(parameter, -bound, bound)


def of_cell_(parameter: Tensor, initial: Initial) -> None:
    """Fill a parameter of a cell in place.

    Args:
        parameter: The parameter [H].
        initial: The initial value: a number, or a function that fills a tensor.
    """
    if callable(initial):
        with torch.no_grad():
            initial(parameter)
    else:
        torch.nn.init.constant_(parameter, initial)
