"""Checks of the layers' arguments other than shapes and dtypes: sizes, options, non-tensors, TorchScript."""

from __future__ import annotations

import math
import numbers
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from gatewise.cells import Cell, candidate_changed, check_statement, is_shipped
from gatewise.cells.step import next_states
from gatewise.contract.errors import ArgumentError, DtypeError, ShapeError, sentence
from gatewise.contract.ranges import PROBABILITY
from gatewise.contract.tracing import is_compiling, is_exporting
from gatewise.functional.arguments import check_dropout, check_memory, check_name, check_reverse


class Sizes(NamedTuple):
    """The sizes of a layer, as integers of Python: I, H, L and P."""

    input_size: int
    hidden_size: int
    num_layers: int
    proj_size: int


def checked_sizes(
    input_size: object, hidden_size: object, num_layers: object = 1, proj_size: object = 0, *, least_input: int = 1
) -> Sizes:
    """Return the sizes of a layer, which may be integers of NumPy, as integers of Python.

    Args:
        input_size: I, the number of input features.
        hidden_size: H, the number of hidden units.
        num_layers: L, the number of layers.
        proj_size: P, the number of features of the projected hidden state; 0 for no projection.
        least_input: The least number of input features: 0 for the cells of PyTorch.

    Raises:
        ArgumentError: A size is not an integer or too small, or the projection is not smaller than the hidden size.
    """
    features = checked_size("input_size", input_size, least_input)
    units, layers = checked_size("hidden_size", hidden_size), checked_size("num_layers", num_layers)
    most = units - 1
    # False means 0, as in PyTorch's layer.
    if proj_size is True or not isinstance(proj_size, numbers.Integral) or not 0 <= int(proj_size) <= most:
        expectation = f"an integer from 0 to hidden_size - 1 = {most}"
        raise ArgumentError(sentence("proj_size", expectation, repr(proj_size), "0 means no projection."))
    return Sizes(features, units, layers, int(proj_size))


def checked_size(name: str, value: object, least: int = 1) -> int:
    """Return a size, which may be an integer of NumPy, as an integer of Python.

    Args:
        name: The name of the argument.
        value: The size.
        least: The least size, 0 or 1.

    Raises:
        ArgumentError: It is not an integer, or too small.
    """
    # PyTorch's layers take True for 1, but a flag in the place of a size was meant for another argument.
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        expectation = "a positive integer" if least else "an integer from 0 on"
        advice = "Give flags, such as `bidirectional`, by their names." if isinstance(value, bool) else ""
        raise ArgumentError(sentence(name, expectation, repr(value), advice))
    return int(value)


def check_cell(cell: object) -> None:
    """Check that a cell is one, and its statement.

    Raises:
        ArgumentError: It is no instance of `gatewise.Cell`.
        StatementError: Names clash, or an initial value is neither a number nor a function.
    """
    if not isinstance(cell, Cell):
        advice = "Give an instance, such as gatewise.cells.LSTM()."
        raise ArgumentError(sentence("cell", "a gatewise.Cell", repr(cell), advice))
    check_statement(cell)


def check_compiled(cell: Cell) -> bool:
    """Check that `torch.compile` can trace a call of the cell, if it does so now; `torch.export` checks for itself.

    Returns:
        Whether a call is traced.

    Raises:
        ArgumentError: It traces a call of a cell that is not one of the library.
    """
    compiling = torch.compiler.is_compiling() and is_compiling()
    if compiling and not is_exporting() and not is_shipped(cell):
        advice = "Call the layer outside of the compiled function, as torch.compiler.disable does."
        raise ArgumentError(sentence("cell", "one of gatewise.cells under torch.compile", repr(cell), advice))
    return compiling


def check_flag(name: str, value: object) -> None:
    """Check that an option is True or False."""
    if not isinstance(value, bool):
        raise ArgumentError(sentence(name, "True or False", repr(value)))


