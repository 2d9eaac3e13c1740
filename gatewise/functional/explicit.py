"""The explicit passes: forward to outputs and an opaque `Saved`, and backward from it, outside autograd."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gatewise.cells import LSTM
from gatewise.contract.errors import DeviceError, DtypeError, ShapeError, callers_level, sentence
from gatewise.contract.problem import NORMAL
from gatewise.contract.saved import InputGradients, Inputs, Needs, OutputGradients, Result, Saved
from gatewise.functional.arguments import check_backward, check_tensors
from gatewise.functional.execution import prepare
from gatewise.functional.passes import Guarded, with_masks
from gatewise.functional.plan import Particulars, probed
from gatewise.functional.weights import NestedWeights, flattened, nested_like
from gatewise.selection import AUTO, choose, kernel_named, preference

_CELL = LSTM()


class State(NamedTuple):
    """The hidden state [L*D, B, R] and the cell state [L*D, B, H]."""

    h: Tensor
    c: Tensor


class Output(NamedTuple):
    """The output [T, B, D*R] ([N, D*R] when packed) and the final state."""

    y: Tensor
    state: State


class Gradients(NamedTuple):
    """The gradients of the input, of the initial state and of the weights, in the nesting of what was given."""

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
    resets: Tensor | None = None,
) -> tuple[Output, Saved]:
    """Run the forward pass outside autograd and return what the backward pass needs as one opaque value.

    Equivalent to `torch.nn.LSTM`'s forward:

        i, f, g, o = (W_ih x_t + b_ih + W_hh h_{t-1} + b_hh).chunk(4)
        c_t = sigmoid(f) c_{t-1} + sigmoid(i) tanh(g)
        h_t = sigmoid(o) tanh(c_t)                      (then W_hr h_t with projection)

    Args:
        x: The input [T, B, I] with any strides, or [N, I] with `batch_sizes`.
        state: The initial state (h0 [L*D, B, R], c0 [L*D, B, H]); None for zeros.
        weights: The weights nested as `torch.nn.LSTM.all_weights`, or all tensors in one flat sequence.
        lengths: The lengths of the sequences, integers [B] in [0, T] on any device, or a list; None when every sequence
            has T steps. `y` is zero after the end of a sequence, and the final state is the one at its end. Lengths on
            the GPU are never copied to the CPU: one out of range turns its row into NaN instead of raising.
        batch_sizes: The batch size at each step [T], as `PackedSequence.batch_sizes`; None unless x is packed.
        bidirectional: Whether every layer has a reverse direction.
        dropout: The probability of dropping an output between layers, applied as given; 0 for none.
        kernel: The name of a kernel from `gatewise.kernel_names()`, or "auto".
        keep: Whether a backward pass will follow. If False, nothing is kept and `backward` repeats the forward pass.
        projected: Whether x already holds the products of the input with the first layer's input weights,
            [T, B, D*4H] (gates `i f g o`, forward direction first), for products that no kernel computes, such as those
            of a sparse matrix. Those weights are then [4H, 0], and the gradient of x is that of the products.
        memory: "normal" keeps for the backward pass whatever makes it fastest. "lean" (gradient checkpointing within
            the layer) keeps the cell states and nothing that can be computed again from them, x and the outputs; see
            the page on memory.
        memory_budget: The bytes that the call may take beyond x and weights, by prediction; "auto" chooses among the
            kernels that need no more. None for no limit. A kernel that was named is not held to it.
        resets: The steps at which episodes begin [T, B], bool or integers, on the device of x; None for one episode in
            each sequence. Where it is set, the states before the step are zero; see the page on resets.

    Returns:
        The output and the final state, and the `Saved` value for `backward`.

    Raises:
        ShapeError: A rank, size or length does not fit.
        DtypeError: A dtype does not fit.
        DeviceError: Tensors are on devices that do not go together.
        ArgumentError: An argument is of a wrong type, or an option has a value that it cannot have.
        KernelRefused: The kernel that was named cannot run this call; the message is the decision.
        OutOfMemoryPredicted: No kernel keeps to the budget; the message is the decision.

    Examples:
        >>> import torch
        >>> from gatewise import functional
        >>> module = torch.nn.LSTM(4, 8)
        >>> (y, state), saved = functional.forward(torch.randn(5, 2, 4), None, module.all_weights)
        >>> gradients = functional.backward(saved, torch.ones_like(y))
    """
    flat = flattened(weights)
    check_tensors(x, state, flat)
    options = lengths, batch_sizes, bidirectional, dropout, keep, kernel, memory, _CELL
    particulars = Particulars(projected=projected, memory_budget=memory_budget)
    with torch.no_grad():
        plan, inputs = prepare(x, state, flat, *options, particulars, resets)
        inputs = with_masks(plan.problem, _with_version_counters(inputs))
        result = plan.passes.forward(plan.problem, inputs)
        y, h_n, c_n, _ = result
        saved = Saved(plan.kernel, plan.problem, inputs, result, form=weights)
        if y.is_inference():
            saved.result = result._replace(y=y.clone())
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
        saved: The value that `forward` returned.
        dy: The gradient of the output, of the same shape; None for zero.
        dstate: The gradients of the final (h, c); None for zero, for both or for either.
        kernel: The name of another kernel for the backward pass, which repeats the forward pass first, with a warning.
            Default: the kernel that `use_kernel` names, otherwise the kernel that made `saved`.
        needs: The gradients to compute.

    Returns:
        The gradients of x, of the initial state and of the weights, in the nesting in which they were given.

    Raises:
        ArgumentError: An argument is of a wrong type.
        ShapeError: The shape of a gradient is not that of its output.
        DtypeError: The dtype of a gradient is not that of its output.
        DeviceError: The device of a gradient is not that of its output.
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


def run_backward(saved: Saved, gradients: OutputGradients, needs: Needs, kernel: str) -> InputGradients:
    """Run a kernel's backward pass; repeat the forward pass first where `saved` is another kernel's or consumed."""
    problem, inputs, way = saved.problem, saved.inputs, kernel_named(kernel)
    if kernel != saved.kernel or saved.spent or not problem.needs_grad:
        problem = problem.replace(needs_grad=True)
        choose(problem, probed(inputs.x.device), kernel)
        if kernel != saved.kernel:
            message = f"the forward pass ran on {saved.kernel!r}; backward on {kernel!r} repeats it there"
            warnings.warn(message, RepeatedForwardWarning, stacklevel=callers_level())
        result = Guarded(way).forward(problem, inputs)
    else:
        result = saved.result
        saved.spent = way.single_use(problem)
    return Guarded(way).backward(problem, inputs, result, gradients, needs)


def _with_version_counters(inputs: Inputs) -> Inputs:
    # Tensors of the inference mode do not count changes in place; the copies are the call's own.
    tensors = (inputs.x, inputs.h0, inputs.c0, *inputs.weights)
    if not any(map(Tensor.is_inference, tensors)):
        return inputs
    x, h0, c0, *weights = (tensor.clone() if tensor.is_inference() else tensor for tensor in tensors)
    return inputs._replace(x=x, h0=h0, c0=c0, weights=tuple(weights))


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
