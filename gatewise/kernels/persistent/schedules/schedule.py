"""What a schedule is, and which schedule computes a layer.

A schedule is the order of launches and matrix products that computes a layer's forward and backward pass. There are
four: for a single layer, for one whose cell is not fused, for a pair of layers in one launch, and for a layer with
gradient checkpointing (`memory="lean"`). A layer with projection is computed by `Projection`, which allocates its own
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from gatewise.contract.problem import Problem
from gatewise.contract.saved import Needs, OutputGradients, Result
from gatewise.kernels.cuda.scratch import Scratch
from gatewise.kernels.persistent.buffers import as_read, new_result, new_weight_gradients, order_of, order_of_kept
from gatewise.kernels.persistent.launches import Tokens
from gatewise.kernels.persistent.schedules.checkpointed import checkpointed
from gatewise.kernels.persistent.schedules.layer_pair import layer_pair
from gatewise.kernels.persistent.schedules.projection import Projection
from gatewise.kernels.persistent.schedules.row_cell import row_cell
from gatewise.kernels.persistent.schedules.single_layer import single_layer
from gatewise.kernels.persistent.sizes.step import has_fused_passes
from gatewise.kernels.stack import Layer, LayerGradients


class Schedule(Protocol):
    """How one layer, or a pair of layers, is computed in memory that the caller has allocated.

    All other memory comes from `scratch`, so that the launches can be recorded as a CUDA graph and replayed.
    """

    def forward(
        self,
        problem: Problem,
        layers: Layer,
        tokens: Tokens,
        into: Sequence[Result],
        mask: Tensor | None,
        scratch: Scratch,
    ) -> None:
        """Compute the outputs.

        Args:
            problem: The problem.
            layers: The input of the first layer, and the states and weights of all: c0 contiguous, lengths as
                `buffers.on_device` returns them.
            tokens: The order of the tensors of `into`.
            into: The memory for the result of each layer; the states of the first one are those of all layers, and what
                is kept is from `LayerSchedule.new_kept`, or nothing in inference.
            mask: The dropout mask between the layers of a pair [T, B, H], or None.
            scratch: The memory for everything else.
        """
        ...

    def backward(
        self,
        problem: Problem,
        layers: Layer,
        results: Sequence[Result],
        above: OutputGradients,
        into: LayerGradients,
        mask: Tensor | None,
        scratch: Scratch,
    ) -> None:
        """Compute the gradients.

        Args:
            problem: The problem.
            layers: The inputs, as in `forward`.
            results: The result of each layer; kept gates may be overwritten.
            above: The gradients of the outputs of the last layer and of the final states of all, as
                `LayerSchedule.gradients_in_order` returns them.
            into: The memory for the gradients; None, or no weights, for those that are not wanted.
            mask: The dropout mask, as in `forward`.
            scratch: The memory for everything else.
        """
        ...


class LayerSchedule(Schedule, Protocol):
    """A schedule of one layer, which also decides what the forward pass keeps."""

    def new_kept(self, problem: Problem, features: int, like: Tensor | Scratch, tokens: Tokens) -> tuple[Tensor, ...]:
        """Return uninitialised memory for what a layer with so many input features keeps for the backward pass."""
        ...

    def gradients_in_order(self, above: OutputGradients, tokens: Tokens) -> OutputGradients:
        """Return the gradients of outputs as `backward` reads them."""
        ...


class LayerPasses(Protocol):
    """The two passes of one layer, which allocate what they return."""

    def forward(self, problem: Problem, layer: Layer) -> Result:
        """Compute the outputs of a layer."""
        ...

    def backward(
        self, problem: Problem, layer: Layer, result: Result, above: OutputGradients, needs: Needs
    ) -> LayerGradients:
        """Compute the gradients of a layer's inputs."""
        ...


class AllocatingPasses:
    """The two passes of a layer by a schedule, in memory allocated by PyTorch for each call.

    Args:
        schedule: The schedule.
        new_scratch: The function that returns the scratch memory of a pass, given a tensor like those that it needs.
    """

    def __init__(self, schedule: LayerSchedule, new_scratch: Callable[[Tensor], Scratch]) -> None:
        self._schedule = schedule
        self._new_scratch = new_scratch

    def forward(self, problem: Problem, layer: Layer) -> Result:
        """Compute the outputs of a layer."""
        x, tokens = layer.x, order_of(layer.x, problem)
        kept = self._schedule.new_kept(problem, x.shape[2], x, tokens) if problem.needs_grad else ()
        result = new_result(problem, x, tokens, kept)
        self._schedule.forward(problem, as_read(layer), tokens, (result,), None, self._new_scratch(x))
        return result

    def backward(
        self, problem: Problem, layer: Layer, result: Result, above: OutputGradients, needs: Needs
    ) -> LayerGradients:
        """Compute the gradients of a layer's inputs."""
        x, tokens = layer.x, order_of_kept(result.kept[0])
        into = LayerGradients(
            tokens.new(x, width=x.shape[2]) if needs.x else None,
            x.new_empty(result.h_n.shape) if needs.state else None,
            torch.empty_like(layer.c0, memory_format=torch.contiguous_format) if needs.state else None,
            new_weight_gradients(layer, apart=problem.traced) if needs.weights else (),
        )
        above = self._schedule.gradients_in_order(above, tokens)
        self._schedule.backward(problem, as_read(layer), (result,), above, into, None, self._new_scratch(x))
        return into._replace(weights=into.weights or (None,) * (len(layer.weights) * problem.weights_per_direction))


def layer_passes(problem: Problem, new_scratch: Callable[[Tensor], Scratch] = Scratch) -> LayerPasses:
    """Return the passes of a layer for stacks that are computed layer by layer; `new_scratch` as in their classes."""
    return Projection(new_scratch) if problem.proj_size else AllocatingPasses(layer_schedule(problem), new_scratch)


def layer_schedule(problem: Problem) -> LayerSchedule:
    """Return the schedule of each layer of a problem without projections."""
    if not has_fused_passes(problem.cell):
        return row_cell
    return checkpointed if problem.rebuilds_gates else single_layer


def schedule_of(problem: Problem, layers: Sequence[int]) -> Schedule:
    """Return the schedule of one layer, or of a pair of layers."""
    return layer_pair if len(layers) > 1 else layer_schedule(problem)
