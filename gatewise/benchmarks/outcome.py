"""The result of a run, and the reason why a row failed."""

from __future__ import annotations

import dataclasses
from typing import Generic, TypeVar

Row = TypeVar("Row")


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome(Generic[Row]):
    """The result of a run.

    Attributes:
        records: The records, one for each row, in the order of the settings.
        interrupted: Whether Ctrl-C ended the run; the records are then the complete ones.
    """

    records: list[Row]
    interrupted: bool


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if there is no message."""
    return next(iter(str(error).splitlines()), type(error).__name__)
