"""The statistics of a step over hidden units, and the levels in which they depend on each other.

The operations of a level compute each unit by itself. Between two levels, the statistics that the next level reads are
computed over all units.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gatewise.cells.cell import Cell
from gatewise.derivation.trace import MEAN, STATISTICS, Operand, Operation, is_number, traced


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


def statistics_of(operations: Sequence[Operation]) -> list[Operation]:
    """Return the operations that combine hidden units."""
    return [operation for operation in operations if operation.function in STATISTICS]


def moments_and_others(statistics: Sequence[Operation]) -> tuple[list[Operation], list[Operation]]:
    """Return the means, and the deviations from given numbers; other deviations belong to the means."""
    means = [operation for operation in statistics if operation.function == MEAN]
    others = [own for own in statistics if own.function != MEAN and is_number(own.operands[1])]
    return means, others


def averaged(operation: Operation) -> tuple[Operand, ...]:
    """Return the operands that a statistic averages over units."""
    return operation.operands if operation.function == MEAN else operation.operands[2:]


def _values(operation: Operation) -> Iterator[Operand]:
    """Yield the operands on which the level of an operation depends."""
    of_level = averaged(operation) if operation.function in STATISTICS else operation.operands
    return (operand for operand in of_level if not is_number(operand))
