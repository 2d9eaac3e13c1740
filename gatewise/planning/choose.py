"""The choice of the fastest combination of ways within a memory budget."""

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
        source: The number of tokens of the longest sentence, S.
        target: The number of decoder steps, T.
        batch: The number of pairs, B.
    """

    source: int
    target: int
    batch: int

    def __str__(self) -> str:
        """Return the sizes as they are printed: "S 50, T 50, B 128"."""
        return f"S {self.source}, T {self.target}, B {self.batch}"


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """A training step on batches of one shape.

    Attributes:
        shape: The shape of the batch.
        at_rest: The memory in bytes that is in use between two steps, by purpose.
        parts: The parts, in the order of the forward pass.
        update_scratch: The additional workspace in bytes of the optimizer's update.
    """

    shape: Shape
    at_rest: tuple[tuple[str, int], ...]
    parts: tuple[Part, ...]
    update_scratch: int = 0

    def peak(self, ways: Sequence[Way]) -> Peak:
        """Return the peak memory of the step when its parts are computed in these ways."""
        return peak(sum(count for _, count in self.at_rest), self.parts, ways, self.update_scratch)


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """One way for each part, the same for every shape of batch.

    Attributes:
        step: The step with the largest peak memory.
        ways: The way of each of its parts.
        peak: The peak memory of that step.
        seconds: The predicted time of one step of each shape.
    """

    step: Step
    ways: tuple[Way, ...]
    peak: Peak
    seconds: float

    def needs(self, *, twice: bool = False) -> int:
        """Return the peak memory in bytes.

        Args:
            twice: Whether to count the memory that a step adds twice. This applies when eager steps of one batch shape
                run while a CUDA graph of another shape holds its memory for the next replay.
        """
        at_rest = sum(count for _, count in self.step.at_rest)
        return self.peak.bytes + twice * (self.peak.bytes - at_rest)


def choices(steps: Iterable[Step]) -> list[Choice]:
    """Return every combination of ways that Echo's rule allows, the fastest first.

    The rule is applied at the shape that would need most memory if everything were kept.

    Args:
        steps: The step for every shape of batch that occurs; all have the same parts in the same order.
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
    """Return the fastest choice within a memory budget; None if there is none.

    A larger budget never gives a slower choice, because whatever fits into a smaller budget fits into it too.

    Args:
        found: The choices that `choices` returned.
        budget: The budget in bytes; None for no limit.
        twice: Whether the memory of a step counts twice, as in `Choice.needs`.
    """
    return next((choice for choice in found if budget is None or choice.needs(twice=twice) <= budget), None)


def least(found: Sequence[Choice]) -> Choice:
    """Return the choice with the least peak memory."""
    return min(found, key=lambda choice: choice.peak.bytes)
