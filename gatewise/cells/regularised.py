"""Cells with dropout or zoneout in the recurrence.

`Regularised` is a cell in training: the call draws masks, and the kernel applies them. Its `masked` form has the masks
that change at every step as parameters of the step. `Averaged` is a cell with zoneout in evaluation, a cell like any
other: each state is the mean of its value before and after the step.
"""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gatewise.cells.candidate import candidate_changed
from gatewise.cells.cell import Cell


class Regularised(Cell):
    """A cell whose call draws masks for dropout of the hidden state and of the candidate, and for zoneout.

    Args:
        cell: The cell.
        recurrent_dropout: The probability of dropping a unit of the hidden state that enters the recurrent product. One
            mask serves all steps of a call; the other units are multiplied by 1 / (1 - recurrent_dropout).
        zoneout: For the hidden state and each other state, the probability that a unit keeps its value from before a
            step; zero for all states if empty.
        candidate_dropout: The probability of dropping a unit of the candidate at a step; the other units are multiplied
            by 1 / (1 - candidate_dropout).

    Attributes:
        masked: The cell with the masks of steps as parameters of its step; the cell itself if there are none.
        masked_beside_hidden: The same without zoneout of the hidden state, for kernels that apply it themselves.
        of_steps: The probability that an element is 1 for each mask that changes at every step, by name: the masks of
            zoneout in the order of the states, 1 where a unit keeps its value, then that of the candidate, 1 where a
            unit is kept.
    """

    def __init__(
        self, cell: Cell, recurrent_dropout: float = 0.0, zoneout: Sequence[float] = (), candidate_dropout: float = 0.0
    ) -> None:
        _take_over(self, cell)
        self.cell, self.recurrent_dropout, self.candidate_dropout = cell, recurrent_dropout, candidate_dropout
        self.zoneout = tuple(zoneout) if any(zoneout) else ()
        zoned = {name: rate for name, rate in zip(("h", *cell.states), self.zoneout, strict=False) if rate}
        self.of_steps = {_zoneout_of(name): rate for name, rate in zoned.items()}
        if candidate_dropout:
            self.of_steps[_CANDIDATE] = 1.0 - candidate_dropout
        self.masked = _masked(cell, tuple(zoned), candidate_dropout)
        self.masked_beside_hidden = _masked(cell, tuple(name for name in zoned if name != "h"), candidate_dropout)

    @property
    def name(self) -> str:  # type: ignore[override]
        """The name, which follows options of the cell that change."""
        return f"{self.cell.name} with {self._options}"

    @property
    def _options(self) -> str:
        names = ("recurrent_dropout", "zoneout", "candidate_dropout")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names if getattr(self, name))

    def step(self, gate: Any, state: Any, *learned: Any) -> tuple[Any, Mapping[str, Any]]:
        """Return the states after a step, before any mask is applied."""
        return self.cell.step(gate, state, *learned)

    def __hash__(self) -> int:
        # Calls look up their cell often. Everything else is made from these.
        return hash((type(self), self.cell, self.recurrent_dropout, self.zoneout, self.candidate_dropout))

    def __repr__(self) -> str:
        return f"Regularised({self.cell!r}, {self._options})"


class Averaged(Cell):
    """A cell with zoneout in evaluation: each state after a step is `rate * before + (1 - rate) * after`.

    Args:
        cell: The cell.
        zoneout: The rates of the hidden state and of each other state.
    """

    def __init__(self, cell: Cell, zoneout: Sequence[float]) -> None:
        _take_over(self, cell)
        self.cell, self.zoneout = cell, tuple(zoneout)

    @property
    def name(self) -> str:  # type: ignore[override]
        """The name, which follows options of the cell that change."""
        return f"{self.cell.name} with mean zoneout={self.zoneout!r}"

    def step(self, gate: Any, state: Any, *learned: Any) -> tuple[Any, Mapping[str, Any]]:
        """Return the mixed states after a step."""
        rates = zip(("h", *self.cell.states), self.zoneout, strict=True)
        return _mixed(self.cell.step(gate, state, *learned), state, {name: rate for name, rate in rates if rate})

    def __hash__(self) -> int:
        return hash((type(self), self.cell, self.zoneout))

    def __repr__(self) -> str:
        return f"Averaged({self.cell!r}, {self.zoneout!r})"


_CANDIDATE = "candidate_dropout"


