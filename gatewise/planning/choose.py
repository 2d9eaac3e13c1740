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
        usual: The same when every part keeps everything that its first way keeps.
    """

    step: Step
    ways: tuple[Way, ...]
    peak: Peak
    seconds: float
    usual: float


def choices(steps: Iterable[Step]) -> list[Choice]:
    """Return every combination of ways that Echo's rule allows at every shape, the fastest first.

    Args:
        steps: The same parts, in the same order, at every shape of batch that occurs.
    """
    steps = list(steps)
    offered = [_offered(step) for step in steps]
    usual = sum(part.ways[0].seconds for step in steps for part in step.parts)
    common = [
        [way.name for way in ways if all(way.name in there[index] for there in offered)]
        for index, ways in enumerate(part.ways for part in steps[0].parts)
    ]
    found = []
    for names in itertools.product(*common):
        combinations = [tuple(there[index][name] for index, name in enumerate(names)) for there in offered]
        peaks = [step.peak(ways) for step, ways in zip(steps, combinations, strict=True)]
        worst = max(range(len(steps)), key=lambda index: peaks[index].bytes)
        seconds = sum(way.seconds for ways in combinations for way in ways)
        found.append(Choice(steps[worst], combinations[worst], peaks[worst], seconds, usual))
    return sorted(found, key=lambda choice: (choice.seconds, choice.peak.bytes))


def _offered(step: Step) -> list[dict[str, Way]]:
    fastest = sum(min(way.seconds for way in part.ways) for part in step.parts)
    return [{way.name: way for way in admitted(part, fastest)} for part in step.parts]


def within(found: Sequence[Choice], budget: float | None) -> Choice | None:
    """Return the fastest choice that keeps to a budget in bytes; None when none does.

    A larger budget never gives a slower choice: whatever fits a smaller one fits it too.
    """
    return next((choice for choice in found if budget is None or choice.peak.bytes <= budget), None)


def least(found: Sequence[Choice]) -> Choice:
    """Return the choice that needs least."""
    return min(found, key=lambda choice: choice.peak.bytes)
