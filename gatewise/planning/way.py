"""The parts of a training step, and the ways to compute each, as bytes and seconds."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Recomputation:
    """What a way does a second time in the backward pass instead of keeping it.

    Attributes:
        released: Bytes that are no longer kept.
        newly_kept: Bytes that are kept only because of it.
        product_seconds: Predicted time of matrix products that are repeated; 0 when there are none.
    """

    released: int
    newly_kept: int
    product_seconds: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """One way to compute a part of a training step, forward and backward.

    Attributes:
        name: What it is chosen by; the same way has one name at every shape of batch.
        detail: What is printed: how it would be done at this shape.
        seconds: Predicted time of both passes.
        kept: Bytes that live from the part's forward pass to the end of its backward pass, its outputs among them.
        forward_scratch: Bytes that the forward pass needs besides, while it runs.
        backward_scratch: The same of the backward pass: gradients of activations, and room to work in.
        recomputation: What is computed again; None when nothing is.
    """

    name: str
    detail: str = ""
    seconds: float = 0.0
    kept: int = 0
    forward_scratch: int = 0
    backward_scratch: int = 0
    recomputation: Recomputation | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A part of a training step.

    Attributes:
        name: What is printed, and what a choice is remembered by.
        ways: How it can be computed; the first keeps everything.
        gradients: Bytes of the gradients of its parameters, which stay when its backward pass is over.
        with_below: Whether what it kept goes only with what the part before it kept: where both are one function to
            autograd.
    """

    name: str
    ways: tuple[Way, ...]
    gradients: int = 0
    with_below: bool = False
