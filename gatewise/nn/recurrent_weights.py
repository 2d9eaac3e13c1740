"""The names of the weights of a layer of any cell, and the errors where one is missing or its sizes no longer fit."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, TypeVar

from torch import Tensor

from gatewise.contract.errors import ArgumentError, ShapeError, sentence

_Weights = TypeVar("_Weights", bound=Iterable[Any])


def suffixes(layers: int, bidirectional: bool) -> list[str]:
    """Return the last parts of the names of weights, one for each direction of each layer."""
    return [f"_l{layer}{way}" for layer in range(layers) for way in ("", "_reverse")[: 1 + bidirectional]]


def kinds(bias: bool, parameters: Iterable[str], recurrent: Iterable[str] = ("weight_hh",)) -> list[str]:
    """Return the first parts of the names of the weights of a direction.

    Args:
        bias: Whether there are biases.
        parameters: The names of the cell's parameters.
        recurrent: The names of the parameters of the recurrent matrix.
    """
    return ["weight_ih", *recurrent, *(("bias_ih", "bias_hh") if bias else ()), *parameters]


@functools.lru_cache(maxsize=256)
def names_of(layers: int, bidirectional: bool, bias: bool, parameters: tuple[str, ...]) -> list[str]:
    """Return the names of the weights of a layer with full recurrent matrices, in PyTorch's flat order."""
    return [kind + suffix for suffix in suffixes(layers, bidirectional) for kind in kinds(bias, parameters)]


@functools.lru_cache(maxsize=256)
def names_beyond(layers: int, bidirectional: bool, bias: bool) -> list[str]:
    """Return names of weights of which a layer of these sizes has none, one for each size that may be too small."""
    reverse, biases = [] if bidirectional else ["weight_ih_l0_reverse"], [] if bias else ["bias_ih_l0"]
    return [f"weight_ih_l{layers}", *reverse, *biases]


def check_tensors(names: Iterable[str], weights: _Weights) -> _Weights:
    """Return the weights of a layer if all of them are tensors: a program may have assigned None.

    Args:
        names: The name of each weight.
        weights: The weights.

    Raises:
        ArgumentError: A weight is no tensor.
    """
    for name, weight in zip(names, weights, strict=True):
        if not isinstance(weight, Tensor):
            got = "None" if weight is None else type(weight).__name__
            raise ArgumentError(sentence(name, "a tensor", got, "Assign a parameter to it."))
    return weights


def refuse_missing(layer: Any, recurrent: Iterable[str], error: Exception) -> None:
    """Raise the error for a weight that a layer of its sizes should have and has not, if there is one.

    Args:
        layer: The layer.
        recurrent: The names of the parameters of the recurrent matrix.
        error: The error by which that was found.

    Raises:
        ShapeError: The layer has no attribute of the name of a weight.
        ArgumentError: A weight is no tensor.
    """
    for suffix in suffixes(layer.num_layers, layer.bidirectional):
        for kind in kinds(layer.bias, layer.cell.parameters, recurrent):
            if not hasattr(layer, kind + suffix):
                raise misfit(layer, f"no {kind}{suffix}") from error
            check_tensors([kind + suffix], [getattr(layer, kind + suffix)])


def misfit(layer: Any, got: str) -> ShapeError:
    """Return the error for a layer whose sizes have been assigned and no longer fit its weights.

    Args:
        layer: The layer.
        got: The weight that is missing, or that is there and should not be, for the error.
    """
    sizes = ", ".join(f"{name} {getattr(layer, name)}" for name in ("num_layers", "bidirectional", "bias"))
    advice = "Make a new layer of these sizes instead of changing them."
    return ShapeError(sentence("weights", f"those that {sizes} take", got, advice))
