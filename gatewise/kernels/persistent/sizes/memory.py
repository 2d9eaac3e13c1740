"""What a call does for the sake of memory: what is laid out, overwritten, kept or copied, and where it is cut.

The memory of a call is not stated here: a dry run counts it (`persistent.dry_run`). Only the cuts for gradient
checkpointing are chosen by an estimate, because dozens are compared for each problem.
"""

from __future__ import annotations

import bisect
import functools

import torch

from gatewise.contract import ranking
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.kernels.persistent.sizes.exactness import rounds_to_tf32
from gatewise.kernels.persistent.sizes.padding import hidden_of
from gatewise.kernels.persistent.sizes.segments import Cut, evenly, in_order, mirrored
from gatewise.kernels.persistent.sizes.step import drops_hidden, has_fused_passes

# The fewest rows of a batch, and the fewest bytes of a hidden state. Gradients take four times as much memory, and most
# backward passes of up to 256 units in 16 bits run in clusters.
_LEAST_INTERLEAVED = {"forward": (2, 512), "backward": (5, 528)}
_COUNTS = (1, 2, 3, 5, 7, 9, 11, 13, 15)  # of segments
_PARTS_WITH_GATES_KEPT = ((1, 1), (1, 2), (2, 1), (1, 3), (2, 2), (3, 1), (2, 3), (3, 2), (3, 3))  # made again, kept
_MOST_TRIED = 64  # numbers of steps whose gates are kept
_SHARE = 0.35  # of the memory that nn.LSTM takes
_UNSPLIT = 2 << 20  # bytes that PyTorch's allocator may add to what a call keeps and to what it works in
_LITTLE_MORE = 1.1  # times the least that any number of segments takes
_WORTH_A_PRODUCT = 3 << 20  # bytes copied in the time that a small product takes
_REFERENCE = Device.named("h200")  # cuts depend on the problem alone, so that memory can be predicted from it
_PRODUCT_BYTES = 8 << 20  # that cuDNN takes for library products of a layer's direction


def is_laid_out(problem: Problem) -> bool:
    """Whether a call takes all its memory before its first launch, so that it can be replayed."""
    return not problem.traced and not problem.proj_size


def exchanges_in_gates(problem: Problem) -> bool:
    """Whether blocks exchange the gradients of the gate sums in the memory of the gates, which they overwrite.

    A word itself tells whether it is a gradient that has arrived or still a gate: by the last bit of numbers that are
    rounded to TF32, which is otherwise unused. A compiled call may not change what it keeps. In 16 bits, gradients
    overwrite gates where `interleaves_rows`, but blocks exchange them elsewhere.
    """
    if not has_fused_passes(problem.cell):
        return False
    return rounds_to_tf32(problem) and (problem.rebuilds_gates or not problem.traced)


def interleaves_rows(problem: Problem, *, backward: bool) -> bool:
    """Whether blocks of a pass may exchange values in interleaved rows, so that loads are whole lines of the cache.

    The exchange buffer has no other use: outputs, or gradients of gate sums, are stored a second time, the latter over
    the gates. Lean calls save this memory, and in backward passes small batches would take too much of it. Narrow
    layers gain nothing, and in a single step nothing is exchanged. With recurrent dropout, the exchanged hidden states
    are themselves kept for the backward pass, whose products read plain rows. Gradients in TF32 are exchanged in the
    memory of the gates, and those of exact float32 in plain rows. A compiled call may not change the gates.
    """
    if not has_fused_passes(problem.cell) or problem.lean or problem.time == 1:
        return False
    if problem.element_bytes == 4 or problem.traced if backward else drops_hidden(problem.cell):
        return False
    row = hidden_of(problem.hidden_size) * problem.element_bytes
    rows, least = _LEAST_INTERLEAVED["backward" if backward else "forward"]
    return problem.batch >= rows and row >= least


def keeps_matrices(problem: Problem) -> bool:
    """Whether input weights that were rounded up for the forward pass are kept for the backward pass.

    In 16 bits only: in float32 they would take a step's memory beyond what it is to be.
    """
    if not problem.needs_grad or problem.rebuilds_gates or problem.proj_size:
        return False
    return _is_odd(problem) and problem.element_bytes == 2


def copies_states(problem: Problem) -> bool:
    """Whether the hidden states that went into the steps are copied side by side, h0 and all outputs but the last.

    One product then makes the gradient of the recurrent weights. Otherwise the first step has one of its own, which
    reads and writes all of that gradient once more.
    """
    hidden = problem.hidden_size
    if _is_odd(problem) or problem.proj_size or problem.time == 1 or _is_ragged(problem) or problem.resets:
        return True  # with resets, zeros take the place of some
    copied = problem.time * problem.batch * hidden * (4 if problem.bidirectional else 1)  # rows with gaps go slowly
    return copied < 4 * hidden * hidden + _WORTH_A_PRODUCT // problem.element_bytes


