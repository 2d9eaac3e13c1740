"""The differentiable calls: `lstm`, and `recurrent` for any shipped cell.

The tensors of a call are those of the caller, converted by autocast, or the symbols of a graph that `torch.compile`
traces. From here on `execution` computes all calls; those of a graph when it runs.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from gatewise.cells import Cell
from gatewise.contract.data_parallel import multiprocessors_left
from gatewise.contract.errors import ArgumentError, KernelRefused, ShapeError, sentence
from gatewise.contract.problem import NORMAL
from gatewise.contract.pytorch import cell_of_mode
from gatewise.contract.steps import LayerSteps
from gatewise.contract.tracing import is_compiling
from gatewise.contract.transforms import is_transformed
from gatewise.functional.arguments import check_options, check_reverse, check_tensors
from gatewise.functional.execution import execute, prepare
from gatewise.functional.explicit import Output, State
from gatewise.functional.layer_by_layer import layer_by_layer, separate_layers
from gatewise.functional.operators import traced
from gatewise.functional.passes import with_masks
from gatewise.functional.plan import Particulars
from gatewise.functional.resets import reset_before_one_step
from gatewise.functional.reversal import Reversal
from gatewise.functional.torchscript import recorded
from gatewise.functional.weights import NestedWeights, flattened
from gatewise.selection import AUTO, REFERENCE, differentiable_steps


def lstm(
    x: Tensor,
    state: tuple[Tensor, Tensor] | None,
    weights: NestedWeights | Sequence[Tensor],
    *,
    lengths: Tensor | Sequence[int] | None = None,
    batch_sizes: Tensor | None = None,
    bidirectional: bool = False,
    dropout: float = 0.0,
    kernel: str = AUTO,
    memory: str = NORMAL,
    resets: Tensor | None = None,
    reverse: bool = False,
) -> Output:
    """Compute an LSTM, differentiable with respect to x, state and weights, any number of times.

    The equations and arguments are those of `gatewise.functional.forward`. Under autocast, x, state and weights are
    converted to autocast's dtype, which is the dtype of the result (float64 stays). Under `torch.compile` the call is
    one operator of the graph, and the kernel is chosen when it is compiled. Under `torch.export` and
    `torch.onnx.export` it consists of operators that are not gatewise's, unless a kernel is named. For meta tensors
    the results are meta tensors: shapes without values.

    Args:
        x: The input [T, B, I] with any strides, or [N, I] with `batch_sizes`.
        state: The initial state (h0 [L*D, B, R], c0 [L*D, B, H]); None for zeros.
        weights: The weights nested as `torch.nn.LSTM.all_weights`, or all tensors in one flat sequence.
        lengths: The lengths of the sequences, integers [B] in [0, T]; None when every sequence has T steps.
        batch_sizes: The batch size at each step [T] of a packed batch, int64 on the CPU; None unless x is packed.
        bidirectional: Whether every layer has a reverse direction.
        dropout: The probability of dropping an output between layers, applied as given; 0 for none.
        kernel: The name of a kernel from `gatewise.kernel_names()`, or "auto".
        memory: "normal" keeps for the backward pass whatever makes it fastest. "lean" (gradient checkpointing within
            the layer) keeps the cell states and nothing that can be computed again from them, x and the outputs; see
            the page on memory.
        resets: The steps at which episodes begin [T, B], bool or integers, on the device of x; None for one episode in
            each sequence. Where it is set, the states before the step are zero; see the page on resets.
        reverse: Whether the only direction of every layer reads each sequence from its last step to its first; y is in
            the order of x, and the final state is that after the first step.

    Returns:
        `Output(y, State(h, c))`: y [T, B, D*R] ([N, D*R] when packed), and the final state, shaped as the initial one.

    Raises:
        ShapeError: A rank, size or length does not fit.
        DtypeError: A dtype does not fit.
        DeviceError: Tensors are on devices that do not go together.
        ArgumentError: An argument is of a wrong type, or an option has a value that it cannot have.
        KernelRefused: The kernel that was named cannot run this call; the message is the decision.

    Examples:
        >>> import torch
        >>> from gatewise import functional
        >>> module = torch.nn.LSTM(4, 8)
        >>> y, (h_n, c_n) = functional.lstm(torch.randn(5, 2, 4), None, module.all_weights)
    """
    flat = flattened(weights)
    check_reverse(reverse, bidirectional)
    if not is_compiling():
        check_tensors(x, state, flat)
    y, h_n, c_n = recurrent(
        x,
        state,
        flat,
        lengths=lengths,
        batch_sizes=batch_sizes,
        bidirectional=bidirectional,
        dropout=dropout,
        kernel=kernel,
        memory=memory,
        resets=resets,
        reverse=reverse,
    )
    return Output(y, State(h_n, c_n))


def recurrent(
    x: Tensor,
    state: tuple[Tensor, ...] | None,
    flat: tuple[Tensor, ...],
    *,
    lengths: Tensor | Sequence[int] | None,
    batch_sizes: Tensor | None,
    bidirectional: bool,
    dropout: float,
    kernel: str,
    memory: str,
    cell: Cell | str = "LSTM",
    resets: Tensor | None = None,
    reverse: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a recurrent stack of any shipped cell, as `lstm` does; x, state and weights must be tensors.

    Args:
        x: The input [T, B, I] with any strides, or [N, I] with `batch_sizes`.
        state: The initial hidden state [L*D, B, R] and the S other states side by side [L*D, B, S*H]; None for zeros.
            The hidden state alone is enough for a cell without others.
        flat: The weights in torch's flat order.
        lengths: The lengths [B], or None.
        batch_sizes: The batch size at each step [T] of a packed batch, or None.
        bidirectional: Whether every layer has a reverse direction.
        dropout: The probability of dropping an output between layers.
        kernel: The name of a kernel, or "auto".
        memory: "normal" or "lean".
        cell: The cell, or the `mode` of the layer of PyTorch that computes it.
        resets: The steps at which episodes begin [T, B], or None.
        reverse: Whether the only direction reads each sequence from its last step to its first.

    Returns:
        y, h_n and c_n, the final states shaped as the initial ones; c_n means nothing for a cell without other states.
    """
    compiling = torch.compiler.is_compiling() and is_compiling()
    if not compiling and multiprocessors_left.get() is not None and not torch._C._is_tracing():
        check_options(bidirectional, dropout, memory)
        layers = separate_layers(state, flat, bidirectional, cell_of_mode(cell))
        if layers > 1:
            # Autocast converts the weights of a layer in the layer's own call, so that autograd converts their
            # gradients back before it goes on with the layer below.
            of_layer = functools.partial(
                recurrent,
                lengths=lengths,
                batch_sizes=batch_sizes,
                bidirectional=bidirectional,
                dropout=0.0,
                kernel=kernel,
                memory=memory,
                cell=cell,
                resets=resets,
                reverse=reverse,
            )
            hidden_alone = not cell_of_mode(cell).states
            # A call of the whole stack raises the error for a state that does not fit, with the sizes of all layers.
            with contextlib.suppress(ShapeError):
                return layer_by_layer(of_layer, layers, x, state, flat, dropout, hidden_alone=hidden_alone)
    if compiling and is_transformed():
        # The operator has no rules for transforms of `torch.func`: the call is made outside of the graph.
        torch._dynamo.graph_break()
    dtype = None
    if compiling or torch._C._is_any_autocast_enabled():
        if compiling or torch._C._is_tracing() or is_transformed() or forward_ad._current_level >= 0:
            x, state, flat = _as_autocast(x, state, flat)
        else:
            dtype = autocast_dtype(x)
            x, state, _ = _as_autocast(x, state, ())
            if all([weight.dtype is dtype for weight in flat]):  # noqa: C419  no generator
                dtype = None
    order = None
    if reverse:
        check_reverse(reverse, bidirectional)  # an attribute of a layer, which programs may set
    if reverse and x.dim() == (3 if batch_sizes is None else 2):  # otherwise the call refuses x
        order = Reversal.of(x, lengths, batch_sizes)
        resets = order.resets(resets, x)
        x = order.reordered(x)
    if resets is not None and lengths is None and batch_sizes is None and x.dim() == 3 and x.shape[0] == 1:
        state, resets = reset_before_one_step(resets, x, state, cell_of_mode(cell), bidirectional)
    options = lengths, batch_sizes, bidirectional, dropout, kernel, memory
    if not compiling and torch._C._is_tracing():
        found = recorded(x, _pair(state), flat, *options, cell_of_mode(cell), resets)
    elif compiling or x.is_meta:
        found = traced(x, _pair(state), flat, *options, cell_of_mode(cell), resets)
    else:
        try:
            found = execute(x, state, flat, *options, cell, resets, dtype)
        except TypeError:  # symbols, as `make_fx` has for sizes, are no key of a plan
            given = (x, *(state or ()), *flat)
            shapes = itertools.chain.from_iterable(each.shape for each in given if each is not None)
            if not any(isinstance(size, torch.SymInt) for size in shapes):
                raise
            flat = flat if dtype is None else tuple([weight.to(dtype) for weight in flat])
            found = traced(x, _pair(state), flat, *options, cell_of_mode(cell), resets)
    return found if order is None else (order.reordered(found[0]), *found[1:])


