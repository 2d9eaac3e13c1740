"""The explicit forward and backward passes, which autograd, layers, tests and benchmarks all use."""

from __future__ import annotations

import torch
from torch import Tensor

from gatewise.attention import plain
from gatewise.attention.call import Gradients, Inputs, Result, Saved
from gatewise.attention.choice import AUTO, choose, kernel_named
from gatewise.attention.problem import Problem, Score
from gatewise.attention.reference import reference
from gatewise.attention.steps import Steps
from gatewise.attention.sums import zeros
from gatewise.attention.validate import check_like
from gatewise.contract.budget import check_memory_budget
from gatewise.contract.device import Device
from gatewise.contract.errors import ArgumentError, KernelRefused, sentence
from gatewise.contract.second_derivatives import differentiable_gradients


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
        problem: The description of the call from `validate.prepare`; unless it needs a gradient, no state is kept.
        inputs: The inputs from `validate.prepare`.
        need_weights: Whether to return the attention weights.
        kernel: The name of a kernel, or "auto".
        memory_budget: The maximum predicted memory in bytes for "auto".
    """
    if problem.is_empty:
        return _empty(problem, inputs, need_weights)
    chosen = choose(problem, Device.probe(inputs.keys.device), kernel, memory_budget)
    with torch.no_grad():
        result = chosen.forward(problem, _projected(inputs), need_weights=need_weights)
    return result, Saved(chosen.name, problem, inputs, result)


def run_operators(
    problem: Problem, inputs: Inputs, kernel: str = AUTO, memory_budget: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return the context and the weights by the operators of the kernel `reference`, which autograd records.

    Args:
        problem: The description of the call from `validate.prepare`.
        inputs: The inputs from `validate.prepare`.
        kernel: The name of a kernel, or "auto".
        memory_budget: The budget of the call, which is checked, and does not apply.

    Raises:
        KernelRefused: Another kernel is named.
    """
    check_memory_budget(memory_budget)
    if kernel != AUTO and kernel_named(kernel) is not reference:
        expectation = (
            f"'{AUTO}' or '{reference.name}' inside of torch.func's transforms, in forward mode and for meta tensors"
        )
        raise KernelRefused(sentence("kernel", expectation, repr(kernel)))
    return plain.differentiable(problem, _projected(inputs))


def run_backward(
    saved: Saved, dcontext: Tensor, dweights: Tensor | None = None, *, into: Gradients | None = None
) -> Gradients:
    """Return the gradients of all inputs; only kernels that recompute repeat a part of the forward pass.

    Args:
        saved: The state from `run_forward`.
        dcontext: The gradient of the context [T, B, V].
        dweights: The gradient of the attention weights [T, B, S]; None for zero.
        into: Float32 (or wider) tensors to which all gradients except the query's are added in place, so that a decoder
            that runs step by step allocates no gradient of the keys for each step. None allocates new tensors.

    Raises:
        ArgumentError: The forward pass ran with needs_grad=False.
        ModifiedInPlace: An input or the context was modified in place since the forward pass.
        ShapeError: A gradient does not have the shape of its output.
        DtypeError: Its dtype differs from the keys' dtype.
        DeviceError: It is not on the keys' device.
    """
    problem, inputs = saved.problem, saved.inputs
    if not problem.needs_grad:
        expectation = "the state of a forward pass with needs_grad=True"
        raise ArgumentError(sentence("saved", expectation, "one with needs_grad=False"))
    saved.check_unmodified()
    check_like("dcontext", dcontext, tuple(saved.result.context.shape), inputs.values)
    if dweights is not None:
        check_like("dweights", dweights, (problem.steps, problem.batch, problem.source), inputs.values)
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


def run_differentiable_backward(
    problem: Problem, inputs: Inputs, above: tuple[Tensor | None, Tensor | None], wanted: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the inputs, differentiable: no kernel's backward pass is, but the plain operators are.

    Args:
        problem: The description of the call.
        inputs: The inputs of the call.
        above: The gradients of the context and of the attention weights; None for zero.
        wanted: Whether the gradient of each input but the lengths is needed.
    """
    views = [tensor if tensor is None or tensor is inputs.lengths else tensor.view_as(tensor) for tensor in inputs]
    inputs = Inputs(*views)  # type: ignore[arg-type] - None only where it was None before
    with torch.autocast(inputs.keys.device.type, enabled=False):
        outputs = plain.differentiable(problem, _projected(inputs))
        return tuple(differentiable_gradients(outputs, above, (*inputs[:3], *inputs[4:]), wanted))


def new_sums(saved: Saved | Steps) -> Gradients:
    """Return zeros for the argument `into`: float32, or float64 for a problem in float64; the query's is None.

    Args:
        saved: The state of a call, or the steps of a decoder, whose inputs determine the shapes.
    """
    return zeros(saved.problem, saved.inputs)


def _projected(inputs: Inputs) -> Inputs:
    # The weight of the general score is applied by a separate matrix product; the kernels then see a dot score.
    if inputs.weight is None:
        return inputs
    return inputs._replace(query=inputs.query @ inputs.weight, weight=None)


def _empty(problem: Problem, inputs: Inputs, need_weights: bool) -> tuple[Result, Saved]:
    # If S is 0, every sequence has length 0 and the context is zero. If T or B is 0, all results are empty.
    context = inputs.values.new_zeros(problem.steps, problem.batch, problem.value_size)
    weights = inputs.values.new_zeros(problem.steps, problem.batch, problem.source) if need_weights else None
    result = Result(context, weights)
    return result, Saved("", problem, inputs, result)


def _zeros(inputs: Inputs) -> Gradients:
    tensors = (*inputs[:3], *inputs[4:])
    return Gradients(*(None if tensor is None else torch.zeros_like(tensor) for tensor in tensors))
