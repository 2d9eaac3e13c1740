"""Generate the CUDA C++ code of a cell's step and adjoint for threads that together compute all units of batch rows.

This code supports every cell that can be traced: any number of sums, states and parameters, and steps that combine
hidden units (`gatewise.cells.standardized`). A thread computes N units, of one row or of several. The header
`kernels/cuda/row_cell.cuh` includes the code, which defines

    SUMS, GATES, STATES, PARAMETERS   the numbers of sums, of gates, of states other than h, and of parameters
    STATISTICS                        the number of means and deviations over units that the step computes
    PLACES, WIDEST                    the number of places in each function where threads combine units, and the
                                      largest number of pairs of numbers that they combine in one place
    CARRIED                           the number of carried states (`fused.carried_states`), of which h is the last one
    input_gate(sum)                   the gate whose rows of the input weights contribute to a sum; -1 for none
    recurrent_gate(sum)               the gate whose rows of the recurrent weights contribute to a sum; -1 for none
    MASKS                             the number of masks that change at every step
    initial_state(index)              the value of a carried state before the first step of an episode
    Given                             the inputs of the step of a unit: `sums`, `states`, `parameters` and `masks`
    Returned                          the results of the step: `hidden` and `states`
    step_of_row(given, returned, statistics, row)          the step, and its statistics
    adjoint_of_row(given, returned, to, statistics, row)   the gradients of the inputs from those of the results

All arguments but `row` are arrays with an element for each of the N units. `row` provides

    reciprocal             1 divided by the number of units
    merge<place>(moments)  replaces the moments (mean and variance) of units by those of their rows [N][...]
    add_up<place>(sums)    replaces numbers of units by their sums over the units of their rows [N][...]

where units that do not belong to the layer are left out, and each call in a function has its own index `place`.
`reciprocal_root(x)` is 1 / sqrt(x), and `moments_of(x, ...)` returns the moments of the values of a unit.

The step is divided into levels. The operations of a level compute each unit by itself. Between two levels, the means
and deviations that the next level reads are computed over all units. The adjoint computes the step again and then goes
backwards through its operations (reverse mode), level by level. Through a mean m and r = 1 / sqrt(variance + eps) over
n values x, with the gradients dm and dr summed over all units, the gradient of a value is

    dx = dm / n - dr r^3 (x - m) / n
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from gatewise.cells import masks_of_steps, step_cell
from gatewise.cells.cell import Cell
from gatewise.derivation.adjoint import slopes
from gatewise.derivation.device import CUDA, DeviceCode, key_of, number, place
from gatewise.derivation.fused import carried_states
from gatewise.derivation.printing import printer
from gatewise.derivation.trace import MEAN, STATISTICS, Operand, Operation, before, is_number, learned, traced

_LOOP = '    _Pragma("unroll") for (int u = 0; u < N; ++u) {'


def row_code(cell: Cell) -> DeviceCode:
    """Return the code of a cell, without generating its text yet."""
    initial = [cell.initial_value(name) for name in ("h", *cell.states)]
    return DeviceCode(cell, key_of(step_cell(cell), f"row {masks_of_steps(cell)} {initial}"), _written)


@functools.lru_cache(maxsize=64)
def _written(cell: Cell) -> str:
    own, masks = step_cell(cell), masks_of_steps(cell)
    return "\n".join([*_structure(own, masks), *_Row(own, masks).step(), *_Row(own, masks).adjoint()])


class Combinations(NamedTuple):
    """The combinations of hidden units in a cell's code.

    Attributes:
        places: The number of places in a function where threads combine units: the larger one of both functions.
        widest: The largest number of pairs of numbers that are combined for a row in one place.
    """

    places: int
    widest: int


@functools.lru_cache(maxsize=256)
def combinations_of(cell: Cell) -> Combinations:
    """Return the combinations of hidden units in the code of a cell."""
    of_step, of_adjoint = list[int](), list[int]()
    for statistics in map(_statistics, levels_of(cell)):
        means, others = _moments_and_others(statistics)
        of_step += [*([len(means)] if means else []), *([_pairs(others)] if others else [])]
        of_adjoint += [_pairs(statistics)] if statistics else []
    return Combinations(max(len(of_step), len(of_adjoint)), max([*of_step, *of_adjoint], default=0))


def _pairs(operations: Sequence[Operation]) -> int:
    return (len(operations) + 1) // 2


def levels_of(cell: Cell) -> list[list[Operation]]:
    """Return the operations of a cell's step in levels: those of a level read statistics of this level and earlier."""
    operations, levels = traced(cell).operations, dict[str, int]()
    for operation in operations:
        read = [levels.get(str(operand), 0) for operand in _values(operation)]
        levels[operation.name] = max(read, default=0) + (operation.function in STATISTICS)
    # The deviation is computed from the mean of the same values at the same level.
    return [
        [operation for operation in operations if levels[operation.name] == level]
        for level in range(max(levels.values()) + 1)
    ]


