"""The registered operators, which stand for a call in the graphs of `torch.compile`.

Each operator has a fake implementation, which computes shapes only. The results of an operator are tensors, so what a
kernel keeps for the backward pass is returned as tensors too, after the dropout masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, List  # noqa: UP035

import torch
from torch import Tensor

from gatewise.cells import Cell, cell_named, is_shipped, stated
from gatewise.contract.errors import ArgumentError, sentence
from gatewise.contract.masks import mask_specs
from gatewise.contract.saved import Inputs, Needs, OutputGradients, Result
from gatewise.contract.tracing import is_exporting
from gatewise.contract.unaliased import unaliased
from gatewise.functional.arguments import check_input, check_options, check_tensors, described_while_traced
from gatewise.functional.compiled import recurrent
from gatewise.functional.execution import prepare
from gatewise.functional.export import exported, in_steps, refuse_packed_batch
from gatewise.functional.initial_states import initial_states
from gatewise.functional.lengths import as_tensor
from gatewise.functional.passes import with_masks
from gatewise.functional.plan import Particulars, Plan, chosen_for_graph, probed
from gatewise.functional.resets import check_resets, refuse_packed
from gatewise.functional.weights import structure_while_traced
from gatewise.selection import kernel_named, preference

# Whether an operator that is compiled may return tensors of sizes that are known only when it has run. PyTorch 2.9
# refuses such an operator; 2.10 compiles it on a CPU, and was not tried on a GPU.
_KEEPS = torch.__version__ >= "2.11"


def traced(
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
    """Put the call into the graph as an operator; the user's preference among kernels is read while it is traced."""
    check_options(bidirectional, dropout, memory)
    if batch_sizes is not None:
        refuse_packed(resets)
    elif resets is not None:
        check_resets(resets, x.shape[:2], "[T, B]")
    if lengths is not None and not isinstance(lengths, Tensor):
        lengths = as_tensor(lengths)
    found = structure_while_traced(flat, bidirectional, len(cell.gates), len(cell.parameters))
    if state is None:
        if batch_sizes is not None and is_exporting() and not torch.compiler.is_dynamo_compiling():
            refuse_packed_batch()
        rows, batch = found.num_layers * (1 + bidirectional), x.shape[1] if batch_sizes is None else int(batch_sizes[0])
        h0 = x.new_zeros(rows, batch, found.proj_size or found.hidden_size)
        h0, c0 = initial_states(cell, h0, x.new_zeros(rows, batch, len(cell.states) * found.hidden_size))
    else:
        h0, c0 = state
    kernel = _preferred(kernel)
    leaves = is_exporting()
    if leaves:
        whole = exported(found, x, h0, c0, flat, lengths, batch_sizes, dropout, kernel, cell, resets)
        if whole is not None:
            return whole
    elif not is_shipped(stated(cell)):
        # The operator finds its cell by name, so that it has those of the library alone.
        if not x.is_meta:
            advice = "Give `make_fx` sizes that are numbers, as tracing_mode='real' does."
            raise ArgumentError(sentence("cell", "one of gatewise.cells where sizes are symbols", repr(cell), advice))
        if batch_sizes is not None:
            advice = "Give the padded tensor with `lengths`."
            expectation = f"a padded batch on the meta device for the cell {cell.name}"
            raise ArgumentError(sentence("input", expectation, "a PackedSequence", advice))
        check_input(x, found, packed=False)
        return in_steps(found, x, h0, c0, flat, lengths, dropout, cell, resets)
    if x.device.type == "cpu" and not leaves and torch.compiler.is_dynamo_compiling():
        options = lengths, batch_sizes, bidirectional, dropout, kernel, memory, cell.name, resets
        return recurrent(x, h0, c0, flat, *options)
    # While `torch.export` traces, PyTorch hides oneDNN from the choice, and an exported graph may run elsewhere: what
    # the chosen kernel will keep is not known. Its backward pass repeats the forward pass. So it does with a PyTorch
    # that compiles no operator whose results have such sizes as what cuDNN and oneDNN keep.
    keeps = _KEEPS and not leaves and torch.is_grad_enabled()
    needs_grad = keeps and any(tensor.requires_grad for tensor in (x, h0, c0, *flat))
    options = lengths, batch_sizes, bidirectional, dropout, needs_grad, kernel, memory, cell.name, resets
    y, h_n, c_n, _ = lstm_forward(x, h0, c0, flat, *options)
    return y, h_n, c_n


def _preferred(kernel: str) -> str:
    return preference(kernel).kernel


