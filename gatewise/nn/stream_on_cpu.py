"""Steps of a stream on a CPU that repeat a step whose arguments have passed all checks."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gatewise.cells import Cell
from gatewise.functional.one_step import Stack, operator_of, steps_freely

# One call in C reads them.
_OPTIONS = operator.attrgetter(
    "mode", "num_layers", "bias", "proj_size", "bidirectional", "reverse", "_flat_weights_names"
)


class RepeatedStep(NamedTuple):
    """The form of a step that has passed all checks: a step of the same form need not be checked again.

    It holds no tensor. Each call reads the weights from the layer, because their values may change in any way between
    two calls, and compares their forms. Apart from the operators, a call takes as little time as checks in Python can,
    in few functions: most of it is spent loading their code, which the operators have displaced from the caches.

    Attributes:
        operator: PyTorch's operator for a step of one layer.
        shape: The shape of the input [B, I].
        dtype: The dtype of the input, the states and the weights.
        options: The attributes of the layer that say which step it is and how many weights there are.
        values_of: The function that returns the weights in a mapping with their names, in the flat order of PyTorch.
        shapes: The shapes of the weights.
    """

    operator: Callable[..., Any]
    shape: torch.Size
    dtype: torch.dtype
    options: tuple[Any, ...]
    values_of: Callable[[Mapping[str, Any]], tuple[Any, ...]]
    shapes: list[torch.Size]

    @classmethod
    def of(cls, layer: Any, cell: Cell, x: Tensor, shapes: list[torch.Size]) -> RepeatedStep | None:
        """Return the form of a step; None for layers whose step is not one operator with the weights themselves.

        Args:
            layer: The layer.
            cell: Its cell, as in evaluation mode.
            x: The input, of the dtype of the weights.
            shapes: The shapes of the weights, which fit together.
        """
        if not isinstance(layer, nn.RNNBase):
            return None
        found = operator_of(cell, x.dtype, layer.proj_size > 0)
        if found is None:
            return None
        *options, names = _OPTIONS(layer)
        return cls(found, x.shape, x.dtype, (*options, list(names)), operator.itemgetter(*names), shapes)

    def after(self, layer: Any, x: Tensor, states: Stack) -> Stack | None:
        """Return the states after a step; None, and nothing has been computed, if the step has another form.

        Args:
            layer: The layer.
            x: The input.
            states: The states before the step.
        """
        found, shape, dtype, options, values_of, shapes = self
        h = states[0][0]
        if (
            x.dtype is not dtype
            or x.shape != shape
            or not x.is_cpu
            or x.layout is not torch.strided
            or h.dtype is not dtype
            or not h.is_cpu
            or not steps_freely(layer.kernel)
            or torch._C._is_any_autocast_enabled()
            or _OPTIONS(layer) != options
        ):
            return None
        try:
            weights = values_of(layer._parameters)
        except KeyError:  # one is no parameter, but a tensor that a parametrization computes, for example
            return None
        listed = layer._flat_weights
        if len(listed) != len(weights):
            return None
        # The lists are as long as each other. A program may replace a weight in either of the two places where a layer
        # has it, and `weights_of` knows which one counts then.
        for weight, one, its_shape in zip(weights, listed, shapes):  # noqa: B905
            if weight is not one or weight is None or weight.shape != its_shape or weight.dtype is not dtype:
                return None
            if not weight.is_cpu:
                return None
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.after(layer, x, states)
        after, each = [], len(weights) // len(states)
        for before in states:
            state = found(x, before, *weights[:each]) if len(before) == 2 else (found(x, before[0], *weights[:each]),)
            after.append(state)
            x, weights = state[0], weights[each:]
        return after
