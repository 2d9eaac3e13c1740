"""A step of attention with what surrounds it: from the query to the output that the next step is fed, and back.

`Apart` takes what the attention package offers step by step, with any of its kernels, and an element-wise part.
`gatewise.feeding.attend_launches` does both in one launch where that kernel is "fused".
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from gatewise import attention
from gatewise.feeding.call import Inputs, at
from gatewise.feeding.elementwise import Elementwise, Planes


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


class Apart:
    """The step by the attention package, and the rest by an element-wise part.

    Args:
        inputs: Of the decoder.
        steps: Of attention.
        places: Where the steps read and write.
        parts: The element-wise parts.
    """

    def __init__(self, inputs: Inputs, steps: attention.Steps, places: Places, parts: Elementwise) -> None:
        self._dropout, self._steps, self._places, self._parts = inputs.dropout, steps, places, parts
        self._gathered: attention.Gradients | None = None

    def forward(self, step: int) -> None:
        """Write the attended output of a step."""
        places = self._places
        context = attention.attend_step(self._steps, step)
        outputs = None if places.outputs is places.fed else places.outputs[step]
        self._parts.attended(context, places.states[step], outputs, places.fed[step], at(self._dropout, step))

    def backward(self, step: int, dy: Tensor | None, later: Planes | None) -> None:
        """Write the gradients of the query and of the sum."""
        places = self._places
        dsums = places.states[step]
        self._parts.attended_gradient(dsums, places.outputs[step], dy, later, at(self._dropout, step))
        if step == self._steps.problem.steps - 1:
            self._gathered = attention.new_gathering(self._steps)
        attention.query_gradient_step(self._steps, step, dsums, out=places.dqueries[step], gathered=self._gathered)

    def source_gradients(self, dcontexts: Tensor) -> attention.Gradients:
        """Return the gradients of what all steps share."""
        return attention.source_gradients(self._steps, dcontexts, gathered=self._gathered)
