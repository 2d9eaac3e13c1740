"""Criteria: the conditions on problem and device under which a kernel runs, and refusals if they are not met."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from gatewise.contract.device import Device
from gatewise.contract.problem import Problem


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why a kernel cannot run a problem.

    Attributes:
        quantity: The quantity that was checked ("dtype", "hidden_size", ...).
        actual: The value of the quantity in this call.
        allowed: The values that the kernel allows.
        advice: The advice to the user; may be empty.
    """

    quantity: str
    actual: str
    allowed: str
    advice: str = ""

    def __str__(self) -> str:
        """Return one sentence: the quantity, its value, the allowed values, and the advice."""
        return f"{self.quantity} is {self.actual}, allowed: {self.allowed}{'; ' + self.advice if self.advice else ''}"


@dataclasses.dataclass(frozen=True, slots=True)
class Criterion:
    """A condition under which a kernel runs.

    Attributes:
        quantity: The quantity that is checked.
        allowed: The allowed values, as text.
        actual: A function that returns the value of the quantity, as text.
        holds: A function that returns whether the condition is met.
        violation: A function that changes a problem and a device so that the condition is not met; one test covers
            every refusal with it.
        advice: The advice to the user; may be empty.
    """

    quantity: str
    allowed: str
    actual: Callable[[Problem, Device], str]
    holds: Callable[[Problem, Device], bool]
    violation: Callable[[Problem, Device], tuple[Problem, Device]]
    advice: str = ""

    def check(self, problem: Problem, device: Device) -> Refusal | None:
        """Return None if the condition is met, otherwise the refusal."""
        if self.holds(problem, device):
            return None
        return Refusal(self.quantity, self.actual(problem, device), self.allowed, self.advice)
