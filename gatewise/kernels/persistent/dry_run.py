"""The memory of a call, counted in a dry run: its schedules run on tensors without memory, and launch nothing."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from gatewise.contract.device import Device
from gatewise.contract.kernel import TensorSpec
from gatewise.contract.masks import mask_specs
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.saved import Inputs, Needs, OutputGradients, Result
from gatewise.kernels import stack
from gatewise.kernels.cuda.allocations import Allocations, counting_scratch, run_dry
from gatewise.kernels.cuda.scratch import Scratch
from gatewise.kernels.persistent import buffers, replay
from gatewise.kernels.persistent.launches import Tokens
from gatewise.kernels.persistent.schedules.schedule import layer_passes
from gatewise.kernels.persistent.sizes.gradients import gradients_dtype
from gatewise.kernels.persistent.sizes.memory import is_laid_out
from gatewise.kernels.persistent.sizes.step import carried_size

Kept = tuple[TensorSpec, ...]

_TYPICAL_SIZE = 64  # of calls in place of those whose numbers of steps or sequences are symbols


class Memory(NamedTuple):
    """The memory of a call besides inputs, outputs and gradients.

    Attributes:
        kept: The tensors that the forward pass keeps for the backward pass.
        workspace_bytes: The bytes of the workspace at the peak, dropout masks included.
    """

    kept: tuple[TensorSpec, ...]
    workspace_bytes: int


def memory_of(problem: Problem, device: Device) -> Memory:
    """Return the memory of a call on a device, which this machine need not have."""
    if problem.captured or problem.announced:  # a call in a CUDA graph takes the same memory
        problem = problem.replace(captured=False, announced=False)
    return _memory_of(problem, device)


def kept_of(problem: Problem, device: Device) -> Kept:
    """Return the tensors that the forward pass of a call keeps, with symbols in their sizes if the problem has any.

    While `torch.compile` traces a graph for any number of steps or sequences, T or B is a symbol. No dry run takes
    symbols, and none is needed: every size of a kept tensor is `a + b T + c B + d T B` with integers that do not depend
    on T and B, and those follow from dry runs for two values of each.
    """
    if isinstance(problem.time, int) and isinstance(problem.batch, int):
        return memory_of(problem, device).kept
    times, batches = _two_values(problem.time), _two_values(problem.batch)

    def at(time: int) -> Kept:
        found = [memory_of(problem.replace(time=time, batch=batch), device).kept for batch in batches]
        return _on_line(batches, found, problem.batch)

    return _on_line(times, [at(time) for time in times], problem.time)


def _two_values(size: int) -> tuple[int, ...]:
    """Return two values in place of a symbol, and a number itself."""
    return (size,) if isinstance(size, int) else (_TYPICAL_SIZE, _TYPICAL_SIZE + 1)


def _on_line(places: Sequence[int], found: Sequence[Kept], size: int) -> Kept:
    """Return kept tensors whose sizes are the linear functions of `size` that have the sizes found at two places."""
    if len(places) == 1:
        return found[0]
    place, (first, second) = places[0], found

    def between(one: int, other: int) -> int:
        slope = other - one
        return one - place * slope + slope * size

    return tuple(
        [
            own._replace(shape=tuple(map(between, own.shape, other.shape)))
            for own, other in zip(first, second, strict=True)
        ]
    )


@functools.lru_cache(maxsize=4096)
def _memory_of(problem: Problem, device: Device) -> Memory:
    return run_dry(lambda: (_in_one_buffer if is_laid_out(problem) else _layer_by_layer)(problem, device))


def _in_one_buffer(problem: Problem, device: Device) -> Memory:
    """Return the memory of a call whose workspace is one buffer: that of the pass that needs more."""
    inputs, above = _arguments(problem)
    kept = (_new(problem, replay.count_kept(problem), dtype=torch.uint8),) if problem.needs_grad else ()
    result, tokens = Result(*_outputs(problem), kept), Tokens(problem.time, problem.batch, by_row=False)
    scratch = counting_scratch(problem.dtype, device)
    with Allocations():  # where operators compute nothing; `scratch` counts what is allocated
        replay.issue_forward(problem, inputs, result, tokens, scratch)
    needed = scratch.needed
    if problem.needs_grad:
        weights = _new(problem, problem.parameter_count, dtype=gradients_dtype(problem))
        into = inputs.x, inputs.h0, inputs.c0, weights
        # The forward pass has no gradients beside it yet.
        needed -= sum(tensor.nbytes for tensor in into)
        scratch = counting_scratch(problem.dtype, device)
        with Allocations():
            replay.issue_backward(problem, inputs, result, above, into, tokens, scratch)
        needed = max(needed, scratch.needed)
    return Memory(_specs(kept), needed + _bytes_of_masks(inputs))


def _layer_by_layer(problem: Problem, device: Device) -> Memory:
    """Return the memory of a call whose tensors PyTorch allocates one by one."""
    inputs, above = _arguments(problem)
    passes = layer_passes(problem, functools.partial(Scratch, device=device))
    with Allocations() as allocations:
        result = stack.forward(problem, inputs, passes.forward)
        returned: list[object] = [result]
        if problem.needs_grad:
            returned.append(stack.backward(problem, inputs, result, above, Needs(), passes.backward))
    # What still exists is what was returned, kept tensors included.
    return Memory(_specs(result.kept), allocations.peak - allocations.now + _bytes_of_masks(inputs))


def _arguments(problem: Problem) -> tuple[Inputs, OutputGradients]:
    y, h_n, c_n = _outputs(problem)
    ragged = problem.layout is not Layout.DENSE
    inputs = Inputs(
        _new(problem, problem.time, problem.batch, problem.input_size),
        h_n,
        c_n,
        tuple([_new(problem, *shape) for shape in buffers.weight_shapes(problem)]),
        _new(problem, problem.batch, dtype=torch.int64) if ragged else None,
        masks=tuple(
            _new(problem, *spec.shape, dtype=torch.bool)
            for spec in mask_specs(problem, (problem.time, problem.batch), tuple(h_n.shape))
        ),
        resets=_new(problem, problem.time, problem.batch, dtype=torch.bool) if problem.resets else None,
    )
    return inputs, OutputGradients(y, h_n, c_n)


def _outputs(problem: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = problem.num_layers * problem.num_directions
    return (
        _new(problem, problem.time, problem.batch, problem.output_size),
        _new(problem, rows, problem.batch, problem.state_size),
        _new(problem, rows, problem.batch, carried_size(problem)),
    )


def _new(problem: Problem, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype or problem.dtype, device="meta")


def _bytes_of_masks(inputs: Inputs) -> int:
    return sum(mask.nbytes for mask in inputs.masks)


def _specs(tensors: tuple[torch.Tensor, ...]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(tuple(tensor.shape), tensor.dtype) for tensor in tensors)
