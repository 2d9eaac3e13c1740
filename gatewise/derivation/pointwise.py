"""Generate PyTorch functions for a cell's step and the coefficients of its adjoint.

The functions are generated once for each cell, as Python source. They call only PyTorch operators on whole tensors,
which autograd can differentiate any number of times.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gatewise.cells.cell import Cell
from gatewise.derivation.adjoint import adjoint_of
from gatewise.derivation.printing import fused_product, printer
from gatewise.derivation.trace import Operand, Operation, Step, before, is_number, literal, traced

_SYMBOLS = {"add": "+", "sub": "-", "mul": "*", "div": "/"}


class Pointwise(NamedTuple):
    """The PyTorch functions of a cell's step, for all units of a layer.

    Attributes:
        step: A function that computes a step. Its arguments are the sums [B, S*H], the hidden state and the other
            states before the step [B, H], and the parameters [H]. It returns a tuple of the hidden state and the other
            states after the step.
        hidden: A function that recomputes the hidden state after a step. Its arguments are the sums [..., S*H], all
            states before the step, the states other than the hidden state after the step, and the parameters.
        source: The Python source of both functions.
    """

    step: Callable[..., tuple[Tensor, ...]]
    hidden: Callable[..., Tensor]
    source: str


@functools.lru_cache(maxsize=256)
def pointwise_of(cell: Cell) -> Pointwise:
    """Return the functions of a cell's step."""
    step = traced(cell)
    states = [before(name) for name in ("h", *step.states)]
    forward = _Writer(step, known=())
    forward.needs((step.hidden, *step.after))
    outputs = ", ".join(map(forward.name, (step.hidden, *step.after)))
    again = _Writer(step, known=step.after)
    again.needs((step.hidden,))
    given = ", ".join(["sums", *states])
    source = "\n".join(
        [
            f"def step({', '.join([given, *step.parameters])}):",
            *forward.lines(),
            f"    return ({outputs},)",
            "",
            f"def hidden({', '.join([given, *map(again.name, step.after), *step.parameters])}):",
            *again.lines(),
            f"    return {again.name(step.hidden)}",
        ]
    )
    made = _made(source)
    return Pointwise(made["step"], made["hidden"], source)


@functools.lru_cache(maxsize=256)
def coefficient_function(cell: Cell) -> Callable[..., None]:
    """Return a function that computes the coefficients of a cell's adjoint, for any number of steps at once.

    The arguments of the function are the sums [..., S*H]; the states before the step [..., H], the hidden state first;
    the states other than the hidden state after the step [..., H]; the parameters [H]; and the list of output tensors.
    These are one tensor [..., rows, H] for each column of the table in `Adjoint`.
    """
    step, adjoint = traced(cell), adjoint_of(cell)
    writer = _Writer(step, known=step.after)
    expressions = [expression for _, expression in adjoint.shared] + [one for row in adjoint.table for one in row]
    shared = {name for name, _ in adjoint.shared}
    writer.needs(sorted({str(one) for some in expressions for one in some.free_symbols} - shared))
    states = [*(before(name) for name in ("h", *step.states)), *map(writer.name, step.after)]
    lines = [f"def coefficients({', '.join(['sums', *states, *step.parameters, 'columns'])}):", *writer.lines()]
    printed = printer(writer.name)
    lines += [f"    {name} = {printed.doprint(expression)}" for name, expression in adjoint.shared]
    of_units = set(step.of_units)
    for name, expression in adjoint.shared:
        if of_units.issuperset(map(str, expression.free_symbols)):
            of_units.add(name)
    for row, (name, entries) in enumerate(zip(adjoint.rows, adjoint.table, strict=True)):
        lines.append(f"    # {name}")
        lines += [
            f"    {written(entry, f'columns[{column}].select(-2, {row})', printed, of_units)}"
            for column, entry in enumerate(entries)
        ]
    source = "\n".join(lines)
    return _made(source)["coefficients"]


