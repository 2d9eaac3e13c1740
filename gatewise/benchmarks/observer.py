"""The observer of a benchmark's progress."""

from __future__ import annotations

from typing import Protocol


class Observer(Protocol):
    """The interface of an object that shows a run's progress, one table at a time."""

    def begin(self, table: str, steps: int) -> None:
        """Called at the start of a table with the given number of steps."""
        ...

    def step(self, doing: str) -> None:
        """Called at the start of a step of the table, with its description."""
        ...
