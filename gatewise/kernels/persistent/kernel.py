"""The `persistent` kernel: recurrent weights on the chip, one launch a layer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from gatewise.contract.criterion import Criterion
from gatewise.contract.device import Device
from gatewise.contract.kernel import TensorSpec, Traces, Work
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.saved import InputGradients, Inputs, Needs, OutputGradients, Result
from gatewise.kernels import stack
from gatewise.kernels.carried import (
    as_carried,
    gradients_as_carried,
    gradients_without_state,
    without_state,
)
from gatewise.kernels.persistent import in_calls
from gatewise.kernels.persistent.criteria import CRITERIA
from gatewise.kernels.persistent.memory import (
    copies_states,
    is_laid_out,
    kept_bytes,
    kept_tensors,
    lean_cut,
    lean_forward_pieces,
    overwrites_gates,
    workspace_bytes,
)
from gatewise.kernels.persistent.plan import Tiling, hidden_of, tiling
from gatewise.kernels.persistent.sizes import layer_pairs
from gatewise.kernels.persistent.sizes.exactness import exact_products
from gatewise.kernels.skinny import exact_slowdown, slowdown

if TYPE_CHECKING:
    from gatewise.kernels.persistent.replay import Stack
    from gatewise.kernels.persistent.schedules.schedule import LayerPasses


class _Persistent:
    """Forward and backward of a layer, or two beside each other, each in one launch; lean ones in one a segment.

    Weights are loaded into registers once; hidden states (backward: gradients of the gate sums) travel between
    multiprocessors through L2, where the data itself is the signal that it has arrived.
    """

    name = "persistent"
    summary = "recurrent weights on the chip, one launch a layer"
    layouts = frozenset({Layout.DENSE, Layout.HOST_LENGTHS, Layout.DEVICE_LENGTHS})
    sets_up_in_captures = True
    traces = Traces(frozenset({"recurrent_forward"}), frozenset({"recurrent_backward"}))  # in cuda/*.cu

    def single_use(self, problem: Problem) -> bool:
        if problem.rebuilds_gates:
            return lean_cut(problem).kept_steps > 0  # gates that are made again take the place of kept ones
        return overwrites_gates(problem)

    def criteria(self) -> Sequence[Criterion]:
        return CRITERIA

    def algorithm(self, problem: Problem, device: Device) -> str:
        return "; ".join(
            f"{own.name}: "
            + (f"layers in pairs, {_placed(own.both)}" if own.both else "")
            + ("; the last one " if own.both and problem.num_layers % 2 else "")
            + (_placed(own.cut) if not own.both or problem.num_layers % 2 else "")
            for own in _passes(problem, device)
        )

    def work(self, problem: Problem, device: Device) -> Work:
        hidden, layers = hidden_of(problem.hidden_size), problem.num_layers
        planes = problem.num_directions * problem.time * problem.batch * hidden * problem.element_bytes
        passes = 3 if problem.needs_grad else 1
        cuts = _passes(problem, device)
        seconds = sum(own.seconds(problem) for own in cuts)
        pairs = sum(layers // 2 for own in cuts if own.both)
        weights = problem.parameter_count * problem.element_bytes
        moved = weights * (4 if problem.needs_grad else 0.5 if problem.time < in_calls.FEW_STEPS else 2)
        if problem.hidden_size % 8:  # copies of weights and states with their sizes rounded up
            moved += weights * (6 if problem.needs_grad else 2)
        tokens, state = problem.num_directions * problem.time * problem.batch, hidden_of(problem.state_size)
        recurrent = 8.0 * layers * tokens * hidden * state
        # Planes around the loops; four less where gradients have no memory of their own that had to be filled.
        around = 9 if not problem.needs_grad else 26 if overwrites_gates(problem) else 30
        between = 8.0 * pairs * tokens * hidden * hidden  # made in the loop, too
        work = Work(
            matmul_flops=(passes * problem.matmul_flops - (2 if problem.needs_grad else 1) * recurrent - between)
            * exact_slowdown(problem)
            * slowdown(problem),
            bytes_moved=layers * planes * around + moved,
            launches=layers * _launches(problem) - pairs,
            operators=_operators(problem),
            exchanges=round(seconds / device.exchange_seconds),
            workspace_bytes=workspace_bytes(problem, in_pairs=bool(cuts and cuts[-1].both)),
        )
        if problem.proj_size:
            return work + _folded(problem, planes)
        if problem.rebuilds_gates:
            return work + _segmented(problem, device, planes, in_calls.start_seconds(problem, cuts[-1].cut))
        return work

    def kept(self, problem: Problem, device: Device) -> tuple[TensorSpec, ...]:
        if not problem.needs_grad:
            return ()
        if is_laid_out(problem):
            return (TensorSpec((kept_bytes(problem),), torch.uint8),)
        return kept_tensors(problem)

    def forward(self, problem: Problem, inputs: Inputs) -> Result:
        replayed, carries = _stack_of()(problem), not problem.cell.states  # as `carries_hidden`, a Python call less
        if carries:
            inputs = as_carried(inputs)
        if replayed is not None:
            result = replayed.forward(inputs)
        else:
            result = stack.forward(problem, inputs, _layer_passes(problem).forward)
        return without_state(result) if carries else result

    def backward(
        self, problem: Problem, inputs: Inputs, result: Result, gradients: OutputGradients, needs: Needs
    ) -> InputGradients:
        replayed, carries = _stack_of()(problem), not problem.cell.states  # as `carries_hidden`, a Python call less
        if carries:
            inputs, gradients = as_carried(inputs), gradients_as_carried(gradients)
        if replayed is not None:
            found = replayed.backward(inputs, result, gradients, needs)
        else:
            found = stack.backward(problem, inputs, result, gradients, needs, _layer_passes(problem).backward)
        return gradients_without_state(found) if carries else found

    def recorded(self, problem: Problem, inputs: Inputs) -> Result | None:
        return None


def _launches(problem: Problem) -> int:
    # Of a layer. Forward: products of the input, what fills the exchange, the loop.
    directions, odd = problem.num_directions, problem.hidden_size % 8 > 0
    forward = directions * (1 + odd) + (problem.time > 1) + 1
    if not problem.needs_grad:
        return forward
    # Backward: the same two; products for the gradient of the input, of both weights, and copies or products for the
    # states that went into the steps, of both directions at once where nothing is copied.
    together = problem.bidirectional and not copies_states(problem)
    products = directions + 3 if together else directions * (3 + (problem.time > 1) + 3 * odd)
    return forward + 2 + products


def _operators(problem: Problem) -> int:
    # Measured as CPU time, in operators' worth. In training autograd's thread doubles the cost of each, and adds some.
    layers, odd = problem.num_layers, problem.hidden_size % 8 > 0
    second = problem.num_directions - 1
    if is_laid_out(problem):
        # Replayed: two launches in training, whatever the layers; their weights and gradients pass through autograd. In
        # inference what is stated as launches is nearly all. Fitted to eager calls of nine cells in bfloat16, timed as
        # `gatewise bench lstm` does: 360 to 610 us a training step of one layer, depending on how cold caches are.
        each, ragged = layers * problem.num_directions, problem.layout is not Layout.DENSE
        return 33 + 7 * each + 12 * ragged if problem.needs_grad else 4
    if problem.needs_grad:
        return 53 + layers * (47 + 8 * second + 20 * odd)
    return 7 + layers * (4 + 2 * second + 6 * odd)


def _folded(problem: Problem, planes: int) -> Work:
    # The product of the two matrices, and the unprojected states with their gradients.
    passes, each = 2 if problem.needs_grad else 1, problem.num_layers * problem.num_directions
    return Work(
        matmul_flops=8.0 * passes * each * problem.hidden_size**2 * problem.proj_size,
        bytes_moved=problem.num_layers * planes * (8 if problem.needs_grad else 2),
        launches=(12 if problem.needs_grad else 4) * each,
        operators=(30 if problem.needs_grad else 5) * each,
        workspace_bytes=planes * (2 if problem.needs_grad else 1),
    )


def _segmented(problem: Problem, device: Device, planes: int, start_seconds: float) -> Work:
    # The forward pass's products are made again and activated; each segment after the first has launches and products
    # of its own.
    layers, directions = problem.num_layers, problem.num_directions
    cut = lean_cut(problem)
    more_forward, more_backward = len(lean_forward_pieces(problem)) - 1, cut.segments - 1
    again = sum(cut.rebuilt) / problem.time
    launches = 1 + 3 * directions + more_forward * (1 + directions) + more_backward * (4 + 5 * directions)
    return Work(
        matmul_flops=again * problem.matmul_flops,
        bytes_moved=12.0 * again * layers * planes,
        launches=layers * launches,
        operators=0 if is_laid_out(problem) else 3 * layers * launches,
        exchanges=round(layers * (more_forward + more_backward) * start_seconds / device.exchange_seconds),
    )


@functools.cache
def _stack_of() -> Callable[[Problem], Stack | None]:
    # Imported with the toolchain for CUDA, which is not needed to choose a kernel, nor on a CPU.
    from gatewise.kernels.persistent.replay import stack_of

    return stack_of


def _layer_passes(problem: Problem) -> LayerPasses:
    # Imported as above.
    from gatewise.kernels.persistent.schedules.schedule import layer_passes

    return layer_passes(problem)


class _Pass(NamedTuple):
    """One of the two passes: how a layer is cut, and how two are that run beside each other, if layers go in pairs."""

    name: str
    cut: Tiling
    both: Tiling | None

    def seconds(self, problem: Problem) -> float:
        pairs, single = divmod(problem.num_layers, 2) if self.both else (0, problem.num_layers)
        in_pairs = pairs * in_calls.seconds(problem, self.both) if self.both else 0.0
        return single * in_calls.seconds(problem, self.cut) + in_pairs


def _placed(cut: Tiling) -> str:
    blocks = f"{cut.units} units x {cut.rows} rows a block, {cut.blocks * cut.together * cut.directions} blocks"
    return blocks + (f" in clusters of {cut.split}" if cut.split > 1 else "")


def _passes(problem: Problem, device: Device) -> list[_Pass]:
    names = ("forward", "backward") if problem.needs_grad else ("forward",)
    sizes = problem.hidden_size, problem.batch, problem.num_directions
    number = problem.element_bytes, exact_products(problem)
    cuts = [(name, tiling(*sizes, device, name == "backward", *number)) for name in names]
    return [
        _Pass(name, cut, layer_pairs.stacked_cut(problem, device, backward=name == "backward"))
        for name, cut in cuts
        if cut is not None
    ]


persistent = _Persistent()