def _statistics(operations: Sequence[Operation]) -> list[Operation]:
    return [operation for operation in operations if operation.function in STATISTICS]


def _moments_and_others(statistics: Sequence[Operation]) -> tuple[list[Operation], list[Operation]]:
    """Return the means, and the deviations from given numbers; other deviations belong to the means."""
    means = [operation for operation in statistics if operation.function == MEAN]
    others = [own for own in statistics if own.function != MEAN and is_number(own.operands[1])]
    return means, others


def _structure(cell: Cell, masks: int) -> list[str]:
    gates, recurrent = len(cell.gates), dict(zip(cell.recurrent_sums, range(len(cell.gates)), strict=True))
    carried = carried_states(cell)
    numbers = {"SUMS": len(cell.sums), "GATES": gates, "STATES": len(cell.states), "MASKS": masks}
    numbers |= {"PARAMETERS": len(cell.parameters) - masks, "CARRIED": len(carried)}
    numbers["STATISTICS"] = len(traced(cell).statistics)
    numbers |= dict(zip(("PLACES", "WIDEST"), combinations_of(cell), strict=True))
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


class _Row:
    """The generator of a function of the code of one cell.

    Args:
        cell: The cell.
        masks: The number of parameters, the last ones, that are masks of steps.
    """

    def __init__(self, cell: Cell, masks: int) -> None:
        step, own = traced(cell), len(cell.parameters) - masks
        self._step = step
        self._places = itertools.count()
        self._given = {name: f"sums[{index}]" for index, name in enumerate(step.sums)}
        self._given |= {before(name): f"states[{index}]" for index, name in enumerate(carried_states(cell))}
        for index, name in enumerate(cell.parameters):
            self._given[learned(name)] = f"parameters[{index}]" if index < own else f"masks[{index - own}]"
        self._returned = [("hidden", step.hidden)]
        self._returned += [(f"states[{index}]", name) for index, name in enumerate(step.after)]
        self._of_row = {operation.name: index for index, operation in enumerate(step.statistics)}
        self._levels = levels_of(cell)

    def step(self) -> list[str]:
        """Return the function of the step."""
        return [
            "template <int N, class Units>",
            "__device__ __forceinline__ void step_of_row("
            "const Given (&given)[N], Returned (&returned)[N], Real (&statistics)[N][STATISTICS + 1], Units& row) {",
            *self._forward(self._computed),
            _LOOP,
            *(f"        returned[u].{field} = {self._text(name)};" for field, name in self._returned),
            *(f"        statistics[u][{index}] = {name}[u];" for name, index in self._of_row.items()),
            "    }",
            "}",
        ]

    def adjoint(self) -> list[str]:
        """Return the function of the adjoint."""
        declared = ", ".join(f"d_{operation.name}[N] = {{}}" for operation in self._step.operations)
        return [
            "template <int N, class Units>",
            "__device__ __forceinline__ void adjoint_of_row("
            "const Given (&given)[N], const Returned (&returned)[N], Given (&to)[N],"
            " const Real (&statistics)[N][STATISTICS + 1], Units& row) {",
            *self._forward(self._known),
            f"    Real {declared};",
            _LOOP,
            *(f"        to[u].{field} = 0;" for field in self._given.values()),
            *(f"        d_{name}[u] += returned[u].{field};" for field, name in self._returned),
            "    }",
            *itertools.chain.from_iterable(map(self._backward, reversed(self._levels))),
            "}",
        ]

    def _text(self, value: Operand) -> str:
        if is_number(value):
            return number(float(value))
        name = str(value)
        return f"given[u].{self._given[name]}" if name in self._given else f"{name}[u]"

    def _gradient(self, value: Operand) -> str:
        name = str(value)
        return f"to[u].{self._given[name]}" if name in self._given else f"d_{name}[u]"

    def _forward(self, statistics_of: Callable[[Sequence[Operation]], Iterator[str]]) -> Iterator[str]:
        yield f"    Real {', '.join(f'{operation.name}[N]' for operation in self._step.operations)};"
        for operations in self._levels:
            yield from statistics_of(_statistics(operations))
            yield _LOOP
            for operation in operations:
                if operation.function not in STATISTICS:
                    operands = [self._text(operand) for operand in operation.operands]
                    yield f"        {operation.name}[u] = {CUDA.expression(operation, operands)};"
            yield "    }"

    def _known(self, statistics: Sequence[Operation]) -> Iterator[str]:
        """Yield the code that reads the statistics of a level."""
        yield _LOOP
        yield from (f"        {own.name}[u] = statistics[u][{self._of_row[own.name]}];" for own in statistics)
        yield "    }"

    def _computed(self, statistics: Sequence[Operation]) -> Iterator[str]:
        """Yield the code that computes the statistics of a level."""
        means, others = _moments_and_others(statistics)
        if means:
            place = next(self._places)
            yield f"    Moments combined_{place}[N][{len(means)}];"
            yield _LOOP
            for index, operation in enumerate(means):
                values = ", ".join(map(self._text, operation.operands))
                yield f"        combined_{place}[u][{index}] = moments_of({values});"
            yield "    }"
            yield f"    row.template merge<{place}>(combined_{place});"
            yield _LOOP
            for index, operation in enumerate(means):
                yield f"        {operation.name}[u] = combined_{place}[u][{index}].mean;"
                for own in statistics:
                    if own.function != MEAN and own.operands[1] == operation.name:
                        variance = f"combined_{place}[u][{index}].variance"
                        yield f"        {own.name}[u] = reciprocal_root({variance} + {self._text(own.operands[0])});"
            yield "    }"
        yield from self._about_numbers(others)

    def _about_numbers(self, deviations: Sequence[Operation]) -> Iterator[str]:
        """Yield the code that computes deviations from given numbers."""
        if not deviations:
            return
        place = next(self._places)
        yield f"    Real combined_{place}[N][{len(deviations)}];"
        yield _LOOP
        for index, operation in enumerate(deviations):
            mean = self._text(operation.operands[1])
            terms = [f"({term} - {mean}) * ({term} - {mean})" for term in map(self._text, _averaged(operation))]
            yield f"        combined_{place}[u][{index}] = {' + '.join(terms)};"
        yield "    }"
        yield f"    row.template add_up<{place}>(combined_{place});"
        yield _LOOP
        for index, operation in enumerate(deviations):
            average = f"combined_{place}[u][{index}] * {_share(operation)}"
            yield f"        {operation.name}[u] = reciprocal_root({average} + {self._text(operation.operands[0])});"
        yield "    }"

    def _backward(self, operations: Sequence[Operation]) -> Iterator[str]:
        """Yield the code that hands the gradients of the results of a level to the operands."""
        printed = printer(self._text, number=number)
        yield _LOOP
        for operation in reversed(operations):
            if operation.function in STATISTICS:
                continue
            given = f"d_{operation.name}[u]"
            for operand, slope in zip(operation.operands, slopes(operation), strict=True):
                if is_number(operand) or slope == 0:
                    continue
                share = given if slope == 1 else f"{given} * ({printed.doprint(slope)})"
                yield f"        {self._gradient(operand)} += {share};"
        yield "    }"
        statistics = _statistics(operations)
        if not statistics:
            return
        place = next(self._places)
        yield f"    Real combined_{place}[N][{len(statistics)}];"
        yield _LOOP
        for index, operation in enumerate(statistics):
            yield f"        combined_{place}[u][{index}] = d_{operation.name}[u];"
        yield "    }"
        yield f"    row.template add_up<{place}>(combined_{place});"
        yield _LOOP
        for index, operation in enumerate(statistics):
            name, factor = operation.name, "" if operation.function == MEAN else f" * {operation.name}[u]"
            yield f"        d_{name}[u] = combined_{place}[u][{index}]{factor * 3} * {_share(operation)};"
        for operation in statistics:
            for value in _averaged(operation):
                share = f"d_{operation.name}[u]"
                if operation.function != MEAN:
                    share = f"-{share} * ({self._text(value)} - {self._text(operation.operands[1])})"
                yield f"        {self._gradient(value)} += {share};"
        yield "    }"


def _initial(value: float) -> str:
    if math.isinf(value):
        return f"Real(__uint_as_float(0x{'7' if value > 0 else 'f'}f800000u))"
    return number(value)


def _averaged(operation: Operation) -> tuple[Operand, ...]:
    """Return the operands that a statistic averages over units."""
    return operation.operands if operation.function == MEAN else operation.operands[2:]


def _values(operation: Operation) -> Iterator[Operand]:
    """Yield the operands on which the level of an operation depends."""
    of_level = _averaged(operation) if operation.function in STATISTICS else operation.operands
    return (operand for operand in of_level if not is_number(operand))


def _share(operation: Operation) -> str:
    """Return the share of each value in an average."""
    return f"(row.reciprocal * {number(1 / len(_averaged(operation)))})"
