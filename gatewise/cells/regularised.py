"""Cells with dropout or zoneout in the recurrence.

`Regularised` is a cell in training: the call draws masks, and the kernel applies them. Its `masked` form has the masks
of zoneout as parameters of the step. `Averaged` is a cell with zoneout in evaluation, a cell like any other: each state
is the mean of its value before and after the step.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gatewise.cells.cell import Cell


class Regularised(Cell):
    """A cell whose call draws masks for dropout of the hidden state and for zoneout.

    Args:
        cell: The cell.
        recurrent_dropout: The probability of dropping a unit of the hidden state that enters the recurrent product. One
            mask serves all steps of a call; the other units are multiplied by 1 / (1 - recurrent_dropout).
        zoneout: For the hidden state and each other state, the probability that a unit keeps its value from before a
            step.

    Attributes:
        masked: The cell whose step mixes the states before and after the step by masks, which are parameters of the
            step: 1 where a unit keeps its value, otherwise 0. The cell itself without zoneout.
        zoned: The names of the states with zoneout, in the order of the masks.
    """

    def __init__(self, cell: Cell, recurrent_dropout: float, zoneout: Sequence[float]) -> None:
        _take_over(self, cell)
        self.cell, self.recurrent_dropout, self.zoneout = cell, recurrent_dropout, tuple(zoneout)
        rates = {"recurrent_dropout": recurrent_dropout, "zoneout": self.zoneout if any(self.zoneout) else 0}
        self.name = f"{cell.name} with {', '.join(f'{name}={rate!r}' for name, rate in rates.items() if rate)}"
        self.zoned = tuple(name for name, rate in zip(("h", *cell.states), self.zoneout, strict=True) if rate)
        self.masked = _Masked(cell, self.zoned) if self.zoned else cell

    def step(self, gate: Any, state: Any, *learned: Any) -> tuple[Any, Mapping[str, Any]]:
        """Return the states after a step, before any mask is applied."""
        return self.cell.step(gate, state, *learned)


class Averaged(Cell):
    """A cell with zoneout in evaluation: each state after a step is `rate * before + (1 - rate) * after`.

    Args:
        cell: The cell.
        zoneout: The rates of the hidden state and of each other state.
    """

    def __init__(self, cell: Cell, zoneout: Sequence[float]) -> None:
        _take_over(self, cell)
        self.cell, self.zoneout = cell, tuple(zoneout)
        self.name = f"{cell.name} with mean zoneout={self.zoneout!r}"

    def step(self, gate: Any, state: Any, *learned: Any) -> tuple[Any, Mapping[str, Any]]:
        """Return the mixed states after a step."""
        rates = dict(zip(("h", *self.cell.states), self.zoneout, strict=True))
        return _mixed(self.cell.step(gate, state, *learned), state, lambda name: rates[name])


class _Masked(Cell):
    """A cell with masks of zoneout as further parameters of its step.

    Args:
        cell: The cell.
        zoned: The names of the states with zoneout.
    """

    def __init__(self, cell: Cell, zoned: tuple[str, ...]) -> None:
        _take_over(self, cell)
        self.cell, self.zoned = cell, zoned
        self.name = f"{cell.name} with masks of {', '.join(zoned)}"
        self.parameters = {**cell.parameters, **{f"{name}_zoneout": 0.0 for name in zoned}}  # type: ignore[misc]

    def step(self, gate: Any, state: Any, masks: Any) -> tuple[Any, Mapping[str, Any]]:
        """Return the mixed states after a step."""
        learned = [masks] if self.cell.parameters else []
        after = self.cell.step(gate, state, *learned)
        return _mixed(after, state, lambda name: getattr(masks, f"{name}_zoneout") if name in self.zoned else 0.0)


def in_evaluation(cell: Cell, zoneout: Sequence[float]) -> Cell:
    """Return the cell that stands for a cell with zoneout in evaluation: itself where no rate is set."""
    return Averaged(cell, zoneout) if any(zoneout) else cell


def in_training(cell: Cell, recurrent_dropout: float, zoneout: Sequence[float]) -> Cell:
    """Return the cell that stands for a cell with dropout or zoneout in training: itself where no rate is set."""
    return Regularised(cell, recurrent_dropout, zoneout) if recurrent_dropout or any(zoneout) else cell


def stated(cell: Cell) -> Cell:
    """Return the cell that its author stated, without what surrounds it."""
    while isinstance(cell, Regularised | Averaged | _Masked):
        cell = cell.cell
    return cell


def named(name: str, known: Callable[[str], Cell]) -> Cell | None:
    """Return the regularised cell of a name; None if the name is that of another cell.

    Args:
        name: The name, as of a `Regularised` or an `Averaged`.
        known: The function that returns the surrounded cell by its name.
    """
    found = re.fullmatch(r"(.+) with (mean )?(?:recurrent_dropout=([^,]+))?(?:, )?(?:zoneout=(.+))?", name)
    if found is None:
        return None
    cell = known(found[1])
    zoneout = ast.literal_eval(found[4]) if found[4] else (0.0,) * (1 + len(cell.states))
    return Averaged(cell, zoneout) if found[2] else Regularised(cell, float(found[3] or 0), zoneout)


def _take_over(self: Cell, cell: Cell) -> None:
    for name in ("gates", "states", "apart", "parameters", "initial_states"):
        setattr(self, name, getattr(cell, name))


def _mixed(
    after: tuple[Any, Mapping[str, Any]], before: Any, rate: Callable[[str], Any]
) -> tuple[Any, Mapping[str, Any]]:
    hidden, others = after

    def mix(name: str, value: Any) -> Any:
        share = rate(name)
        # Products with 0 and 1 are exact, so that a mask selects one of both values.
        return value if isinstance(share, float) and not share else share * getattr(before, name) + (1 - share) * value

    return mix("h", hidden), {name: mix(name, value) for name, value in others.items()}
