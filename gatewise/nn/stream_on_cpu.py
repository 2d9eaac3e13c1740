"""Steps of a stream on a CPU that repeat a step whose arguments have passed all checks."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from gatewise.cells import Cell
from gatewise.functional.one_step import Stack, repeated_step_of, steps_freely

# One call in C reads several attributes.
_OPTIONS = operator.attrgetter(
    "mode", "num_layers", "bias", "proj_size", "bidirectional", "reverse", "_flat_weights_names"
)
_FORM = operator.attrgetter("shape", "dtype", "is_cpu", "__class__")
_TYPES = Tensor, nn.Parameter  # other classes may not compute operators with the argument `out`


class RepeatedStep(NamedTuple):
    """The form of a step that has passed all checks: a step of the same form need not be checked again.

    It holds no weight. Each call reads the weights from the layer, because their values may change in any way between
    two calls, and compares their forms. Apart from the operators, a call takes as little time as checks in Python can,
    in few functions: most of it is spent loading their code, which the operators have displaced from the caches.

    Attributes:
        step: The function for a step of one layer.
        shape: The shape of the input [B, I].
        dtype: The dtype of the input, the states and the weights.
        options: The attributes of the layer that say which step it is and how many weights there are.
        values_of: The function that returns the weights in a mapping with their names, in the flat order of PyTorch.
        forms: For each weight its shape, its dtype, that it is on the CPU, and its class.
    """

    step: Callable[..., tuple[Tensor, ...]]
    shape: torch.Size
    dtype: torch.dtype
    options: tuple[Any, ...]
    values_of: Callable[[Mapping[str, Any]], tuple[Any, ...]]
    forms: list[tuple[torch.Size, torch.dtype, bool, type]]

    @classmethod
    def of(cls, layer: Any, cell: Cell, x: Tensor, weights: Sequence[Tensor]) -> RepeatedStep | None:
        """Return the form of a step; None for layers whose step takes other operators than those of PyTorch's cells.

        Args:
            layer: The layer.
            cell: Its cell, as in evaluation mode.
            x: The input, of the dtype of the weights.
            weights: The weights in the flat order of PyTorch's layers, which have passed the checks.
        """
        if not isinstance(layer, nn.RNNBase) or not all(type(weight) in _TYPES for weight in weights):
            return None
        step = repeated_step_of(cell, x.dtype, layer.proj_size > 0, len(x), weights[1].shape[1])
        if step is None:
            return None
        *options, names = _OPTIONS(layer)
        forms = list(map(_FORM, weights))
        return cls(step, x.shape, x.dtype, (*options, list(names)), operator.itemgetter(*names), forms)

    def after(self, layer: Any, x: Tensor, states: Stack) -> Stack | None:
        """Return the states after a step; None, and nothing has been computed, if the step has another form.

        Args:
            layer: The layer.
            x: The input.
            states: The states before the step.
        """
        step, shape, dtype, options, values_of, forms = self
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
            or forward_ad._current_level >= 0
            or _OPTIONS(layer) != options
        ):
            return None
        listed = layer._flat_weights
        try:
            weights = values_of(layer._parameters)
            if list(map(_FORM, weights)) != forms:
                return None
        except (KeyError, AttributeError):  # one is computed by a parametrization, for example, or None
            return None
        # A program may replace a weight in either of the two places where a layer has it, and `weights_of` knows which
        # one counts then.
        if len(listed) != len(weights) or not all(map(operator.is_, weights, listed)):
            return None
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.after(layer, x, states)
        if len(states) == 1:  # slices take as long as a small operator
            return [step(x, states[0], *weights)]
        after, each = [], len(weights) // len(states)
        for before in states:
            state = step(x, before, *weights[:each])
            after.append(state)
            x, weights = state[0], weights[each:]
        return after
