"""The operations of a step with each normalization over hidden units, and each log-sigmoid, as one operation.

A trace has the mean and the deviation of a normalization, and the differences and products that apply them. PyTorch has
one operator for all of them, and another one for its gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

from gatewise.cells.cell import Cell
from gatewise.derivation.trace import RECIPROCAL_DEVIATION, STATISTICS, Operand, Operation, is_number, traced


class Normalization(NamedTuple):
    """The normalization of one or several values over the hidden units of a sequence.

    Attributes:
        results: The names of the normalized values.
        values: The names of the values.
        eps: The number that is added to the variance.
        centered: Whether the mean is subtracted.
        together: Whether all values share a mean and a variance; otherwise each value has its own.
    """

    results: tuple[str, ...]
    values: tuple[str, ...]
    eps: float
    centered: bool
    together: bool


Computed = Operation | Normalization
LOG_SIGMOID = "logsigmoid"


@functools.lru_cache(maxsize=256)
def normalized(cell: Cell) -> tuple[Computed, ...]:
    """Return the operations of a cell's step, with each normalization as one operation.

    Sums that are normalized alike, each by itself, are one `Normalization`.
    """
    step = traced(cell)
    differences = {one.name: one.operands for one in step.operations if one.function == "sub"}
    found: list[Computed] = []
    applied: set[str] = set()
    scaled: dict[tuple[str, str], str] = {}
    scales = {one.name: one for one in step.operations if one.function == RECIPROCAL_DEVIATION}
    for operation in step.operations:
        if operation.function == "mul" and operation.operands[1] in scales:
            value, scale = map(str, operation.operands)
            if not is_number(scales[scale].operands[1]):
                applied.add(value)
                value = str(differences[value][0])
            applied.add(operation.name)
            scaled[value, scale] = operation.name
    for operation in step.operations:
        if operation.name in scales:
            eps, mean, *values = operation.operands
            names = tuple(dict.fromkeys(map(str, values)))
            results = tuple(scaled[value, operation.name] for value in names)
            found.append(Normalization(results, names, float(eps), not is_number(mean), len(names) > 1))
        elif operation.name not in applied and operation.function not in STATISTICS:
            found.append(operation)
    return tuple(_alike(_with_log_sigmoids(found), step.sums))


def counted_twice(cell: Cell) -> bool:
    """Return whether a normalization has the same value several times, which `normalized` does not express."""
    counted = [one.operands[2:] for one in traced(cell).statistics if one.function == RECIPROCAL_DEVIATION]
    return any(len(set(values)) < len(values) for values in counted)


def operands_of(operation: Computed) -> tuple[Operand, ...]:
    """Return the operands of an operation."""
    return operation.values if isinstance(operation, Normalization) else operation.operands


def results_of(operation: Computed) -> tuple[str, ...]:
    """Return the names of the results of an operation."""
    return operation.results if isinstance(operation, Normalization) else (operation.name,)


def _with_log_sigmoids(operations: list[Computed]) -> list[Computed]:
    """Return the operations with the last one of each logarithm of a sigmoid, as a trace has it, replaced by it."""
    made_by = {one.name: one for one in operations if isinstance(one, Operation)}

    def operands(name: Operand, function: str) -> tuple[Operand, ...]:
        found = made_by.get(str(name))
        return found.operands if found is not None and found.function == function else (0.0, 0.0)

    def argument(one: Operation) -> Operand | None:
        # (x - |x|) / 2 - log(1 + exp(-|x|))
        if one.function != "sub":
            return None
        (difference, two), (logarithm, *_) = operands(one.operands[0], "div"), operands(one.operands[1], "log")
        (value, size), (one_more, exponential) = operands(difference, "sub"), operands(logarithm, "add")
        (opposite, *_), (larger, other) = operands(exponential, "exp"), operands(size, "maximum")
        fits = (two, one_more, larger) == (2.0, 1.0, value) and operands(opposite, "neg") == (size,)
        return value if fits and operands(other, "neg") == (value,) else None

    found: list[Computed] = []
    for one in operations:
        value = argument(one) if isinstance(one, Operation) else None
        found.append(one if value is None else Operation(results_of(one)[0], LOG_SIGMOID, (value,)))
    return found


def _alike(operations: list[Computed], sums: tuple[str, ...]) -> Iterator[Computed]:
    """Yield the operations, with normalizations of single sums that are alike joined in the place of the first one."""
    alike: dict[tuple[float, bool], list[Normalization]] = {}
    for one in operations:
        if isinstance(one, Normalization) and not one.together and one.values[0] in sums:
            alike.setdefault((one.eps, one.centered), []).append(one)
    for one in operations:
        if not isinstance(one, Normalization) or one.together or one.values[0] not in sums:
            yield one
        elif alike[one.eps, one.centered][0] is one:
            own = sorted(alike[one.eps, one.centered], key=lambda each: sums.index(each.values[0]))
            results, values = tuple(each.results[0] for each in own), tuple(each.values[0] for each in own)
            yield one._replace(results=results, values=values)