def check_dtype(dtype: object) -> None:
    """Check that the dtype of parameters is None or a dtype whose numbers have gradients.

    Raises:
        ArgumentError: It is no dtype.
        DtypeError: It is one of integers or bool.
    """
    if dtype is None:
        return
    if not isinstance(dtype, torch.dtype):
        raise ArgumentError(sentence("dtype", "None or a torch.dtype", repr(dtype), "Give torch.float32, for example."))
    if not (dtype.is_floating_point or dtype.is_complex):
        raise DtypeError(sentence("dtype", "one of floating-point numbers", dtype, "Parameters have gradients."))


def check_layer_options(
    bias: bool,
    batch_first: bool,
    bidirectional: bool,
    dropout: float,
    kernel: str,
    memory: str,
    reverse: bool,
) -> None:
    """Check the options of a layer."""
    check_flag("bias", bias)
    check_flag("batch_first", batch_first)
    # PyTorch's layers accept 0 and 1 too, and some programs pass them.
    if not isinstance(bidirectional, int) or bidirectional not in (0, 1):
        raise ArgumentError(sentence("bidirectional", "True or False", repr(bidirectional)))
    check_dropout(dropout)
    check_name(kernel, "kernel")
    check_memory(memory)
    check_reverse(reverse, bidirectional)


def check_rate(name: str, rate: Any) -> float:
    """Return the rate of a dropout inside the recurrence, checked.

    Args:
        name: The name of the option.
        rate: The probability of dropping a value.

    Raises:
        ArgumentError: The rate is not a number in [0, 1).
    """
    PROBABILITY.check(name, rate)
    return float(rate)


def checked_zoneout(zoneout: object, cell: Cell) -> tuple[float, ...]:
    """Return the rates of zoneout of the hidden state and of each other state of a cell.

    Args:
        zoneout: The rate of the hidden state, or a dictionary from names of states to rates.
        cell: The cell.

    Raises:
        ArgumentError: A rate is not a number in [0, 1), a name is not that of a state, or a state begins at infinity.
    """
    names = ("h", *cell.states)
    given = zoneout if isinstance(zoneout, Mapping) else {"h": zoneout}
    for name in given:
        if name not in names:
            expectation = f"rates by the names of states, which are {', '.join(names)}"
            raise ArgumentError(sentence("zoneout", expectation, repr(name)))
    labels = {name: f"zoneout[{name!r}]" if isinstance(zoneout, Mapping) else "zoneout" for name in given}
    rates = {name: check_rate(labels[name], rate) for name, rate in given.items()}
    for name, rate in rates.items():
        if rate and not math.isfinite(cell.initial_value(name)):
            got = f"{rate:g}, and the state begins at {cell.initial_value(name)}"
            raise ArgumentError(sentence(labels[name], "0 for a state that does not begin at a finite number", got))
    return tuple(rates.get(name, 0.0) for name in names)


def checked_candidate_dropout(rate: object, cell: Cell) -> float:
    """Return the rate of dropout of the candidate of a cell, checked.

    Args:
        rate: The probability of dropping a unit of the candidate.
        cell: The cell.

    Raises:
        ArgumentError: The rate is not a number in [0, 1), or the step of the cell marks no candidate.
    """
    checked = check_rate("candidate_dropout", rate)
    if not checked:
        return checked
    marked: list[Tensor] = []

    def found(value: Tensor) -> Tensor:
        marked.append(value)
        return value

    def values(names: Iterable[str]) -> dict[str, Tensor]:
        return {name: torch.zeros(1, device="cpu") for name in names}

    with torch.no_grad(), candidate_changed(found):
        next_states(cell, values(cell.sums), values(("h", *cell.states)), values(cell.parameters))
    if not marked:
        advice = "Mark it in the step: gatewise.cells.candidate(torch.tanh(gate.g))."
        raise ArgumentError(sentence("candidate_dropout", f"0 for {cell.name}, which marks no candidate", rate, advice))
    return checked


