"""From the ways of every part to the fastest combination that keeps to a budget."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gatewise.planning.echo import admitted
from gatewise.planning.peak import Peak, peak
from gatewise.planning.way import Part, Way


class Shape(NamedTuple):
    """The shape of a batch of sentence pairs.

    Attributes:
        source: Tokens of its longest sentence, S.
        target: Steps of the decoder, T.
        batch: Pairs, B.
    """

    source: int
    target: int
    batch: int

    def __str__(self) -> str:
        """As sizes are printed: "S 50, T 50, B 128"."""
        return f"S {self.source}, T {self.target}, B {self.batch}"


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """A training step on batches of one shape.

    Attributes:
        shape: Of the batch.
        at_rest: Bytes between two steps, by what they are for.
        parts: In the order of the forward pass.
        update_scratch: Bytes that the optimizer needs besides, while it runs.
    """

    shape: Shape
    at_rest: tuple[tuple[str, int], ...]
    parts: tuple[Part, ...]
    update_scratch: int = 0

    def peak(self, ways: Sequence[Way]) -> Peak:
        """Return where a step in these ways needs most."""
        return peak(sum(count for _, count in self.at_rest), self.parts, ways, self.update_scratch)


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """A way for each part, the same at every shape of batch.

    Attributes:
        step: The step that needs most.
        ways: One for each of its parts.
        peak: What it needs.
        seconds: Predicted time of one step of each shape.
    """

    step: Step
    ways: tuple[Way, ...]
    peak: Peak
    seconds: float

    def needs(self, *, twice: bool = False) -> int:
        """Return the bytes of its peak.

        Args:
            twice: With all that a step adds counted a second time, as where steps of one shape of batch run from Python
                while the memory of a CUDA graph, of another shape, waits for its next replay.
        """
        at_rest = sum(count for _, count in self.step.at_rest)
        return self.peak.bytes + twice * (self.peak.bytes - at_rest)


def choices(steps: Iterable[Step]) -> list[Choice]:
    """Return every combination of ways that Echo's rule allows, the fastest first.

    The rule is asked at the shape that would need most if everything were kept.

    Args:
        steps: The same parts, in the same order, at every shape of batch that occurs.
    """
    steps = list(steps)
    offered = [[{way.name: way for way in part.ways} for part in step.parts] for step in steps]
    common = [
        [name for name in names if all(name in there[index] for there in offered)]
        for index, names in enumerate(_allowed(max(steps, key=_usual_bytes)))
    ]
    found = []
    for names in itertools.product(*common):
        combinations = [tuple(there[index][name] for index, name in enumerate(names)) for there in offered]
        peaks = [step.peak(ways) for step, ways in zip(steps, combinations, strict=True)]
        worst = max(range(len(steps)), key=lambda index: peaks[index].bytes)
        seconds = sum(way.seconds for ways in combinations for way in ways)
        found.append(Choice(steps[worst], combinations[worst], peaks[worst], seconds))
    return sorted(found, key=lambda choice: (choice.seconds, choice.peak.bytes))


def _allowed(step: Step) -> list[list[str]]:
    """Return the names of the ways of each part that the rule allows."""
    fastest = sum(min(way.seconds for way in part.ways) for part in step.parts)
    return [[way.name for way in admitted(part, fastest)] for part in step.parts]


def _usual_bytes(step: Step) -> int:
    return step.peak([part.ways[0] for part in step.parts]).bytes


def within(found: Sequence[Choice], budget: float | None, *, twice: bool = False) -> Choice | None:
    """Return the fastest choice that keeps to a budget in bytes; None when none does.

    A larger budget never gives a slower choice: whatever fits a smaller one fits it too.

    Args:
        found: As `choices` returns them.
        budget: Bytes; None for no limit.
        twice: As in `Choice.needs`.
    """
    return next((choice for choice in found if budget is None or choice.needs(twice=twice) <= budget), None)


def least(found: Sequence[Choice]) -> Choice:
    """Return the choice that needs least."""
    return min(found, key=lambda choice: choice.peak.bytes)
