"""Arguments of a call that are not of the kind they must be: no tensor, no pair of states, no number."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gatewise.contract.errors import ArgumentError, sentence
from gatewise.contract.problem import LEAN, NORMAL
from gatewise.contract.saved import Needs, Saved
from gatewise.selection import check_name

__all__ = [
    "check_backward",
    "check_dropout",
    "check_memory",
    "check_name",
    "check_options",
    "check_tensors",
    "check_weights",
]

# `isinstance` asks one tensor after the other; the usual ones are told apart from everything else at once.
_USUAL = frozenset({Tensor, nn.Parameter})


def check_tensors(x: object, state: Any, flat: tuple[object, ...]) -> None:
    """Check that x is a dense tensor, that weights are tensors, and that the state is None or two of them.

    Args:
        x: Input.
        state: Initial state.
        flat: Weights in torch's flat order.

    Raises:
        ArgumentError: One is of another kind.
    """
    if not isinstance(x, Tensor):
        raise ArgumentError(
            sentence("x", "a tensor", type(x).__name__, "torch.as_tensor makes one of an array or a list.")
        )
    if x.layout is not torch.strided:
        raise ArgumentError(sentence("x", "a dense tensor", f"one of {x.layout}", "Call .to_dense() on it."))
    if state is not None:
        _check_pair("state", state, "(h0, c0)")
    if not _USUAL.issuperset(map(type, flat)):
        for index, weight in enumerate(flat):
            if not isinstance(weight, Tensor):
                raise ArgumentError(sentence(f"weights[{index}]", "a tensor", _kind(weight)))


def check_weights(weights: Any) -> None:
    """Check that weights are a sequence, of tensors or of sequences of them, as far as its first member shows.

    Raises:
        ArgumentError: They are something else.
    """
    expectation = "a sequence of tensors, or one sequence of them for each direction of each layer"
    advice = "Give `module.all_weights`, or the tensors of `module.parameters()` as a list."
    if isinstance(weights, (Tensor, str, Mapping)) or not (
        hasattr(weights, "__getitem__") and hasattr(weights, "__len__")
    ):
        raise ArgumentError(sentence("weights", expectation, _kind(weights), advice))
    for index, member in enumerate(weights):  # type: ignore[arg-type]
        if not isinstance(member, (Tensor, list, tuple)) or isinstance(member, Tensor) != isinstance(
            weights[0], Tensor
        ):  # type: ignore[index]
            raise ArgumentError(sentence("weights", expectation, f"{_kind(member)} as weights[{index}]", advice))


def check_options(bidirectional: object, dropout: object, memory: object) -> None:
    """Check the options of a call that are neither tensors nor names of kernels.

    Raises:
        ArgumentError: One is not what it can be.
    """
    if not isinstance(bidirectional, int) or bidirectional not in (False, True):
        raise ArgumentError(sentence("bidirectional", "True or False", repr(bidirectional)))
    check_dropout(dropout)
    check_memory(memory)


def check_dropout(dropout: object) -> None:
    """Check the argument of that name."""
    if not isinstance(dropout, numbers.Real) or isinstance(dropout, bool) or not 0.0 <= float(dropout) <= 1.0:
        advice = "It is the probability of dropping an output between layers."
        raise ArgumentError(sentence("dropout", "a number from 0 to 1", repr(dropout), advice))


def check_memory(memory: object) -> None:
    """Check the argument of that name."""
    if memory not in (NORMAL, LEAN):
        raise ArgumentError(sentence("memory", f"{NORMAL!r} or {LEAN!r}", repr(memory)))


def check_backward(saved: object, dy: object, dstate: Any, needs: object) -> None:
    """Check what the explicit backward pass is given.

    Raises:
        ArgumentError: An argument is of another kind.
    """
    if not isinstance(saved, Saved):
        advice = "Give the second result of gatewise.functional.forward."
        raise ArgumentError(
            sentence("saved", "what gatewise.functional.forward returned for backward", _kind(saved), advice)
        )
    if not (dy is None or isinstance(dy, Tensor)):
        raise ArgumentError(sentence("dy", "None or a tensor", type(dy).__name__))
    if dstate is not None:
        _check_pair("dstate", dstate, "(dh, dc), each of them a tensor or None", or_none=True)
    if not isinstance(needs, Needs):
        advice = "Import it from gatewise.contract.saved."
        raise ArgumentError(sentence("needs", "Needs(x, state, weights)", repr(needs), advice))


def _check_pair(name: str, given: Any, form: str, *, or_none: bool = False) -> None:
    kinds = (Tensor, type(None)) if or_none else Tensor
    if not (
        isinstance(given, (tuple, list))
        and len(given) == 2
        and isinstance(given[0], kinds)
        and isinstance(given[1], kinds)
    ):
        advice = "" if or_none else "Give zeros for a state that is not known."
        raise ArgumentError(sentence(name, f"None or a pair {form}", _kind(given), advice))


def _kind(given: object) -> str:
    if isinstance(given, (tuple, list)) and len(given) < 5:
        return f"({', '.join('None' if each is None else type(each).__name__ for each in given)})"
    return "None" if given is None else type(given).__name__
