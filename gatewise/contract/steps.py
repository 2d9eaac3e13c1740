"""The values of a layer at every step, as a call hands them out on request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor


class LayerSteps(NamedTuple):
    """The states and gate sums of one layer at every step, the directions side by side, zero in the padding.

    Attributes:
        states: The states after each step [T, B, D*H], by name: "h", then those of `Cell.states`.
        sums: The sums that the step reads [T, B, D*H], by the names in `Cell.sums`: those of the gates, before any
            activation; for a gate in `Cell.apart` two, `{gate}_input` and `{gate}_recurrent`.
    """

    states: Mapping[str, Tensor]
    sums: Mapping[str, Tensor]

    def map(self, function: Callable[[Tensor], Tensor]) -> LayerSteps:
        """Return the values with a function applied to each."""
        states, sums = ({name: function(value) for name, value in group.items()} for group in self)
        return LayerSteps(states, sums)