def warn_of_idle_dropout(dropout: float, num_layers: int, stacklevel: int = 3) -> None:
    """Warn that the dropout of a layer's constructor drops nothing, where it does.

    Args:
        dropout: The probability of dropping an output between layers.
        num_layers: L, the number of layers.
        stacklevel: The number of calls from the warning up to the line that it names, as in `warnings.warn`.
    """
    if dropout > 0 and num_layers == 1:
        # The words of PyTorch, because programs ignore the warning by its beginning.
        warnings.warn(
            "dropout option adds dropout after all but last recurrent layer, so non-zero dropout expects num_layers "
            f"greater than 1, but got dropout={dropout} and num_layers={num_layers}. Add a layer, or a "
            "torch.nn.Dropout after this one.",
            stacklevel=stacklevel,
        )


def refuse_input(input: object, name: str = "input") -> NoReturn:
    """Raise the error for an input that is not a tensor.

    Args:
        input: The input.
        name: The name of the argument, for the error.
    """
    advice = "torch.as_tensor makes one of an array or a list."
    raise ArgumentError(sentence(name, "a tensor", type(input).__name__, advice))


def check_pair(hx: object) -> None:
    """Check that the initial states are a pair of tensors."""
    if not (isinstance(hx, (tuple, list)) and len(hx) == 2 and isinstance(hx[0], Tensor) and isinstance(hx[1], Tensor)):
        advice = "Give zeros for a state that is not known."
        raise ArgumentError(sentence("hx", "None or a pair of tensors (h_0, c_0)", _words(hx), advice))


def check_state(hx: object) -> None:
    """Check that an initial hidden state is a tensor."""
    if not isinstance(hx, Tensor):
        raise ArgumentError(
            sentence("hx", "None or a tensor h_0", _words(hx), "Give None for a state that is not known.")
        )


def check_step(
    x: object, states: tuple[Tensor, ...] | None, input_size: int, hidden_size: int, dtype: torch.dtype
) -> None:
    """Check the input and the states of a single time step.

    Args:
        x: The input [B, I], or [I] without a batch.
        states: The states, [B, H] or [H] each; None for zeros.
        input_size: I, the number of input features.
        hidden_size: H, the number of hidden units.
        dtype: The dtype of the parameters, which the input must have too unless autocast is on.

    Raises:
        ArgumentError: The input is not a tensor.
        ShapeError: A rank or size does not fit.
        DtypeError: The dtype of the input differs from that of the parameters.
    """
    if not isinstance(x, Tensor):
        refuse_input(x)
    shape = x.shape
    if len(shape) not in (1, 2):
        expectation = "[B, I], or [I] without a batch"
        raise ShapeError(sentence("input", expectation, f"rank {len(shape)} with shape {list(shape)}"))
    if shape[-1] != input_size:
        raise ShapeError(sentence("input", f"of {input_size} features", f"{shape[-1]} in {list(shape)}"))
    expected = (*shape[:-1], hidden_size)
    for index, value in enumerate(states or ()):
        if value.shape != expected:
            name = "hx" if states is None or len(states) == 1 else f"hx[{index}]"
            raise ShapeError(sentence(name, f"of shape {list(expected)}", list(value.shape)))
    if x.dtype != dtype and not torch._C._is_any_autocast_enabled():
        advice = "Convert one of them with .to(dtype)."
        raise DtypeError(sentence("input", f"{dtype} like the parameters", x.dtype, advice))


def refuse_script(layer: str) -> NoReturn:
    """Raise the error for layers in TorchScript whose compiler would fail at an arbitrary line of gatewise."""
    how = "compiled by torch.compile or torch.export"
    raise ArgumentError(sentence(f"gatewise.{layer}", how, "torch.jit.script"))


def _words(given: object) -> str:
    if isinstance(given, (tuple, list)) and len(given) < 5:
        return f"({', '.join('None' if each is None else type(each).__name__ for each in given)})"
    return type(given).__name__
