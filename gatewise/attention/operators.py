"""The registered operators, which stand for a call of attention in the graphs of `torch.compile`.

A graph serves every number of steps, of source positions and of sequences from 2 up. The kernel must be the same while
the graph is traced and when it runs, so it is chosen for sizes that depend on neither. With a memory budget it is
chosen when the graph runs, and what it keeps for the backward pass is not known before: that pass then repeats the
forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, List  # noqa: UP035

import torch
from torch import Tensor

from gatewise.attention import explicit
from gatewise.attention.call import Inputs, Result, Saved
from gatewise.attention.choice import AUTO, choose
from gatewise.attention.problem import Problem, Score
from gatewise.attention.validate import as_tensor, prepare
from gatewise.contract.device import Device
from gatewise.contract.unaliased import unaliased

_TYPICAL_SIZE = 64


def traced(
    tensors: Sequence[Tensor | None],
    lengths: Tensor | Sequence[int] | None,
    score: str | Score,
    kernel: str,
    memory_budget: float | None,
    *,
    need_weights: bool,
    needs_grad: bool,
) -> tuple[Tensor, Tensor | None]:
    """Put a call into the graph as an operator, and return its context [T, B, V] and its weights [T, B, S] or None.

    Args:
        tensors: The query [T, B, Q], and the other tensors of `Inputs` but the lengths.
        lengths: The lengths [B] or None. Those of a tensor are read when the graph runs.
        score: The score.
        kernel: The name of a kernel, or "auto".
        memory_budget: The maximum predicted memory in bytes of a kernel that "auto" chooses; None for no limit.
        need_weights: Whether the weights are returned.
        needs_grad: Whether a backward pass may follow.
    """
    query, keys, values, *parameters = tensors
    if lengths is not None and not isinstance(lengths, Tensor):
        lengths = as_tensor(lengths, keys.shape[1])  # type: ignore[union-attr]
    named = score.value if isinstance(score, Score) else score
    context, weights, _ = attend_forward(
        query, keys, values, lengths, *parameters, named, kernel, memory_budget, need_weights, needs_grad
    )
    return context, weights if need_weights else None


# `List`, because PyTorch 2.6 infers no schema of an operator that returns `list`.
@torch.library.custom_op("gatewise::attend_forward", mutates_args=())
def attend_forward(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor | None,
    v: Tensor | None,
    weight: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    score: str,
    kernel: str,
    memory_budget: float | None,
    need_weights: bool,
    needs_grad: bool,
) -> tuple[Tensor, Tensor, List[Tensor]]:  # noqa: UP006
    """Run the forward pass; the last result is what the kernel keeps, the one before the weights or an empty tensor."""
    tensors = query, keys, values, v, weight, norm_weight, norm_bias
    problem, inputs = prepare(tensors, lengths, score, needs_grad)
    result, _ = _forward(problem, inputs, kernel, memory_budget, need_weights=need_weights)
    weights = keys.new_empty(0) if result.weights is None else result.weights
    kept = result.kept if memory_budget is None else ()
    found = [tensor.contiguous() for tensor in (result.context, weights, *kept)]
    context, weights, *kept = unaliased(found, [*tensors, lengths])
    return context, weights, kept


@attend_forward.register_fake
def _attend_forward_fake(*given: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    query, keys, values, lengths, *parameters, score, kernel, memory_budget, need_weights, needs_grad = given
    problem, _ = prepare((query, keys, values, *parameters), None, score, needs_grad)
    problem = problem.replace(ragged=lengths is not None)
    steps, source, batch = problem.steps, problem.source, problem.batch
    weights = keys.new_empty((steps, batch, source) if need_weights else (0,))
    kept: list[Tensor] = []
    if memory_budget is None and needs_grad and not problem.is_empty:
        device = Device.probe(keys.device)
        chosen = choose(_for_graph(problem), device, kernel)
        kept = [keys.new_empty(spec.shape, dtype=spec.dtype) for spec in chosen.kept(problem, device)]
    return keys.new_empty(steps, batch, problem.value_size), weights, kept


@torch.library.custom_op("gatewise::attend_backward", mutates_args=())
def attend_backward(
    dcontext: Tensor | None,
    dweights: Tensor | None,
    context: Tensor,
    kept: Sequence[Tensor],
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor | None,
    v: Tensor | None,
    weight: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    score: str,
    kernel: str,
    memory_budget: float | None,
) -> List[Tensor]:  # noqa: UP006
    """Run the backward pass of the kernel of the forward pass; return the gradients of all tensors that are given."""
    tensors = query, keys, values, v, weight, norm_weight, norm_bias
    problem, inputs = prepare(tensors, lengths, score, True)
    if memory_budget is None:
        name = "" if problem.is_empty else _chosen(problem, keys.device, kernel)
        saved = Saved(name, problem, inputs, Result(context, None, tuple(kept)))
    else:
        _, saved = _forward(problem, inputs, kernel, memory_budget, need_weights=False)
    dcontext = torch.zeros_like(context) if dcontext is None else dcontext
    gradients = explicit.run_backward(saved, dcontext, dweights)
    found = [gradient.contiguous() for gradient in gradients if gradient is not None]
    return unaliased(found, [dcontext, dweights, context, *kept, *tensors, lengths])


@attend_backward.register_fake
def _attend_backward_fake(
    dcontext: Tensor | None, dweights: Tensor | None, context: Tensor, kept: Sequence[Tensor], *given: Any
) -> list[Tensor]:
    inputs = Inputs(*given[: len(Inputs._fields)])
    return [tensor.new_empty(tensor.shape) for tensor in inputs._replace(lengths=None) if tensor is not None]


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    *tensors, score, kernel, memory_budget, _, _ = inputs
    context, _, kept = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(context, *tensors, *kept)
    ctx.options = score, kernel, memory_budget


def _backward(ctx: Any, dcontext: Tensor | None, dweights: Tensor | None, dkept: object) -> tuple:
    context, *rest = ctx.saved_tensors
    tensors, kept = rest[: len(Inputs._fields)], rest[len(Inputs._fields) :]
    gradients = iter(attend_backward(dcontext, dweights, context, kept, *tensors, *ctx.options))
    differentiable = Inputs(*tensors)._replace(lengths=None)
    return (*[None if tensor is None else next(gradients) for tensor in differentiable], *[None] * 5)


attend_forward.register_autograd(_backward, setup_context=_setup_context)


def _forward(
    problem: Problem, inputs: Inputs, kernel: str, memory_budget: float | None, *, need_weights: bool
) -> tuple[Result, Saved]:
    if memory_budget is None and not problem.is_empty:
        kernel = _chosen(problem, inputs.keys.device, kernel)
    return explicit.run_forward(problem, inputs, need_weights=need_weights, kernel=kernel, memory_budget=memory_budget)


def _chosen(problem: Problem, device: torch.device, kernel: str) -> str:
    return choose(_for_graph(problem), Device.probe(device), kernel).name if kernel == AUTO else kernel


def _for_graph(problem: Problem) -> Problem:
    """Return the problem for which the kernel of a graph is chosen, with sizes that do not depend on the call."""

    def typical(size: int) -> int:
        return size if isinstance(size, int) and size < 2 else _TYPICAL_SIZE

    sizes = {name: typical(getattr(problem, name)) for name in ("steps", "source", "batch")}
    # The others may be symbols, too, but are the same in all calls of a graph: they are sizes of weights.
    sizes |= {name: int(getattr(problem, name)) for name in ("hidden_size", "value_size", "query_size")}
    return problem.replace(**sizes)
