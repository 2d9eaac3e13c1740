"""The initialisation of recurrent layers."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from gatewise.cells import Cell, StatementError
from gatewise.contract.errors import sentence


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


def of_cell_(parameter: Tensor, cell: Cell, name: str) -> None:
    """Fill a parameter of a cell in place.

    Args:
        parameter: The parameter [H].
        cell: The cell.
        name: The name of the parameter in `cell.parameters`.

    Raises:
        StatementError: The function for the initial value raises an error, or leaves elements as they are.
    """
    initial = cell.parameters[name]
    if not callable(initial):
        torch.nn.init.constant_(parameter, initial)
        return
    has_values = type(parameter) is nn.Parameter and not parameter.is_meta
    with torch.no_grad():
        if has_values:
            parameter.fill_(torch.nan)
        try:
            initial(parameter)
        except (RuntimeError, TypeError, ValueError) as error:
            raise _error(cell, name, f"{type(error).__name__}: {error}") from error
        if has_values and parameter.isnan().any():
            raise _error(cell, name, "one that leaves elements as they are")


def _error(cell: Cell, name: str, got: str) -> StatementError:
    label = f"{type(cell).__name__}.parameters[{name!r}]"
    return StatementError(sentence(label, "a function that fills a tensor [H] in place", got))
