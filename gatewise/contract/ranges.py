"""Ranges of numbers, declared with the field that they restrict: `batch_size: Annotated[int, COUNT] = 20`.

No range contains infinity or NaN. `check_ranges` checks every field of a dataclass against the range in its annotation,
so that a recipe, a command-line option and a call from Python raise the same error.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import typing
from typing import Any, Protocol

from gatewise.contract.errors import ArgumentError, sentence


class Rule(Protocol):
    """The interface of an annotation that checks a value."""

    def check(self, name: str, value: Any) -> None:
        """Raise `ArgumentError` if the value is not allowed."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """An interval of numbers.

    Attributes:
        words: The description of the interval in an error.
        least: The lower limit.
        most: The upper limit.
        above: Whether the interval is open at the lower limit.
        below: Whether the interval is open at the upper limit.

    Examples:
        >>> Range("a probability in [0, 1)", 0, 1, below=True).check("dropout", 0.5)
    """

    words: str
    least: float = -math.inf
    most: float = math.inf
    above: bool = False
    below: bool = False

    def check(self, name: str, value: float) -> None:
        """Check that a number is in the range.

        Raises:
            ArgumentError: The value is no number, outside of the range, infinite, or NaN.
        """
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise ArgumentError(sentence(name, self.words, repr(value)))
        # Comparisons with numbers are all that `torch.compile` can trace for a rate that a program changes.
        inside = self.least <= value <= self.most
        at_end = (self.above and value == self.least) or (self.below and value == self.most)
        bounded = math.isfinite(self.least) and math.isfinite(self.most)
        if inside and not at_end and (bounded or -math.inf < value < math.inf):
            return
        if not bounded and not -math.inf < value < math.inf:  # NaN too
            raise ArgumentError(sentence(name, "a finite number", value))
        words = self.words
        if value > self.most and not self.below and f"{self.most:g}" not in words:
            # An upper limit that the description does not mention is technical, such as that of an index; the error
            # states it.
            words = f"at most {self.most:,}"
        raise ArgumentError(sentence(name, words, value))


LARGEST = 2**31 - 1
"""The largest allowed count: libraries that use 32-bit indices do not overflow below it."""

NUMBER = Range("a finite number")
AMOUNT = Range("0 or more", 0)
POSITIVE = Range("greater than 0", 0, above=True)
SHARE = Range("in (0, 1]", 0, 1, above=True)
PROBABILITY = Range("a probability in [0, 1)", 0, 1, below=True)
COUNT = Range("a positive integer", 1, LARGEST)
COUNT_OR_NONE = Range("0 or more", 0, LARGEST)
SIZE = Range("a positive integer", 1, 2**20)
LAYERS = Range("a positive integer", 1, 1024)
THREADS = Range("0 or more", 0, 1024)
SEED = Range("0 or more", 0, 2**32 - 1)


def check_ranges(options: Any) -> None:
    """Check every field of a dataclass against its type, if that is int or bool, and the rules in its annotation.

    Raises:
        ArgumentError: A value is not allowed; the message names the field.
    """
    for name, (kind, rules) in _rules(type(options)).items():
        value = getattr(options, name)
        if kind is bool and not isinstance(value, bool):
            raise ArgumentError(sentence(name, "True or False", repr(value)))
        for rule in rules:
            rule.check(name, value)
        if kind is int and not isinstance(value, numbers.Integral):
            raise ArgumentError(sentence(name, "an integer", repr(value)))


@functools.cache
def _rules(kind: type) -> dict[str, tuple[Any, tuple[Rule, ...]]]:
    """Return the type of every field, and the rules in its annotation."""
    plain, hints = typing.get_type_hints(kind), typing.get_type_hints(kind, include_extras=True)
    return {
        field.name: (
            plain[field.name],
            tuple(each for each in getattr(hints[field.name], "__metadata__", ()) if hasattr(each, "check")),
        )
        for field in dataclasses.fields(kind)
    }
