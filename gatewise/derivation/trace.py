"""Symbolic tracing: record the operations of a cell's step by calling it once with values that record operations."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import re
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch

from gatewise.cells.cell import Cell

_RESERVED = re.compile(
    r"[vt]\d+|h"
)  # names of results of operations, of common subexpressions, and of the hidden state

Operand = str | float
"""An operand: the name of a value, or a number."""


class Operation(NamedTuple):
    """One operation of a step.

    Attributes:
        name: The name of its result.
        function: The name of the PyTorch function, such as "sigmoid" or "mul".
        operands: The names of values, or numbers.
    """

    name: str
    function: str
    operands: tuple[Operand, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """The operations of a cell's step, in the order of execution.

    Attributes:
        sums: The names of the gate sums that the step reads, as in `Cell.sums`.
        states: The names of the states other than the hidden state.
        operations: The operations. Their operands are sums, states before the step (`before(state)`), and results of
            earlier operations.
        hidden: The name of the hidden state after the step.
        after: The names of the other states after the step, in the order of `states`.
    """

    sums: tuple[str, ...]
    states: tuple[str, ...]
    operations: tuple[Operation, ...]
    hidden: str
    after: tuple[str, ...]

    @property
    def reads_hidden(self) -> bool:
        """Whether the step reads the hidden state element by element, in addition to the recurrent product."""
        return any(before("h") in operation.operands for operation in self.operations)


def before(state: str) -> str:
    """Return the name of a state before the step."""
    return f"{state}_before"


@functools.lru_cache(maxsize=256)
def traced(cell: Cell) -> Step:
    """Return the operations of a cell's step.

    Args:
        cell: The cell.

    Raises:
        NotTraceable: The step contains an operation that cannot be recorded; the message names the line.
    """
    if bad := [name for name in (*cell.gates, *cell.states) if not name.isidentifier() or _RESERVED.fullmatch(name)]:
        allowed = "Python identifiers other than `h`, `v0`, `t0` and the like"
        raise NotTraceable(f"`{type(cell).__name__}` must have gates and states named by {allowed}, got {bad[0]!r}.")
    tape: list[Operation] = []
    sums = {name: _Value(tape, name) for name in cell.sums}
    states = {name: _Value(tape, before(name)) for name in ("h", *cell.states)}
    try:
        hidden, after = cell.called(sums, states)
        outputs = [_lifted(tape, value) for value in (hidden, *after)]
    except _Untraceable as error:
        raise NotTraceable(_refusal(cell, error)) from None
    return Step(cell.sums, cell.states, tuple(tape), outputs[0], tuple(outputs[1:]))


class NotTraceable(TypeError):
    """A cell's step cannot be traced; the message names the line and the allowed operations."""


class _Untraceable(Exception):
    """An operation that cannot be recorded."""


class _Value:
    """A symbolic value that records the operations on it."""

    def __init__(self, tape: list[Operation], name: str) -> None:
        self._tape, self.name = tape, name

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> _Value:
        name = _TORCH_NAMES.get(function)
        if function is torch.clamp:
            return _clamped(*args, **(kwargs or {}))
        if name is None or kwargs:
            raise _Untraceable(f"torch.{getattr(function, '__name__', function)}")
        return _recorded(name, *args)

    def __bool__(self) -> bool:
        raise _Untraceable("a branch that depends on a value")

    def _compared(self, other: object) -> NoReturn:
        raise _Untraceable("a comparison, which torch.maximum, minimum and clamp can often replace")

    __lt__ = __le__ = __gt__ = __ge__ = _compared

    def __float__(self) -> float:
        raise _Untraceable("a conversion of a value to a Python number")

    def __neg__(self) -> _Value:
        return _recorded("neg", self)

    def __add__(self, other: Any) -> _Value:
        return _recorded("add", self, other)

    def __radd__(self, other: Any) -> _Value:
        return _recorded("add", other, self)

    def __sub__(self, other: Any) -> _Value:
        return _recorded("sub", self, other)

    def __rsub__(self, other: Any) -> _Value:
        return _recorded("sub", other, self)

    def __mul__(self, other: Any) -> _Value:
        return _recorded("mul", self, other)

    def __rmul__(self, other: Any) -> _Value:
        return _recorded("mul", other, self)

    def __truediv__(self, other: Any) -> _Value:
        return _recorded("div", self, other)

    def __rtruediv__(self, other: Any) -> _Value:
        return _recorded("div", other, self)


# The PyTorch functions that can be recorded, and their names.
_TORCH_NAMES: dict[Callable, str] = {
    torch.sigmoid: "sigmoid",
    torch.tanh: "tanh",
    torch.relu: "relu",
    torch.exp: "exp",
    torch.log: "log",
    torch.sqrt: "sqrt",
    torch.neg: "neg",
    torch.add: "add",
    torch.sub: "sub",
    torch.mul: "mul",
    torch.div: "div",
    torch.maximum: "maximum",
    torch.minimum: "minimum",
}


def _recorded(function: str, *operands: Any) -> _Value:
    tape = next(operand._tape for operand in operands if isinstance(operand, _Value))
    operation = Operation(f"v{len(tape)}", function, tuple(map(_operand, operands)))
    known = next((one for one in tape if one[1:] == operation[1:]), None)
    if known is None:
        tape.append(operation)
    return _Value(tape, (known or operation).name)


def _clamped(value: _Value, min: Any = None, max: Any = None) -> _Value:
    for function, limit in (("clamp_min", min), ("clamp_max", max)):
        value = value if limit is None else _recorded(function, value, limit)
    return value


def _operand(value: Any) -> Operand:
    if isinstance(value, _Value):
        return value.name
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _Untraceable(f"an operand of type {type(value).__name__}")
    if not math.isfinite(value):
        raise _Untraceable(f"the number {value}")
    return float(value)


def _lifted(tape: list[Operation], value: Any) -> str:
    if not isinstance(value, _Value):
        found = type(value).__name__
        raise _Untraceable(f"a result of type {found}")
    if any(operation.name == value.name for operation in tape):
        return value.name
    return _recorded("mul", value, 1.0).name  # a state or a sum that is returned unchanged gets a new name


def _refusal(cell: Cell, error: _Untraceable) -> str:
    file = inspect.getsourcefile(type(cell))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    where = f", in line {frames[-1].lineno} of {frames[-1].filename}: {frames[-1].line}" if frames else ""
    allowed = ", ".join(sorted({*_TORCH_NAMES.values(), "clamp"}))
    expectation = f"composed of + - * / and {allowed}, without branches on values"
    return f"`{type(cell).__name__}.step` must be {expectation}, got {error}{where}."


def is_number(operand: Operand) -> bool:
    """Return whether an operand is a number."""
    return isinstance(operand, float)
