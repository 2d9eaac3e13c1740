"""The explicit passes: forward to outputs and an opaque `Saved`, backward from it. All calls go through here."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gatewise.contract.errors import DeviceError, DtypeError, ShapeError, sentence
from gatewise.contract.problem import NORMAL, Problem
from gatewise.contract.saved import InputGradients, Inputs, Needs, OutputGradients, Result, Saved
from gatewise.functional.arguments import check_backward
from gatewise.functional.plan import probed
from gatewise.functional.products import without_products
from gatewise.functional.ragged import conversion
from gatewise.functional.set_up import set_up_permitted
from gatewise.functional.signature import NestedWeights, flattened, nested_like
from gatewise.functional.validate import prepare, with_masks
from gatewise.selection import AUTO, choose, kernel_named, preference

_NOTHING = contextlib.nullcontext()


class State(NamedTuple):
    """Hidden state [L*D, B, R] and cell state [L*D, B, H]."""

    h: Tensor
    c: Tensor


class Output(NamedTuple):
    """Output [T, B, D*R] ([N, D*R] when packed) and the final state."""

    y: Tensor
    state: State


class Gradients(NamedTuple):
    """Gradients of the input, the initial state and the weights, each in the form it was given in."""

    x: Tensor | None
    state: State | None
    weights: list


class RepeatedForwardWarning(UserWarning):
    """A backward pass had to repeat the forward pass."""


def forward(
    x: Tensor,
    state: tuple[Tensor, Tensor] | None,
    weights: NestedWeights | Sequence[Tensor],
    *,
    lengths: Tensor | Sequence[int] | None = None,
    batch_sizes: Tensor | None = None,
    bidirectional: bool = False,
    dropout: float = 0.0,
    kernel: str = AUTO,
    keep: bool = True,
    projected: bool = False,
    memory: str = NORMAL,
    memory_budget: float | None = None,
) -> tuple[Output, Saved]:
    """Run the forward pass outside autograd and return what the backward pass needs as one opaque value.

    Equivalent to `torch.nn.LSTM`'s forward:

        i, f, g, o = (W_ih x_t + b_ih + W_hh h_{t-1} + b_hh).chunk(4)
        c_t = sigmoid(f) c_{t-1} + sigmoid(i) tanh(g)
        h_t = sigmoid(o) tanh(c_t)                      (then W_hr h_t with projection)

    Args:
        x: Input [T, B, I], any strides; [N, I] with `batch_sizes`.
        state: Initial (h0 [L*D, B, R], c0 [L*D, B, H]); None for zeros.
        weights: As `torch.nn.LSTM.all_weights`, or all tensors in one flat sequence.
        lengths: Integers [B] in [0, T] on any device, or a list; None when every sequence has T steps. `y` is zero
            after the end of a sequence, the final state is the one at its end. Lengths on the GPU are read without
            waiting for it: one out of range turns its row into NaN instead of raising.
        batch_sizes: Sequences alive at each step [T], as `PackedSequence.batch_sizes`; None unless x is packed.
        bidirectional: Whether every layer has a reverse direction.
        dropout: Probability of dropping an output between layers, applied as given; 0 for none.
        kernel: A name from `gatewise.kernel_names()`, or "auto".
        keep: Whether a backward pass will follow; without, nothing is kept and `backward` repeats the forward.
        projected: Whether x holds the products of the input with the first layer's input weights already, as
            [T, B, D*4H] (gates `i f g o`, forward direction first), made in a way that no kernel has: from a sparse
            matrix, by looking rows up. Those weights are [4H, 0] then, and the gradient of x is that of the products.
        memory: "normal" keeps for the backward pass whatever makes it fastest. "lean" keeps the cell states and nothing
            that can be computed again from them, x and the outputs; see the page on memory.
        memory_budget: Bytes that the call may take beyond x and weights, by prediction; kernels that need more are
            passed over by "auto". None for no limit. A kernel that was named runs whatever it needs.

    Returns:
        The output and final state, and the `Saved` value to hand to `backward`.

    Raises:
        ShapeError: A rank, size or length does not fit.
        DtypeError: A dtype does not fit.
        DeviceError: Tensors are on devices that do not go together.
        ArgumentError: An argument is not of the kind it must be, or `dropout` or `memory` is not what it can be.
        KernelRefused: The kernel that was named cannot run this call; the message is the decision.
        OutOfMemoryPredicted: No kernel keeps to the budget; the message is the decision.

    Example:
        >>> import torch
        >>> from gatewise import functional
        >>> module = torch.nn.LSTM(4, 8)
        >>> (y, state), saved = functional.forward(torch.randn(5, 2, 4), None, module.all_weights)
        >>> gradients = functional.backward(saved, torch.ones_like(y))
    """
    with torch.no_grad():
        problem, inputs = prepare(
            without_products(x, flattened(weights)) if projected else x,
            state,
            flattened(weights),
            lengths=lengths,
            batch_sizes=batch_sizes,
            bidirectional=bidirectional,
            dropout=dropout,
            needs_grad=keep,
            memory=memory,
        )
        if projected:
            problem, inputs = problem.replace(projected=True), inputs._replace(x=x)
        saved = run(problem, with_masks(problem, _versioned(inputs)), kernel, memory_budget)
        y, h_n, c_n, _ = saved.result
        if y.is_inference():
            saved.result = saved.result._replace(y=y.clone())
    saved.form = weights
    return Output(y, State(h_n, c_n)), saved


def backward(
    saved: Saved,
    dy: Tensor | None,
    dstate: tuple[Tensor | None, Tensor | None] | None = None,
    *,
    kernel: str | None = None,
    needs: Needs = Needs(),  # noqa: B008  an immutable tuple
) -> Gradients:
    """Run the backward pass of the kernel that made `saved`, without repeating its forward pass.

    Args:
        saved: From `forward`.
        dy: Gradient of the output, shaped as it; None for zero.
        dstate: Gradients of the final (h, c); None, whole or in part, for zero.
        kernel: Another kernel to run the backward pass on; it repeats the forward pass first, with a warning. Default:
            the one that `use_kernel` names, otherwise the kernel that made `saved`.
        needs: Which gradients to compute.

    Returns:
        Gradients of x, of the initial state and of the weights in the nesting they were given in.

    Raises:
        ArgumentError: An argument is not of the kind it must be.
        ShapeError: A gradient is not shaped as its output.
        DtypeError: A gradient is not of its output's dtype.
        DeviceError: A gradient is not on its output's device.
        ModifiedInPlace: x, the initial state, a weight or the output was changed since the forward pass.
        KernelRefused: The kernel that was named cannot run this problem.
    """
    check_backward(saved, dy, dstate, needs)
    dh, dc = dstate if dstate is not None else (None, None)
    gradients = OutputGradients(dy, dh, dc)
    _check_gradients(gradients, saved.result)
    saved.check_unmodified()
    wanted = preference(AUTO if kernel is None else kernel).kernel
    with torch.no_grad():
        found = run_backward(saved, gradients, needs, saved.kernel if wanted == AUTO else wanted)
    state = None if found.h0 is None or found.c0 is None else State(found.h0, found.c0)
    return Gradients(found.x, state, nested_like(saved.form or saved.inputs.weights, found.weights))


def _versioned(inputs: Inputs) -> Inputs:
    # Tensors of the inference mode do not count their changes: nobody but us may have them.
    tensors = (inputs.x, inputs.h0, inputs.c0, *inputs.weights)
    if not any(map(Tensor.is_inference, tensors)):
        return inputs
    x, h0, c0, *weights = (tensor.clone() if tensor.is_inference() else tensor for tensor in tensors)
    return inputs._replace(x=x, h0=h0, c0=c0, weights=tuple(weights))


def run(problem: Problem, inputs: Inputs, kernel: str, memory_budget: float | None = None) -> Saved:
    """Choose a kernel for checked inputs and run its forward pass."""
    chosen = choose(problem, probed(inputs.x.device), kernel, memory_budget).chosen or ""
    return Saved(chosen, problem, inputs, forward_on(chosen, problem, inputs))


def record(kernel: str, problem: Problem, inputs: Inputs) -> Result | None:
    """Compute the outputs under autograd by a kernel that is PyTorch's own; None when an explicit pass is needed."""
    way = kernel_named(kernel)
    if inputs.lengths is not None or problem.layout not in way.layouts:
        return None
    with _around(problem, inputs.x):
        return way.recorded(problem, inputs)


