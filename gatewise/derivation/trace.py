"""Symbolic tracing: record the operations of a cell's step by calling it once with values that record operations."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from gatewise.cells.cell import Cell
from gatewise.cells.normalization import standardized
from gatewise.cells.regularised import stated
from gatewise.cells.statement import (
    STEP_ERRORS,
    StatementError,
    before,
    check_statement,
    learned,
    line_of,
    returned_error,
    said_by,
)
from gatewise.cells.step import Values, next_states

__all__ = [
    "STATISTICS",
    "NotTraceable",
    "Operand",
    "Operation",
    "Step",
    "before",
    "is_number",
    "is_pointwise",
    "literal",
    "refusal_of",
    "traced",
]

MEAN, RECIPROCAL_DEVIATION = "mean", "reciprocal_deviation"
STATISTICS = frozenset({MEAN, RECIPROCAL_DEVIATION})
"""The operations whose result is a number for all hidden units of a sequence.

The operands of "mean" are the values that it averages over units. Those of "reciprocal_deviation" are epsilon, the mean
(a number if it is given) and the values: 1 / sqrt(average of (value - mean)^2 + epsilon).
"""

Operand = str | float
"""An operand: the name of a value, or a number."""


class Operation(NamedTuple):
    """One operation of a step.

    Attributes:
        name: The name of its result.
        function: The name of the PyTorch function, such as "sigmoid" or "mul", or one of `STATISTICS`.
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
        parameters: The names of the learned parameters among the operands.
    """

    sums: tuple[str, ...]
    states: tuple[str, ...]
    operations: tuple[Operation, ...]
    hidden: str
    after: tuple[str, ...]
    parameters: tuple[str, ...] = ()

    @property
    def reads_hidden(self) -> bool:
        """Whether the step reads the hidden state element by element, in addition to the recurrent product."""
        return any(before("h") in operation.operands for operation in self.operations)

    @property
    def of_units(self) -> frozenset[str]:
        """The names of the parameters and of all values that depend on nothing else: one value a unit, at all steps."""
        found = set(self.parameters)
        for operation in self.operations:
            if all(is_number(operand) or operand in found for operand in operation.operands):
                found.add(operation.name)
        return frozenset(found)

    @property
    def statistics(self) -> tuple[Operation, ...]:
        """The operations that combine hidden units."""
        return tuple(operation for operation in self.operations if operation.function in STATISTICS)


@functools.lru_cache(maxsize=256)
def traced(cell: Cell) -> Step:
    """Return the operations of a cell's step.

    Args:
        cell: The cell.

    Raises:
        NotTraceable: The step contains an operation that cannot be recorded; the message names the line.
        StatementError: A name clashes, an initial value is no value, or the step returns other states.
    """
    check_statement(cell)
    tape: list[Operation] = []
    sums = {name: _Value(tape, name) for name in cell.sums}
    states = {name: _Value(tape, before(name)) for name in ("h", *cell.states)}
    parameters = {name: _Value(tape, learned(name), of_units=True) for name in cell.parameters}
    author = stated(cell)
    attributes = dict(vars(author))
    try:
        with _gradients_enabled():
            hidden, after = next_states(cell, sums, states, parameters)
            outputs = [_lifted(tape, value) for value in (hidden, *after)]
        if kept := _kept_in(author):  # its reader expects a tensor
            raise _Untraceable(f"a value that the step keeps as the attribute {kept!r} of the cell")
    except _Untraceable as error:
        raise NotTraceable(_refusal(cell, error)) from None
    except _Mistaken as error:
        expectation = "normalize parameters apart from gates and states, which have values for each sequence"
        raise StatementError(
            f"`{type(cell).__name__}.step` must {expectation}, got {error}{line_of(cell, error)}. "
            "Call `standardized` once for each of the two kinds."
        ) from None
    except StatementError:
        raise
    except STEP_ERRORS as error:
        if not isinstance(error, AttributeError) or not isinstance(error.obj, Values):
            raise NotTraceable(_refusal(cell, error)) from error
        named = [f"{kind} {', '.join(names)}" for kind, names in _readable(cell).items() if names]
        expectation = f"read {'; '.join(named)}"
        message = f"`{type(cell).__name__}.step` must {expectation}, got {error.name!r}{line_of(cell, error)}."
        raise StatementError(message) from error
    finally:
        if _kept_in(author):
            vars(author).clear()
            vars(author).update(attributes)
    step = Step(cell.sums, cell.states, tuple(tape), outputs[0], tuple(outputs[1:]), tuple(map(learned, parameters)))
    of_units = step.of_units
    for name, value in zip(("h", *cell.states), outputs, strict=True):
        if value in of_units:
            expectation = "return states that are computed from gates or states"
            raise returned_error(cell, expectation, f"a state {name!r} of parameters alone")
    return step


@contextlib.contextmanager
def _gradients_enabled() -> Iterator[None]:
    """Enable gradients in the block, as `torch.enable_grad` does, but not in a graph that PyTorch is recording.

    A cell may be traced for the first time while `torch.export` records a call. Switches of the mode would become nodes
    of its graph, which PyTorch can save but not load.
    """

    def switch(enabled: bool) -> bool:
        before = torch.is_grad_enabled()
        with torch._C.DisableTorchFunction():
            torch._C._set_grad_enabled(enabled)
        return before

    before = switch(True)
    try:
        yield
    finally:
        switch(before)


def _kept_in(cell: Cell) -> str:
    """Return the name of an attribute that a step has set to one of its values; empty if there is none."""
    return next((name for name, value in vars(cell).items() if isinstance(value, _Value)), "")


def _readable(cell: Cell) -> dict[str, Sequence[str]]:
    gates = [f"{name}.input, {name}.recurrent" if name in cell.apart else name for name in cell.gates]
    return {"the gates": gates, "the states": ("h", *cell.states), "the parameters": tuple(cell.parameters)}


class NotTraceable(StatementError):
    """A cell's step cannot be traced; the message names the line and the allowed operations."""


