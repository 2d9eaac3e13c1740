"""The checks of a call's arguments, and the `Problem` that the arguments describe.

Only the shapes, dtypes and devices of tensors are read here, as `Form`s, so that what was found for one call can be
looked up for the next.
"""

from __future__ import annotations

import functools
import numbers
from typing import Any

import torch
from torch import Tensor, nn

from gatewise.cells import Cell
from gatewise.contract.device import tf32_allowed
from gatewise.contract.errors import ArgumentError, DeviceError, DtypeError, ShapeError, sentence
from gatewise.contract.problem import LEAN, NORMAL, Layout, Problem
from gatewise.contract.saved import Needs, Saved
from gatewise.functional.weights import Form, Structure, kind_of, structure_of
from gatewise.selection import check_name

__all__ = [
    "check_backward",
    "check_dropout",
    "check_input",
    "check_memory",
    "check_name",
    "check_options",
    "check_reverse",
    "check_tensors",
    "described",
    "described_while_traced",
    "without_features",
]

_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

# `isinstance` tests one tensor after the other; one set operation tests for the usual types at once.
_USUAL_TYPES = frozenset({Tensor, nn.Parameter})


def check_tensors(x: object, state: Any, flat: tuple[object, ...]) -> None:
    """Check that x is a dense tensor, that every weight is a tensor, and that the state is None or two tensors.

    Args:
        x: The input.
        state: The initial state.
        flat: The weights in torch's flat order.

    Raises:
        ArgumentError: An argument is of another kind.
    """
    if not isinstance(x, Tensor):
        raise ArgumentError(
            sentence("x", "a tensor", type(x).__name__, "torch.as_tensor makes one of an array or a list.")
        )
    if x.layout is not torch.strided:
        raise ArgumentError(sentence("x", "a dense tensor", f"one of {x.layout}", "Call .to_dense() on it."))
    if state is not None:
        _check_pair("state", state, "(h0, c0)")
    if not _USUAL_TYPES.issuperset(map(type, flat)):
        for index, weight in enumerate(flat):
            if not isinstance(weight, Tensor):
                raise ArgumentError(sentence(f"weights[{index}]", "a tensor", kind_of(weight)))


def check_options(bidirectional: object, dropout: object, memory: object) -> None:
    """Check the options of a call that are neither tensors nor names of kernels.

    Raises:
        ArgumentError: An option has a value that it cannot have.
    """
    if not isinstance(bidirectional, int) or bidirectional not in (False, True):
        raise ArgumentError(sentence("bidirectional", "True or False", repr(bidirectional)))
    check_dropout(dropout)
    check_memory(memory)


def check_reverse(reverse: object, bidirectional: object) -> None:
    """Check that `reverse` is a flag, and not set for a call that has both directions.

    Raises:
        ArgumentError: It is neither True nor False, or True with two directions.
    """
    if not isinstance(reverse, bool):
        raise ArgumentError(sentence("reverse", "True or False", repr(reverse), "Use a flag of Python."))
    if reverse and bidirectional:
        advice = "A bidirectional layer has both directions already."
        raise ArgumentError(sentence("reverse", "False with bidirectional=True", "True", advice))


def check_dropout(dropout: object) -> None:
    """Check that `dropout` is a probability.

    Raises:
        ArgumentError: It is not a number from 0 to 1.
    """
    if not isinstance(dropout, numbers.Real) or isinstance(dropout, bool) or not 0.0 <= float(dropout) <= 1.0:
        advice = "It is the probability of dropping an output between layers."
        raise ArgumentError(sentence("dropout", "a number from 0 to 1", repr(dropout), advice))


def check_memory(memory: object) -> None:
    """Check that `memory` is one of the two modes.

    Raises:
        ArgumentError: It is neither "normal" nor "lean".
    """
    if memory not in (NORMAL, LEAN):
        raise ArgumentError(sentence("memory", f"{NORMAL!r} or {LEAN!r}", repr(memory)))


