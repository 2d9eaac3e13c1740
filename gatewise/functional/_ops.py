"""The call as registered operators: the boundary that torch.compile and torch.export see.

Each operator has a fake implementation, which knows only shapes. What a kernel keeps for backward crosses the boundary
as tensors, after the dropout masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gatewise.cells import Cell, cell_named
from gatewise.contract.device import tf32_allowed
from gatewise.contract.errors import KernelRefused
from gatewise.contract.problem import LEAN, Layout, Problem
from gatewise.contract.saved import Inputs, Needs, OutputGradients, Result, Saved
from gatewise.functional.arguments import check_options
from gatewise.functional.explicit import State, run, run_backward
from gatewise.functional.lengths import as_tensor
from gatewise.functional.plan import probed
from gatewise.functional.signature import Signature, traced_signature
from gatewise.functional.validate import check_input, prepare, with_masks
from gatewise.selection import AUTO, choose, kernel_named, predicted, preference

_TYPICAL_SIZE = 64


def traced_lstm(
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
) -> tuple[Tensor, State]:
    """Make the call through the registered operators; the kernel is fixed while the graph is being built."""
    check_options(bidirectional, dropout, memory)
    if lengths is not None and not isinstance(lengths, Tensor):
        lengths = as_tensor(lengths)
    if state is None:
        found = traced_signature(flat, bidirectional, len(cell.gates))
        rows, batch = found.num_layers * (1 + bidirectional), x.shape[1] if batch_sizes is None else int(batch_sizes[0])
        h0 = x.new_zeros(rows, batch, found.proj_size or found.hidden_size)
        c0 = x.new_zeros(rows, batch, len(cell.states) * found.hidden_size)
    else:
        h0, c0 = state
    needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, h0, c0, *flat))
    y, h_n, c_n, _ = lstm_forward(
        x, h0, c0, flat, lengths, batch_sizes, bidirectional, dropout, needs_grad, _preferred(kernel), memory, cell.name
    )
    return y, State(h_n, c_n)


def _preferred(kernel: str) -> str:
    return preference(kernel).kernel


# What `torch.compiler.assume_constant_result` does, without importing the compiler with the package: the preference is
# read while the graph is built.
_preferred._dynamo_marked_constant = True  # type: ignore[attr-defined]


@torch.library.custom_op("gatewise::lstm_forward", mutates_args=())
def lstm_forward(
    x: Tensor,
    h0: Tensor,
    c0: Tensor,
    weights: Sequence[Tensor],
    lengths: Tensor | None,
    batch_sizes: Tensor | None,
    bidirectional: bool,
    dropout: float,
    needs_grad: bool,
    kernel: str,
    memory: str,
    cell: str,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Run the forward pass; the last result is the dropout masks and what the kernel kept."""
    options = lengths, batch_sizes, bidirectional, dropout, needs_grad, memory, cell
    problem, inputs = _prepared(x, h0, c0, weights, *options)
    inputs = with_masks(problem, inputs)
    result = run(problem, inputs, _chosen(problem, x.device, kernel)).result
    kept = [*inputs.masks, *result.kept] if needs_grad else []
    found = _unaliased([*result[:3], *kept], given=[x, h0, c0, *weights, lengths, batch_sizes])
    return found[0], found[1], found[2], found[3:]


