"""The parts of a training step, and the memory and time of each way to compute them."""

from __future__ import annotations

import dataclasses

from gatewise.contract.decision import Decision


@dataclasses.dataclass(frozen=True, slots=True)
class Recomputation:
    """The work that a way repeats in the backward pass instead of keeping its results.

    Attributes:
        released: The memory in bytes that is no longer kept.
        newly_kept: The memory in bytes that is kept only for the recomputation.
        product_seconds: The predicted time of the repeated matrix products; 0 if there are none.
    """

    released: int
    newly_kept: int
    product_seconds: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """One way to compute a part of a training step, forward and backward.

    Attributes:
        name: The name by which the way is selected; the same way has one name at every shape of batch.
        detail: The description of the way at this shape, for the report.
        seconds: The predicted time of both passes.
        kept: The memory in bytes, outputs included, that lives from the part's forward pass to the end of its backward
            pass.
        forward_scratch: The additional workspace in bytes of the forward pass.
        backward_scratch: The additional workspace in bytes of the backward pass, gradients of activations included.
        recomputation: The work that is repeated in the backward pass; None if there is none.
        decision: The choice of the kernel of a decoder with input feeding; None for the other parts.
    """

    name: str
    detail: str = ""
    seconds: float = 0.0
    kept: int = 0
    forward_scratch: int = 0
    backward_scratch: int = 0
    recomputation: Recomputation | None = None
    decision: Decision | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A part of a training step.

    Attributes:
        name: The name of the part, for the report and for looking up its way.
        ways: The ways to compute it; the first keeps everything.
        gradients: The size in bytes of its parameters' gradients, which remain after its backward pass.
        with_below: Whether the memory that it keeps is released only together with that of the previous part, because
            both are one autograd function.
    """

    name: str
    ways: tuple[Way, ...]
    gradients: int = 0
    with_below: bool = False
