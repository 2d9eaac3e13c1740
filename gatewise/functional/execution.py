"""The common path of all calls: `prepare` turns its arguments into a plan and inputs, and the plan's kernel runs.

The layers, `gatewise.functional.lstm`, the explicit passes and the operators of compiled graphs all prepare their calls
here. `execute` also runs the call and connects it to autograd.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from gatewise.cells import Cell
from gatewise.contract import token_factors
from gatewise.contract.budget import check_memory_budget
from gatewise.contract.capture import state as state_of_capture
from gatewise.contract.data_parallel import multiprocessors_left, reserved
from gatewise.contract.device import tf32_allowed
from gatewise.contract.errors import ArgumentError, sentence
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.saved import Inputs, Needs, OutputGradients, Result, Versions, check_versions, versions_of
from gatewise.contract.second_derivatives import differentiable_gradients
from gatewise.contract.token_factors import TokenFactors
from gatewise.contract.weights import copied_together
from gatewise.functional.arguments import check_options, check_tensors
from gatewise.functional.batched_gradients import one_by_one
from gatewise.functional.initial_states import initial_states
from gatewise.functional.lengths import bounded, checked_batch_sizes, checked_lengths, read_lengths
from gatewise.functional.passes import Guarded, in_plain_pytorch, with_masks
from gatewise.functional.plan import Particulars, Plan, Settings, plan_of
from gatewise.functional.resets import copied_resets, refuse_packed
from gatewise.functional.weights import forms_of
from gatewise.selection import AUTO, FREE, REFERENCE, Preference, kernel_named, preference

_ALL = Needs()
_NOTHING = contextlib.nullcontext()

_requires_grad = operator.attrgetter("requires_grad")

# Whether another backward pass may follow the one in progress (`retain_graph`); older PyTorch cannot tell.
_graph_is_kept: Callable[[], bool] = getattr(
    torch._C._autograd,  # type: ignore[attr-defined]
    "_get_current_graph_task_keep_graph",
    lambda: False,
)


def execute(
    x: Tensor,
    state: tuple[Tensor, ...] | None,
    flat: tuple[Tensor, ...],
    lengths: Tensor | Sequence[int] | None,
    batch_sizes: Tensor | None,
    bidirectional: bool,
    dropout: float,
    kernel: str,
    memory: str,
    cell: Cell | str,
    resets: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute y, h_n and c_n, differentiable; other arguments and errors are those of `prepare`.

    For a cell with the hidden state alone, `state` may be the tuple of that one tensor, and c_n means nothing. `dtype`
    is the dtype to which autocast converts the weights, None if it does not; x and the states have it already.
    """
    grad_enabled = torch.is_grad_enabled()
    try:
        needs_grad = grad_enabled and (
            x.requires_grad
            or (state is not None and (state[0].requires_grad or state[-1].requires_grad))
            or True in map(_requires_grad, flat)
        )
    except AttributeError:  # of a weight that is None
        check_tensors(x, None, flat)
        raise
    packed = particulars = None
    if batch_sizes is not None or lengths is not None or resets is not None:
        packed, particulars, resets = _layout_of(None, x, lengths, batch_sizes, resets)
    plan = _planned(
        x, state, flat, bidirectional, dropout, needs_grad, kernel, memory, cell, packed, particulars, dtype
    )
    parameters = flat
    if dtype is not None:
        together = not needs_grad or plan.problem.float32_gradients
        flat = copied_together(flat, dtype) if together else tuple([weight.to(dtype) for weight in flat])
        if not together:
            parameters = flat  # the conversions are operators that autograd has recorded
    # A small call takes about as long as this function, so that nothing is prepared for an operator that it does not
    # read, and calls are without `*`, which the interpreter does not inline.
    if plan.operator is not None:
        h0, c0 = (None, None) if state is None else (state[0], state[-1])
        return plan.operator(x, h0, c0, flat, batch_sizes)
    if plan.ragged is not None and forward_ad._current_level < 0:
        each, shortest, longest = read_lengths(lengths, plan.problem.time, plan.problem.batch, x.device)
        if shortest:
            h0, c0 = _zeros(plan, x) if state is None else (state[0], state[-1])
            computed = plan.ragged(x, h0, c0, flat, each, shortest, longest, state is None)
            if computed is not None:
                return computed
    options = lengths, batch_sizes, bidirectional, dropout, needs_grad, kernel, memory, cell, particulars, resets
    plan, inputs = _with_inputs(plan, x, state, flat, *options)
    found = plan.passes.recorded(plan.problem, inputs) if plan.records else None
    if found is None:
        if plan.draws:
            inputs = with_masks(plan.problem, inputs)
        if needs_grad:
            # The tensors are arguments too, so that autograd finds them.
            found = _apply(plan, inputs, x, inputs.h0, inputs.c0, *parameters)
        else:
            with torch.no_grad() if grad_enabled else _NOTHING:
                found = plan.passes.forward(plan.problem, inputs)
    return found[0], found[1], found[2]


