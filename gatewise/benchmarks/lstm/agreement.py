"""The comparison of both layers with float64, which comes before their timing."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping

import torch
from torch import Tensor

from gatewise.benchmarks.lstm.call import Call
from gatewise.benchmarks.lstm.side import rival_side
from gatewise.benchmarks.precision import Precision

Errors = dict[str, float]


@dataclasses.dataclass(frozen=True, slots=True)
class Agreement:
    """The errors of a side with respect to float64, compared with those of PyTorch's layer in the same precision.

    The allowance of every tensor is twice the sum of the error of PyTorch's layer and one rounding unit of
    the precision's coarsest format. It is derived for each call, never tuned.

    Attributes:
        errors: The relative error of every tensor.
        rival_errors: The errors of PyTorch's layer.
        rounding: The rounding unit of the precision.
        slack: The relative error that is allowed for gradients in addition, where the function is not smooth.
    """

    errors: Errors
    rival_errors: Errors
    rounding: float
    slack: float = 0.0

    @property
    def worst(self) -> str:
        """The tensor with the largest error relative to its allowance."""
        return max(self.errors, key=lambda name: _severity(self.errors[name] / self.allowed(name)))

    @property
    def agrees(self) -> bool:
        """Whether all errors are allowed; NaN is not."""
        return all(error <= self.allowed(name) for name, error in self.errors.items())

    @property
    def over_rival(self) -> float:
        """The largest ratio to the error of PyTorch's layer: of y, h_n, dx, ..., and the worst weight of each kind."""
        theirs = by_kind(self.rival_errors)
        ratios = [error / theirs[kind] for kind, error in by_kind(self.errors).items() if theirs[kind] > 0]
        return max(ratios, default=1.0)

    def allowed(self, name: str) -> float:
        """Return the allowance for the error of a tensor."""
        return 2 * (self.rival_errors[name] + self.rounding + (self.slack if name.startswith("d") else 0.0))

    def __str__(self) -> str:
        """Return one sentence."""
        name = self.worst
        relation = "within" if self.agrees else "more than"
        return f"{name} is {self.errors[name]:.1e} from float64, {relation} the allowed {self.allowed(name):.1e}"


def truth(call: Call) -> dict[str, Tensor]:
    """Compute a call in float64 on its device with PyTorch's layer, without any code of gatewise."""
    return rival_side(call, torch.float64).evidence(training=True)


def errors(found: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> Errors:
    """Return |found - exact| / |exact| for every tensor found, in Frobenius norms; infinite if shapes differ."""
    return {name: _error(tensor, exact[name]) for name, tensor in found.items()}


def agreement(found: Errors, rival: Errors, precision: Precision) -> Agreement:
    """Compare the errors of a side with those of PyTorch's layer."""
    return Agreement(found, rival, precision.rounding)


def larger(one: Errors, other: Errors) -> Errors:
    """Return the larger error of every tensor in two runs of a side."""
    return {name: max(error, other[name], key=_severity) for name, error in one.items()}


def by_kind(found: Errors) -> Errors:
    """Return the largest error of each kind; weights of all layers and directions are one kind each."""
    kinds: Errors = {}
    for name, error in found.items():
        kind = re.sub(r"_l\d+(_reverse)?$", "", name)
        kinds[kind] = max(error, kinds.get(kind, 0.0), key=_severity)
    return kinds


def _severity(error: float) -> float:
    # NaN compares false with everything, so `max` would not find it.
    return math.inf if math.isnan(error) else error


def _error(value: Tensor, exact: Tensor) -> float:
    if value.shape != exact.shape:
        return math.inf
    distance, size = float((value.double() - exact).norm()), float(exact.norm())
    # A tensor that is exactly zero has no relative error.
    return distance / size if size else math.inf if distance else 0.0