@lstm_forward.register_fake
def _lstm_forward_fake(
    x: Tensor,
    h0: Tensor,
    c0: Tensor,
    weights: Sequence[Tensor],
    lengths: Tensor | None,
    batch_sizes: Tensor | None,
    bidirectional: bool,
    dropout: float,
    needs_grad: bool,
    kernel: str,
    memory: str,
    cell: str,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    stated = cell_named(cell)
    found = traced_signature(weights, bidirectional, len(stated.gates))
    if batch_sizes is None:
        check_input(x, found, packed=False)
    dropped = dropout if found.num_layers > 1 else 0.0
    output = (*x.shape[:-1], (1 + bidirectional) * (found.proj_size or found.hidden_size))
    kept: list[Tensor] = []
    if needs_grad and x.device.type != "meta":
        problem = _fake_problem(x, h0, found, lengths, batch_sizes, dropped, memory, stated)
        name = _chosen(problem, x.device, kernel)
        masks = found.num_layers - 1 if dropped else 0
        kept = [x.new_empty(output, dtype=torch.bool) for _ in range(masks)]
        for spec in kernel_named(name).kept(problem, probed(x.device)):
            shape = spec.shape if spec.exact else (torch.library.get_ctx().new_dynamic_size(),)
            kept.append(x.new_empty(shape, dtype=spec.dtype))
    return x.new_empty(output), torch.empty_like(h0), torch.empty_like(c0), kept


@torch.library.custom_op("gatewise::lstm_backward", mutates_args=())
def lstm_backward(
    dy: Tensor | None,
    dh: Tensor | None,
    dc: Tensor | None,
    x: Tensor,
    h0: Tensor,
    c0: Tensor,
    weights: Sequence[Tensor],
    lengths: Tensor | None,
    batch_sizes: Tensor | None,
    y: Tensor,
    kept: Sequence[Tensor],
    bidirectional: bool,
    dropout: float,
    kernel: str,
    memory: str,
    cell: str,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Run the backward pass of the kernel that `lstm_forward` chose."""
    problem, inputs = _prepared(x, h0, c0, weights, lengths, batch_sizes, bidirectional, 0.0, True, memory, cell)
    problem = problem.replace(dropout=dropout if problem.num_layers > 1 else 0.0)
    masks = problem.num_layers - 1 if problem.dropout else 0
    inputs = inputs._replace(masks=tuple(kept[:masks]))
    name = _chosen(problem, x.device, kernel)
    saved = Saved(name, problem, inputs, Result(y, h0, c0, tuple(kept[masks:])))  # final states are not read
    found = run_backward(saved, OutputGradients(dy, dh, dc), Needs(), name)
    given = [dy, dh, dc, x, h0, c0, *weights, lengths, batch_sizes, y, *kept]
    dx, dh0, dc0, *dweights = _unaliased([found.x, found.h0, found.c0, *found.weights], given)
    return dx, dh0, dc0, dweights


@lstm_backward.register_fake
def _lstm_backward_fake(
    dy: Tensor | None,
    dh: Tensor | None,
    dc: Tensor | None,
    x: Tensor,
    h0: Tensor,
    c0: Tensor,
    weights: Sequence[Tensor],
    *rest: object,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    empty = torch.empty_like
    return x.new_empty(x.shape), empty(h0), empty(c0), [weight.new_empty(weight.shape) for weight in weights]


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    x, h0, c0, weights, lengths, batch_sizes, bidirectional, dropout, needs_grad, kernel, memory, cell = inputs
    y, _, _, kept = output
    if not needs_grad:
        return
    ctx.set_materialize_grads(False)
    # On a CPU y is the caller's to change in place, as in `_autograd`.
    ctx.save_for_backward(x, h0, c0, lengths, batch_sizes, y if y.is_cuda else y.clone(), *weights, *kept)
    ctx.count, ctx.options = len(weights), (bidirectional, dropout, kernel, memory, cell)


def _backward(ctx: Any, dy: Tensor | None, dh: Tensor | None, dc: Tensor | None, dkept: object) -> tuple:
    x, h0, c0, lengths, batch_sizes, y, *rest = ctx.saved_tensors
    weights, kept = rest[: ctx.count], rest[ctx.count :]
    gradients = lstm_backward(dy, dh, dc, x, h0, c0, weights, lengths, batch_sizes, y, kept, *ctx.options)
    return (*gradients, *[None] * 8)


lstm_forward.register_autograd(_backward, setup_context=_setup_context)


def _unaliased(found: Sequence[Tensor | None], given: Sequence[Tensor | None]) -> list[Tensor]:
    # An operator's results may share no storage with its arguments or with each other. Kernels lay several of them into
    # one; both biases have one gradient; an empty sequence hands its state through, and its state's gradient.
    seen = {tensor.untyped_storage()._cdata for tensor in given if tensor is not None}
    apart: list[Tensor] = []
    for tensor in found:
        if tensor is None:
            raise RuntimeError("a kernel left out a gradient that was asked for")
        if tensor.untyped_storage()._cdata in seen:
            tensor = tensor.clone()
        # Callers change results in place, which autograd allows of no views.
        apart.append(tensor.data if tensor._is_view() else tensor)
        seen.add(apart[-1].untyped_storage()._cdata)
    return apart


def _prepared(
    x: Tensor,
    h0: Tensor,
    c0: Tensor,
    weights: Sequence[Tensor],
    lengths: Tensor | None,
    batch_sizes: Tensor | None,
    bidirectional: bool,
    dropout: float,
    needs_grad: bool,
    memory: str,
    cell: str,
) -> tuple[Problem, Inputs]:
    return prepare(
        x,
        (h0, c0),
        tuple(weights),
        lengths=lengths,
        batch_sizes=batch_sizes,
        bidirectional=bidirectional,
        dropout=dropout,
        needs_grad=needs_grad,
        traced=True,
        memory=memory,
        cell=cell_named(cell),
    )


def _fake_problem(
    x: Tensor,
    h0: Tensor,
    found: Signature,
    lengths: Tensor | None,
    batch_sizes: Tensor | None,
    dropout: float,
    memory: str,
    cell: Cell,
) -> Problem:
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
        dropout=dropout,
        needs_grad=True,
        allow_tf32=x.device.type == "cuda" and found.dtype == torch.float32 and tf32_allowed(),
        traced=True,
        lean=memory == LEAN,
        cell=cell,
    )


def _chosen(problem: Problem, device: torch.device, kernel: str) -> str:
    # A graph serves every length and batch size from two up. The choice must be the same while the graph is built and
    # when it runs, so it sees neither.
    time, batch = (
        size if isinstance(size, int) and size < 2 else _TYPICAL_SIZE for size in (problem.time, problem.batch)
    )
    problem = problem.replace(time=time, batch=batch)
    where = probed(device)
    # "auto" is already what was preferred: a `use_kernel` around the compiled call comes too late.
    chosen = predicted(problem, where).chosen if kernel == AUTO else choose(problem, where, kernel).chosen
    if chosen is None:
        raise KernelRefused(kernel)
    return chosen
