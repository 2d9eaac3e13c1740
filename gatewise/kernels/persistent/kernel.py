"""The `persistent` kernel: recurrent weights on the chip, one launch a layer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from gatewise.cells import Regularised, step_cell
from gatewise.contract import ranking
from gatewise.contract.criterion import Criterion
from gatewise.contract.device import Device
from gatewise.contract.kernel import Operator, TensorSpec, Traces, Work
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.saved import InputGradients, Inputs, Needs, OutputGradients, Result
from gatewise.derivation.fused import carried_states
from gatewise.kernels import stack
from gatewise.kernels.carried import (
    as_carried,
    gradients_as_carried,
    gradients_without_hidden,
    without_hidden,
)
from gatewise.kernels.persistent.criteria import CRITERIA
from gatewise.kernels.persistent.sizes import half_operands, layer_pairs
from gatewise.kernels.persistent.sizes.cell_size import cell_size_of, has_two_tensors
from gatewise.kernels.persistent.sizes.exactness import exact_products
from gatewise.kernels.persistent.sizes.free_multiprocessors import device_of_pass
from gatewise.kernels.persistent.sizes.gradients import factor_widths
from gatewise.kernels.persistent.sizes.memory import (
    copies_states,
    exchanges_in_gates,
    interleaves_rows,
    is_laid_out,
    lean_cut,
    lean_forward_pieces,
)
from gatewise.kernels.persistent.sizes.padding import hidden_of
from gatewise.kernels.persistent.sizes.step import carries_hidden, drops_hidden, has_fused_passes, macros_of
from gatewise.kernels.persistent.sizes.tiling import Tiling
from gatewise.kernels.persistent.sizes.tiling_choice import tiling

if TYPE_CHECKING:
    from gatewise.kernels.persistent.dry_run import Memory
    from gatewise.kernels.persistent.replay import Stack
    from gatewise.kernels.persistent.schedules.schedule import LayerPasses


class _Persistent:
    """Forward and backward of a layer, or two beside each other, each in one launch; lean ones in one a segment.

    Weights are loaded into registers once; hidden states (backward: gradients of the gate sums) travel between
    multiprocessors through L2, where the data itself is the signal that it has arrived, or inside of a cluster.
    """

    name = "persistent"
    summary = "recurrent weights on the chip, one launch per layer"
    layouts = frozenset({Layout.DENSE, Layout.HOST_LENGTHS, Layout.DEVICE_LENGTHS})
    widens_gradients = True
    traces = Traces(  # entry points in cuda/*.cu
        frozenset({"recurrent_forward", "recurrent_row_forward"}),
        frozenset({"recurrent_backward", "recurrent_row_backward"}),
    )

    def sets_up_in_captures(self, problem: Problem) -> bool:
        return True

    def single_use(self, problem: Problem) -> bool:
        if problem.rebuilds_gates:
            return lean_cut(problem).kept_steps > 0  # gates that are made again take the place of kept ones
        return exchanges_in_gates(problem) or interleaves_rows(problem, backward=True)

    def factor_widths(self, problem: Problem) -> tuple[int, ...]:
        return factor_widths(problem)

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
        pairs = sum(layers // 2 for own in cuts if own.both)
        weights = problem.parameter_count * problem.element_bytes
        moved = weights * (4 if problem.needs_grad else 1)
        if problem.hidden_size % 8:  # copies of weights and states with their sizes rounded up
            moved += weights * (6 if problem.needs_grad else 2)
        tokens = problem.num_directions * problem.time * problem.batch
        recurrent = 2.0 * layers * tokens * problem.gate_rows * problem.state_size
        # Planes around the loops; four less where gradients have no memory of their own that had to be filled. In
        # clusters nothing is filled, which the measured share of an exchange takes into account.
        around = 9.0 if not problem.needs_grad else 26.0 if exchanges_in_gates(problem) else 30.0
        around += _planes_of_cell(problem)
        between = 2.0 * pairs * tokens * problem.gate_rows * problem.state_size  # made in the loop, too
        products = passes * problem.matmul_flops - (2 if problem.needs_grad else 1) * recurrent - between
        work = Work(
            matmul_flops=products,
            exact_flops=products if exact_products(problem) else 0.0,
            bytes_moved=layers * planes * around + moved,
            launches=layers * _launches(problem) - pairs + _launches_of_padding(problem),
            operators=_operators(problem),
        )
        for own in cuts:
            work += own.loops(problem, device)
        work += half_operands.work(problem, device)
        if problem.resets:
            work += _resets(problem, planes)
        if isinstance(problem.cell, Regularised):
            work += _masks(problem, problem.cell, planes)
        if problem.proj_size:
            return work + _folded(problem, planes)
        if problem.rebuilds_gates:
            return work + _segmented(problem, planes)
        return work

    def kept(self, problem: Problem, device: Device) -> tuple[TensorSpec, ...]:
        return _kept_of(problem, device) if problem.needs_grad else ()

    def workspace_bytes(self, problem: Problem, device: Device) -> int:
        return _memory_of(problem, device).workspace_bytes

    def forward(self, problem: Problem, inputs: Inputs) -> Result:
        replayed = _stack_of()(problem)
        carries = carries_hidden(problem) if replayed is None else replayed.carries_hidden
        if carries:
            inputs = as_carried(problem, inputs)
        if replayed is not None:
            result = replayed.forward(inputs)
        else:
            result = stack.forward(problem, inputs, _layer_passes(problem).forward)
        return without_hidden(problem, result) if carries else result

    def backward(
        self, problem: Problem, inputs: Inputs, result: Result, gradients: OutputGradients, needs: Needs
    ) -> InputGradients:
        replayed = _stack_of()(problem)
        carries = carries_hidden(problem) if replayed is None else replayed.carries_hidden
        if carries:
            inputs, gradients = as_carried(problem, inputs), gradients_as_carried(problem, gradients)
        if replayed is not None:
            found = replayed.backward(inputs, result, gradients, needs)
        else:
            found = stack.backward(problem, inputs, result, gradients, needs, _layer_passes(problem).backward)
        return gradients_without_hidden(problem, found) if carries else found

    def recorded(self, problem: Problem, inputs: Inputs) -> Result | None:
        return None

    def operator(self, problem: Problem, device: Device) -> Operator | None:
        return None

    def in_graph(self, problem: Problem, device: Device) -> Operator | None:
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


def _launches_of_padding(problem: Problem) -> int:
    # Inputs whose size is not a multiple of 8 are copied with their weights, and so are both gradients.
    padded = sum(problem.layer_input_size(layer) % 8 > 0 for layer in range(problem.num_layers))
    directions = problem.num_directions
    return padded * (1 + directions + (1 + 2 * directions if problem.needs_grad else 0))


def _operators(problem: Problem) -> int:
    # Outputs and scratch memory are allocated; each weight and its gradient pass through autograd, as do input, states
    # and outputs. Lengths are copied to the device and put in order.
    tensors = problem.weights_per_direction * problem.num_layers * problem.num_directions if problem.needs_grad else 0
    ragged = problem.layout is not Layout.DENSE
    around = 4 + (8 if problem.needs_grad else 0) + 3 * ragged
    if is_laid_out(problem):
        return around + tensors
    # Every launch has its views, and every layer memory of its own.
    return around + tensors + problem.num_layers * (6 + 2 * _launches(problem))


def _planes_of_cell(problem: Problem) -> float:
    # What the passes of a cell that is not fused write and read beyond one state in the dtype of the tensors: all
    # carried states in float32 and, with a second tensor of sums, those of the four gates and the gradients of the
    # first tensor.
    if has_fused_passes(problem.cell) or not problem.needs_grad:
        return 0.0
    states = 2 * (len(carried_states(step_cell(problem.cell))) * 4 / problem.element_bytes - 1)
    return states + (12 if has_two_tensors(problem.cell) else 0)


def _folded(problem: Problem, planes: int) -> Work:
    # The product of the two matrices, and the unprojected states with their gradients.
    passes, each = 2 if problem.needs_grad else 1, problem.num_layers * problem.num_directions
    return Work(
        matmul_flops=8.0 * passes * each * problem.hidden_size**2 * problem.proj_size,
        bytes_moved=problem.num_layers * planes * (8 if problem.needs_grad else 2),
        launches=(12 if problem.needs_grad else 4) * each,
        operators=(30 if problem.needs_grad else 5) * each,
    )


def _resets(problem: Problem, planes: int) -> Work:
    # Both loops read a byte for each token, and so does the copy of the hidden states for the gradient of the weights,
    # which without resets may be read in place.
    read = problem.num_layers * problem.num_directions * problem.time * problem.batch * (3 if problem.needs_grad else 1)
    copies = problem.needs_grad and not copies_states(problem.replace(resets=False))
    return Work(bytes_moved=read + 2 * copies * problem.num_layers * planes)


def _masks(problem: Problem, cell: Regularised, planes: int) -> Work:
    # The loops read a byte for each unit of each mask of steps. With recurrent dropout, hidden states are stored twice,
    # and two launches make the first of them.
    loops, layers = 2 if problem.needs_grad else 1, problem.num_layers
    units = layers * problem.num_directions * problem.time * problem.batch * problem.hidden_size
    drops = drops_hidden(cell)
    return Work(
        bytes_moved=loops * len(cell.of_steps) * units + drops * layers * planes,
        launches=2 * drops * layers,
        operators=0 if is_laid_out(problem) else 2 * drops * layers,
    )


def _segmented(problem: Problem, planes: int) -> Work:
    # The forward pass's products are made again and activated; each segment after the first has launches and products
    # of its own, and its loop reads the weights and waits for its first step anew.
    layers, directions = problem.num_layers, problem.num_directions
    cut = lean_cut(problem)
    more_forward, more_backward = len(lean_forward_pieces(problem)) - 1, cut.segments - 1
    again = sum(cut.rebuilt) / problem.time
    launches = 1 + 3 * directions + more_forward * (1 + directions) + more_backward * (4 + 5 * directions)
    matrix = 4 * hidden_of(problem.hidden_size) ** 2 * problem.element_bytes
    return Work(
        matmul_flops=again * problem.matmul_flops,
        exact_flops=again * problem.matmul_flops if exact_products(problem) else 0.0,
        bytes_moved=12.0 * again * layers * planes + layers * directions * (more_forward + more_backward) * matrix,
        launches=layers * launches,
        operators=0 if is_laid_out(problem) else 3 * layers * launches,
        exchanges=layers * (more_forward + more_backward),
    )


@functools.cache
def _stack_of() -> Callable[[Problem], Stack | None]:
    # Imported with the toolchain for CUDA, which is not needed to choose a kernel, nor on a CPU.
    from gatewise.kernels.persistent.replay import stack_of

    return stack_of


def _memory_of(problem: Problem, device: Device) -> Memory:
    # Imported as above.
    from gatewise.kernels.persistent.dry_run import memory_of

    return memory_of(problem, device)


def _kept_of(problem: Problem, device: Device) -> tuple[TensorSpec, ...]:
    # Imported as above.
    from gatewise.kernels.persistent.dry_run import kept_of

    return kept_of(problem, device)


def _layer_passes(problem: Problem) -> LayerPasses:
    # Imported as above.
    from gatewise.kernels.persistent.schedules.schedule import layer_passes

    return layer_passes(problem)


class _Pass(NamedTuple):
    """One of the two passes: how a layer is cut, and how two are that run beside each other, if layers go in pairs."""

    name: str
    cut: Tiling
    both: Tiling | None

    def loops(self, problem: Problem, device: Device) -> Work:
        """Return the work of the loops over all steps: what lies between them is stated elsewhere."""
        pairs, single = divmod(problem.num_layers, 2) if self.both else (0, problem.num_layers)
        loops = [_loop(problem, self.cut, device)] * single
        loops += [_loop(problem, self.both, device)] * pairs if self.both else []
        return sum(loops, start=Work())


def _loop(problem: Problem, cut: Tiling, device: Device) -> Work:
    # Two layers are a step apart. A step is repeated for groups of rows, and for directions, that follow each other.
    in_turn = 1 if cut.stacked else problem.num_directions / cut.directions
    steps = (problem.time + cut.stacked) * in_turn * cut.rounds
    operand = cut.rows * cut.depth * cut.value_bytes * cut.blocks * cut.together * cut.directions
    if cut.eights > 1:
        # The loads of several groups of rows are in flight together, so that a block waits for fewer of them.
        operand *= ranking.weights(device, "persistent several groups")["loads"]
    # Blocks of cells that are not fused exchange hidden states in plain rows. They add up the statistics of a row when
    # they arrive, and only then go on.
    each = ranking.weights(device, "persistent statistics")
    exchanges = 1.0 if cut.cell_size is None else each["states"] + each["exchanges"] * cut.cell_size.places
    flops = steps * 2.0 * 16 * cut.tiles * cut.depth * cut.rows * device.multiprocessors
    if cut.distributed:
        # Blocks of a cluster wait for each other for a shorter time, and send nothing through the cache.
        share = ranking.weights(device, "persistent clusters")["exchanges"]
        return Work(resident_flops=flops, exchanges=round(share * steps))
    return Work(resident_flops=flops, cached_bytes=steps * operand, exchanges=round(steps * exchanges))


def _placed(cut: Tiling) -> str:
    at_a_time = f" ({8 * cut.eights} at a time)" if cut.eights > 1 else ""
    number = cut.blocks * cut.together * cut.directions
    blocks = f"{cut.units} units x {cut.rows} rows per block{at_a_time}, {number} blocks"
    products = ", products by warpgroups" if cut.warpgroups else ""
    shared = ", values in distributed shared memory" if cut.distributed else ""
    return blocks + (f" in clusters of {cut.cluster}" if cut.cluster > 1 else "") + products + shared


def _passes(problem: Problem, device: Device) -> list[_Pass]:
    names = ("forward", "backward") if problem.needs_grad else ("forward",)
    sizes = problem.hidden_size, problem.batch, problem.num_directions
    number = problem.element_bytes, exact_products(problem)
    cuts = []
    for name, backward in zip(names, (False, True), strict=False):
        where = device_of_pass(problem, device, backward=backward)
        size, masked = cell_size_of(problem.cell, backward=backward), bool(macros_of(problem.cell))
        ragged = problem.layout is not Layout.DENSE
        options = {"masked": masked, "one_group": ragged, "one_step": problem.time == 1}
        cuts.append((name, tiling(*sizes, where, backward, *number, size, **options)))
    return [
        _Pass(name, cut, layer_pairs.stacked_cut(problem, device, backward=name == "backward"))
        for name, cut in cuts
        if cut is not None
    ]


persistent = _Persistent()
