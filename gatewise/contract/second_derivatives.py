"""Backward passes that are differentiated themselves, as with `create_graph=True`, or that refuse to be."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gatewise.contract.tracing import is_compiling

Backward = Callable[..., tuple[Tensor | None, ...]]


def once_differentiable(what: str, advice: str) -> Callable[[Backward], Backward]:
    """Return a decorator for the backward pass of an autograd function that has no second derivative.

    A backward pass with `create_graph` raises an error. With the decorator of this name in PyTorch, the error comes in
    the second derivative, but not if the gradients with respect to the function's inputs are asked for, nor for an
    incoming gradient that is a constant, as that of a loss is: they would lack the part of this function silently.

    Args:
        what: The name of the function in the error.
        advice: The last sentence of the error, which names an alternative.
    """

    def decorate(backward: Backward) -> Backward:
        @functools.wraps(backward)
        def once(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
            if torch.is_grad_enabled() and not is_compiling():
                raise RuntimeError(f"{what} is differentiable once, which excludes `create_graph=True`. {advice}")
            with torch.no_grad():
                return backward(ctx, *gradients)

        return once

    return decorate


def differentiable_gradients(
    outputs: Sequence[Tensor],
    above: Sequence[Tensor | None],
    inputs: Sequence[Tensor | None],
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """Return the gradients of inputs, as tensors that autograd can differentiate again.

    Args:
        outputs: The outputs, computed from the inputs by operators that autograd has recorded.
        above: The gradients of the outputs; None for zero.
        inputs: The inputs. Each should be a view of its own: where one was computed from another one, or two are the
            same tensor, the gradient of each is then that of its own use.
        wanted: Whether the gradient of each input is needed.

    Returns:
        The gradient of each input; None where it is not needed, or zero because no output depends on the input.
    """
    given = [
        (output, gradient)
        for output, gradient in zip(outputs, above, strict=True)
        if gradient is not None and output.requires_grad  # not so a state that counts the steps
    ]
    if not given:
        return [None] * len(inputs)
    sources = [tensor for tensor, want in zip(inputs, wanted, strict=True) if want and tensor is not None]
    found = iter(
        torch.autograd.grad(
            [output for output, _ in given],
            sources,
            [gradient for _, gradient in given],
            create_graph=True,
            allow_unused=True,
        )
    )
    return [next(found) if want and tensor is not None else None for tensor, want in zip(inputs, wanted, strict=True)]