def check_backward(saved: object, dy: object, dstate: Any, needs: object) -> None:
    """Check the kinds of the arguments of the explicit backward pass.

    Raises:
        ArgumentError: An argument is of another kind.
    """
    if not isinstance(saved, Saved):
        advice = "Give the second result of gatewise.functional.forward."
        raise ArgumentError(
            sentence("saved", "what gatewise.functional.forward returned for backward", kind_of(saved), advice)
        )
    if not (dy is None or isinstance(dy, Tensor)):
        raise ArgumentError(sentence("dy", "None or a tensor", type(dy).__name__))
    if dstate is not None:
        _check_pair("dstate", dstate, "(dh, dc), each of them a tensor or None", or_none=True)
    if not isinstance(needs, Needs):
        advice = "Import it from gatewise.contract.saved."
        raise ArgumentError(sentence("needs", "Needs(x, state, weights)", repr(needs), advice))


# The checks read forms and options only, and the same ones come back again and again. Equal calls get one `Problem`
# object, which makes looking up its decision fast too.
@functools.lru_cache(maxsize=4096)
def described(
    x: tuple,
    state: tuple[tuple, ...] | None,
    weights: tuple[tuple, ...],
    packed: tuple[int, int] | None,
    bidirectional: bool,
    dropout: float,
    needs_grad: bool,
    allow_tf32: bool,
    traced: bool,
    memory: str,
    capture: str,
    cell: Cell,
) -> Problem:
    """Check the forms and options of a call and return the problem that they describe, without lengths.

    Args:
        x: The form of the input.
        state: The forms of the initial states, or None.
        weights: The forms of the weights in torch's flat order.
        packed: T and B of a packed batch; None for padded sequences.
        bidirectional: Whether every layer has a reverse direction.
        dropout: The probability of dropping an output between layers.
        needs_grad: Whether a backward pass will follow.
        allow_tf32: Whether PyTorch's settings allow TF32, whatever the dtype.
        traced: Whether the call is an operator of a compiled graph.
        memory: "normal" or "lean".
        capture: The state of CUDA graph capture, from `contract.capture.state`.
        cell: The cell.

    Raises:
        ShapeError: A rank or size does not fit.
        DtypeError: A dtype does not fit.
        DeviceError: Tensors are on devices that do not go together.
        ArgumentError: An option has a value that it cannot have.
    """
    check_options(bidirectional, dropout, memory)
    found = structure_of(weights, bidirectional, len(cell.gates), len(cell.parameters))
    given = Form(*x)
    check_input(given, found, packed=packed is not None)
    time, batch = given.shape[:2] if packed is None else packed
    if state is not None:
        _check_state(state, given, found, batch, len(cell.states))
    return Problem(
        time=time,
        batch=batch,
        input_size=found.input_size,
        hidden_size=found.hidden_size,
        proj_size=found.proj_size,
        num_layers=found.num_layers,
        bidirectional=found.bidirectional,
        bias=found.bias,
        dtype=found.dtype,
        layout=Layout.DENSE if packed is None else Layout.PACKED,
        dropout=dropout if found.num_layers > 1 else 0.0,
        needs_grad=needs_grad,
        allow_tf32=allow_tf32 and found.dtype == torch.float32,
        traced=traced,
        lean=memory == LEAN,
        captured=capture != "",
        announced=capture == "announced",
        cell=cell,
    )


def described_while_traced(
    x: Tensor,
    h0: Tensor,
    found: Structure,
    lengths: Tensor | None,
    batch_sizes: Tensor | None,
    dropout: float,
    memory: str,
    cell: Cell,
    resets: bool,
) -> Problem:
    """Return the problem of a call that needs gradients while a graph is traced, where sizes may be symbols.

    Args:
        x: The input.
        h0: The initial hidden state.
        found: The structure of the weights.
        lengths: The lengths, or None.
        batch_sizes: The batch sizes of a packed batch, or None.
        dropout: The probability of dropping an output between layers.
        memory: "normal" or "lean".
        cell: The cell.
        resets: Whether resets are given.
    """
    layout = Layout.DENSE
    if batch_sizes is not None:
        layout = Layout.PACKED
    elif lengths is not None:
        layout = Layout.DEVICE_LENGTHS if lengths.device.type == "cuda" else Layout.HOST_LENGTHS
    return Problem(
        time=x.shape[0] if batch_sizes is None else batch_sizes.shape[0],
        batch=h0.shape[1],
        input_size=int(found.input_size),
        hidden_size=int(found.hidden_size),
        proj_size=int(found.proj_size),
        num_layers=found.num_layers,
        bidirectional=found.bidirectional,
        bias=found.bias,
        dtype=found.dtype,
        layout=layout,
        dropout=dropout if found.num_layers > 1 else 0.0,
        needs_grad=True,
        allow_tf32=x.device.type == "cuda" and found.dtype == torch.float32 and tf32_allowed(),
        traced=True,
        lean=memory == LEAN,
        cell=cell,
        resets=resets,
    )


