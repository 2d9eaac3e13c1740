"""Attention step by step with any kernel of `gatewise.attention`, followed by an element-wise operation."""

from __future__ import annotations

from torch import Tensor

from gatewise import attention
from gatewise.feeding.attention_part import Places
from gatewise.feeding.call import Inputs, at
from gatewise.feeding.elementwise import Elementwise, Planes


class SeparateAttention:
    """Computes attention with `gatewise.attention` and the rest with an element-wise operation; see `AttentionPart`.

    Args:
        inputs: The inputs of the decoder.
        steps: The attention steps.
        places: The tensors that the steps read and write.
        parts: The element-wise operations.
    """

    def __init__(self, inputs: Inputs, steps: attention.Steps, places: Places, parts: Elementwise) -> None:
        self._dropout, self._steps, self._places, self._parts = inputs.dropout, steps, places, parts
        self._gathered: attention.Gradients | None = None

    def forward(self, step: int) -> None:
        """Write the attentional output of a step."""
        places = self._places
        context = attention.attend_step(self._steps, step)
        outputs = None if places.outputs is places.fed else places.outputs[step]
        self._parts.attended(context, places.states[step], outputs, places.fed[step], at(self._dropout, step))

    def backward(self, step: int, dy: Tensor | None, later: Planes | None) -> None:
        """Write the gradients of the query and of the sum of context and state."""
        places = self._places
        dsums = places.states[step]
        self._parts.attended_gradient(dsums, places.outputs[step], dy, later, at(self._dropout, step))
        if step == self._steps.problem.steps - 1:
            self._gathered = attention.new_gathering(self._steps)
        attention.query_gradient_step(self._steps, step, dsums, out=places.dqueries[step], gathered=self._gathered)

    def source_gradients(self, dcontexts: Tensor) -> attention.Gradients:
        """Return the gradients of the attention inputs that all steps share."""
        return attention.source_gradients(self._steps, dcontexts, gathered=self._gathered)