class _Masked(Cell):
    """A cell with the masks of steps as further parameters of its step.

    Args:
        cell: The cell.
        zoned: The names of the states with zoneout.
        candidate_dropout: The probability of dropping a unit of the candidate.
    """

    def __init__(self, cell: Cell, zoned: tuple[str, ...], candidate_dropout: float) -> None:
        _take_over(self, cell)
        self.cell, self.zoned, self.candidate_dropout = cell, zoned, candidate_dropout
        self.parameters = {**cell.parameters, **dict.fromkeys(self._masks, 0.0)}  # type: ignore[misc]

    @property
    def name(self) -> str:  # type: ignore[override]
        """The name, which follows options of the cell that change."""
        return f"{self.cell.name} with masks of {', '.join(self._masks)}"

    @property
    def _masks(self) -> list[str]:
        return [*map(_zoneout_of, self.zoned), *([_CANDIDATE] if self.candidate_dropout else [])]

    def step(self, gate: Any, state: Any, masks: Any) -> tuple[Any, Mapping[str, Any]]:
        """Return the states after a step with the masks applied."""
        scale = 1.0 / (1.0 - self.candidate_dropout)
        dropped = candidate_changed(lambda value: value * getattr(masks, _CANDIDATE) * scale)
        with dropped if self.candidate_dropout else contextlib.nullcontext():
            after = self.cell.step(gate, state, *([masks] if self.cell.parameters else []))
        return _mixed(after, state, {name: getattr(masks, _zoneout_of(name)) for name in self.zoned})

    def __hash__(self) -> int:
        return hash((type(self), self.cell, self.zoned, self.candidate_dropout))


def _masked(cell: Cell, zoned: tuple[str, ...], candidate_dropout: float) -> Cell:
    return _Masked(cell, zoned, candidate_dropout) if zoned or candidate_dropout else cell


def in_evaluation(cell: Cell, zoneout: Sequence[float]) -> Cell:
    """Return the cell that stands for a cell with zoneout in evaluation: itself where no rate is set."""
    return Averaged(cell, zoneout) if any(zoneout) else cell


def in_training(cell: Cell, recurrent_dropout: float, zoneout: Sequence[float], candidate_dropout: float) -> Cell:
    """Return the cell that stands for a cell with dropout or zoneout in training: itself where no rate is set."""
    if not (recurrent_dropout or candidate_dropout or any(zoneout)):
        return cell
    return Regularised(cell, recurrent_dropout, zoneout, candidate_dropout)


def step_cell(cell: Cell) -> Cell:
    """Return the cell whose step computes a cell: for a regularised one, with the masks of steps as last parameters."""
    return cell.masked if isinstance(cell, Regularised) else cell


def masks_of_steps(cell: Cell) -> int:
    """Return the number of masks that a cell reads at every step."""
    return len(cell.of_steps) if isinstance(cell, Regularised) else 0


def stated(cell: Cell) -> Cell:
    """Return the cell that its author stated, without what surrounds it."""
    while isinstance(cell, (Regularised, Averaged, _Masked)):  # PyTorch 2.6 cannot trace a union of them
        cell = cell.cell
    return cell


def named(name: str, known: Callable[[str], Cell]) -> Cell | None:
    """Return the regularised cell of a name; None if the name is that of another cell.

    Args:
        name: The name, as of a `Regularised` or an `Averaged`.
        known: The function that returns the surrounded cell by its name.
    """
    cell, surrounded, options = name.partition(" with ")
    if not surrounded:
        return None
    kind = Averaged if options.startswith("mean ") else Regularised
    rates = {option: ast.literal_eval(rate) for option, rate in re.findall(r"(\w+)=(\(.*?\)|[^,]+)", options)}
    return kind(known(cell), **rates)


def _zoneout_of(state: str) -> str:
    return f"{state}_zoneout"


def _take_over(self: Cell, cell: Cell) -> None:
    for name in ("gates", "states", "apart", "parameters", "initial_states"):
        setattr(self, name, getattr(cell, name))


def _mixed(
    after: tuple[Any, Mapping[str, Any]], before: Any, rates: Mapping[str, Any]
) -> tuple[Any, Mapping[str, Any]]:
    hidden, others = after

    def mixed(name: str, value: Any) -> Any:
        # Products with 0 and 1 are exact, so that a mask selects one of both values.
        return rates[name] * getattr(before, name) + (1 - rates[name]) * value if name in rates else value

    return mixed("h", hidden), {name: mixed(name, value) for name, value in others.items()}