# What `torch.compiler.assume_constant_result` does, without importing the compiler with the package: the preference is
# read while the graph is built.
_preferred._dynamo_marked_constant = True  # type: ignore[attr-defined]


# `List`, because PyTorch 2.6 infers no schema of an operator that returns `list`.
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
    resets: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, List[Tensor]]:  # noqa: UP006
    """Run the forward pass; the last result is the masks, and with `needs_grad` what the kernel kept."""
    options = lengths, batch_sizes, bidirectional, dropout, needs_grad, kernel, memory, cell, resets
    plan, inputs = _prepared(x, h0, c0, weights, *options)
    inputs = with_masks(plan.problem, inputs)
    result = plan.passes.forward(plan.problem, inputs)
    kept = [*inputs.masks, *(result.kept if needs_grad else ())]
    found = unaliased([*result[:3], *kept], given=[x, h0, c0, *weights, lengths, batch_sizes, resets])
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
    resets: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    stated = cell_named(cell)
    found = structure_while_traced(weights, bidirectional, len(stated.gates), len(stated.parameters))
    if batch_sizes is None:
        check_input(x, found, packed=False)
    output = (*x.shape[:-1], (1 + bidirectional) * (found.proj_size or found.hidden_size))
    kept: list[Tensor] = []
    if x.device.type != "meta":
        problem = described_while_traced(
            x, h0, found, lengths, batch_sizes, dropout, memory, stated, resets is not None
        )
        kept = [x.new_empty(shape, dtype=torch.bool) for shape, _ in mask_specs(problem, x.shape[:-1], h0.shape)]
        device = probed(x.device)
        chosen = kernel_named(chosen_for_graph(problem, device, kernel)) if needs_grad else None
        for spec in chosen.kept(problem, device) if chosen else ():
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
    resets: Tensor | None,
    keeps: bool,
) -> tuple[Tensor, Tensor, Tensor, List[Tensor]]:  # noqa: UP006
    """Run the backward pass of the kernel that `lstm_forward` chose; without `keeps`, it kept nothing but masks."""
    options = lengths, batch_sizes, bidirectional, dropout, True, kernel, memory, cell, resets
    plan, inputs = _prepared(x, h0, c0, weights, *options)
    drawn = len(mask_specs(plan.problem, x.shape[:-1], h0.shape))
    inputs = inputs._replace(masks=tuple(kept[:drawn]))
    # The initial states stand in the place of the final ones, which no backward pass reads.
    result = Result(y, h0, c0, tuple(kept[drawn:]))
    if not keeps:
        result = plan.passes.forward(plan.problem, inputs)
    found = plan.passes.backward(plan.problem, inputs, result, OutputGradients(dy, dh, dc), Needs())
    given = [dy, dh, dc, x, h0, c0, *weights, lengths, batch_sizes, y, *kept, resets]
    dx, dh0, dc0, *dweights = unaliased([found.x, found.h0, found.c0, *found.weights], given)
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
    x, h0, c0, weights, lengths, batch_sizes, bidirectional, dropout, needs_grad, kernel, memory, cell, resets = inputs
    y, _, _, kept = output
    ctx.set_materialize_grads(False)
    # On a CPU y is the caller's to change in place, as in `execution`.
    ctx.save_for_backward(x, h0, c0, lengths, batch_sizes, resets, y if y.is_cuda else y.clone(), *weights, *kept)
    ctx.count, ctx.options, ctx.keeps = len(weights), (bidirectional, dropout, kernel, memory, cell), needs_grad


def _backward(ctx: Any, dy: Tensor | None, dh: Tensor | None, dc: Tensor | None, dkept: object) -> tuple:
    x, h0, c0, lengths, batch_sizes, resets, y, *rest = ctx.saved_tensors
    weights, kept = rest[: ctx.count], rest[ctx.count :]
    gradients = lstm_backward(
        dy, dh, dc, x, h0, c0, weights, lengths, batch_sizes, y, kept, *ctx.options, resets, ctx.keeps
    )
    return (*gradients, *[None] * 9)


lstm_forward.register_autograd(_backward, setup_context=_setup_context)


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
    kernel: str,
    memory: str,
    cell: str,
    resets: Tensor | None,
) -> tuple[Plan, Inputs]:
    flat = tuple(weights)
    check_tensors(x, (h0, c0), flat)
    options = lengths, batch_sizes, bidirectional, dropout, needs_grad, kernel, memory, cell_named(cell)
    return prepare(x, (h0, c0), flat, *options, Particulars(traced=True), resets)
