"""Generate a PyTorch function of a cell's step that computes each gate by operators of its own.

The function is meant for CPUs: on a GPU an operator for several gates at once, as in `pointwise`, is faster. If
autograd does not record, nothing reads the sum of a gate again after its activation, so that most operators can write
to memory that exists already and is in the cache.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gatewise.cells.cell import Cell
from gatewise.derivation.normalized import LOG_SIGMOID, normalized
from gatewise.derivation.printing import fused_product
from gatewise.derivation.trace import Operand, Operation, before, is_number, literal, traced

_OPERATORS = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
_COMMUTATIVE = ("add", "mul")
_WITH_OUT = ("maximum", "minimum")
"""The functions that write to an existing tensor only by the argument `out`."""


class _Writer:
    """The generator of the lines of a step function, in the order of the step.

    Args:
        cell: The cell, which computes every hidden unit by itself.
        overwrites: Whether operators write their results to values that are not read again.
    """

    def __init__(self, cell: Cell, overwrites: bool) -> None:
        step = traced(cell)
        self._sums = step.sums
        # Without normalizations, these are the operations of the trace, but for logarithms of sigmoids.
        self._operations = [operation for operation in normalized(cell) if isinstance(operation, Operation)]
        self._results = (step.hidden, *step.after)
        self._made_by = {operation.name: operation for operation in self._operations}
        self._wanted = self._needed()
        # How often values will still be read. A value that is not read again may be overwritten, if it belongs to the
        # step and has one element for each sequence and unit.
        self._reads: collections.Counter[str] = collections.Counter(self._results)
        for operation in self._operations:
            if operation.name in self._wanted:
                self._reads.update(operand for operand in operation.operands if isinstance(operand, str))
        # The derivative of `addcmul` multiplies by its `value` too, so that autograd is given the product and the sum.
        self._fused = {
            operation.name: fused_product(operation, self._made_by, self._reads) if overwrites else ""
            for operation in self._operations
            if operation.name in self._wanted
        }
        made = {name for name in self._wanted if name not in step.of_units}
        self._own = made | set(step.sums) if overwrites else set()

    def lines(self) -> list[str]:
        """Return the lines that compute the states after the step from the sums."""
        fused = set(self._fused.values())
        return [
            f"    {operation.name} = {self._expression(operation)}"
            for operation in self._operations
            if operation.name in self._wanted and operation.name not in fused
        ]

    def _needed(self) -> set[str]:
        found: set[str] = set()
        pending = list(self._results)
        while pending:
            operation = self._made_by.get(pending.pop())
            if operation is not None and operation.name not in found:
                found.add(operation.name)
                pending += [operand for operand in operation.operands if isinstance(operand, str)]
        return found

    def _expression(self, operation: Operation) -> str:
        fused = self._fused[operation.name]
        operands = list(operation.operands)
        if fused:
            operands[1:] = self._made_by[fused].operands
            self._reads[fused] -= 1
        for operand in operands:
            self._reads[str(operand)] -= 1
        names = [self.name(operand) for operand in operands]
        into = next((place for place, operand in enumerate(operands) if self._is_free(operand)), None)
        if fused:
            value = ", value=-1" if operation.function == "sub" else ""
            if into == 0:
                return f"{names[0]}.addcmul_({names[1]}, {names[2]}{value})"
            return f"torch.addcmul({', '.join(names)}{value})"
        function = operation.function
        if function == LOG_SIGMOID:
            return f"{function}({names[0]})"
        if into is not None and function in _WITH_OUT:
            return f"torch.{function}({', '.join(names)}, out={names[into]})"
        if into == 0 or (into is not None and function in _COMMUTATIVE):
            return f"{names.pop(into)}.{function}_({', '.join(names)})"
        if function in _OPERATORS:
            return f" {_OPERATORS[function]} ".join(names)
        return f"torch.{function}({', '.join(names)})"

    def _is_free(self, operand: Operand) -> bool:
        return operand in self._own and not self._reads[str(operand)]

    def name(self, value: Operand) -> str:
        """Return the Python expression of a value: its name or number."""
        if is_number(value):
            return literal(value)
        return f"sum_{value}" if value in self._sums else str(value)


@functools.lru_cache(maxsize=256)
def step_by_gates(cell: Cell, overwrites: bool) -> Callable[..., tuple[Tensor, ...]]:
    """Return a function that computes a step.

    Its arguments are the sums of the gates [B, G*H]; the hidden state and the other states before the step [B, H],
    which stay as they are; and the parameters [H]. For a cell with gates in `apart` the first arguments are two: the
    input products [B, G*H] and the recurrent products [B, G*H], of all gates. The function returns a tuple of the
    hidden state and the other states after the step.

    Args:
        cell: The cell, which can be traced and computes every hidden unit by itself.
        overwrites: Whether the function may overwrite the sums or products, and return views of them, which autograd
            cannot record.
    """
    namespace: dict[str, Any] = {"torch": torch, LOG_SIGMOID: torch.nn.functional.logsigmoid}
    exec(compile(source_of(cell, overwrites), "<step of a recurrent cell>", "exec"), namespace)
    return namespace["step"]


def source_of(cell: Cell, overwrites: bool) -> str:
    """Return the Python source of the function of `step_by_gates`."""
    step, count = traced(cell), len(cell.gates)
    writer = _Writer(cell, overwrites)
    sums = [writer.name(name) for name in step.sums]
    lines = [f"    {', '.join(sums[:count])}, = inputs.chunk({count}, -1)"]
    if cell.apart:
        separate = iter(sums[count:])
        products = [next(separate) if gate in cell.apart else f"product_{gate}" for gate in cell.gates]
        lines.append(f"    {', '.join(products)}, = products.chunk({count}, -1)")
        for gate, own, product in zip(cell.gates, sums, products, strict=False):
            if gate not in cell.apart:
                lines.append(f"    {own}.add_({product})" if overwrites else f"    {own} = {own} + {product}")
    given = ["inputs", "products"] if cell.apart else ["inputs"]
    arguments = [*given, *(before(name) for name in ("h", *step.states)), *step.parameters]
    results = ", ".join(writer.name(name) for name in (step.hidden, *step.after))
    return "\n".join([f"def step({', '.join(arguments)}):", *lines, *writer.lines(), f"    return ({results},)"])
