"""A step of attention with what surrounds it: from the query to the output that the next step is fed, and back.

`gatewise.feeding.attend_launches` does all of it in one launch where attention's kernel is "fused",
`gatewise.feeding.attend_apart` with any kernel.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from gatewise import attention
from gatewise.feeding.elementwise import Planes


class Places(NamedTuple):
    """Where the steps read and write, each a slice of these.

    Attributes:
        states: What the hidden state adds to the context [T, B, H]; the backward pass writes the gradient of the sum.
        outputs: The attended outputs [T, B, H].
        fed: The same as operands of the next step; `outputs` itself where they have its dtype.
        dqueries: Gradients of the queries [T, B, A].
    """

    states: Tensor
    outputs: Tensor
    fed: Tensor
    dqueries: Tensor


class Attending(Protocol):
    """Attention of one step after the other."""

    def forward(self, step: int) -> None:
        """Write the attended output of a step."""
        ...

    def backward(self, step: int, dy: Tensor | None, later: Planes | None) -> None:
        """Write the gradients of the query and of the sum of context and state, from those of the output.

        Args:
            step: Which.
            dy: From outside [B, H].
            later: From the next step.
        """
        ...

    def source_gradients(self, dcontexts: Tensor) -> attention.Gradients:
        """Return the gradients of what all steps share, once all went back; from those of all contexts [T, B, H]."""
        ...
