"""The attention part of a decoder step, from the query to the attentional output that is fed to the next step.

`gatewise.feeding.fused_attention` computes it in one launch for the attention kernel "fused",
`gatewise.feeding.separate_attention` with any attention kernel.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from gatewise import attention
from gatewise.feeding.elementwise import Planes


class Places(NamedTuple):
    """The tensors of all steps that the attention part reads and writes; each step uses one slice.

    Attributes:
        states: The contribution of the hidden state, which is added to the context [T, B, H]; the backward pass
            overwrites it with the gradient of the sum.
        outputs: The attentional outputs [T, B, H].
        fed: The attentional outputs as operands of the next step; the same tensor as `outputs` if the dtypes are equal.
        dqueries: The gradients of the queries [T, B, A].
    """

    states: Tensor
    outputs: Tensor
    fed: Tensor
    dqueries: Tensor


class AttentionPart(Protocol):
    """The interface of the attention part of the steps."""

    def forward(self, step: int) -> None:
        """Write the attentional output of a step."""
        ...

    def backward(self, step: int, dy: Tensor | None, later: Planes | None) -> None:
        """Write the gradients of the query and of the sum of context and state, from those of the output.

        Args:
            step: The number of the step.
            dy: The gradient of the output from the loss [B, H]; None for zero.
            later: The gradient of the output from the next step; None for zero.
        """
        ...

    def source_gradients(self, dcontexts: Tensor) -> attention.Gradients:
        """Return the gradients of the inputs that all steps share, after the loop, from those of all contexts."""
        ...
