"""The other choice of selections between nearly equal numbers: `torch.minimum`, `maximum`, `clamp` and `relu`.

The gradient of a selection jumps where its operands are equal. If they differ by less than their rounding errors, then
a result in a lower precision may have selected the other operand, and its gradients are right for that choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class OtherSelections(TorchFunctionMode):
    """Select the other operand inside the block wherever two operands are nearly, but not exactly, equal.

    All other results and gradients are those of PyTorch, also where two operands are exactly equal.

    Args:
        tolerance: The largest difference of nearly equal operands, relative to the root mean square of the operand
            with the larger one.

    Attributes:
        number: The number of selections that were changed so far.
    """

    def __init__(self, tolerance: float) -> None:
        super().__init__()
        self._tolerance, self.number = tolerance, 0

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute a selection with the other choice, and any other function as usual."""
        options = dict(kwargs or {})
        selection = {"minimum": self._smaller, "maximum": self._larger, "relu": self._relu, "clamp": self._clamped}.get(
            getattr(func, "__name__", "")
        )
        return func(*args, **options) if selection is None else selection(*args, **options)

    # The names of the arguments are PyTorch's.
    def _smaller(self, input: Tensor, other: Tensor) -> Tensor:
        return torch.where(self._near(input, other), torch.maximum(input, other), torch.minimum(input, other))

    def _larger(self, input: Tensor, other: Tensor) -> Tensor:
        return torch.where(self._near(input, other), torch.minimum(input, other), torch.maximum(input, other))

    def _relu(self, input: Tensor, inplace: bool = False) -> Tensor:
        zeros = torch.zeros_like(input)
        return torch.where(self._near(input, zeros), torch.minimum(input, zeros), torch.relu(input))

    def _clamped(self, input: Tensor, min: Any = None, max: Any = None) -> Tensor:
        clamped = torch.clamp(input, min, max)
        for limit, other in ((min, torch.minimum), (max, torch.maximum)):
            if limit is not None:
                edge = torch.as_tensor(limit, dtype=input.dtype, device=input.device).expand_as(input)
                clamped = torch.where(self._near(input, edge), other(input, edge), clamped)
        return clamped

    def _near(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = a.detach(), b.detach()
        scale = torch.maximum(_root_mean_square(a), _root_mean_square(b))
        near = ((a - b).abs() <= self._tolerance * scale) & (a != b)
        self.number += int(near.sum())
        return near


def _root_mean_square(value: Tensor) -> Tensor:
    """Return the root mean square of the finite values, because states may begin at minus infinity."""
    return value.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).square().mean().sqrt()
