"""Backward passes that are not differentiated themselves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Backward = Callable[..., tuple[Tensor | None, ...]]


def once_differentiable(what: str, advice: str) -> Callable[[Backward], Backward]:
    """Return a decorator for the backward pass of an autograd function that has no second derivative.

    A backward pass with `create_graph` raises an error. With the decorator of this name in PyTorch, the error comes in
    the second derivative, but not if the gradients with respect to the function's inputs are asked for, nor for an
    incoming gradient that is a constant, as that of a loss is: they would lack the part of this function silently.

    Args:
        what: The function, for the error.
        advice: What to do instead, a sentence.
    """

    def decorate(backward: Backward) -> Backward:
        @functools.wraps(backward)
        def once(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                raise RuntimeError(f"{what} is differentiable once, which excludes `create_graph=True`. {advice}")
            with torch.no_grad():
                return backward(ctx, *gradients)

        return once

    return decorate
