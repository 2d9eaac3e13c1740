"""The plan of a call: its problem and the chosen kernel's passes, looked up by everything the choice depends on.

The key of the look-up is the shape, dtype and device of every tensor, the options of the call, the user's preference,
and the settings of PyTorch that are read in choosing. A change of any of them is another key, so that no entry has to
be invalidated.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gatewise.cells import LSTM, Cell, stated
from gatewise.contract.capture import state as state_of_capture
from gatewise.contract.data_parallel import reserved
from gatewise.contract.decision import Decision
from gatewise.contract.device import Device, tf32_allowed
from gatewise.contract.errors import KernelRefused, SlowerKernelWarning, callers_level, sentence
from gatewise.contract.kernel import Operator
from gatewise.contract.masks import draws_masks
from gatewise.contract.problem import LEAN, NORMAL, Layout, Problem
from gatewise.contract.pytorch import cell_of_mode
from gatewise.functional.arguments import described, without_features
from gatewise.functional.lengths import checked_batch_sizes, checked_lengths
from gatewise.functional.passes import Guarded, Passes, PlainPyTorch
from gatewise.functional.ragged import Ragged, ragged
from gatewise.functional.weights import NestedWeights, flattened
from gatewise.selection import (
    AUTO,
    FREE,
    REFERENCE,
    Preference,
    choose,
    decide,
    has_adjoint,
    kernel_named,
    predicted,
    refusal_of,
)
from gatewise.selection.profiled_kernels import kernels_among
from gatewise.selection.pytorch import decide_as_pytorch

__all__ = [
    "REFERENCE",
    "Particulars",
    "Plan",
    "Settings",
    "chosen_for_graph",
    "decision_of",
    "kernels_among",
    "plan_of",
    "probed",
]

_TYPICAL_SIZE = 64


class Particulars(NamedTuple):
    """The properties of a call that few calls have.

    Attributes:
        lengths: `Layout.HOST_LENGTHS` or `Layout.DEVICE_LENGTHS` where lengths are given.
        projected: Whether x holds the first layer's input products.
        memory_budget: The bytes that the call may take by prediction; None for no limit.
        traced: Whether the call is an operator of a compiled graph.
        empty: Whether every length is 0.
        resets: Whether resets are given.
    """

    lengths: Layout | None = None
    projected: bool = False
    memory_budget: float | None = None
    traced: bool = False
    empty: bool = False
    resets: bool = False


class Settings(NamedTuple):
    """The settings that a choice depends on besides the arguments of the call.

    Attributes:
        wanted: The user's preference among kernels.
        allow_tf32: Whether PyTorch's settings allow TF32.
        cudnn_enabled: Whether PyTorch's settings allow cuDNN.
        capture: The state of CUDA graph capture, from `contract.capture.state`.
        autocast: Whether autocast is enabled for any device.
        converts: Whether autocast converts the weights of this call.
        transformed: Whether a transform of `torch.func` or a derivative in forward mode is active.
        reserved: The number of multiprocessors that backward passes leave free, from `contract.data_parallel`.
    """

    wanted: Preference = FREE
    allow_tf32: bool = False
    cudnn_enabled: bool = True
    capture: str = ""
    autocast: bool = False
    converts: bool = False
    transformed: bool = False
    reserved: int = 0


_USUAL_SETTINGS, _USUAL_PARTICULARS = Settings(), Particulars()
_MOST_PLANS = 4096


class Plan(NamedTuple):
    """The way a call is computed.

    Attributes:
        problem: The problem.
        kernel: The name of the chosen kernel.
        passes: The passes: those of the kernel itself where nothing has to be done around them.
        h0_shape: The shape of the initial hidden state.
        c0_shape: The shape of the other initial states; None if they need no tensor beside that of the hidden state.
        records: Whether to ask for the recorded forward pass first: the kernel reads the layout, and no lengths are
            given, or the sequences are packed for it on a CPU. With dropout, only calls with gradients are recorded.
        single_use: Whether a backward pass consumes what the forward pass kept.
        draws: Whether masks must be drawn, for dropout between layers or for a regularised cell.
        operator: The function that computes the call from the caller's own tensors, if the kernel has one and nothing
            has to be done around it.
        ragged: The same for a call with lengths on a CPU, all of them positive.
    """

    problem: Problem
    kernel: str
    passes: Passes
    h0_shape: tuple[int, ...]
    c0_shape: tuple[int, ...] | None
    records: bool
    single_use: bool
    draws: bool = False
    operator: Operator | None = None
    ragged: Ragged | None = None


# A cache with a limit reads and writes the order of use in each look-up: memory that the processor's caches no longer
# hold after a backward pass. So this one has no limit, and is emptied when it is full.
@functools.cache
def plan_of(
    x: tuple,
    state: tuple[tuple, ...] | None,
    weights: tuple[tuple, ...],
    bidirectional: bool,
    dropout: float,
    needs_grad: bool,
    memory: str,
    cell: Cell | str,
    packed: tuple[int, int] | None = None,
    settings: Settings | None = None,
    particulars: Particulars | None = None,
) -> Plan:
    """Return the plan of a call.

    Args:
        x: The form of the input.
        state: The forms of the initial states, or None.
        weights: The forms of the weights in torch's flat order.
        bidirectional: Whether every layer has a reverse direction.
        dropout: The probability of dropping an output between layers.
        needs_grad: Whether a backward pass will follow.
        memory: "normal" or "lean".
        cell: The cell, or the `mode` of the layer of PyTorch that computes it.
        packed: T and B of a packed batch; None for padded sequences.
        settings: The settings that the choice depends on, too; None for the defaults, which most calls on a CPU
            have, and which are hashed faster so.
        particulars: The properties that few calls have; None for the defaults.

    Raises:
        ShapeError: A rank or size does not fit.
        DtypeError: A dtype does not fit.
        DeviceError: Tensors are on devices that do not go together.
        ArgumentError: An option has a value that it cannot have.
        KernelRefused: The kernel that was named cannot run this call.
        OutOfMemoryPredicted: No kernel fits into the memory budget.
        TypeError: An option cannot be hashed.
    """
    if plan_of.cache_info().currsize >= _MOST_PLANS:
        plan_of.cache_clear()
    wanted, allow_tf32, cudnn_enabled, capture, autocast, converts, transformed, left_free = settings or _USUAL_SETTINGS
    lengths, projected, memory_budget, traced, empty, resets = particulars or _USUAL_PARTICULARS
    cell = cell_of_mode(cell)
    if projected:
        x = without_features(x, weights)
    problem = described(
        x, state, weights, packed, bidirectional, dropout, needs_grad, allow_tf32, traced, memory, capture, cell
    )
    if lengths is not None:
        problem = _with_lengths(problem, lengths, empty)
    if projected:
        problem = problem.replace(projected=True)
    if resets:
        problem = problem.replace(resets=True)
    if left_free:
        problem = problem.replace(reserved=left_free)
    rows = problem.num_layers * problem.num_directions
    h0_shape, c0_shape = (rows, problem.batch, problem.state_size), (rows, problem.batch, problem.states_size)
    shapes = h0_shape, None if c0_shape == h0_shape else c0_shape  # nothing writes to the states
    if transformed:
        _check_transformable(wanted)
        return Plan(problem, REFERENCE.name, PlainPyTorch(), *shapes, records=True, single_use=False)
    device = _without_cudnn_if_off(x[2], cudnn_enabled)
    name = chosen_for_graph(problem, device, wanted.kernel) if traced else AUTO
    decision = choose(problem, device, name if traced else wanted, memory_budget)
    kernel = kernel_named(decision.chosen or "")
    if device.kind == "cuda" and kernel is REFERENCE and wanted.kernel == AUTO and problem.time * problem.batch:
        _warn_if_nothing_else_accepts(decision)
    if kernel is REFERENCE and not has_adjoint(cell):
        if refusal := refusal_of(stated(cell)):
            advice = f"Only {kernel.name} runs it, by its own operators under autograd."
            warnings.warn(f"{refusal} {advice}", stacklevel=callers_level())
        if refusal or not problem.rebuilds_gates:
            return Plan(problem, kernel.name, PlainPyTorch(), *shapes, records=True, single_use=False)
    if converts and needs_grad and kernel.widens_gradients:
        problem = problem.replace(float32_gradients=True)
    reads_layout = problem.layout in kernel.layouts
    elsewhere = lengths is Layout.HOST_LENGTHS and x[2].type != "cpu"
    straight = reads_layout and not (autocast or capture or elsewhere)
    # On a CPU, autograd records the packing and the operator in less time than the explicit passes take around them.
    packs = problem.layout is Layout.HOST_LENGTHS and x[2].type == "cpu" and Layout.PACKED in kernel.layouts
    # A call without gradients draws the dropout masks of one with them, as reentrant checkpointing expects: the tokens'
    # where autograd records PyTorch's operator, which it does not with little memory, and those of all steps elsewhere.
    drops = needs_grad or not problem.dropout or (x[2].type == "cpu" and memory != LEAN)
    records = (packs or (reads_layout and lengths is None)) and drops
    operator = kernel.operator(problem, device) if straight and records else None
    by_lengths = ragged(kernel, problem, device) if packs and records and not autocast else None
    if by_lengths is not None and not cell.states:
        shapes = h0_shape, None
    return Plan(
        problem,
        kernel.name,
        kernel if straight else Guarded(kernel),
        *shapes,
        records,
        single_use=kernel.single_use(problem),
        draws=draws_masks(problem),
        operator=operator,
        ragged=by_lengths,
    )


def _warn_if_nothing_else_accepts(decision: Decision) -> None:
    if sum(verdict.accepted for verdict in decision.verdicts) == 1:
        text = (  # the same for all calls, so that it is shown once for each place in a program
            f"`{REFERENCE.name}` computes this call on a GPU, with several operators for every time step, because "
            f"every other kernel refuses it. gatewise.explain gives the reasons; with kernel='{REFERENCE.name}' there "
            "is no warning."
        )
        warnings.warn(text, SlowerKernelWarning, stacklevel=callers_level())


def chosen_for_graph(problem: Problem, device: Device, kernel: str) -> str:
    """Return the name of the kernel for a call in a compiled graph.

    A graph serves every length and batch size from 2 up. The choice must be the same while the graph is traced and when
    it runs, so it is made for sizes that do not depend on either.

    Args:
        problem: The problem.
        device: The device.
        kernel: The name of a kernel, or "auto".

    Raises:
        KernelRefused: The kernel that was named cannot run this problem.
    """
    time, batch = (
        size if isinstance(size, int) and size < 2 else _TYPICAL_SIZE for size in (problem.time, problem.batch)
    )
    problem = problem.replace(time=time, batch=batch)
    # "auto" is what was preferred while the graph was traced.
    chosen = predicted(problem, device).chosen if kernel == AUTO else choose(problem, device, kernel).chosen
    if chosen is None:
        raise KernelRefused(kernel)
    return chosen


def probed(device: torch.device) -> Device:
    """Return the properties of a device as choosing sees them: without cuDNN where the user switched it off."""
    return _without_cudnn_if_off(device, torch.backends.cudnn.enabled)


def decision_of(
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
    by_pytorch: bool = False,
    cell: Cell = LSTM(),  # noqa: B008  an immutable statement
    resets: Tensor | None = None,
) -> Decision:
    """Return the decision that `gatewise.functional.lstm` would make for these arguments here and now.

    Autocast, grad mode, `use_kernel` and the environment count as they do in the call. Nothing is computed.

    Args:
        x: The input, as in the call.
        state: The initial state, or None.
        weights: The weights.
        lengths: The lengths, or None.
        batch_sizes: The batch sizes of a packed batch, or None.
        bidirectional: Whether every layer has a reverse direction.
        dropout: The probability of dropping an output between layers, as applied.
        kernel: The name of a kernel, or "auto".
        memory: "normal" or "lean".
        by_pytorch: Whether PyTorch's layer makes the call, by its own rule.
        cell: The cell.
        resets: The steps at which episodes begin, or None.
    """
    flat = flattened(weights)
    tensors = (x, *flat, *(state if state is not None else ()))
    dtype = _autocast_dtype(x, by_pytorch)
    forms = [(tensor.shape, dtype, tensor.device) for tensor in tensors]
    count = 1 + len(flat)
    packed = None
    if batch_sizes is not None:
        packed = checked_batch_sizes(batch_sizes, len(x))
    problem = described(
        forms[0],
        tuple(forms[count:]) or None,
        tuple(forms[1:count]),
        packed,
        bidirectional,
        dropout,
        torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors),
        x.is_cuda and tf32_allowed(),
        False,
        memory,
        state_of_capture() if x.is_cuda else "",
        cell,
    )
    if lengths is not None:
        found, longest = checked_lengths(lengths, problem.time, problem.batch, x.device)
        layout = Layout.DEVICE_LENGTHS if found.is_cuda else Layout.HOST_LENGTHS
        problem = _with_lengths(problem, layout, longest == 0)
    if resets is not None and not (problem.time == 1 and lengths is None):  # see reset_before_one_step
        problem = problem.replace(resets=True)
    if x.is_cuda and reserved():
        problem = problem.replace(reserved=reserved())
    device = probed(x.device)
    return decide_as_pytorch(problem, device) if by_pytorch else decide(problem, device, kernel)


# Equal calls get one `Problem` object, which makes looking up its decision fast.
@functools.lru_cache(maxsize=4096)
def _with_lengths(problem: Problem, layout: Layout, empty: bool) -> Problem:
    return problem.replace(layout=layout, time=0 if empty else problem.time)


def _without_cudnn_if_off(device: torch.device, cudnn_enabled: bool) -> Device:
    found = Device.probe(device)
    return found.replace(cudnn_version=0) if found.cudnn_version and not cudnn_enabled else found


def _check_transformable(wanted: Preference) -> None:
    if wanted.kernel not in (AUTO, REFERENCE.name):
        expectation = f"{AUTO!r} or {REFERENCE.name!r} inside torch.func.grad, vmap and the like"
        advice = "They see plain PyTorch operators only."
        raise KernelRefused(sentence("kernel", expectation, repr(wanted.kernel), advice))


def _autocast_dtype(x: Tensor, by_pytorch: bool) -> torch.dtype:
    if not torch.is_autocast_enabled(x.device.type) or x.dtype == torch.float64:
        return x.dtype
    if by_pytorch:
        # PyTorch's cuDNN call is in float16 under every autocast; on a CPU autocast does not reach it.
        return torch.float16 if x.is_cuda else x.dtype
    return torch.get_autocast_dtype(x.device.type)
