"""A memory plan: what each part of a training step keeps, its workspace, and where the peak is."""

from __future__ import annotations

import dataclasses

from gatewise.contract.decision import format_bytes, wrapped
from gatewise.planning.choose import Choice
from gatewise.planning.peak import FORWARD, UPDATE
from gatewise.planning.way import Way


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """A memory plan of a training step.

    Attributes:
        choice: The way of each part, and the step with the largest peak.
        budget: The budget in bytes; None if the device's memory size is unknown.
        asked: The budget as the user gave it: a size, or "auto".
        fastest: The predicted time in seconds of the fastest ways, for all shapes of batch.
    """

    choice: Choice
    budget: int | None
    asked: str
    fastest: float

    @property
    def peak_bytes(self) -> int:
        """The predicted peak of the memory that PyTorch allocates, in bytes."""
        return self.choice.peak.bytes

    def way(self, part: str) -> Way:
        """Return the way in which a part is computed."""
        names = [each.name for each in self.choice.step.parts]
        return self.choice.ways[names.index(part)]

    def __str__(self) -> str:
        """Return a report of at most 80 columns."""
        choice = self.choice
        lines = [*wrapped("memory plan  ", self._headline()), ""]
        lines += wrapped("  at rest    ", f"{_size(sum(count for _, count in choice.step.at_rest))}  {_items(choice)}")
        lines.append(f"  {'part':<9}  {'kept':>9}  {'workspace':>9}  how")
        for part, way in zip(choice.step.parts, choice.ways, strict=True):
            room = max(way.forward_scratch, way.backward_scratch)
            lead = f"  {part.name:<9}  {_size(way.kept)}  {_size(room)}  "
            lines += wrapped(lead, way.detail)
        return "\n".join([*lines, *wrapped("  peak       ", f"{_size(self.peak_bytes)}  {_where(choice)}")])

    def _headline(self) -> str:
        share = f" of {format_bytes(self.budget)}" if self.budget is not None else ""
        slower = self.choice.seconds / self.fastest - 1 if self.fastest else 0.0
        price = f"; {slower:.0%} slower than without" if slower >= 0.005 else ""
        return f"{format_bytes(self.peak_bytes)} predicted{share} ({self.asked}), {self.choice.step.shape}{price}"


def _items(choice: Choice) -> str:
    return ", ".join(f"{name} {format_bytes(count)}" for name, count in choice.step.at_rest)


def _where(choice: Choice) -> str:
    found = choice.peak
    if found.phase == UPDATE:
        return "in the update of the weights"
    return f"in the {found.phase} pass of {found.part}" + (
        "" if found.phase == FORWARD else f", gradients of {format_bytes(_gradients(choice))} among it"
    )


def _gradients(choice: Choice) -> int:
    """Return the size in bytes of the parameters' gradients that exist at the peak."""
    names = [part.name for part in choice.step.parts]
    return sum(part.gradients for part in choice.step.parts[names.index(choice.peak.part) :])


def _size(count: int) -> str:
    return f"{format_bytes(count):>9}"
