"""Generate the CUDA C++ code of a cell's step and adjoint for threads that together compute all units of batch rows.

This code supports every cell that can be traced: any number of sums, states and parameters, and steps that combine
hidden units (`gatewise.cells.standardized`). A thread computes N units, of one row or of several. The header
`kernels/cuda/row_cell.cuh` includes the code, which defines

    SUMS, GATES, STATES, PARAMETERS   the numbers of sums, of gates, of states other than h, and of parameters
    STATISTICS                        the number of means and deviations over units that the step computes
    JACOBIAN                          the number of derivatives of statistics by earlier ones that the adjoint reads; 0
                                      for an adjoint that combines units level by level
    STEP_PLACES, STEP_WIDEST          the number of places in the step where threads combine units, and the largest
                                      number of pairs of numbers that they combine in one place
    ADJOINT_PLACES, ADJOINT_WIDEST    the same for the adjoint
    CARRIED                           the number of carried states (`fused.carried_states`), of which h is the last one
    input_gate(sum)                   the gate whose rows of the input weights contribute to a sum; -1 for none
    recurrent_gate(sum)               the gate whose rows of the recurrent weights contribute to a sum; -1 for none
    MASKS                             the number of masks that change at every step
    initial_state(index)              the value of a carried state before the first step of an episode
    Given                             the inputs of the step of a unit: `sums`, `states`, `parameters` and `masks`
    Returned                          the results of the step: `hidden` and `states`
    step_of_row(given, returned, statistics, row)          the step, and its statistics
    jacobian_of_units(given, statistics, entries, row)     each unit's part of the derivatives of statistics by earlier
                                                           ones, which `row` gets before the adjoint is called
    adjoint_of_row(given, returned, to, statistics, row)   the gradients of the inputs from those of the results

All arguments but `row` are arrays with an element for each of the N units. `row` provides

    reciprocal             1 divided by the number of units
    merge<place>(moments)  replaces the moments (mean and variance) of units by those of their rows [N][...]
    add_up<place>(sums)    replaces numbers of units by their sums over the units of their rows [N][...]
    add_up_with_offered<place>(sums, offered)              the same; the other array gets the sums of the numbers that
                                                           `row` got beforehand; called only if JACOBIAN > 0

where units that do not belong to the layer are left out, and each call in a function has its own index `place`.
`reciprocal_root(x)` is 1 / sqrt(x), and `moments_of(x, ...)` returns the moments of the values of a unit.

The step is divided into levels (`levels`). The adjoint computes the step again and then goes backwards through its
operations (reverse mode). Through a mean m and r = 1 / sqrt(variance + eps) over n values x, with the gradients dm and
dr summed over all units, the gradient of a value is

    dx = dm / n - dr r^3 (x - m) / n

The adjoint has two forms. In one, it combines units level by level: it serves where a combination takes little time,
and where the other form gains nothing. In the other one it combines all units in one place (`jacobian`).
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from gatewise.cells import masks_of_steps, step_cell
from gatewise.cells.cell import Cell
from gatewise.derivation.device import DeviceCode, key_of, number, place
from gatewise.derivation.fused import carried_states
from gatewise.derivation.jacobian import Totals, is_solved, pairs_of, totals_of
from gatewise.derivation.levels import levels_of, moments_and_others, statistics_of
from gatewise.derivation.row_adjoint import adjoint_lines, jacobian_lines, solved_adjoint_lines
from gatewise.derivation.row_step import step_lines
from gatewise.derivation.row_text import RowText
from gatewise.derivation.trace import traced


def row_code(cell: Cell, *, solved: bool = False) -> DeviceCode:
    """Return the code of a cell, without generating its text yet.

    Args:
        cell: The cell.
        solved: Whether the adjoint combines units in one place, if `jacobian.is_solved` says so of the cell.
    """
    own, masks = step_cell(cell), masks_of_steps(cell)
    solved = solved and is_solved(own)
    initial = [cell.initial_value(name) for name in ("h", *cell.states)]
    form = f"row {masks} {initial}{' solved' if solved else ''}"
    return DeviceCode(cell, key_of(own, form), _solved if solved else _by_level)


@functools.lru_cache(maxsize=64)
def _by_level(cell: Cell) -> str:
    return _written(cell, solved=False)


@functools.lru_cache(maxsize=64)
def _solved(cell: Cell) -> str:
    return _written(cell, solved=True)


def _written(cell: Cell, *, solved: bool) -> str:
    own, masks = step_cell(cell), masks_of_steps(cell)
    totals, text = totals_of(own) if solved else None, RowText(own, masks)
    adjoint = adjoint_lines(text) if totals is None else solved_adjoint_lines(text, totals)
    functions = *step_lines(text), *jacobian_lines(text, totals), *adjoint
    return "\n".join([*_structure(own, masks, totals), *functions])


class Combinations(NamedTuple):
    """The combinations of hidden units in a function of a cell's code.

    Attributes:
        places: The number of places where threads combine units.
        widest: The largest number of pairs of numbers that are combined for a row in one place.
    """

    places: int
    widest: int


@functools.lru_cache(maxsize=256)
def combinations_of_step(cell: Cell) -> Combinations:
    """Return the combinations of hidden units in the step of a cell."""
    found = list[int]()
    for level in levels_of(cell):
        means, others = moments_and_others(statistics_of(level))
        found += [*([len(means)] if means else []), *([pairs_of(others)] if others else [])]
    return Combinations(len(found), max(found, default=0))


@functools.lru_cache(maxsize=256)
def combinations_of_adjoint(cell: Cell, *, solved: bool = False) -> Combinations:
    """Return the combinations of hidden units in the adjoint of a cell; `solved` is that of `row_code`."""
    if solved and is_solved(cell):
        return Combinations(1, totals_of(cell).pairs)
    found = [pairs_of(statistics) for statistics in map(statistics_of, levels_of(cell)) if statistics]
    return Combinations(len(found), max(found, default=0))


def _structure(cell: Cell, masks: int, totals: Totals | None) -> list[str]:
    gates, recurrent = len(cell.gates), dict(zip(cell.recurrent_sums, range(len(cell.gates)), strict=True))
    carried = carried_states(cell)
    numbers = {"SUMS": len(cell.sums), "GATES": gates, "STATES": len(cell.states), "MASKS": masks}
    numbers |= {"PARAMETERS": len(cell.parameters) - masks, "CARRIED": len(carried)}
    numbers["STATISTICS"] = len(traced(cell).statistics)
    numbers["JACOBIAN"] = len(totals.entries) if totals else 0
    numbers |= dict(zip(("STEP_PLACES", "STEP_WIDEST"), combinations_of_step(cell), strict=True))
    adjoint = combinations_of_adjoint(cell, solved=totals is not None)
    numbers |= dict(zip(("ADJOINT_PLACES", "ADJOINT_WIDEST"), adjoint, strict=True))
    initial = [_initial(cell.initial_value(name)) for name in carried]
    return [
        f"constexpr int {', '.join(f'{name} = {value}' for name, value in numbers.items())};",
        place("input_gate", [index if index < gates else -1 for index in range(len(cell.sums))]),
        place("recurrent_gate", [recurrent.get(index, -1) for index in range(len(cell.sums))]),
        "__device__ __forceinline__ Real initial_state(int index) {",
        f"    return {''.join(f'index == {index} ? {value} : ' for index, value in enumerate(initial))}Real(0);",
        "}",
        "struct Given {",
        "    Real sums[SUMS]; Real states[CARRIED]; Real parameters[PARAMETERS + 1]; Real masks[MASKS + 1];",
        "};",
        "struct Returned { Real hidden; Real states[STATES + 1]; };",
    ]


def _initial(value: float) -> str:
    if math.isinf(value):
        return f"Real(__uint_as_float(0x{'7' if value > 0 else 'f'}f800000u))"
    return number(value)
