"""The text of a step's values in the code for rows, and of the operations that compute them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from gatewise.cells.cell import Cell
from gatewise.derivation.adjoint import slopes
from gatewise.derivation.device import CUDA, number
from gatewise.derivation.fused import carried_states
from gatewise.derivation.levels import averaged, levels_of, statistics_of
from gatewise.derivation.printing import printer
from gatewise.derivation.trace import MEAN, STATISTICS, Operand, Operation, Step, before, is_number, learned, traced

LOOP = '    _Pragma("unroll") for (int u = 0; u < N; ++u) {'


class RowText:
    """The texts of the values of one cell.

    Args:
        cell: The cell.
        masks: The number of parameters, the last ones, that are masks of steps.

    Attributes:
        step: The operations of the cell's step.
        levels: The operations in levels.
        given: The element of `Given` for each value that the step reads.
        returned: The element of `Returned` for each result, and the name of the result.
        of_row: The index of each statistic.
    """

    def __init__(self, cell: Cell, masks: int) -> None:
        self.step: Step = traced(cell)
        self.levels = levels_of(cell)
        own = len(cell.parameters) - masks
        self.given = {name: f"sums[{index}]" for index, name in enumerate(self.step.sums)}
        self.given |= {before(name): f"states[{index}]" for index, name in enumerate(carried_states(cell))}
        for index, name in enumerate(cell.parameters):
            self.given[learned(name)] = f"parameters[{index}]" if index < own else f"masks[{index - own}]"
        self.returned = [("hidden", self.step.hidden)]
        self.returned += [(f"states[{index}]", name) for index, name in enumerate(self.step.after)]
        self.of_row = {operation.name: index for index, operation in enumerate(self.step.statistics)}
        self._printed: Any = None

    def value(self, value: Operand) -> str:
        """Return the expression of a value, or the literal of a number."""
        if is_number(value):
            return number(float(value))
        name = str(value)
        return f"given[u].{self.given[name]}" if name in self.given else f"{name}[u]"

    def forward(self, statistics_of_level: Callable[[Sequence[Operation]], Iterable[str]]) -> Iterator[str]:
        """Yield the code of the operations of the step, with that of each level's statistics before it."""
        yield f"    Real {', '.join(f'{operation.name}[N]' for operation in self.step.operations)};"
        for operations in self.levels:
            yield from statistics_of_level(statistics_of(operations))
            yield LOOP
            for operation in operations:
                if operation.function not in STATISTICS:
                    operands = [self.value(operand) for operand in operation.operands]
                    yield f"        {operation.name}[u] = {CUDA.expression(operation, operands)};"
            yield "    }"

    def known(self, statistics: Sequence[Operation]) -> Iterator[str]:
        """Yield the code that reads the statistics of a level."""
        yield LOOP
        yield from (f"        {own.name}[u] = statistics[u][{self.of_row[own.name]}];" for own in statistics)
        yield "    }"

    def shares(self, operation: Operation, above: str) -> Iterator[tuple[str, str]]:
        """Yield the operands of an operation, and the expressions of what a gradient `above` adds to theirs."""
        self._printed = self._printed or printer(self.value, number=number)
        for operand, slope in zip(operation.operands, slopes(operation), strict=True):
            if not is_number(operand) and slope != 0:
                yield str(operand), above if slope == 1 else f"{above} * ({self._printed.doprint(slope)})"

    def shares_of_statistic(self, operation: Operation, scaled: str) -> Iterator[tuple[str, str]]:
        """Yield the values that a statistic averages, and what its gradient, as `scaled`, adds to theirs."""
        for value in averaged(operation):
            if operation.function == MEAN:
                yield str(value), scaled
            else:
                yield str(value), f"-{scaled} * ({self.value(value)} - {self.value(operation.operands[1])})"

    def scaled(self, operation: Operation, gradient: str) -> str:
        """Return the gradient of a statistic times what is common to its derivatives by all values."""
        factor = "" if operation.function == MEAN else f" * {operation.name}[u]"
        return f"{gradient}{factor * 3} * {share(operation)}"


def share(operation: Operation) -> str:
    """Return the expression of the share of each value in an average."""
    return f"(row.reciprocal * {number(1 / len(averaged(operation)))})"
