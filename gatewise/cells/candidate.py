"""The candidate of a step, which dropout of the candidate multiplies by its masks."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import torch

_change: contextvars.ContextVar[Callable[[Any], Any] | None] = contextvars.ContextVar("candidate", default=None)


def candidate(value: Any) -> Any:
    """Return a value of a cell's step, marked as its candidate: the new content that the step adds to a state.

    Layers with `candidate_dropout` drop units of this value; otherwise it is returned as it is.

    Args:
        value: The activated candidate, such as `torch.tanh(gate.g)` of an LSTM.

    Examples:
        >>> import torch
        >>> from gatewise.cells import Cell, candidate
        >>> class Leaky(Cell):
        ...     gates = ("a", "g")
        ...
        ...     def step(self, gate, state):
        ...         a = torch.sigmoid(gate.a)
        ...         return a * state.h + (1 - a) * candidate(torch.tanh(gate.g)), {}
    """
    # Dynamo cannot read context variables, and masks are not applied in steps that it traces. `is_compiling` would also
    # be true where a call that is being compiled derives its step, whose derivation has the masks and is kept.
    if torch.compiler.is_dynamo_compiling():
        return value
    change = _change.get()
    return value if change is None else change(value)


@contextlib.contextmanager
def candidate_changed(change: Callable[[Any], Any]) -> Iterator[None]:
    """Apply a function to the candidates of the steps that are called in this context."""
    token = _change.set(change)
    try:
        yield
    finally:
        _change.reset(token)
