"""From a user's arguments to a `Problem` and `Inputs`, or an error that says what to change."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from gatewise.cells import LSTM, Cell
from gatewise.contract.capture import state as state_of_capture
from gatewise.contract.device import tf32_allowed
from gatewise.contract.errors import ArgumentError, DeviceError, DtypeError, ShapeError, sentence
from gatewise.contract.problem import LEAN, NORMAL, Layout, Problem
from gatewise.contract.saved import Inputs
from gatewise.functional.arguments import check_options, check_tensors
from gatewise.functional.lengths import checked_batch_sizes, checked_lengths, without_sync
from gatewise.functional.signature import Form, Signature, form_of, signature_of

_LSTM = LSTM()
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def prepare(
    x: Tensor,
    state: tuple[Tensor, Tensor] | None,
    flat: tuple[Tensor, ...],
    *,
    lengths: Tensor | Sequence[int] | None,
    batch_sizes: Tensor | None,
    bidirectional: bool,
    dropout: float,
    needs_grad: bool,
    traced: bool = False,
    memory: str = NORMAL,
    cell: Cell = _LSTM,
) -> tuple[Problem, Inputs]:
    """Check every argument and describe the call.

    Returns:
        The problem, and the inputs with zeros for a missing state and lengths as int64, without dropout masks.

    Raises:
        ShapeError: A rank, size or length does not fit.
        DtypeError: A dtype does not fit.
        DeviceError: Tensors are on devices that do not go together.
        ArgumentError: An argument is not of the kind it must be, an option is not what it can be, or both `lengths` and
            `batch_sizes` are given.
    """
    check_tensors(x, state, flat)
    packed = None
    if batch_sizes is not None:
        if lengths is not None:
            raise ArgumentError(sentence("lengths", "None for a packed batch", "both lengths and batch_sizes"))
        batch_sizes = checked_batch_sizes(batch_sizes, len(x) if x.dim() else 0)
        packed = len(batch_sizes), int(batch_sizes[0]) if len(batch_sizes) else 0
    try:
        problem = described(
            form_of(x),
            None if state is None else tuple(map(form_of, state)),
            tuple(map(form_of, flat)),
            packed,
            bidirectional,
            dropout,
            needs_grad,
            x.is_cuda and tf32_allowed(),
            traced,
            memory,
            # What is compiled must have one choice, inside a graph and outside.
            state_of_capture() if x.is_cuda and not traced else "",
            cell,
        )
    except TypeError:  # an option that nothing can be looked up by
        check_options(bidirectional, dropout, memory)
        raise
    h0, c0 = zeros(problem, x) if state is None else state
    if lengths is None:
        return problem, Inputs(x, h0, c0, flat, None, batch_sizes)
    row_lengths, longest = checked_lengths(lengths, problem.time, problem.batch, x.device)
    if row_lengths.is_cuda:
        row_lengths, h0 = without_sync(row_lengths, problem.time, h0)
    return with_lengths(problem, row_lengths.is_cuda, longest == 0), Inputs(x, h0, c0, flat, row_lengths)


# A call's checks read forms and options only, and the same ones come back again and again. One object for each problem
# makes looking up its decision fast too.
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
    cell: Cell = _LSTM,
) -> Problem:
    """Check forms and options and return their problem.

    Arguments are those of `prepare`, tensors by their forms; `packed` is T and B of a packed batch, `allow_tf32` what
    PyTorch's settings say, whatever the dtype.
    """
    check_options(bidirectional, dropout, memory)
    found = signature_of(weights, bidirectional, len(cell.gates))
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


@functools.lru_cache(maxsize=4096)
def with_lengths(problem: Problem, on_device: bool, all_empty: bool) -> Problem:
    """Return the problem of a call that is given lengths."""
    layout = Layout.DEVICE_LENGTHS if on_device else Layout.HOST_LENGTHS
    return problem.replace(layout=layout, time=0 if all_empty else problem.time)


def check_input(x: Tensor | Form, found: Signature, *, packed: bool) -> None:
    """Check x, or its form, against the weights."""
    shape, expected = x.shape, "2, [N, I] with batch_sizes" if packed else "3, [T, B, I]"
    if len(shape) != (2 if packed else 3):
        raise ShapeError(sentence("x", f"of rank {expected}", f"rank {len(shape)} with shape {list(shape)}"))
    if shape[-1] != found.input_size:
        advice = "The last dimension of x is the input size of the weights."
        raise ShapeError(sentence("x", f"of {found.input_size} features", f"{shape[-1]} in {list(shape)}", advice))
    if x.dtype != found.dtype:
        raise DtypeError(sentence("x", f"{found.dtype} like the weights", x.dtype, "Convert one with .to(dtype)."))
    if x.dtype not in _FLOATS:
        raise DtypeError(sentence("x", "float32, float64, float16 or bfloat16", x.dtype))
    if x.device != found.device:
        advice = "Move one of them with .to(device)."
        raise DeviceError(sentence("x", f"on {found.device} like the weights", f"one on {x.device}", advice))


def _check_state(state: tuple[tuple, ...], x: Form, found: Signature, batch: int, states: int) -> None:
    rows = found.num_layers * (1 + found.bidirectional)
    hidden = (rows, batch, found.proj_size or found.hidden_size)
    cell = (rows, batch, states * found.hidden_size)
    h0, c0 = (Form(*form) for form in state)
    for name, form, shape in (("h0", h0, hidden), ("c0", c0, cell)):
        if form.shape != shape:
            meaning = "[L*D, B, R]" if name == "h0" else "[L*D, B, H]"
            raise ShapeError(sentence(name, f"{list(shape)}, which is {meaning}", list(form.shape)))
        if form.dtype != x.dtype:
            raise DtypeError(sentence(name, f"{x.dtype} like x", form.dtype, "Convert it with .to(x.dtype)."))
        if form.device != x.device:
            raise DeviceError(sentence(name, f"on {x.device} like x", f"one on {form.device}"))


def zeros(problem: Problem, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the initial state of a call that gives none; nothing writes to it, so one tensor may be both."""
    rows = problem.num_layers * problem.num_directions
    h0 = x.new_zeros(rows, problem.batch, problem.state_size)
    alike = problem.states_size == problem.state_size
    return h0, h0 if alike else x.new_zeros(rows, problem.batch, problem.states_size)


def with_masks(problem: Problem, inputs: Inputs) -> Inputs:
    """Draw the dropout masks from PyTorch's generator, one for each gap between layers."""
    if not problem.dropout:
        return inputs
    shape, device = (*inputs.x.shape[:-1], problem.output_size), inputs.x.device
    keep = 1.0 - problem.dropout
    gaps = range(problem.num_layers - 1)
    masks = tuple(torch.empty(shape, dtype=torch.bool, device=device).bernoulli_(keep) for _ in gaps)
    return inputs._replace(masks=masks)
