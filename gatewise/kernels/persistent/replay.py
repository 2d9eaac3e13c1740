"""A stack of layers in memory that is laid out before its first launch, so that calls can be recorded and replayed.

Nothing is allocated between the first launch and the last, so the launches depend on addresses alone, and those of a
call at the same addresses are replayed as a CUDA graph (`gatewise.kernels.cuda.graphs`). `memory.is_laid_out` says for
which problems this is done.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gatewise.contract import token_factors
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.saved import InputGradients, Inputs, Needs, OutputGradients, Result
from gatewise.contract.weights import Place, places
from gatewise.kernels import stack
from gatewise.kernels.cuda.allocations import counting_scratch, run_dry
from gatewise.kernels.cuda.graphs import Replays, product_settings
from gatewise.kernels.cuda.scratch import Scratch
from gatewise.kernels.cuda.static_tensors import CallTensors
from gatewise.kernels.persistent import buffers, launches
from gatewise.kernels.persistent.buffers import order_of, order_of_outputs
from gatewise.kernels.persistent.launches import Tokens
from gatewise.kernels.persistent.schedules.schedule import layer_schedule, schedule_of
from gatewise.kernels.persistent.sizes import layer_pairs, memory
from gatewise.kernels.persistent.sizes.gradients import gradients_dtype
from gatewise.kernels.persistent.sizes.step import carried_size, carries_hidden
from gatewise.kernels.stack import LayerGradients

_ALL = Needs()
_MOST_GRAPHS = 16  # of a problem: in some loops that carry a state, addresses repeat every few iterations
_PATIENCE = 8  # in others they do not repeat
# Of a problem with one step. Calls in a loop over time, such as those of a policy in reinforcement learning, all have
# their own addresses, which come back when the loop begins again. Each graph has a few small nodes, beside which copies
# of small tensors take long.
_MOST_GRAPHS_OF_A_STEP, _PATIENCE_OF_A_STEP = 512, 1024

# The methods `forward` and `backward` are the CPU's share of a replayed call: each Python call and each operator shows
# in its time, the more so where caches have gone cold since the last call.


class Stack(NamedTuple):
    """A stack of layers, with all that its calls would otherwise have to find out each time.

    Attributes:
        problem: The problem.
        straight: Whether calls whose tensors are all contiguous use the tokens and recordings below.
        tokens: The order of the tokens of such calls.
        input: The shape of x.
        output: The shape of the outputs.
        hidden: The shape of hidden states.
        cell: The shape of cell states.
        forward_replays: The recordings of forward passes.
        backward_replays: The recordings of backward passes that compute all gradients.
        kept_bytes: The number of bytes that a forward pass keeps.
        parameters: The number of values of all weights.
        gradients: The dtype of the weights' gradients.
        places: The place of each weight's gradient in their buffer.
        carries_hidden: Whether the hidden state is one of the carried states.
    """

    problem: Problem
    straight: bool
    tokens: Tokens
    input: tuple[int, int, int]
    output: tuple[int, int, int]
    hidden: tuple[int, int, int]
    cell: tuple[int, int, int]
    forward_replays: Replays
    backward_replays: Replays
    kept_bytes: int
    parameters: int
    gradients: torch.dtype
    places: tuple[Place, ...]
    carries_hidden: bool

    def forward(self, inputs: Inputs) -> Result:
        """Compute the outputs."""
        problem, tokens = self.problem, self.tokens
        x, h0, c0, weights, lengths, _, masks, resets = inputs
        fit = all([weight.is_contiguous() and weight.data_ptr() % 16 == 0 for weight in weights])  # noqa: C419  no generator
        read = (x, h0, c0, lengths, *masks)
        if self.straight and fit and all([tensor is None or tensor.is_contiguous() for tensor in read]):  # noqa: C419
            replays, y = self.forward_replays, x.new_empty(*self.output)
        else:
            tokens = order_of(x, problem)
            replays = _replays("forward", problem, _orders(problem, tokens, x), _ALL)
            inputs = _contiguous(problem, inputs, tokens)
            x, h0, c0, weights, lengths, _, masks, _ = inputs
            y = tokens.new(x, width=problem.output_size)
        h_n, c_n = x.new_empty(*self.hidden), x.new_empty(*self.cell)
        # One allocation holds all of it, so that it is freed at once, and its address is read once.
        kept = (x.new_empty(self.kept_bytes, dtype=torch.uint8),) if problem.needs_grad else ()
        _play(
            replays,
            x,
            (*weights, x, h0, c0, lengths, resets, *masks),
            (y, h_n, c_n, *kept),
            len(weights) if problem.bidirectional else 0,  # both directions can be multiplied together
            lambda read, written, scratch: issue_forward(
                problem, _reading(inputs, read), _writing(written), tokens, scratch
            ),
        )
        return Result(y, h_n, c_n, kept)

    def backward(self, inputs: Inputs, result: Result, gradients: OutputGradients, needs: Needs) -> InputGradients:
        """Compute the gradients of the inputs."""
        problem, tokens, above, y = self.problem, self.tokens, gradients, result.y
        needs_x, needs_state, needs_weights = needs
        x, h0, c0, weights, lengths, _, masks, resets = inputs
        fit = all([weight.is_contiguous() and weight.data_ptr() % 16 == 0 for weight in weights])  # noqa: C419  as above
        read = (x, h0, c0, lengths, y, *masks, *gradients)
        if self.straight and fit and all([tensor is None or tensor.is_contiguous() for tensor in read]):  # noqa: C419
            replays = self.backward_replays if needs == _ALL else _replays("backward", problem, False, needs)
            dx = x.new_empty(*self.input) if needs_x else None
        else:
            tokens = order_of_outputs(y)
            inputs = _contiguous(problem, inputs, tokens)
            x, h0, c0, weights, lengths, _, masks, _ = inputs
            above = layer_schedule(problem).gradients_in_order(gradients, tokens)
            replays = _replays("backward", problem, _orders(problem, tokens, x, above.y), needs)
            dx = tokens.new(x, width=problem.input_size) if needs_x else None
        into = (
            dx,
            x.new_empty(*self.hidden) if needs_state else None,
            x.new_empty(*self.cell) if needs_state else None,
            x.new_empty(self.parameters, dtype=self.gradients) if needs_weights else None,
        )
        _play(
            replays,
            x,
            (*weights, x, h0, c0, lengths, resets, *masks, y, *result.kept, *above),
            into,
            len(weights) if problem.bidirectional else 0,  # both directions can be multiplied together
            lambda read, written, scratch: issue_backward(
                problem, *_reading_results(inputs, result, read), written, tokens, scratch
            ),
        )
        _, dh0, dc0, buffer = into
        if buffer is None:
            return InputGradients(dx, dh0, dc0, (None,) * len(weights))
        # Views are made while the device is at work.
        return InputGradients(dx, dh0, dc0, tuple([buffer.as_strided(*place) for place in self.places]))


@functools.lru_cache(maxsize=256)
def stack_of(problem: Problem) -> Stack | None:
    """Return the stack of a problem; None if its memory is not laid out before the first launch."""
    if not memory.is_laid_out(problem):
        return None
    rows = problem.num_layers * problem.num_directions
    return Stack(
        problem,
        straight=problem.layout in (Layout.DENSE, Layout.DEVICE_LENGTHS) and not problem.rebuilds_gates,
        tokens=Tokens(problem.time, problem.batch, by_row=False),
        input=(problem.time, problem.batch, problem.input_size),
        output=(problem.time, problem.batch, problem.output_size),
        hidden=(rows, problem.batch, problem.state_size),
        cell=(rows, problem.batch, carried_size(problem)),
        forward_replays=_replays("forward", problem, False, _ALL),
        backward_replays=_replays("backward", problem, False, _ALL),
        kept_bytes=kept_bytes(problem),
        parameters=problem.parameter_count,
        gradients=gradients_dtype(problem),
        places=places(buffers.weight_shapes(problem))[0],
        carries_hidden=carries_hidden(problem),
    )


@functools.lru_cache(maxsize=4096)
def kept_bytes(problem: Problem) -> int:
    """Return the bytes of the allocation that holds all that a forward pass keeps; 0 in inference."""
    return run_dry(lambda: count_kept(problem)) if problem.needs_grad else 0


def count_kept(problem: Problem) -> int:
    """Return `kept_bytes` of a training call; within `run_dry`."""
    scratch = counting_scratch(problem.dtype)
    _new_kept(problem, scratch, Tokens(problem.time, problem.batch, by_row=False))
    return scratch.needed


@functools.lru_cache(maxsize=256)
def _replays(name: str, problem: Problem, orders: bool | tuple[bool, ...], needs: Needs) -> Replays:
    """Return the recordings of one kind of call, which the arguments identify."""
    single = problem.time == 1
    most, patience = (_MOST_GRAPHS_OF_A_STEP, _PATIENCE_OF_A_STEP) if single else (_MOST_GRAPHS, _PATIENCE)
    # Calls that warm up for the capture of a graph by the caller are not worth recording.
    return Replays(0 if problem.captured else most, patience)


def _orders(problem: Problem, tokens: Tokens, *tensors: Tensor | None) -> bool | tuple[bool, ...]:
    """Return the orders in which tensors have their tokens, by which calls at the same addresses can differ."""
    if not problem.rebuilds_gates:
        return tokens.by_row
    return tuple(tensor is not None and tensor.is_contiguous() for tensor in tensors)


def _contiguous(problem: Problem, inputs: Inputs, tokens: Tokens) -> Inputs:
    x, h0, c0, weights, lengths, _, masks, resets = inputs
    weights = tuple([launches.aligned(weight) for weight in weights])
    # Checkpointed layers read x by segments, and copy no more of it if it is in the order of rows.
    if not (tokens.by_row or (problem.rebuilds_gates and x.transpose(0, 1).is_contiguous())):
        x = x.contiguous()
    lengths, masks = buffers.on_device(lengths, x.device), tuple([mask.contiguous() for mask in masks])
    return Inputs(x, h0.contiguous(), c0.contiguous(), weights, lengths, None, masks, resets)


def _reading(inputs: Inputs, read: Sequence[Any]) -> Inputs:
    """Return inputs with the tensors that a forward pass reads, in the order in which `Stack.forward` lists them."""
    count = len(inputs.weights)
    x, h0, c0, lengths, resets, *masks = read[count:]
    return Inputs(x, h0, c0, tuple(read[:count]), lengths, None, tuple(masks), resets)


def _writing(written: Sequence[Any]) -> Result:
    """Return results with the tensors that a forward pass writes, in the order in which `Stack.forward` lists them."""
    y, h_n, c_n, *kept = written
    return Result(y, h_n, c_n, tuple(kept))


def _reading_results(inputs: Inputs, result: Result, read: Sequence[Any]) -> tuple[Inputs, Result, OutputGradients]:
    """Return the inputs, results and gradients that a backward pass reads.

    The tensors of `read` are in the order in which `Stack.backward` lists them.
    """
    count = len(read) - len(OutputGradients._fields)
    first = count - len(result.kept) - 1
    y, *kept = read[first:count]
    return _reading(inputs, read[:first]), result._replace(y=y, kept=tuple(kept)), OutputGradients(*read[count:])


def _play(
    replays: Replays,
    like: Tensor,
    read: tuple[Tensor | None, ...],
    written: tuple[Tensor | None, ...],
    neighbours: int,
    issue: Callable[[Sequence[Any], Sequence[Any], Scratch], None],
) -> None:
    """Call `issue` with tensors to read and to write and scratch memory, or replay the launches of an earlier call."""
    device = like.device
    if device.index != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            _play(replays, like, read, written, neighbours, issue)
        return
    launches.raise_if_given_up(device.index)
    if token_factors.receiver.get() is not None:  # it gives each call memory of its own
        issue(read, written, Scratch(like))
        return
    size = replays.scratch_bytes
    if size is None:
        scratch = Scratch(like)
        issue(read, written, scratch)
        replays.scratch_bytes = scratch.needed
        return
    tensors = CallTensors(read, written, like.new_empty(size, dtype=torch.uint8), neighbours)
    replays.play(
        product_settings(), tensors, device, lambda own: issue(own.read, own.written, Scratch(like, own.scratch))
    )


def issue_forward(problem: Problem, inputs: Inputs, result: Result, tokens: Tokens, scratch: Scratch) -> None:
    """Launch the forward pass of all layers in the memory of `result`, with scratch memory for everything else."""
    count, directions = problem.num_layers, problem.num_directions
    x, width = inputs.x, problem.output_size
    below, kept = _kept(problem, result, tokens)
    below = below or _alternating(result.y, count, functools.partial(tokens.new, scratch, width=width))
    outputs = (*below, result.y)
    for layers in layer_pairs.turns(problem, scratch.device, backward=False):
        index, last = layers[0], layers[-1]
        rows = slice(index * directions, (last + 1) * directions)
        into = [Result(outputs[own], result.h_n[rows], result.c_n[rows], kept[own] if kept else ()) for own in layers]
        with scratch.frame():
            if index:
                x = _dropped(problem, inputs, index - 1, x, scratch)
            given = stack.layer_of(problem, inputs, layers, x)
            schedule_of(problem, layers).forward(problem, given, tokens, into, _mask(problem, inputs, layers), scratch)
        x = outputs[last]


def _kept(problem: Problem, result: Result, tokens: Tokens) -> tuple[list[Tensor], list[tuple[Tensor, ...]]]:
    """Return views of the kept memory: the outputs of all layers below the last, and what each layer keeps."""
    if not result.kept:
        return [], []
    return _new_kept(problem, Scratch(result.y, result.kept[0]), tokens)


def _new_kept(problem: Problem, room: Scratch, tokens: Tokens) -> tuple[list[Tensor], list[tuple[Tensor, ...]]]:
    layers, schedule = range(problem.num_layers), layer_schedule(problem)
    below = [tokens.new(room, width=problem.output_size) for _ in layers[1:]]
    return below, [schedule.new_kept(problem, problem.layer_input_size(layer), room, tokens) for layer in layers]


def _alternating(last: Tensor, count: int, new: Callable[[], Tensor]) -> list[Tensor]:
    """Return the outputs of the layers below the last in two alternating buffers, as each layer reads only one."""
    if count == 1:
        return []
    other = new()
    return [last if (count - 1 - index) % 2 == 0 else other for index in range(count - 1)]


def issue_backward(
    problem: Problem,
    inputs: Inputs,
    result: Result,
    above: OutputGradients,
    into: Sequence[Tensor | None],
    tokens: Tokens,
    scratch: Scratch,
) -> None:
    """Launch the backward pass of all layers, from the last layer to the first.

    Args:
        problem: The problem.
        inputs: The inputs.
        result: The result of the forward pass.
        above: The gradients of the outputs, in the order of `tokens`.
        into: The memory for the gradients of x, h0, c0 and all weights, one after the other; None for those not wanted.
        tokens: The order of the tokens.
        scratch: The memory for everything else.
    """
    of_x, of_h0, of_c0, buffer = into
    count, directions = problem.num_layers, problem.num_directions
    below, kept = _kept(problem, result, tokens)
    outputs, share = (*below, result.y), directions * problem.weights_per_direction
    weights = () if buffer is None else buffers.views_like(buffer, inputs.weights)
    vectors = _vectors(weights, inputs.x.dtype, scratch)
    written = tuple([vectors.get(number, weight) for number, weight in enumerate(weights)])
    between = [tokens.new(scratch, width=problem.output_size) for _ in range(min(2, count - 1))]
    dy = above.y
    for layers in reversed(layer_pairs.turns(problem, scratch.device, backward=True)):
        index, last = layers[0], layers[-1]
        rows = slice(index * directions, (last + 1) * directions)
        dx = between[index % 2 if count > 2 else 0] if index else of_x
        with scratch.frame():
            x = inputs.x if index == 0 else _dropped(problem, inputs, index - 1, outputs[index - 1], scratch)
            results = [Result(outputs[own], result.h_n, result.c_n, kept[own]) for own in layers]
            given = stack.layer_of(problem, inputs, layers, x)
            found = LayerGradients(
                dx, _rows(of_h0, rows), _rows(of_c0, rows), written[index * share : (last + 1) * share]
            )
            from_above = OutputGradients(dy, _rows(above.h_n, rows), _rows(above.c_n, rows))
            schedule_of(problem, layers).backward(
                problem, given, results, from_above, found, _mask(problem, inputs, layers), scratch
            )
        if index and dx is not None:
            dy = _dropped(problem, inputs, index - 1, dx, scratch, out=dx)
    if vectors:
        torch._foreach_copy_([weights[number] for number in vectors], list(vectors.values()))


def _vectors(gradients: tuple[Tensor, ...], dtype: torch.dtype, scratch: Scratch) -> dict[int, Tensor]:
    """Return memory for the gradients that are vectors and have another dtype than the launches write, by number."""
    return {
        number: scratch.new_empty(gradient.shape, dtype=dtype)
        for number, gradient in enumerate(gradients)
        if gradient.dim() == 1 and gradient.dtype != dtype
    }


def _mask(problem: Problem, inputs: Inputs, layers: tuple[int, ...]) -> Tensor | None:
    """Return the dropout mask between the layers of a pair."""
    return inputs.masks[layers[0]] if problem.dropout and inputs.masks and len(layers) > 1 else None


def _rows(state: Tensor | None, rows: slice) -> Tensor | None:
    return None if state is None else state[rows]


def _dropped(
    problem: Problem, inputs: Inputs, gap: int, tensor: Tensor, scratch: Scratch, out: Tensor | None = None
) -> Tensor:
    if not (problem.dropout and inputs.masks):
        return tensor
    if out is None:
        out = torch.as_strided(scratch.new_empty(tensor.shape), tensor.shape, tensor.stride())
    return torch.mul(tensor, inputs.masks[gap], out=out).mul_(stack.survivors_scale(problem))