@functools.lru_cache(maxsize=256)
def refusal_of(cell: Cell) -> str:
    """Return why a cell cannot be traced, in a sentence; empty if it can."""
    try:
        traced(cell)
    except NotTraceable as error:
        return str(error)
    return ""


@functools.lru_cache(maxsize=256)
def is_pointwise(cell: Cell) -> bool:
    """Return whether a cell can be traced and computes every hidden unit by itself, without `standardized`."""
    return not refusal_of(cell) and not traced(cell).statistics


class _Untraceable(Exception):
    """An operation that cannot be recorded."""


class _Mistaken(Exception):
    """An operation that PyTorch cannot compute either; the message is what the step does."""


class _Value:
    """A symbolic value that records the operations on it."""

    def __init__(self, tape: list[Operation], name: str, of_units: bool = False) -> None:
        self._tape, self.name = tape, name
        self.of_units = of_units  # whether it depends on parameters alone

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> _Value:
        name, whole = _TORCH_NAMES.get(function), _COMPOSED.get(function)
        if any(isinstance(value, torch.Tensor) for value in args):
            raise _Untraceable(_FOREIGN_TENSOR)
        if whole is not None:
            return whole(*args, **(kwargs or {}))
        if name is None or kwargs:
            raise _Untraceable(f"torch.{getattr(function, '__name__', function)}")
        return _recorded(name, *args)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _Untraceable(f"the attribute .{name} of a value")

    def __bool__(self) -> bool:
        raise _Untraceable("a branch that depends on a value")

    def _compared(self, other: object) -> NoReturn:
        raise _Untraceable("a comparison, which torch.maximum, minimum and clamp can often replace")

    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _compared
    __hash__ = object.__hash__

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
    if not torch.is_grad_enabled():
        raise _Untraceable("an operation without a gradient, as under torch.no_grad")
    tape = next(operand._tape for operand in operands if isinstance(operand, _Value))
    operation = Operation(f"v{len(tape)}", function, tuple(map(_operand, operands)))
    known = next((one for one in tape if one[1:] == operation[1:]), None)
    if known is None:
        tape.append(operation)
    of_units = all(operand.of_units for operand in operands if isinstance(operand, _Value))
    return _Value(tape, (known or operation).name, of_units)


def _clamped(value: _Value, min: Any = None, max: Any = None) -> _Value:
    for function, limit in (("clamp_min", min), ("clamp_max", max)):
        value = value if limit is None else _recorded(function, value, limit)
    return value


def _log_sigmoid(value: _Value) -> _Value:
    # Neither exponential overflows, and the derivative at 0 is that of PyTorch, 1/2.
    size = torch.maximum(value, -value)  # type: ignore[call-overload] - it records
    return (value - size) / 2 - torch.log(1 + torch.exp(-size))  # type: ignore[call-overload]


def _standardized(*values: Any, eps: float, centered: bool) -> Any:
    for value in values:
        if not isinstance(value, _Value):
            raise _Untraceable(f"`standardized` of {type(value).__name__}")
    if len({value.of_units for value in values}) > 1:
        raise _Mistaken("`standardized` of both")
    mean = _recorded(MEAN, *values) if centered else 0.0
    scale = _recorded(RECIPROCAL_DEVIATION, eps, mean, *values)
    found = [(value - mean) * scale if centered else value * scale for value in values]
    return tuple(found) if len(found) > 1 else found[0]


# The functions that are recorded as several operations.
_COMPOSED: dict[Callable, Callable[..., Any]] = {
    torch.clamp: _clamped,
    torch.nn.functional.logsigmoid: _log_sigmoid,
    standardized: _standardized,
}

_FOREIGN_TENSOR = "a tensor from outside of the step, which a cell may declare in `parameters`"


def _operand(value: Any) -> Operand:
    if isinstance(value, _Value):
        return value.name
    if isinstance(value, torch.Tensor):
        raise _Untraceable(_FOREIGN_TENSOR)
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


def _refusal(cell: Cell, error: Exception) -> str:
    allowed = ", ".join(sorted({*_TORCH_NAMES.values(), "clamp", "logsigmoid", "standardized"}))
    expectation = f"composed of + - * / and {allowed}, without branches on values"
    got = str(error) if isinstance(error, _Untraceable) else said_by(error)
    return f"`{type(cell).__name__}.step` must be {expectation}, got {got}{line_of(cell, error)}."


def is_number(operand: Operand) -> bool:
    """Return whether an operand is a number."""
    return isinstance(operand, float)


def literal(number: Operand) -> str:
    """Return the Python literal of a number: of an integer without a point, as long as tensors can hold it."""
    value = float(number)
    return repr(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)