def check_input(x: Tensor | Form, found: Structure, *, packed: bool) -> None:
    """Check the input, or its form, against the structure of the weights.

    Raises:
        ShapeError: The rank or the number of features does not fit.
        DtypeError: The dtype is another one than that of the weights, or no float dtype.
        DeviceError: The device is another one than that of the weights.
    """
    shape, expected = x.shape, "2, [N, I] with batch_sizes" if packed else "3, [T, B, I]"
    if len(shape) != (2 if packed else 3):
        raise ShapeError(sentence("x", f"of rank {expected}", f"rank {len(shape)} with shape {list(shape)}"))
    if shape[-1] != found.input_size:
        advice = "The last dimension is the input size of the weights."
        raise ShapeError(sentence("x", f"of {found.input_size} features", f"{shape[-1]} in {list(shape)}", advice))
    if x.dtype != found.dtype:
        raise DtypeError(sentence("x", f"{found.dtype} like the weights", x.dtype, "Convert one with .to(dtype)."))
    if x.dtype not in _FLOATS:
        raise DtypeError(sentence("x", "float32, float64, float16 or bfloat16", x.dtype))
    if x.device != found.device:
        advice = "Move one of them with .to(device)."
        raise DeviceError(sentence("x", f"on {found.device} like the weights", f"one on {x.device}", advice))


def without_features(x: tuple, weights: tuple[tuple, ...]) -> tuple:
    """Check the form of x as products with the first layer's input weights; return the form of an input of size 0.

    Args:
        x: The form of the products [T, B, D*4H], or [N, D*4H] when packed.
        weights: The forms of the weights in torch's flat order; the first layer's input weights are [4H, 0].

    Raises:
        ShapeError: Those weights have columns, or x has another number of products.
    """
    given, first = Form(*x), weights[0][0]
    if len(first) != 2 or first[1] != 0:
        advice = "With projected=True their products are in x."
        raise ShapeError(sentence("weights", "[4H, 0] for the first layer's input weights", list(first), advice))
    directions = sum(len(shape) == 2 and shape[1] == 0 for shape, *_ in weights)
    if not given.shape or given.shape[-1] != directions * first[0]:
        raise ShapeError(sentence("x", f"of D * 4H = {directions * first[0]} products", list(given.shape)))
    return given._replace(shape=torch.Size((*given.shape[:-1], 0)))


def _check_state(state: tuple[tuple, ...], x: Form, found: Structure, batch: int, states: int) -> None:
    rows = found.num_layers * (1 + found.bidirectional)
    hidden = (rows, batch, found.proj_size or found.hidden_size)
    cell = (rows, batch, states * found.hidden_size)
    # For a cell with the hidden state alone, there may be no tensor for the others.
    for name, each, shape in zip(("h0", "c0"), state, (hidden, cell)[: len(state)], strict=False):
        form = Form(*each)
        if form.shape != shape:
            meaning = "[L*D, B, R]" if name == "h0" else "[L*D, B, H]"
            raise ShapeError(sentence(name, f"{list(shape)}, which is {meaning}", list(form.shape)))
        if form.dtype != x.dtype:
            raise DtypeError(sentence(name, f"{x.dtype} like x", form.dtype, "Convert it with .to(x.dtype)."))
        if form.device != x.device:
            raise DeviceError(sentence(name, f"on {x.device} like x", f"one on {form.device}"))


def _check_pair(name: str, given: Any, form: str, *, or_none: bool = False) -> None:
    kinds = (Tensor, type(None)) if or_none else Tensor
    if not (
        isinstance(given, (tuple, list))
        and len(given) == 2
        and isinstance(given[0], kinds)
        and isinstance(given[1], kinds)
    ):
        advice = "" if or_none else "Give zeros for a state that is not known."
        raise ArgumentError(sentence(name, f"None or a pair {form}", kind_of(given), advice))
