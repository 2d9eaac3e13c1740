"""Calls that `torch.jit.trace` records, as `torch.onnx.export` with `dynamo=False` does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from gatewise.cells import Cell
from gatewise.contract.errors import ArgumentError, KernelRefused, sentence
from gatewise.contract.pytorch import in_pytorch
from gatewise.contract.saved import Inputs
from gatewise.functional.execution import prepare
from gatewise.functional.export import by_pytorch
from gatewise.functional.initial_states import initial_states
from gatewise.functional.lengths import as_tensor
from gatewise.functional.passes import PlainPyTorch
from gatewise.functional.weights import Structure, structure_while_traced
from gatewise.selection import AUTO, REFERENCE, preference


def recorded(
    x: Tensor,
    state: tuple[Tensor, Tensor] | None,
    flat: tuple[Tensor, ...],
    lengths: Tensor | Sequence[int] | None,
    batch_sizes: Tensor | None,
    bidirectional: bool,
    dropout: float,
    kernel: str,
    memory: str,
    cell: Cell,
    resets: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a call by operators of PyTorch: a tracer records neither kernels nor functions with a backward pass.

    PyTorch's operator of whole layers computes the call whatever the kernel, and is recorded for any sizes. A call that
    PyTorch has no operator for is computed step by step, and recorded for this T.

    Args:
        x: The input [T, B, I], or [N, I] with `batch_sizes`.
        state: The initial states, or None.
        flat: The weights in torch's flat order.
        lengths: The lengths [B], or None; all of them positive where PyTorch has an operator.
        batch_sizes: The batch size at each step [T] of a packed batch, or None.
        bidirectional: Whether every layer has a reverse direction.
        dropout: The probability of dropping an output between layers.
        kernel: "auto", or the name of a kernel.
        memory: "normal" or "lean", which makes no difference.
        cell: The cell.
        resets: The steps at which episodes begin [T, B], or None.

    Returns:
        y, h_n and c_n, as of `recurrent`.

    Raises:
        ArgumentError: PyTorch has no operator for the call, and it is exported to ONNX.
        KernelRefused: PyTorch has no operator for the call, and another kernel than the reference is named.
    """
    if in_pytorch(cell) and resets is None:
        with _not_recorded():  # sizes of recorded tensors are tensors
            found = structure_while_traced(flat, bidirectional, len(cell.gates))
        if lengths is not None:
            return _padded(found, x, state, flat, lengths, dropout, cell)
        if state is None:
            state = _zeros(found, x, x.shape[1] if batch_sizes is None else batch_sizes[0], cell)
        return by_pytorch(found, x, *state, flat, batch_sizes, dropout, cell)
    if torch.onnx.is_in_onnx_export():
        got = f"the cell {cell.name}" if resets is None else "resets"
        advice = "Export it with dynamo=True."
        raise ArgumentError(sentence("call", "one that PyTorch has an operator for with dynamo=False", got, advice))
    wanted = preference(kernel)
    if wanted.kernel not in (AUTO, REFERENCE.name):
        expectation = f"{AUTO!r} or {REFERENCE.name!r} in torch.jit.trace for a call that PyTorch has no operator for"
        advice = "Name no kernel, or use torch.compile or torch.export."
        raise KernelRefused(sentence("kernel", expectation, repr(wanted.kernel), advice))
    needs_grad = torch.is_grad_enabled() and any(each.requires_grad for each in (x, *(state or ()), *flat))
    options = lengths, batch_sizes, bidirectional, dropout, needs_grad, REFERENCE.name, memory, cell, None, resets
    with _not_recorded():  # a plan with sizes that are tensors of one graph would be found again for another graph
        plan, _ = prepare(x, state, flat, *options)
    if lengths is not None:
        lengths = (lengths if isinstance(lengths, Tensor) else as_tensor(lengths)).to(torch.int64)
    if state is None:
        rows, _, size = plan.h0_shape
        batch: Any = x.shape[1] if batch_sizes is None else batch_sizes[0]
        zeros = x.new_zeros(rows, batch, size), x.new_zeros(rows, batch, plan.problem.states_size)
        state = initial_states(cell, *zeros)
    given = Inputs(x, *state, flat, lengths, batch_sizes, resets=None if resets is None else resets.bool())
    # The tracer checks the graph of a call with gradients by recording one without them, which must be the same one.
    with torch.enable_grad():
        result = PlainPyTorch().recorded(plan.problem, given)
    return result.y, result.h_n, result.c_n


def _padded(
    found: Structure,
    x: Tensor,
    state: tuple[Tensor, Tensor] | None,
    flat: tuple[Tensor, ...],
    lengths: Tensor | Sequence[int],
    dropout: float,
    cell: Cell,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a padded batch by packing it, which ONNX's exporter turns into the operator's input of lengths."""
    lengths = lengths if isinstance(lengths, Tensor) else as_tensor(lengths)
    data, batch_sizes, there, back = pack_padded_sequence(x, lengths.cpu(), enforce_sorted=False)
    assert there is not None  # for the type checker: the batch was not sorted
    assert back is not None
    h0, c0 = _zeros(found, x, x.shape[1], cell) if state is None else (one.index_select(1, there) for one in state)
    y, h_n, c_n = by_pytorch(found, data, h0, c0, flat, batch_sizes, dropout, cell)
    padded, _ = pad_packed_sequence(PackedSequence(y, batch_sizes, there, back), total_length=x.shape[0])
    return padded, h_n.index_select(1, back), c_n.index_select(1, back)


def _zeros(found: Structure, x: Tensor, batch: Any, cell: Cell) -> tuple[Tensor, Tensor]:
    rows, size = found.num_layers * (1 + found.bidirectional), found.hidden_size
    return x.new_zeros(rows, batch, found.proj_size or size), x.new_zeros(rows, batch, len(cell.states) * size)


@contextlib.contextmanager
def _not_recorded() -> Iterator[None]:
    state = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch._C._set_tracing_state(state)  # type: ignore[attr-defined]