def prepare(
    x: Tensor,
    state: tuple[Tensor, ...] | None,
    flat: tuple[Tensor, ...],
    lengths: Tensor | Sequence[int] | None,
    batch_sizes: Tensor | None,
    bidirectional: bool,
    dropout: float,
    needs_grad: bool,
    kernel: str,
    memory: str,
    cell: Cell | str,
    particulars: Particulars | None = None,
    resets: Tensor | None = None,
) -> tuple[Plan, Inputs]:
    """Check the arguments of a call and return its plan, and its inputs without dropout masks.

    Args:
        x: The input [T, B, I], or [N, I] when packed.
        state: The initial hidden state and the other states [L*D, B, S*H], or None for zeros. The hidden state alone
            is enough for a cell without others.
        flat: The weights in torch's flat order.
        lengths: The lengths [B], or None.
        batch_sizes: The batch sizes [T] of a packed batch, or None.
        bidirectional: Whether every layer has a reverse direction.
        dropout: The probability of dropping an output between layers.
        needs_grad: Whether a backward pass will follow.
        kernel: The name of a kernel, or "auto".
        memory: "normal" or "lean".
        cell: The cell, or the `mode` of the layer of PyTorch that computes it.
        particulars: The properties that few calls have; those of `lengths`, `batch_sizes` and `resets` are added here.
        resets: The steps at which episodes begin [T, B], or None.

    Raises:
        ShapeError: A rank, size or length does not fit.
        DtypeError: A dtype does not fit.
        DeviceError: Tensors are on devices that do not go together.
        ArgumentError: An option has a value that it cannot have, or `batch_sizes` is given with `lengths` or `resets`.
        KernelRefused: The kernel that was named cannot run this call.
        OutOfMemoryPredicted: No kernel fits into the memory budget.
    """
    packed = None
    if batch_sizes is not None or lengths is not None or resets is not None:
        packed, particulars, resets = _layout_of(particulars, x, lengths, batch_sizes, resets)
    plan = _planned(x, state, flat, bidirectional, dropout, needs_grad, kernel, memory, cell, packed, particulars)
    options = lengths, batch_sizes, bidirectional, dropout, needs_grad, kernel, memory, cell, particulars, resets
    return _with_inputs(plan, x, state, flat, *options)


def _planned(
    x: Tensor,
    state: tuple[Tensor, ...] | None,
    flat: tuple[Tensor, ...],
    bidirectional: bool,
    dropout: float,
    needs_grad: bool,
    kernel: str,
    memory: str,
    cell: Cell | str,
    packed: tuple[int, int] | None,
    particulars: Particulars | None,
    dtype: torch.dtype | None = None,
) -> Plan:
    traced = particulars is not None and particulars.traced
    # The preference was read while the graph was traced: `use_kernel` around the compiled call has no effect.
    wanted = Preference(kernel, "predict", "") if traced else preference(kernel)
    on_gpu, autocast = x.is_cuda, torch._C._is_any_autocast_enabled()
    if dropout is True:  # the cache below would find the plan for 1.0
        check_options(bidirectional, dropout, memory)
    # A kernel that is named computes derivatives in forward mode if it can, as PyTorch's own kernels do.
    transformed = torch._C._are_functorch_transforms_active() or (
        forward_ad._current_level >= 0 and wanted.kernel in (AUTO, REFERENCE.name)
    )
    settings = None
    if on_gpu or autocast or transformed or wanted is not FREE:
        tf32 = on_gpu and x.dtype is torch.float32 and tf32_allowed()
        # A compiled call has one choice, inside a CUDA graph and outside.
        capture = state_of_capture() if on_gpu and not traced else ""
        left_free = reserved() if on_gpu and needs_grad else 0
        cudnn, converts = torch._C._get_cudnn_enabled(), dtype is not None
        settings = Settings(wanted, tf32, cudnn, capture, autocast, converts, transformed, left_free)
    # The policy "measure" depends on earlier measurements, and choosing within a budget is logged at every call.
    cached = wanted.policy == "predict" and (particulars is None or particulars.memory_budget is None)
    try:
        return (plan_of if cached else plan_of.__wrapped__)(
            (x.shape, x.dtype, x.device),
            None if state is None else forms_of(state),
            forms_of(flat) if dtype is None else tuple([(each.shape, dtype, each.device) for each in flat]),
            bidirectional,
            dropout,
            needs_grad,
            memory,
            cell,
            packed,
            settings,
            particulars,
        )
    except AttributeError:  # of a weight that is None
        check_tensors(x, None, flat)
        raise
    except TypeError:  # an option that cannot be hashed
        check_options(bidirectional, dropout, memory)
        check_memory_budget(None if particulars is None else particulars.memory_budget)
        raise


