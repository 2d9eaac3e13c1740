"""Generate the CUDA C++ code of a cell's step and adjoint for all hidden units of a batch row.

This code supports every cell that can be traced: any number of sums, states and parameters, and steps that combine
hidden units (`gatewise.cells.standardized`). A thread computes N units of a row; the threads of a block compute all.
The code calls the functions of `kernels/cuda/functions.cuh` and `activations.cuh`, and defines

    SUMS, GATES, STATES, PARAMETERS   the numbers of sums, of gates, of states other than h, and of parameters
    STATISTICS                        the number of means and deviations over units that the step computes
    CARRIED                           the number of carried states (`fused.carried_states`), of which h is the last one
    input_gate(sum)                   the gate whose rows of the input weights contribute to a sum; -1 for none
    recurrent_gate(sum)               the gate whose rows of the recurrent weights contribute to a sum; -1 for none
    MASKS                             the number of masks that change at every step
    initial_state(index)              the value of a carried state before the first step of an episode
    Given                             the inputs of the step of a unit: `sums`, `states`, `parameters` and `masks`
    Returned                          the results of the step: `hidden` and `states`
    step_of_row(given, returned, statistics, row)          the step, and its statistics
    adjoint_of_row(given, returned, to, statistics, row)   the gradients of the inputs from those of the results

`row` provides `exists(u)`, whether unit u of the thread belongs to the layer, `reciprocal`, 1 divided by the number of
units, and `add_up<place>(numbers)`, which replaces an array of numbers by their sums over all threads of the row; calls
in different places of a function have different indices `place`. `reciprocal_root(x)` is 1 / sqrt(x).

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


def _structure(cell: Cell, masks: int) -> list[str]:
    gates, recurrent = len(cell.gates), dict(zip(cell.recurrent_sums, range(len(cell.gates)), strict=True))
    carried = carried_states(cell)
    numbers = {"SUMS": len(cell.sums), "GATES": gates, "STATES": len(cell.states), "MASKS": masks}
    numbers |= {"PARAMETERS": len(cell.parameters) - masks, "CARRIED": len(carried)}
    numbers["STATISTICS"] = len(traced(cell).statistics)
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
    """The generator of the code of one cell.

    Args:
        cell: The cell.
        masks: The number of parameters, the last ones, that are masks of steps.
    """

    def __init__(self, cell: Cell, masks: int) -> None:
        step, own = traced(cell), len(cell.parameters) - masks
        self._step = step
        self._given = {name: f"sums[{index}]" for index, name in enumerate(step.sums)}
        self._given |= {before(name): f"states[{index}]" for index, name in enumerate(carried_states(cell))}
        for index, name in enumerate(cell.parameters):
            self._given[learned(name)] = f"parameters[{index}]" if index < own else f"masks[{index - own}]"
        self._returned = [("hidden", step.hidden)]
        self._returned += [(f"states[{index}]", name) for index, name in enumerate(step.after)]
        self._of_row = {operation.name: index for index, operation in enumerate(step.statistics)}
        levels: dict[str, int] = {}
        for operation in step.operations:
            read = [levels.get(str(operand), 0) for operand in _values(operation)]
            levels[operation.name] = max(read, default=0) + (operation.function in STATISTICS)
        # The deviation is computed from the mean of the same values at the same level.
        self._levels = [
            [operation for operation in step.operations if levels[operation.name] == level]
            for level in range(max(levels.values()) + 1)
        ]

    def step(self) -> list[str]:
        """Return the function of the step."""
        return [
            "template <int N, class Units>",
            "__device__ __forceinline__ void step_of_row("
            "const Given (&given)[N], Returned (&returned)[N], Real (&statistics)[STATISTICS + 1], const Units& row) {",
            *self._forward(self._computed),
            _LOOP,
            *(f"        returned[u].{field} = {self._text(name)};" for field, name in self._returned),
            "    }",
            *(f"    statistics[{index}] = {name};" for name, index in self._of_row.items()),
            "}",
        ]

    def adjoint(self) -> list[str]:
        """Return the function of the adjoint."""
        pointwise = [operation.name for operation in self._step.operations if operation.name not in self._of_row]
        declared = ", ".join(f"d_{name}[N] = {{}}" for name in pointwise)
        return [
            "template <int N, class Units>",
            "__device__ __forceinline__ void adjoint_of_row("
            "const Given (&given)[N], const Returned (&returned)[N], Given (&to)[N],"
            " const Real (&statistics)[STATISTICS + 1], const Units& row) {",
            *self._forward(self._known),
            f"    Real {declared};",
            *(f"    Real d_{name} = 0;" for name in self._of_row),
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
        if name in self._of_row:
            return name
        return f"given[u].{self._given[name]}" if name in self._given else f"{name}[u]"

    def _gradient(self, value: Operand) -> str:
        name = str(value)
        return f"to[u].{self._given[name]}" if name in self._given else f"d_{name}[u]"

    def _forward(self, statistics_of: Callable[[Sequence[Operation]], Iterator[str]]) -> Iterator[str]:
        names = [operation.name for operation in self._step.operations if operation.name not in self._of_row]
        yield f"    Real {', '.join(f'{name}[N]' for name in names)};"
        for operations in self._levels:
            statistics = [operation for operation in operations if operation.function in STATISTICS]
            yield from statistics_of(statistics)
            yield _LOOP
            for operation in operations:
                if operation.function not in STATISTICS:
                    operands = [self._text(operand) for operand in operation.operands]
                    yield f"        {operation.name}[u] = {CUDA.expression(operation, operands)};"
            yield "    }"

    def _known(self, statistics: Sequence[Operation]) -> Iterator[str]:
        """Yield the code that reads the statistics of a level."""
        return (f"    const Real {own.name} = statistics[{self._of_row[own.name]}];" for own in statistics)

    def _computed(self, statistics: Sequence[Operation]) -> Iterator[str]:
        """Yield the code that computes the statistics of a level: first its means, then its deviations."""
        yield from self._averages([operation for operation in statistics if operation.function == MEAN])
        yield from self._averages([operation for operation in statistics if operation.function != MEAN])

    def _averages(self, operations: Sequence[Operation]) -> Iterator[str]:
        """Yield the code of means, or of deviations, that are summed over units together."""
        if not operations:
            return
        sums = f"sums_of_{operations[0].name}"
        yield f"    Real {sums}[{len(operations)}] = {{}};"
        yield _LOOP
        for index, operation in enumerate(operations):
            terms = [self._text(value) for value in _averaged(operation)]
            if operation.function != MEAN:
                mean = self._text(operation.operands[1])
                terms = [f"({term} - {mean}) * ({term} - {mean})" for term in terms]
            yield f"        if (row.exists(u)) {sums}[{index}] += {' + '.join(terms)};"
        yield "    }"
        yield f"    row.template add_up<{self._of_row[operations[0].name]}>({sums});"
        for index, operation in enumerate(operations):
            average = f"{sums}[{index}] * {_share(operation)}"
            if operation.function != MEAN:
                average = f"reciprocal_root({average} + {self._text(operation.operands[0])})"
            yield f"    const Real {operation.name} = {average};"

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
                if operand in self._of_row:
                    yield f"        if (row.exists(u)) d_{operand} += {share};"
                else:
                    yield f"        {self._gradient(operand)} += {share};"
        yield "    }"
        statistics = [operation for operation in operations if operation.function in STATISTICS]
        if not statistics:
            return
        names = [operation.name for operation in statistics]
        sums = f"gradients_of_{names[0]}"
        yield f"    Real {sums}[{len(names)}] = {{{', '.join(f'd_{name}' for name in names)}}};"
        yield f"    row.template add_up<{self._of_row[names[0]]}>({sums});"
        for index, operation in enumerate(statistics):
            name, factor = operation.name, "" if operation.function == MEAN else f" * {operation.name}"
            yield f"    d_{name} = {sums}[{index}]{factor * 3} * {_share(operation)};"
        yield _LOOP
        for operation in statistics:
            for value in _averaged(operation):
                share = f"d_{operation.name}"
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
