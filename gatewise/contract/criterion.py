"""Criteria: what a kernel demands of a problem and a device, as objects that can explain themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from gatewise.contract.device import Device
from gatewise.contract.problem import Problem


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """Why a kernel cannot run a problem.

    Attributes:
        quantity: What was looked at ("dtype", "hidden_size", ...).
        actual: Its value in this call.
        allowed: The values the kernel takes.
        advice: What to do about it; may be empty.
    """

    quantity: str
    actual: str
    allowed: str
    advice: str = ""

    def __str__(self) -> str:
        """One sentence: the quantity, its value, the allowed values, the way out."""
        return f"{self.quantity} is {self.actual}, allowed: {self.allowed}{'; ' + self.advice if self.advice else ''}"


@dataclasses.dataclass(frozen=True, slots=True)
class Criterion:
    """One demand of a kernel.

    Attributes:
        quantity: What is looked at.
        allowed: The values that pass, as text.
        actual: Reads the value, as text.
        holds: Whether the demand is met.
        violation: Changes a problem and a device so that the demand is not met; one test covers every refusal with it.
        advice: What the user can do; may be empty.
    """

    quantity: str
    allowed: str
    actual: Callable[[Problem, Device], str]
    holds: Callable[[Problem, Device], bool]
    violation: Callable[[Problem, Device], tuple[Problem, Device]]
    advice: str = ""

    def check(self, problem: Problem, device: Device) -> Refusal | None:
        """Return None when the demand is met, otherwise the refusal."""
        if self.holds(problem, device):
            return None
        return Refusal(self.quantity, self.actual(problem, device), self.allowed, self.advice)
