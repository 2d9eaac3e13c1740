"""The gradients of a step's statistics from one combination of hidden units, in place of one for each level.

A statistic s_j is a mean m, or r = 1 / sqrt(variance + eps), over the units of a batch row. Given all statistics, the
step computes each unit u by itself: its results y(u), and the values x(u) that statistics average, are functions of the
inputs of the unit and of s_1 ... s_S. Two kinds of derivatives with respect to a statistic follow:

    partial_j = sum over u and y of dL/dy(u) * dy(u)/ds_j                      (all other statistics held fixed)
    J_ij = ds_i/ds_j = sum over u and x of ds_i/dx(u) * dx(u)/ds_j             (for each later statistic s_i)

where, with n values x, dm/dx = 1 / n and dr/dx = -r^3 (x - m) / n. The derivative of r through m is zero, because the
distances x - m add up to zero; a given number in place of m has none. The total derivatives are the solution of

    total_j = partial_j + sum over i > j of total_i * J_ij

from the last statistic to the first one: the matrix J is strictly triangular, because no statistic depends on itself or
on a later one. With them, the gradients of all values of a unit follow from that unit alone, in reverse mode, where a
value x that s_i averages receives total_i * ds_i/dx.

The sums of `partial` need the gradients of the results. Those of J do not: they depend on the forward pass alone. So
all of them can be combined over the units together, and J before the gradients of the results are known, where the
gradients of one level after the other need a combination for each level. The sums have the same terms as those of
levels, in another order: the gradients agree but for rounding.

This holds for every step that can be traced. It saves nothing where statistics have a single level, and J has up to
S (S - 1) / 2 entries: `is_solved` says for which cells the code of a row is written in this form.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gatewise.cells.cell import Cell
from gatewise.derivation.levels import averaged, levels_of, statistics_of
from gatewise.derivation.trace import STATISTICS, Operand, Operation, is_number, traced

_MOST_PAIRS = 32
"""The largest number of pairs of numbers that a row combines in one place. The memory and the loads of an exchange grow
with it, by about S^2 / 4 for a chain of S statistics, while only S / 2 exchanges are saved."""


class Totals(NamedTuple):
    """The structure of the equations of a cell's statistics.

    Attributes:
        partial: The names of the statistics on which a result depends other than through later statistics.
        entries: The pairs (i, j) of names with a derivative ds_i/ds_j, in the order of i, then of j.
        total: The names of the statistics with a total derivative, from the last one to the first one.
    """

    partial: tuple[str, ...]
    entries: tuple[tuple[str, str], ...]
    total: tuple[str, ...]

    @property
    def pairs(self) -> int:
        """The number of pairs of numbers that are combined over units: those of J, and those of the partial sums."""
        return pairs_of(self.entries) + pairs_of(self.partial)


@functools.lru_cache(maxsize=256)
def totals_of(cell: Cell) -> Totals:
    """Return the structure of the equations of a cell's statistics."""
    step = traced(cell)
    partial = reached(step.operations, [step.hidden, *step.after])
    wanted, entries = set(partial), list[tuple[str, str]]()
    total = list[str]()
    for place in reversed(range(len(step.operations))):
        own = step.operations[place]
        if own.function in STATISTICS and own.name in wanted:
            total.append(own.name)
            earlier = reached(step.operations[:place], averaged(own))
            entries += [(own.name, name) for name in reversed(earlier)]
            wanted.update(earlier)
    return Totals(partial, tuple(reversed(entries)), tuple(total))


def is_solved(cell: Cell) -> bool:
    """Return whether the adjoint of a row combines units in one place, instead of level by level."""
    levels = sum(bool(statistics_of(level)) for level in levels_of(cell))
    return levels > 1 and totals_of(cell).pairs <= _MOST_PAIRS


def reached(operations: Sequence[Operation], seeds: Iterable[Operand]) -> tuple[str, ...]:
    """Return the names of the statistics that values depend on, other than through later statistics, in their order.

    Args:
        operations: The operations that compute the values, in their order.
        seeds: The values.
    """
    seen, found = {str(seed) for seed in seeds if not is_number(seed)}, list[str]()
    for operation in reversed(operations):
        if operation.name not in seen:
            continue
        if operation.function in STATISTICS:
            found.append(operation.name)
        else:
            seen.update(str(operand) for operand in operation.operands if not is_number(operand))
    return tuple(reversed(found))


def pairs_of(numbers: Sequence[object]) -> int:
    """Return the number of pairs that hold these numbers."""
    return (len(numbers) + 1) // 2
