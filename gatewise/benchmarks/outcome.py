"""How a run ended, and why a row failed."""

from __future__ import annotations

import dataclasses
from typing import Generic, TypeVar

Row = TypeVar("Row")


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome(Generic[Row]):
    """What a run found.

    Attributes:
        records: One a row, in the order of the settings.
        interrupted: Whether Ctrl-C ended it early; the records are then those that were finished.
    """

    records: list[Row]
    interrupted: bool


def first_line(error: BaseException) -> str:
    """Return what an error says in a line: of its type where it says nothing."""
    return next(iter(str(error).splitlines()), type(error).__name__)