def recurrent_with_steps(
    x: Tensor,
    state: tuple[Tensor, Tensor] | None,
    flat: tuple[Tensor, ...],
    *,
    lengths: Tensor | Sequence[int] | None,
    bidirectional: bool,
    dropout: float,
    kernel: str,
    memory: str,
    cell: Cell,
    resets: Tensor | None = None,
    reverse: bool = False,
) -> tuple[Tensor, Tensor, Tensor, tuple[LayerSteps, ...]]:
    """Compute a recurrent stack, as `recurrent` does, and return the values of every step.

    PyTorch's operators compute the steps one after another, and autograd records them, so that every value is
    differentiable any number of times.

    Args:
        x: The input [T, B, I] with any strides.
        state: The initial hidden state [L*D, B, R] and the S other states side by side [L*D, B, S*H]; None for zeros.
        flat: The weights in torch's flat order.
        lengths: The lengths [B], or None.
        bidirectional: Whether every layer has a reverse direction.
        dropout: The probability of dropping an output between layers.
        kernel: "auto", or the name of the reference kernel.
        memory: "normal" or "lean", which makes no difference.
        cell: The cell.
        resets: The steps at which episodes begin [T, B], or None.
        reverse: Whether the only direction reads each sequence from its last step to its first.

    Returns:
        y, h_n and c_n, as of `recurrent`, and the values of each layer.

    Raises:
        KernelRefused: Another kernel is named.
        ArgumentError: The call is compiled.
    """
    if kernel not in (AUTO, REFERENCE.name):
        expectation = f"{AUTO!r} or {REFERENCE.name!r} where the values of all steps are returned"
        raise KernelRefused(sentence("kernel", expectation, repr(kernel)))
    if is_compiling():
        advice = "Call the layer outside of the compiled function, as torch.compiler.disable does."
        raise ArgumentError(sentence("return_steps", "False under torch.compile", "True", advice))
    x, given, flat = _as_autocast(x, state, flat)
    order = Reversal.of(x, lengths, None) if reverse else None
    if order is not None:
        resets = order.resets(resets, x)
        x = order.reordered(x)
    needs_grad = torch.is_grad_enabled() and any(one.requires_grad for one in (x, *(given or ()), *flat))
    options = lengths, None, bidirectional, dropout, needs_grad, REFERENCE.name, memory, cell, Particulars(), resets
    plan, inputs = prepare(x, given, flat, *options)
    with torch.autocast(x.device.type, enabled=False):
        result, steps = differentiable_steps(plan.problem, with_masks(plan.problem, inputs))
    if order is None:
        return result.y, result.h_n, result.c_n, steps
    return order.reordered(result.y), result.h_n, result.c_n, tuple(layer.map(order.reordered) for layer in steps)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype to which autocast converts the tensors of a call; None if it converts none.

    It converts none of calls in float64, of those on a device for which it is off, and of meta tensors.

    Args:
        x: The input.
    """
    if x.dtype == torch.float64 or x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return None
    return torch.get_autocast_dtype(x.device.type)


def _pair(state: tuple[Tensor, ...] | None) -> tuple[Tensor, Tensor] | None:
    if state is None or len(state) == 2:
        return state
    return state[0], state[0].new_zeros(state[0].shape[0], state[0].shape[1], 0)


def _as_autocast(
    x: Tensor, state: tuple[Tensor, ...] | None, flat: tuple[Tensor, ...]
) -> tuple[Tensor, tuple[Tensor, ...] | None, tuple[Tensor, ...]]:
    dtype = autocast_dtype(x)
    if dtype is None:
        return x, state, flat
    state = None if state is None else tuple([each.to(dtype) for each in state])
    return x.to(dtype), state, tuple(weight.to(dtype) for weight in flat)
