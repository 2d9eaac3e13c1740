"""The explicit passes: the only path that autograd, layers, tests and benchmarks take."""

from __future__ import annotations

import torch
from torch import Tensor

from gatewise.attention.call import Gradients, Inputs, Result, Saved
from gatewise.attention.choice import AUTO, choose, kernel_named
from gatewise.attention.problem import Problem, Score
from gatewise.attention.steps import Steps
from gatewise.attention.sums import zeros
from gatewise.contract.device import Device


def run_forward(
    problem: Problem,
    inputs: Inputs,
    *,
    need_weights: bool = False,
    kernel: str = AUTO,
    memory_budget: float | None = None,
) -> tuple[Result, Saved]:
    """Run the forward pass of a call on the kernel that is chosen for it.

    Args:
        problem: What `validate.prepare` made of the arguments; nothing is kept unless it needs a gradient.
        inputs: The same.
        need_weights: Whether the attention weights are returned.
        kernel: A name, or "auto".
        memory_budget: Bytes that "auto" may need, by prediction.
    """
    if 0 in (problem.steps, problem.source, problem.batch, problem.value_size):
        return _empty(problem, inputs, need_weights)
    chosen = choose(problem, Device.probe(inputs.keys.device), kernel, memory_budget)
    with torch.no_grad():
        result = chosen.forward(problem, _projected(inputs), need_weights=need_weights)
    return result, Saved(chosen.name, problem, inputs, result)


def run_backward(
    saved: Saved, dcontext: Tensor, dweights: Tensor | None = None, *, into: Gradients | None = None
) -> Gradients:
    """Return the gradients of all inputs; the forward pass is not repeated beyond what its kernel recomputes.

    Args:
        saved: What `run_forward` returned.
        dcontext: Gradient of the context [T, B, V].
        dweights: Gradient of the attention weights [T, B, S]; None for zero.
        into: Float32 (or wider) tensors that all gradients but the query's are added to, in place, so that a decoder
            that runs step by step makes no gradient of the keys for each step. None for new tensors.
    """
    problem, inputs = saved.problem, saved.inputs
    with torch.no_grad():
        if not saved.kernel:
            return _zeros(inputs) if into is None else into._replace(query=torch.zeros_like(inputs.query))
        kernel = kernel_named(saved.kernel)
        found = kernel.backward(problem, _projected(inputs), saved.result, dcontext, dweights, into)
        if problem.score is not Score.GENERAL:
            return found
        assert inputs.weight is not None
        assert found.query is not None
        flat = inputs.query.reshape(-1, inputs.query.shape[-1])
        dweight = flat.T @ found.query.reshape(-1, found.query.shape[-1])
        if into is not None and into.weight is not None:
            dweight = into.weight.add_(dweight)
        return found._replace(query=found.query @ inputs.weight.T, weight=dweight)


def new_sums(saved: Saved | Steps) -> Gradients:
    """Return zeros for `into`: float32, or float64 for a problem in float64; the query's is None.

    Args:
        saved: A call or a decoder's steps, for their inputs.
    """
    return zeros(saved.problem, saved.inputs)


def _projected(inputs: Inputs) -> Inputs:
    # The weight of the general score is one product around the kernels, which see a dot score.
    if inputs.weight is None:
        return inputs
    return inputs._replace(query=inputs.query @ inputs.weight, weight=None)


def _empty(problem: Problem, inputs: Inputs, need_weights: bool) -> tuple[Result, Saved]:
    # Without source, every sequence has length 0: the context is zero. Without steps or rows there is nothing.
    context = inputs.values.new_zeros(problem.steps, problem.batch, problem.value_size)
    weights = inputs.values.new_zeros(problem.steps, problem.batch, problem.source) if need_weights else None
    result = Result(context, weights)
    return result, Saved("", problem, inputs, result)


def _zeros(inputs: Inputs) -> Gradients:
    tensors = (*inputs[:3], *inputs[4:])
    return Gradients(*(None if tensor is None else torch.zeros_like(tensor) for tensor in tensors))
