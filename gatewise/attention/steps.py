"""Attention of a decoder that runs step by step: each step a forward and a query's gradient, the source's once.

What the gradients of keys, values and parameters are sums of, over steps, is known after the loop of the backward pass:
all queries and all gradients of contexts. They are computed then, in one call, and no step makes a gradient of the
source. A kernel that makes a step's map again anyway can gather its share of them meanwhile: `new_gathering`.
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
from gatewise.attention.validate import prepare
from gatewise.contract.device import Device
from gatewise.contract.errors import ArgumentError, DeviceError, DtypeError, ShapeError, sentence


@dataclasses.dataclass(frozen=True, slots=True)
class Steps:
    """The source of a decoder that runs step by step, and the tensors that its steps write into.

    Attributes:
        kernel: That runs every step.
        problem: All steps together.
        inputs: Source and parameters, shared with the caller; the query is that of all steps [T, B, H], which the
            caller writes, a step's before `attend_step`.
        result: Contexts [T, B, V], and what the kernel keeps of each step.
    """

    kernel: Kernel
    problem: Problem
    inputs: Inputs
    result: Result

    @property
    def queries(self) -> Tensor:
        """[T, B, H]; step t's is written by the caller before `attend_step(steps, t)`."""
        return self.inputs.query

    @property
    def contexts(self) -> Tensor:
        """[T, B, V]; step t's is written by `attend_step(steps, t)`."""
        return self.result.context

    def at(self, step: int) -> tuple[Problem, Inputs, Result]:
        """Return one step's share of everything, for a kernel."""
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
    """Choose a kernel and allocate what a decoder's loop writes into; the loop itself then allocates nothing large.

    Args: as in `gatewise.attention.attend`, and
        steps: T.
        score: "additive" or "dot". For the general score, multiply the keys by its weight once and use "dot".
        queries: Where the caller is going to write each step's query [T, B, H]; None makes it.
        contexts: Where each step's context is written [T, B, V]; may be a part of a wider tensor, or the same place for
            all steps. None makes it.
        needs_grad: Whether gradients are asked for later.

    Returns:
        What `attend_step`, `query_gradient_step` and `source_gradients` take.

    Raises:
        ArgumentError: The score is "general", or as `attend` does.
        KernelRefused: As `attend` does.
        OutOfMemoryPredicted: As `attend` does.
        ShapeError: As `attend` does.
        DtypeError: As `attend` does.
        DeviceError: As `attend` does.
    """
    if score in (Score.GENERAL, Score.GENERAL.value):
        advice = "Multiply the keys by the weight once, and use 'dot'."
        raise ArgumentError(sentence("score", "'additive' or 'dot' step by step", "'general'", advice))
    if not isinstance(steps, int) or steps < 1:
        raise ArgumentError(sentence("steps", "a positive integer", repr(steps)))
    if queries is None:
        queries = keys.new_empty(steps, *keys.shape[1:])
    problem, inputs = prepare(
        queries,
        keys,
        values,
        lengths,
        score=score,
        v=v,
        weight=None,
        norm_weight=norm_weight,
        norm_bias=norm_bias,
        needs_grad=needs_grad,
    )
    if problem.steps != steps:
        raise ShapeError(sentence("queries", f"of T = {steps} steps", problem.steps))
    if 0 in (problem.source, problem.batch, problem.value_size):
        raise ShapeError(sentence("keys", "of one position and one sequence at least", list(keys.shape)))
    shape = (steps, problem.batch, problem.value_size)
    contexts = values.new_empty(shape) if contexts is None else contexts
    _check("contexts", contexts, shape, values)
    _check_rows("contexts", contexts)
    device = Device.probe(keys.device)
    chosen = choose(problem, device, kernel, memory_budget)
    kept = tuple(keys.new_empty(spec.shape, dtype=spec.dtype) for spec in chosen.kept(problem, device))
    return Steps(chosen, problem, inputs, Result(contexts, None, kept))


def attend_step(steps: Steps, step: int) -> Tensor:
    """Return the context of one step [B, V], written into `steps.contexts[step]`, from `steps.queries[step]`.

    Args:
        steps: What `new_steps` returned.
        step: t, from 0 to T - 1.

    Raises:
        ShapeError: There is no such step.
    """
    problem, inputs, result = steps.at(_step(steps, step))
    with torch.no_grad():
        return steps.kernel.forward(problem, inputs, out=result).context[0]