def settings_of_calls() -> tuple[Hashable, ...]:
    """Return the settings by which calls choose kernels, apart from their arguments and those of autocast."""
    return preference(AUTO), tf32_allowed(), torch._C._get_cudnn_enabled(), reserved()


def _with_inputs(
    plan: Plan,
    x: Tensor,
    state: tuple[Tensor, ...] | None,
    flat: tuple[Tensor, ...],
    lengths: Tensor | Sequence[int] | None,
    batch_sizes: Tensor | None,
    bidirectional: bool,
    dropout: float,
    needs_grad: bool,
    kernel: str,
    memory: str,
    cell: Cell | str,
    particulars: Particulars | None,
    resets: Tensor | None,
) -> tuple[Plan, Inputs]:
    problem = plan.problem
    if state is None:
        h0, c0 = _zeros(plan, x)
    else:
        h0, c0 = state if len(state) == 2 else (state[0], state[0].new_zeros(*state[0].shape[:2], 0))
    if lengths is None:
        if batch_sizes is not None:
            batch_sizes = batch_sizes.clone()  # the caller may change its own before the backward pass
        return plan, Inputs(x, h0, c0, flat, None, batch_sizes, resets=resets)
    row_lengths, longest = checked_lengths(lengths, problem.time, problem.batch, x.device)
    if problem.layout is Layout.DEVICE_LENGTHS:
        row_lengths, h0 = bounded(row_lengths, problem.time, h0)
    elif longest == 0 and particulars is not None and not particulars.empty:
        options = None, bidirectional, dropout, needs_grad, kernel, memory, cell
        return prepare(x, state, flat, row_lengths, *options, particulars._replace(empty=True), resets)
    return plan, Inputs(x, h0, c0, flat, row_lengths, resets=resets)


def _zeros(plan: Plan, x: Tensor) -> tuple[Tensor, Tensor]:
    h0 = x.new_zeros(plan.h0_shape)
    c0 = h0 if plan.c0_shape is None else x.new_zeros(plan.c0_shape)
    cell = plan.problem.cell
    return initial_states(cell, h0, c0) if cell.initial_states else (h0, c0)