def run_backward(saved: Saved, gradients: OutputGradients, needs: Needs, kernel: str) -> InputGradients:
    """Run a kernel's backward pass; when `saved` is not its own or is used up, repeat the forward pass there first."""
    problem, inputs = saved.problem, saved.inputs
    if kernel != saved.kernel or saved.spent or not problem.needs_grad:
        problem = problem.replace(needs_grad=True)
        choose(problem, probed(inputs.x.device), kernel)
        if kernel != saved.kernel:
            message = f"the forward pass ran on {saved.kernel!r}; backward on {kernel!r} repeats it there"
            warnings.warn(message, RepeatedForwardWarning, stacklevel=callers_level())
        result = forward_on(kernel, problem, inputs)
    else:
        result = saved.result
        saved.spent = kernel_named(kernel).single_use(problem)
    way = kernel_named(kernel)
    between = conversion(problem, inputs, way.layouts)
    with _around(problem, inputs.x):
        if between is None:
            return way.backward(problem, inputs, result, gradients, needs)
        found = way.backward(
            between.problem(problem),
            between.inputs(inputs),
            between.result_in(result),
            between.gradients_in(gradients),
            needs,
        )
    return between.gradients_out(found, gradients)


def callers_level() -> int:
    """Return the `stacklevel` at which a warning names the line outside of gatewise that made the call."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("gatewise."):
        level, frame = level + 1, frame.f_back
    return level


def forward_on(kernel: str, problem: Problem, inputs: Inputs) -> Result:
    """Run a kernel's forward pass in the layout it reads."""
    way = kernel_named(kernel)
    between = conversion(problem, inputs, way.layouts)
    with _around(problem, inputs.x):
        if between is None:
            return way.forward(problem, inputs)
        return between.result_out(way.forward(between.problem(problem), between.inputs(inputs)), inputs)


def _around(problem: Problem, x: Tensor) -> contextlib.AbstractContextManager:
    return _captured(x) if problem.captured else _dtypes_as_given(x)


@contextlib.contextmanager
def _captured(x: Tensor) -> Iterator[None]:
    # The calls before the capture may have run another kernel.
    with set_up_permitted(), _dtypes_as_given(x):
        yield


def _dtypes_as_given(x: Tensor) -> contextlib.AbstractContextManager:
    # The dtype was decided before; autocast must not convert what a kernel computes with once more.
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(x.device.type):
        return torch.autocast(x.device.type, enabled=False)
    return _NOTHING


def _check_gradients(gradients: OutputGradients, result: Result) -> None:
    for name, gradient, output in zip(("dy", "dh", "dc"), gradients, result[:3], strict=True):
        if gradient is None:
            continue
        if gradient.shape != output.shape:
            raise ShapeError(sentence(name, f"shaped {list(output.shape)} as its output", list(gradient.shape)))
        if gradient.dtype != output.dtype:
            raise DtypeError(sentence(name, f"{output.dtype} as its output", gradient.dtype))
        if gradient.device != output.device:
            raise DeviceError(sentence(name, f"on {output.device} as its output", f"one on {gradient.device}"))