def new_gathering(steps: Steps) -> Gradients | None:
    """Return what the backward steps of a kernel that makes their maps again gather for the source's gradients.

    Such a kernel makes the map of a step for its query's gradient. With this, `query_gradient_step` adds up what the
    source's gradients need of it, and `source_gradients` does not make all maps once more. It is for a loop in which
    each step goes back exactly once, from the gradients of contexts that `source_gradients` is given.

    Args:
        steps: From `new_steps`.

    Returns:
        What both are given; None where the kernel gathers nothing.
    """
    kernel, problem = steps.kernel, steps.problem
    if not isinstance(kernel, Gathering) or not kernel.gathers(problem) or not problem.needs_grad:
        return None
    return zeros(problem, steps.inputs)._replace(values=None)


def query_gradient_step(
    steps: Steps, step: int, dcontext: Tensor, out: Tensor | None = None, *, gathered: Gradients | None = None
) -> Tensor:
    """Return the gradient of one step's query [B, H]; nothing else is computed, but for what is gathered.

    Args:
        steps: What `new_steps` returned; its query and context of the step are as `attend_step` left them.
        step: t.
        dcontext: Gradient of the context of the step [B, V].
        out: Where it is written [B, H]; None makes it.
        gathered: What `new_gathering` returned; None to gather nothing.

    Raises:
        ArgumentError: The steps were made without gradients, or rows of `out` are not contiguous.
        ShapeError: There is no such step, or a shape does not fit.
        DtypeError: A dtype is not the keys'.
        DeviceError: A tensor is on another device.
    """
    _check_needs_grad(steps)
    problem, inputs, result = steps.at(_step(steps, step))
    shape = (problem.batch, problem.hidden_size)
    _check("dcontext", dcontext, (problem.batch, problem.value_size), inputs.values)
    out = inputs.keys.new_empty(shape) if out is None else out
    _check("out", out, shape, inputs.keys)
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
    """Return the gradients of everything that all steps share: keys, values, v and layer norm.

    Args:
        steps: What `new_steps` returned, after all its steps.
        dcontexts: Gradients of all contexts [T, B, V].
        into: Float32 (or wider) tensors that the gradients are added to, in place; None for new ones.
        gathered: What `new_gathering` returned, after `query_gradient_step` was given it at all steps.

    Raises:
        ArgumentError: The steps were made without gradients.
        ShapeError: `dcontexts` is not shaped as the contexts.
        DtypeError: Its dtype is not the keys'.
        DeviceError: It is on another device.
    """
    _check_needs_grad(steps)
    _check("dcontexts", dcontexts, tuple(steps.contexts.shape), steps.inputs.values)
    with torch.no_grad():
        if gathered is not None:
            assert isinstance(steps.kernel, Gathering)
            return steps.kernel.gather_source(steps.problem, steps.inputs, steps.result, dcontexts, gathered, into)
        return steps.kernel.backward(
            steps.problem, steps.inputs, steps.result, dcontexts, None, into, needs=Needs(query=False, source=True)
        )


def _step(steps: Steps, step: int) -> int:
    if not 0 <= step < steps.problem.steps:
        raise ShapeError(sentence("step", f"between 0 and {steps.problem.steps - 1}", step))
    return step


def _check_needs_grad(steps: Steps) -> None:
    if not steps.problem.needs_grad:
        raise ArgumentError(sentence("steps", "made with needs_grad=True", "needs_grad=False"))


def _check(name: str, tensor: Tensor, shape: tuple[int, ...], like: Tensor) -> None:
    if tuple(tensor.shape) != shape:
        raise ShapeError(sentence(name, f"of shape {list(shape)}", list(tensor.shape)))
    if tensor.dtype != like.dtype:
        raise DtypeError(sentence(name, f"of the keys' dtype {like.dtype}", tensor.dtype, "Convert one of them."))
    if tensor.device != like.device:
        raise DeviceError(sentence(name, f"on the keys' device '{like.device}'", f"'{tensor.device}'"))


def _check_rows(name: str, tensor: Tensor) -> None:
    if tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
        raise ArgumentError(sentence(name, "of a last stride of 1", tensor.stride(-1), "Its rows are written."))
