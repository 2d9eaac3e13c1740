"""Checks of the statement of a cell: its names, its initial values, and the states that its step returns."""

from __future__ import annotations

import collections
import inspect
import numbers
import re
import traceback
from collections.abc import Iterable, Mapping
from typing import Any

from gatewise.cells.cell import Cell

# The names of results of operations, of common subexpressions, and of the hidden state.
_RESERVED = re.compile(r"[vt]\d+|h")

# The names of the other parameters of a layer, to which its number is appended as to those of a cell.
_OF_LAYERS = frozenset({"weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr", "weight_rh"})


STEP_ERRORS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""The errors that are taken for mistakes in a step that raises them."""


class StatementError(TypeError):
    """The statement of a cell has an error; the message names the cell, and the line where there is one."""


def check_statement(cell: Cell) -> None:
    """Check the names and the initial values of a cell.

    Raises:
        StatementError: A name is no Python identifier, is reserved, or clashes with another; an initial value is
            neither a number nor a function; or the class defines no step, or one with other arguments.
    """
    for kind in ("gates", "states", "apart"):
        if not isinstance(getattr(cell, kind), (tuple, list)):
            raise _error(cell, kind, "a tuple of names", repr(getattr(cell, kind)), 'One name is ("c",).')
    for kind in ("parameters", "initial_states"):
        if not isinstance(getattr(cell, kind), Mapping):
            raise _error(cell, kind, "a dictionary from names to initial values", repr(getattr(cell, kind)))
    if type(cell).__hash__ is None:
        advice = "Leave out `__eq__`, as @dataclass(eq=False) does, or define both."
        raise _error(cell, "__hash__", "defined, because calls look up cells by it", "None", advice)
    for kind in ("gates", "states", "parameters"):
        for name in getattr(cell, kind):
            if not isinstance(name, str) or not name.isidentifier() or _RESERVED.fullmatch(name):
                allowed = "named by Python identifiers other than `h`, `v0`, `t0` and the like"
                raise _error(cell, kind, allowed, repr(name))
    if not cell.gates:
        raise _error(cell, "gates", "at least one name", "none")
    _check_clashes(cell)
    if unknown := sorted({*cell.apart} - {*cell.gates}):
        raise _error(cell, "apart", f"names of gates, which are {', '.join(cell.gates)}", repr(unknown[0]))
    if unknown := sorted({*cell.initial_states} - {"h", *cell.states}):
        allowed = f"values of states, which are {', '.join(('h', *cell.states))}"
        raise _error(cell, "initial_states", allowed, repr(unknown[0]))
    for name, value in cell.initial_states.items():
        if not isinstance(value, numbers.Real):
            raise _error(cell, "initial_states", "numbers", f"{value!r} for {name}")
    for name, value in cell.parameters.items():
        if not isinstance(value, numbers.Real) and not callable(value):
            allowed = "numbers, or functions that fill a tensor, such as torch.nn.init.normal_"
            raise _error(cell, "parameters", allowed, f"{value!r} for {name}")
    _check_signature(cell)


def _check_clashes(cell: Cell) -> None:
    for kind in ("gates", "states"):
        if again := _repeated(getattr(cell, kind)):
            raise _error(cell, kind, "names that differ", f"{again!r} twice")
    for name in cell.parameters:
        if name in _OF_LAYERS:
            raise _error(cell, "parameters", f"names other than {', '.join(sorted(_OF_LAYERS))}", repr(name))
    others = [*(before(name) for name in ("h", *cell.states)), *map(learned, cell.parameters)]
    in_code = [f"sum_{name}" for name in cell.sums]
    if again := _repeated([*cell.sums, *others]) or _repeated([*in_code, *others]):
        allowed = "such that no name of a gate is that of another value"
        advice = "Gates in `apart` take the names with _input and _recurrent, states take those with _before."
        raise _error(cell, "gates", allowed, repr(again), advice)


def _check_signature(cell: Cell) -> None:
    given = ("gate", "state", *(["parameter"] if cell.parameters else []))
    if type(cell).step is Cell.step:
        raise _error(cell, "step", f"defined as step(self, {', '.join(given)})", "none")
    try:
        inspect.signature(cell.step).bind(*given)
    except TypeError:
        found = f"step{inspect.signature(type(cell).step)}"
        advice = "The third argument is there for cells that have `parameters`, and for no others."
        raise returned_error(cell, f"be step(self, {', '.join(given)})", found, advice) from None


def before(state: str) -> str:
    """Return the name of a state before the step."""
    return f"{state}_before"


def learned(parameter: str) -> str:
    """Return the name of a parameter among the values of a step."""
    return f"{parameter}_learned"


def check_returned(cell: Cell, returned: Any) -> tuple[Any, Mapping[str, Any]]:
    """Return the result of a step, checked for its form.

    Raises:
        StatementError: It is no pair of a hidden state and a mapping with exactly the other states.
    """
    form = f"(h, {{{', '.join(f'{name!r}: {name}' for name in cell.states)}}})"
    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping)):
        kinds = f"({', '.join(map(_kind_of, returned))})" if isinstance(returned, tuple) else None
        raise returned_error(cell, f"return {form}", kinds or _kind_of(returned))
    hidden, after = returned
    if missing := [name for name in cell.states if name not in after]:
        raise returned_error(cell, f"return {form}", f"no state {missing[0]!r}")
    if unknown := [name for name in after if name not in cell.states]:
        advice = f"Add {unknown[0]!r} to `states`." if isinstance(unknown[0], str) else ""
        if unknown[0] == "h":
            advice = "The hidden state is the first of both results alone."
        raise returned_error(cell, f"return {form}", f"the unknown state {unknown[0]!r}", advice)
    return hidden, after


def returned_error(cell: Cell, expectation: str, got: str, advice: str = "") -> StatementError:
    """Return the error for a step that returns something else than it must; it names the line of the step."""
    code = getattr(type(cell).step, "__code__", None)
    where = f", from the step in line {code.co_firstlineno} of {code.co_filename}" if code else ""
    return StatementError(f"`{type(cell).__name__}.step` must {expectation}, got {got}{where}. {advice}".rstrip())


def said_by(error: Exception) -> str:
    """Return the class of an error that a step raised and the first line of its message."""
    first, *_ = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {first.rstrip('.')}"


def line_of(cell: Cell, error: Exception) -> str:
    """Return the line of a cell's step in which an error was raised, for the error's sentence."""
    code = getattr(type(cell).step, "__code__", None)
    file = code.co_filename if code else None  # a class of a notebook or of the interpreter has no source file
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    if not frames:
        return ""
    where = f", in line {frames[-1].lineno} of {frames[-1].filename}"
    return f"{where}: {frames[-1].line}" if frames[-1].line else where


def _kind_of(value: Any) -> str:
    return type(value).__name__.lstrip("_")  # values of a step that is traced are of a private class


def _repeated(names: Iterable[str]) -> str:
    return next((name for name, count in collections.Counter(names).items() if count > 1), "")


def _error(cell: Cell, kind: str, allowed: str, got: str, advice: str = "") -> StatementError:
    return StatementError(f"`{type(cell).__name__}.{kind}` must be {allowed}, got {got}. {advice}".rstrip())
