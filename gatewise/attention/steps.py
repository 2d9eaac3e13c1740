"""Attention for a decoder that runs step by step: forward and query gradient per step, source gradients at the end.

The gradients of keys, values and parameters are sums over steps of terms that depend on the queries and on the
gradients of the contexts, all of which are known after the backward loop. They are computed then, in one call, and no
step computes a gradient of the source. A kernel that recomputes each step's feature map anyway can accumulate its
contribution during the loop: see `new_gathering`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from gatewise.attention.call import Gradients, Inputs, Needs, Result
from gatewise.attention.choice import AUTO, choose
from gatewise.attention.kernel import Gathering, Kernel
from gatewise.attention.problem import Problem, Score
from gatewise.attention.sums import zeros
from gatewise.attention.validate import check_like, prepare
from gatewise.contract.device import Device
from gatewise.contract.errors import ArgumentError, ShapeError, sentence


@dataclasses.dataclass(frozen=True, slots=True)
class Steps:
    """The source of a decoder that runs step by step, and the tensors that its steps write into.

    Attributes:
        kernel: The kernel that runs every step.
        problem: The description of all steps together.
        inputs: The source and the parameters, shared with the caller. The query is that of all steps [T, B, H]; the
            caller writes the query of a step before `attend_step`.
        result: The contexts [T, B, V], and the tensors that the kernel keeps of each step.
    """

    kernel: Kernel
    problem: Problem
    inputs: Inputs
    result: Result

    @property
    def queries(self) -> Tensor:
        """The queries [T, B, H]; the caller writes that of step t before `attend_step(steps, t)`."""
        return self.inputs.query

    @property
    def contexts(self) -> Tensor:
        """The contexts [T, B, V]; `attend_step(steps, t)` writes that of step t."""
        return self.result.context

    def at(self, step: int) -> tuple[Problem, Inputs, Result]:
        """Return problem, inputs and result of one step, for a kernel."""
        here = slice(step, step + 1)
        result = Result(self.result.context[here], None, tuple(kept[here] for kept in self.result.kept))
        return self.problem.replace(steps=1), self.inputs._replace(query=self.inputs.query[here]), result


def new_steps(
    steps: int,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor | Sequence[int] | None = None,
    *,
    score: str | Score = "additive",
    v: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    queries: Tensor | None = None,
    contexts: Tensor | None = None,
    needs_grad: bool = True,
    kernel: str = AUTO,
    memory_budget: float | None = None,
) -> Steps:
    """Choose a kernel and allocate the tensors of a decoder's loop, so that the loop itself allocates nothing large.

    Args: The same as for `gatewise.attention.attend`, and
        steps: The number of decoder steps, T.
        score: "additive" or "dot". For the general score, multiply the keys by its weight once and use "dot".
        queries: The tensor into which the caller writes each step's query [T, B, H]; None allocates it.
        contexts: The tensor into which each step's context is written [T, B, V]. It may be a part of a wider tensor, or
            use the same memory for all steps. None allocates it.
        needs_grad: Whether gradients are computed later.

    Returns:
        The steps, for `attend_step`, `query_gradient_step` and `source_gradients`.

    Raises:
        ArgumentError: The score is "general", or a parameter of the score is missing or belongs to another score.
        KernelRefused: The named kernel cannot run this call, as for `attend`.
        OutOfMemoryPredicted: No kernel fits into the memory budget, as for `attend`.
        ShapeError: A rank, size or length does not fit, as for `attend`.
        DtypeError: The dtypes differ or are not floating point, as for `attend`.
        DeviceError: The tensors are on different devices, as for `attend`.
    """
    if score in (Score.GENERAL, Score.GENERAL.value):
        advice = "Multiply the keys by the weight once, and use 'dot'."
        raise ArgumentError(sentence("score", "'additive' or 'dot' step by step", "'general'", advice))
    if not isinstance(steps, int) or steps < 1:
        raise ArgumentError(sentence("steps", "a positive integer", repr(steps)))
    if queries is None:
        queries = keys.new_empty(steps, *keys.shape[1:])
    tensors = queries, keys, values, v, None, norm_weight, norm_bias
    problem, inputs = prepare(tensors, lengths, score, needs_grad)
    if problem.steps != steps:
        raise ShapeError(sentence("queries", f"of T = {steps} steps", problem.steps))
    if problem.is_empty:  # not of steps, which are at least one
        raise ShapeError(sentence("keys", "of at least one position and one sequence", list(keys.shape)))
    shape = (steps, problem.batch, problem.value_size)
    contexts = values.new_empty(shape) if contexts is None else contexts
    check_like("contexts", contexts, shape, values)
    _check_rows("contexts", contexts)
    device = Device.probe(keys.device)
    chosen = choose(problem, device, kernel, memory_budget)
    kept = tuple(keys.new_empty(spec.shape, dtype=spec.dtype) for spec in chosen.kept(problem, device))
    return Steps(chosen, problem, inputs, Result(contexts, None, kept))


def attend_step(steps: Steps, step: int) -> Tensor:
    """Return the context of one step [B, V], written into `steps.contexts[step]`, from `steps.queries[step]`.

    Args:
        steps: The steps from `new_steps`.
        step: The number of the step, t, from 0 to T - 1.

    Raises:
        ShapeError: There is no such step.
    """
    problem, inputs, result = steps.at(_step(steps, step))
    with torch.no_grad():
        return steps.kernel.forward(problem, inputs, out=result).context[0]


def new_gathering(steps: Steps) -> Gradients | None:
    """Return accumulators for the source gradients, for kernels that recompute the feature map of each step.

    Such a kernel recomputes the feature map of a step for the gradient of its query. With these accumulators,
    `query_gradient_step` also adds the step's contribution to the source gradients, and `source_gradients` need not
    recompute all maps once more. They are for a loop in which the backward pass runs through each step exactly once,
    with the same gradients of contexts that `source_gradients` is given.

    Args:
        steps: The steps from `new_steps`.

    Returns:
        The accumulators to pass to both functions; None if the kernel does not recompute a feature map.
    """
    kernel, problem = steps.kernel, steps.problem
    if not isinstance(kernel, Gathering) or not kernel.gathers(problem) or not problem.needs_grad:
        return None
    return zeros(problem, steps.inputs)._replace(values=None)


def query_gradient_step(
    steps: Steps, step: int, dcontext: Tensor, out: Tensor | None = None, *, gathered: Gradients | None = None
) -> Tensor:
    """Return the gradient of one step's query [B, H], and accumulate source gradients if `gathered` is given.

    Args:
        steps: The steps from `new_steps`; query and context of the step must be as `attend_step` left them.
        step: The number of the step, t.
        dcontext: The gradient of the step's context [B, V].
        out: The tensor for the result [B, H]; None allocates it.
        gathered: The accumulators from `new_gathering`; None to accumulate nothing.

    Raises:
        ArgumentError: The steps were created with needs_grad=False, or rows of `out` are not contiguous.
        ShapeError: There is no such step, or a shape does not fit.
        DtypeError: A dtype differs from the keys' dtype.
        DeviceError: A tensor is not on the keys' device.
    """
    _check_needs_grad(steps)
    problem, inputs, result = steps.at(_step(steps, step))
    shape = (problem.batch, problem.hidden_size)
    check_like("dcontext", dcontext, (problem.batch, problem.value_size), inputs.values)
    out = inputs.keys.new_empty(shape) if out is None else out
    check_like("out", out, shape, inputs.keys)
    _check_rows("out", out)
    with torch.no_grad():
        if gathered is not None:
            assert isinstance(steps.kernel, Gathering)
            steps.kernel.gather_step(problem, inputs, result, dcontext[None], gathered, out[None])
            return out
        steps.kernel.backward(
            problem, inputs, result, dcontext[None], None, needs=Needs(query=True, source=False), dquery=out[None]
        )
    return out


def source_gradients(
    steps: Steps, dcontexts: Tensor, *, into: Gradients | None = None, gathered: Gradients | None = None
) -> Gradients:
    """Return the gradients of the inputs that all steps share: keys, values, v and layer norm.

    Args:
        steps: The steps from `new_steps`, after all of them have run.
        dcontexts: The gradients of all contexts [T, B, V].
        into: Float32 (or wider) tensors to which the gradients are added in place; None allocates new tensors.
        gathered: The accumulators from `new_gathering`, after `query_gradient_step` was called with them for all steps.

    Raises:
        ArgumentError: The steps were created with needs_grad=False.
        ShapeError: `dcontexts` does not have the shape of the contexts.
        DtypeError: Its dtype differs from the keys' dtype.
        DeviceError: It is not on the keys' device.
    """
    _check_needs_grad(steps)
    check_like("dcontexts", dcontexts, tuple(steps.contexts.shape), steps.inputs.values)
    with torch.no_grad():
        if gathered is not None:
            assert isinstance(steps.kernel, Gathering)
            return steps.kernel.gather_source(steps.problem, steps.inputs, steps.result, dcontexts, gathered, into)
        return steps.kernel.backward(
            steps.problem, steps.inputs, steps.result, dcontexts, None, into, needs=Needs(query=False, source=True)
        )


def _step(steps: Steps, step: int) -> int:
    if not isinstance(step, int) or not 0 <= step < steps.problem.steps:
        raise ShapeError(sentence("step", f"between 0 and {steps.problem.steps - 1}", repr(step)))
    return step


def _check_needs_grad(steps: Steps) -> None:
    if not steps.problem.needs_grad:
        raise ArgumentError(sentence("steps", "created with needs_grad=True", "needs_grad=False"))


def _check_rows(name: str, tensor: Tensor) -> None:
    if tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
        raise ArgumentError(
            sentence(name, "contiguous in its last dimension", f"stride {tensor.stride(-1)}", "Give such a tensor.")
        )
