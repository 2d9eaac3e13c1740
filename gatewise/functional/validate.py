"""From a user's arguments to a `Problem` and `Inputs`, or an error that says what to change."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from gatewise.contract.device import tf32_allowed
from gatewise.contract.errors import ArgumentError, DeviceError, DtypeError, ShapeError, sentence
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.saved import Inputs
from gatewise.functional.signature import Signature, signature

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
) -> tuple[Problem, Inputs]:
    """Check every argument and describe the call.

    Returns:
        The problem, and the inputs with zeros for a missing state and lengths as int64, without dropout masks.

    Raises:
        ShapeError: A rank, size or length does not fit.
        DtypeError: A dtype does not fit.
        DeviceError: Tensors are on devices that do not go together.
        ArgumentError: `dropout` is outside [0, 1], or both `lengths` and `batch_sizes` are given.
    """
    found = signature(flat, bidirectional)
    time, batch = check_input(x, found, batch_sizes)
    layout, row_lengths = Layout.DENSE, None
    if batch_sizes is not None:
        if lengths is not None:
            raise ArgumentError(sentence("lengths", "None for a packed batch", "both lengths and batch_sizes"))
        layout = Layout.PACKED
    elif lengths is not None:
        row_lengths, longest = _checked_lengths(lengths, time, batch, x.device)
        layout = Layout.DEVICE_LENGTHS if row_lengths.is_cuda else Layout.HOST_LENGTHS
        if longest == 0:
            time = 0
    h0, c0 = _checked_state(state, x, found, batch)
    if row_lengths is not None and row_lengths.is_cuda:
        row_lengths, h0 = _without_sync(row_lengths, time, h0)
    if not 0.0 <= dropout <= 1.0:
        raise ArgumentError(sentence("dropout", "a probability between 0 and 1", dropout))
    problem = _described(
        found,
        time,
        batch,
        layout,
        dropout if found.num_layers > 1 else 0.0,
        needs_grad,
        found.dtype == torch.float32 and x.is_cuda and tf32_allowed(),
        traced,
    )
    return problem, Inputs(x, h0, c0, flat, row_lengths, batch_sizes)


# Like signatures, problems come back again and again; one object for each makes looking up its decision fast too.
@functools.lru_cache(maxsize=4096)
def _described(
    found: Signature,
    time: int,
    batch: int,
    layout: Layout,
    dropout: float,
    needs_grad: bool,
    allow_tf32: bool,
    traced: bool,
) -> Problem:
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
        layout=layout,
        dropout=dropout,
        needs_grad=needs_grad,
        allow_tf32=allow_tf32,
        traced=traced,
    )


def check_input(x: Tensor, found: Signature, batch_sizes: Tensor | None) -> tuple[int, int]:
    """Check x against the weights and return T and B."""
    if batch_sizes is None:
        rank, shape = 3, "[T, B, I]"
    else:
        rank, shape = 2, "[N, I] with batch_sizes"
    if x.dim() != rank:
        raise ShapeError(sentence("x", f"of rank {rank}, {shape}", f"rank {x.dim()} with shape {list(x.shape)}"))
    if x.shape[-1] != found.input_size:
        advice = "The last dimension of x is the input size of the weights."
        raise ShapeError(sentence("x", f"of {found.input_size} features", f"{x.shape[-1]} in {list(x.shape)}", advice))
    if x.dtype != found.dtype:
        raise DtypeError(sentence("x", f"{found.dtype} like the weights", x.dtype, "Convert one with .to(dtype)."))
    if x.dtype not in _FLOATS:
        raise DtypeError(sentence("x", "float32, float64, float16 or bfloat16", x.dtype))
    if x.device != found.device:
        advice = "Move one of them with .to(device)."
        raise DeviceError(sentence("x", f"on {found.device} like the weights", f"one on {x.device}", advice))
    if batch_sizes is None:
        return x.shape[0], x.shape[1]
    return len(batch_sizes), int(batch_sizes[0]) if len(batch_sizes) else 0


def _checked_state(
    state: tuple[Tensor, Tensor] | None, x: Tensor, found: Signature, batch: int
) -> tuple[Tensor, Tensor]:
    rows = found.num_layers * (1 + found.bidirectional)
    hidden = (rows, batch, found.proj_size or found.hidden_size)
    cell = (rows, batch, found.hidden_size)
    if state is None:
        h0 = x.new_zeros(hidden)
        return h0, (h0 if hidden == cell else x.new_zeros(cell))
    h0, c0 = state
    for name, tensor, shape in (("h0", h0, hidden), ("c0", c0, cell)):
        if tensor.shape != shape:
            meaning = "[L*D, B, R]" if name == "h0" else "[L*D, B, H]"
            raise ShapeError(sentence(name, f"{list(shape)}, which is {meaning}", list(tensor.shape)))
        if tensor.dtype != x.dtype:
            raise DtypeError(sentence(name, f"{x.dtype} like x", tensor.dtype, "Convert it with .to(x.dtype)."))
        if tensor.device != x.device:
            raise DeviceError(sentence(name, f"on {x.device} like x", f"one on {tensor.device}"))
    return h0, c0


def _checked_lengths(
    lengths: Tensor | Sequence[int], time: int, batch: int, device: torch.device
) -> tuple[Tensor, int | None]:
    # The second result is the longest length where it can be read without a sync.
    if not isinstance(lengths, Tensor):
        lengths = torch.tensor(lengths)
        if lengths.numel() == 0:
            lengths = lengths.to(torch.int64)
    if lengths.dtype.is_floating_point or lengths.dtype == torch.bool or lengths.dtype.is_complex:
        raise DtypeError(sentence("lengths", "integers", lengths.dtype))
    if lengths.shape != (batch,):
        raise ShapeError(sentence("lengths", f"one integer a sequence, [{batch}]", list(lengths.shape)))
    if lengths.device != device and lengths.device.type != "cpu":
        if device.type != "cpu":
            raise DeviceError(sentence("lengths", f"on {device} like x, or on the CPU", f"on {lengths.device}"))
        lengths = lengths.cpu()
    lengths = lengths.to(torch.int64)
    if lengths.device.type != "cpu" or batch == 0:
        return lengths, None
    low, high = (int(bound) for bound in torch.aminmax(lengths))
    if low < 0 or high > time:
        raise ShapeError(sentence("lengths", f"between 0 and T = {time}", low if low < 0 else high))
    return lengths, high


def _without_sync(lengths: Tensor, time: int, h0: Tensor) -> tuple[Tensor, Tensor]:
    # Reading the values back would stop the GPU, so a length out of range cannot raise here. It must not pass for a
    # right one either: the row's state, and with it everything computed from it, becomes NaN.
    bounded = lengths.clamp(0, time)
    return bounded, torch.where((bounded == lengths)[:, None], h0, torch.nan)


def with_masks(problem: Problem, inputs: Inputs) -> Inputs:
    """Draw the dropout masks from PyTorch's generator, one for each gap between layers."""
    if not problem.dropout:
        return inputs
    shape, device = (*inputs.x.shape[:-1], problem.output_size), inputs.x.device
    keep = 1.0 - problem.dropout
    gaps = range(problem.num_layers - 1)
    masks = tuple(torch.empty(shape, dtype=torch.bool, device=device).bernoulli_(keep) for _ in gaps)
    return inputs._replace(masks=masks)