class _Recurrence(torch.autograd.Function):
    """The plan's passes as one autograd function; when its backward pass is differentiated, plain PyTorch runs."""

    @staticmethod
    def forward(
        ctx: Any, plan: Plan, inputs: Inputs, x: Tensor, h0: Tensor, c0: Tensor, *weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the outputs; the tensors of `inputs` come once more, for autograd to see them."""
        run = plan.passes.forward(plan.problem, inputs)
        y, h_n, c_n = (output.data if output._is_view() else output for output in run[:3])
        # The outputs are the caller's, to change in place as those of torch.nn.LSTM: no backward pass reads the final
        # states again, and on a CPU y is read from a copy. On a GPU, changing y is an error, as it is with cuDNN.
        ctx.save_for_backward(x, h0, c0, *inputs.weights, y if y.is_cuda else y.clone(), *inputs.masks, *run.kept)
        ragged = inputs.lengths, inputs.batch_sizes, inputs.resets
        ctx.call = (plan, ragged, len(weights), len(inputs.masks))
        ctx.parameters = (weights, versions_of(weights)) if plan.problem.float32_gradients else None
        ctx.spent = False
        if multiprocessors_left.get() is not None:
            ctx.token_factors = _token_factors(plan, inputs, len(weights))
        ctx.set_materialize_grads(False)
        return y, h_n, c_n

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple:
        """Return the gradients of x, h0, c0 and the weights."""
        return None, None, *one_by_one(functools.partial(_backward, ctx), gradients)


# `_Recurrence.apply` without its test for transforms of `torch.func`: none is active where it is called.
_apply: Callable[..., tuple[Tensor, Tensor, Tensor]] = super(torch.autograd.Function, _Recurrence).apply  # type: ignore[misc]


def _backward(ctx: Any, gradients: Sequence[Tensor | None], follows: bool) -> Sequence[Tensor | None]:
    """Return the gradients of x, h0, c0 and the weights of a call of `_Recurrence`.

    Args:
        ctx: The context of the call.
        gradients: The gradients of y, h_n and c_n.
        follows: Whether this walk of the autograd graph comes here again.
    """
    plan, (lengths, batch_sizes, resets), count, drawn = ctx.call
    x, h0, c0, *others = ctx.saved_tensors
    y, *rest = others[count:]
    masks, kept = tuple(rest[:drawn]), rest[drawn:]
    inputs = Inputs(x, h0, c0, tuple(others[:count]), lengths, batch_sizes, masks, resets)
    wanted, above = ctx.needs_input_grad[2:], OutputGradients(*gradients)
    if torch.is_grad_enabled():
        return _differentiable_backward(plan.problem, inputs, above, wanted, ctx.parameters)
    passes = Guarded(kernel_named(plan.kernel)) if torch._C._is_any_autocast_enabled() else plan.passes
    again = False
    if ctx.spent:
        result = passes.forward(plan.problem, inputs)
    else:
        again = plan.single_use and (follows or _graph_is_kept())
        # The initial states stand in the place of the final ones, which no backward pass reads.
        result = Result(y, h0, c0, tuple([tensor.clone() for tensor in kept] if again else kept))
    needs = _ALL if all(wanted) else Needs(wanted[0], wanted[1] or wanted[2], any(wanted[3:]))
    receiver = getattr(ctx, "factor_receiver", None)  # `receiver_of`, without a call
    if receiver is None:
        dx, dh0, dc0, dweights = passes.backward(plan.problem, inputs, result, above, needs)
    else:
        with token_factors.received_by(receiver):
            dx, dh0, dc0, dweights = passes.backward(plan.problem, inputs, result, above, needs)
        left = ctx.token_factors.weights  # whose gradients the receiver computes
        dweights = tuple([None if 3 + place in left else each for place, each in enumerate(dweights)])
    ctx.spent = plan.single_use and not again
    return dx, dh0, dc0, *dweights


def _token_factors(plan: Plan, inputs: Inputs, weights: int) -> TokenFactors | None:
    """Return the factors that the backward pass of a call can leave in place of gradients."""
    problem, kernel = plan.problem, kernel_named(plan.kernel)
    widths = kernel.factor_widths(problem) if problem.layout in kernel.layouts else ()
    if not widths:
        return None
    # In `next_functions`, those of a direction follow x, h0 and c0: first its input weights and its recurrent weights.
    each = weights // problem.num_directions
    places = tuple([3 + direction * each + place for direction in range(problem.num_directions) for place in (0, 1)])
    tokens, values = problem.time * problem.batch, sum([inputs.weights[place - 3].numel() for place in places])
    wide = torch.float32 if problem.float32_gradients else problem.dtype
    dtypes = (problem.dtype,) * len(widths)
    return TokenFactors(tokens, widths, dtypes, places, wide, flops=2 * tokens * values)


def _layout_of(
    particulars: Particulars | None,
    x: Tensor,
    lengths: Tensor | Sequence[int] | None,
    batch_sizes: Tensor | None,
    resets: Tensor | None,
) -> tuple[tuple[int, int] | None, Particulars | None, Tensor | None]:
    """Return T and B of a packed batch, the particulars with lengths and resets, and a copy of the resets."""
    if batch_sizes is not None:
        if lengths is not None:
            raise ArgumentError(sentence("lengths", "None for a packed batch", "both lengths and batch_sizes"))
        if resets is not None:
            refuse_packed(resets)
        return checked_batch_sizes(batch_sizes, x.shape[0] if x.dim() else 0), particulars, None
    if lengths is not None:
        on_gpu = isinstance(lengths, Tensor) and lengths.is_cuda and x.is_cuda
        layout = Layout.DEVICE_LENGTHS if on_gpu else Layout.HOST_LENGTHS
        # `_replace` takes five times as long as making the tuple, which is all that calls of layers need.
        particulars = Particulars(layout) if particulars is None else particulars._replace(lengths=layout)
    if resets is not None:
        resets = copied_resets(resets, x.shape, x.device, packed=False)
        particulars = (particulars or Particulars())._replace(resets=True)
    return None, particulars, resets


def _differentiable_backward(
    problem: Problem,
    inputs: Inputs,
    above: OutputGradients,
    wanted: tuple[bool, ...],
    parameters: tuple[tuple[Tensor, ...], Versions] | None,
) -> list[Tensor | None]:
    # No kernel's backward pass can be differentiated itself. The same call in plain PyTorch can, from the same inputs
    # and the same dropout masks. Where the weights are copies, autograd knows only the parameters.
    weights = inputs.weights
    if parameters is not None:
        weights, versions = parameters
        check_versions([f"weights[{index}]" for index in range(len(weights))], versions, versions_of(weights))
    views = [tensor.view_as(tensor) for tensor in (inputs.x, inputs.h0, inputs.c0, *weights)]
    x, h0, c0, *read = views
    if parameters is not None:
        read = [weight.to(problem.dtype) for weight in read]
    result = in_plain_pytorch(problem, inputs._replace(x=x, h0=h0, c0=c0, weights=tuple(read)))
    return differentiable_gradients(result[:3], above, views, wanted)