@functools.lru_cache(maxsize=4096)
def lean_cut(problem: Problem) -> Cut:
    """Return how the lean backward pass cuts a sequence.

    Segments cost their launches and products, weighed as they were measured on one GPU, so that the memory of a call
    is the same on all; gates that the forward pass keeps for the last of them need
    not be made again. Of all cuts that leave the memory beside inputs, weights, outputs and gradients within 0.35 of
    what `torch.nn.LSTM` takes, it is the one that ranks first by them; where none does, the one with the fewest
    segments that takes at most a tenth more than the least.
    """
    plain = [Cut(evenly(problem.time, count)) for count in _COUNTS]
    taken = {cut: _lean(problem, cut, holds=cut.segments > 1) for cut in plain}
    allowed = max(_allowed(problem), _LITTLE_MORE * min(taken.values()))
    best = next(cut for cut in taken if taken[cut] <= allowed)
    # A compiled call may not change what it keeps.
    for rebuilt, kept in () if problem.traced else _PARTS_WITH_GATES_KEPT:
        found = _most_kept(problem, rebuilt, kept, allowed - _UNSPLIT)
        if found is not None and _lean_rank(problem, found) < _lean_rank(problem, best):
            best = found
    return best


def _most_kept(problem: Problem, rebuilt: int, kept: int, allowed: float) -> Cut | None:
    """Return the cut into so many segments with the most gates kept that memory allows."""
    time, cut = problem.time, mirrored if problem.bidirectional else in_order
    every = range(1, time, max(1, time // _MOST_TRIED))
    cuts = [found for steps in every if (found := cut(time, steps, rebuilt, kept)) is not None]
    # Gates that are made again take the place of kept ones, which are used up by then.
    cuts = [own for own in cuts if max(own.rebuilt) <= own.kept_steps]
    fitting = bisect.bisect_right(cuts, allowed, key=lambda own: _lean(problem, own, holds=True))
    return cuts[fitting - 1] if fitting else None


def _lean_rank(problem: Problem, cut: Cut) -> float:
    """Return the additional cost of a checkpointed step over an ordinary one, by the weights that rank its cuts."""
    weights = ranking.weights(_REFERENCE, "persistent segments")
    exact = problem.dtype == torch.float32 and not problem.allow_tf32
    rate = weights["exact_flops"] if exact else weights["flops"] * 2 / problem.element_bytes
    moved = 8 * problem.num_layers * _plane(problem) * problem.element_bytes
    again = problem.matmul_flops / rate + moved / weights["memory_bytes"]
    matrix = 4 * hidden_of(problem.hidden_size) ** 2 * problem.element_bytes
    segment = weights["segment"] + matrix / weights["weight_bytes"]
    return (
        again * sum(cut.rebuilt) / problem.time + segment * problem.num_layers * problem.num_directions * cut.segments
    )


@functools.lru_cache(maxsize=4096)
def holds_matrices(problem: Problem) -> bool:
    """Whether the lean backward pass keeps input weights that it rounded up until it needs them again."""
    cut = lean_cut(problem)
    return cut.segments > 1 or _lean(problem, cut, holds=True) <= _allowed(problem)


def _allowed(problem: Problem) -> float:
    kept = problem.num_layers * _plane(problem) + (problem.num_layers - 1) * _outputs(problem)
    return _SHARE * _of_nn_lstm(problem) - kept * problem.element_bytes


@functools.lru_cache(maxsize=4096)
def lean_forward_pieces(problem: Problem) -> tuple[int, ...]:
    """Return the steps of the segments of the lean forward pass: as few as take no more than backward.

    If there are several and gates are kept, the last one is that of the steps whose gates are.
    """
    cut = lean_cut(problem)
    # It has no gradients beside it yet.
    gradients = problem.parameter_count + problem.time * problem.batch * problem.x_size
    allowed = _lean(problem, cut, holds_matrices(problem)) + gradients * problem.element_bytes
    others = [evenly(sum(cut.rebuilt), count) for count in _COUNTS]
    ways = [(problem.time,), *((*own, cut.kept_steps) if cut.kept else own for own in others)]
    return next((own for own in ways if _lean_forward(problem, own) <= allowed), ways[-1])


def _of_nn_lstm(problem: Problem) -> int:
    # What the kernel `cudnn` states of its ordinary algorithm, and in bfloat16 a copy of the weights: nn.LSTM lays them
    # side by side in one buffer for the other dtypes alone, so PyTorch does it in every call.
    layers, time = problem.num_layers, max(problem.time, 1)
    values = 6 * layers - 1 + 6 + 10 * layers / time + 1.5 * problem.bidirectional
    tokens = problem.time * problem.batch * problem.num_directions * problem.hidden_size
    stored = problem.parameter_count * (1 + (problem.dtype == torch.bfloat16)) + round(values * tokens)
    return stored * problem.element_bytes + _PRODUCT_BYTES * layers * problem.num_directions


def _masks(problem: Problem) -> int:
    # A byte a value.
    values = (problem.num_layers - 1) * problem.time * problem.batch * problem.output_size
    return values // problem.element_bytes * (problem.dropout > 0)


def _inputs(problem: Problem) -> set[int]:
    return {problem.layer_input_size(layer) for layer in range(problem.num_layers)}


def _widened(rows: int, columns: int) -> int:
    return rows * hidden_of(columns) * (columns % 8 > 0)


def _copied_inputs(problem: Problem, tokens: int, layer: int) -> int:
    """Return the values of a layer's inputs where products of the backward pass cannot read them as they lie."""
    features = problem.layer_input_size(layer)
    # What lies beyond the ends of sequences may be anything, but for outputs of a layer below.
    return tokens * hidden_of(features) * (features % 8 > 0 or (_is_ragged(problem) and layer == 0))


def _matrix(problem: Problem, features: int) -> int:
    odd = _is_odd(problem) or features % 8 > 0
    return len(problem.cell.gates) * hidden_of(problem.hidden_size) * hidden_of(features) * odd


def _dgates(problem: Problem, tokens: int) -> int:
    return 0 if exchanges_in_gates(problem) else 4 * tokens * _width(problem)


def _lean(problem: Problem, cut: Cut, holds: bool) -> int:
    """Return the bytes that the lean backward pass takes so cut, and kept gates, with input weights held or not."""
    return _lean_workspace_bytes(problem, cut, holds) + _kept_gates(problem, cut) * problem.element_bytes


def _kept_gates(problem: Problem, cut: Cut) -> int:
    return 4 * problem.num_layers * cut.kept_steps * problem.batch * _width(problem)


def _lean_workspace_bytes(problem: Problem, cut: Cut, holds: bool) -> int:
    """Estimate the bytes of scratch memory of the lean backward pass, with input weights held or not."""
    tokens, size, directions = cut.longest * problem.batch, problem.hidden_size, problem.num_directions
    odd, ragged, several = _is_odd(problem), _is_ragged(problem), cut.segments > 1
    copied = directions if odd or problem.resets else ragged and problem.bidirectional
    history = tokens * hidden_of(size) * copied
    layers = []
    for layer in range(problem.num_layers):
        features = problem.layer_input_size(layer)
        w_ih, w_hh = _matrix(problem, features), _matrix(problem, size) * odd
        inputs = _copied_inputs(problem, tokens, layer)
        # Both directions read the only segment; matrices and sums of their gradients last over several.
        held = directions * w_ih * holds + inputs * (directions if several else 1) + history
        lasting = directions * (w_ih + 2 * w_hh) if several else max(w_ih, w_hh)
        wide = tokens * hidden_of(features) * (features % 8 > 0)
        gates = 0 if cut.kept else 4 * max(cut.rebuilt) * problem.batch * _width(problem)
        gates += _dgates(problem, tokens)
        layers.append(
            gates
            + held
            + (lasting + wide if several else max(lasting, wide + w_ih * (not holds)))
            + problem.time * problem.batch * features * (problem.dropout > 0)
        )
    states = (4 + (several and (odd or directions == 2)) + ragged) * directions * problem.batch * size
    between = _outputs(problem) * min(2, problem.num_layers - 1)
    return (between + max(layers) + states + _masks(problem)) * problem.element_bytes


def _lean_forward(problem: Problem, pieces: tuple[int, ...]) -> int:
    # The gates of the last segment of several lie where they are kept.
    cut = lean_cut(problem)
    in_scratch = pieces[:-1] if cut.kept and len(pieces) > 1 else pieces
    layers = [
        (4 * max(in_scratch) + _is_odd(problem) * max(pieces)) * problem.batch * _width(problem)
        + problem.num_directions * _matrix(problem, features)
        + _widened(max(pieces) * problem.batch, features)
        + problem.time * problem.batch * features * (problem.dropout > 0)
        for features in _inputs(problem)
    ]
    return (max(layers) + _masks(problem) + _kept_gates(problem, cut)) * problem.element_bytes


def _outputs(problem: Problem) -> int:
    return problem.time * problem.batch * problem.output_size


def _plane(problem: Problem) -> int:
    return problem.time * problem.batch * _width(problem)


def _width(problem: Problem) -> int:
    return problem.num_directions * hidden_of(problem.hidden_size)


def _is_odd(problem: Problem) -> bool:
    return problem.hidden_size % 8 > 0


def _is_ragged(problem: Problem) -> bool:
    return problem.layout is not Layout.DENSE