def _made(source: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {"torch": torch, "larger": larger, "at_least": at_least}
    exec(compile(source, "<functions of a recurrent cell>", "exec"), namespace)
    return namespace


def larger(first: Tensor | float, second: Tensor | float) -> Tensor:
    """Return 1 where the first value is larger, 1/2 where both values are equal, and 0 elsewhere."""
    difference = torch.as_tensor(first - second)
    return (torch.sign(difference) + 1) / 2


def at_least(first: Tensor | float, second: Tensor | float) -> Tensor:
    """Return 1 where the first value is larger or both values are equal, and 0 elsewhere."""
    difference = torch.as_tensor(first - second)
    return (difference >= 0).to(difference.dtype)


class _Writer:
    """A generator of Python source lines that compute values of a step from its sums and states.

    Args:
        step: The step.
        known: The names of values that are given and therefore not computed.
    """

    def __init__(self, step: Step, known: Iterable[str]) -> None:
        self._step, self._known = step, frozenset(known)
        self._made_by = {operation.name: operation for operation in step.operations}
        self._wanted: set[str] = set()
        self._uses: collections.Counter[str] = collections.Counter()

    def name(self, value: Operand) -> str:
        """Return the Python expression of a value: its name or number."""
        if is_number(value):
            return literal(value)
        return f"sum_{value}" if value in self._step.sums else str(value)

    def needs(self, names: Sequence[str]) -> None:
        """Request these values, and all values that they are computed from."""
        self._uses.update(names)
        pending = list(names)
        while pending:
            operation = self._made_by.get(pending.pop())
            if operation is None or operation.name in self._known or operation.name in self._wanted:
                continue
            self._wanted.add(operation.name)
            operands = [str(operand) for operand in operation.operands if not is_number(operand)]
            self._uses.update(operands)
            pending += operands

    def lines(self) -> list[str]:
        """Return the lines that compute the requested values, in the order of the step."""
        found, activated = self._sums()
        for operation in self._step.operations:
            if operation.name not in self._wanted or operation.name in activated or self._is_fused(operation):
                continue
            found.append(f"    {operation.name} = {self._expression(operation)}")
        return found

    def _sums(self) -> tuple[list[str], set[str]]:
        """Return lines that split the sums, and the names of activations that they compute for several sums at once."""
        places = {name: place for place, name in enumerate(self._step.sums)}
        read = [name for name in self._step.sums if self._uses[name]]
        if not read:
            return [], set()
        lines = [f"    size = sums.shape[-1] // {len(places)}"]
        alike: dict[str, list[Operation]] = collections.defaultdict(list)
        for operation in self._step.operations:
            if operation.name in self._wanted and len(operation.operands) == 1 and operation.operands[0] in places:
                alike[operation.function].append(operation)
        activated: set[str] = set()
        for function, operations in alike.items():
            by_place = {places[str(one.operands[0])]: one.name for one in operations}
            first, last = min(by_place), max(by_place)
            width = last - first + 1
            # One operator over adjacent gates takes less time than one operator for each gate, even if it includes
            # others.
            if len(operations) < 2 or width > 2 * len(operations):
                continue
            names = ", ".join(by_place.get(place, "_") for place in range(first, last + 1))
            span = "sums" if width == len(places) else f"sums.narrow(-1, {first} * size, {width} * size)"
            # The method `split` is written in Python, and slower than `chunk`.
            lines.append(f"    {names} = torch.{function}({span}).chunk({width}, -1)")
            activated.update(by_place.values())
        passed = [str(self._made_by[name].operands[0]) for name in activated]
        done = {name for name in passed if self._uses[name] == 1}
        lines += [
            f"    {self.name(name)} = sums.narrow(-1, {places[name]} * size, size)" for name in read if name not in done
        ]
        return lines, activated

    def _is_fused(self, operation: Operation) -> bool:
        """Return whether a product is computed by the `torch.addcmul` of the only operation that reads it."""
        return any(self._fused(one) == operation.name for one in self._step.operations if one.name in self._wanted)

    def _fused(self, operation: Operation) -> str:
        """Return the name of the product that a sum or difference includes, as `torch.addcmul`; empty for none."""
        name = fused_product(operation, self._made_by, self._uses)
        return name if name in self._wanted else ""

    def _expression(self, operation: Operation) -> str:
        names = [self.name(operand) for operand in operation.operands]
        if fused := self._fused(operation):
            factors = ", ".join(map(self.name, self._made_by[fused].operands))
            return f"torch.addcmul({names[0]}, {factors}{', value=-1' if operation.function == 'sub' else ''})"
        if operation.function in _SYMBOLS:
            return f" {_SYMBOLS[operation.function]} ".join(names)
        return f"torch.{operation.function}({', '.join(names)})"


def written(entry: Any, into: str, printer: Any, of_units: Collection[str]) -> str:
    """Return the line that writes an expression to an existing tensor; values `of_units` have the shape [H]."""
    if entry.is_Number:
        return f"{into}.fill_({printer.doprint(entry)})"
    if entry.is_Symbol or all(str(symbol) in of_units for symbol in entry.free_symbols):
        return f"{into}.copy_({printer.doprint(entry)})"
    if entry.is_Mul and len(entry.args) > 1 and not entry.args[0].is_Number:
        first, rest = entry.args[0], entry.func(*entry.args[1:])
        return f"torch.mul({printer.doprint(first)}, {printer.doprint(rest)}, out={into})"
    return f"{into}.copy_({printer.doprint(entry)})"
