"""One launch function for each Triton kernel: its grid, its arguments and its compile-time constants."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from gatewise.attention.call import EPSILON, Gradients, Inputs, Needs, Result
from gatewise.attention.fused.tiles import (
    StepTile,
    Tile,
    context_tile,
    input_registers,
    input_tile,
    score_gradient_tile,
    score_tile,
    value_gradient_tile,
)
from gatewise.attention.problem import Problem
from gatewise.contract import triton_kernels


def step(problem: Problem, inputs: Inputs, result: Result, tile: StepTile) -> None:
    """Write the context, the weights and the kept tensors of a few steps, each step in its own Triton program."""
    scores, lse, statistics = (*result.kept, None, None, None)[:3]
    arguments = (
        *inputs[:5], *inputs[6:], result.context, result.weights, scores, lse, statistics,
        problem.batch, problem.source, problem.hidden_size, problem.value_size, EPSILON,
        *inputs.query.stride()[:2], *inputs.keys.stride()[:2], *inputs.values.stride()[:2],
        *result.context.stride()[:2],
    )  # fmt: skip
    _launch(
        "step_program", (problem.batch, problem.steps), arguments,
        ADDITIVE=problem.additive, NORM=problem.layer_norm, RAGGED=problem.ragged, KEEP=problem.needs_grad,
        WEIGHTS=result.weights is not None, HARDWARE=_hardware_tanh(problem), **_step_constants(tile),
    )  # fmt: skip


def scores(problem: Problem, inputs: Inputs, result: Result) -> None:
    """Write the scores of all steps, their log-sum-exp, and the weights if they are requested."""
    tile = score_tile(problem)
    scores, lse, statistics = (*result.kept, None)[:3]
    arguments = (
        inputs.query, inputs.keys, inputs.lengths, inputs.v, inputs.norm_weight, inputs.norm_bias,
        result.weights, scores, lse, statistics,
        problem.steps, problem.batch, problem.source, problem.hidden_size, EPSILON,
        *inputs.query.stride()[:2], *inputs.keys.stride()[:2],
    )  # fmt: skip
    _launch(
        "score_program", (-(-problem.steps // tile.steps), problem.batch), arguments,
        ADDITIVE=problem.additive, NORM=problem.layer_norm, RAGGED=problem.ragged, KEEP=problem.needs_grad,
        WEIGHTS=result.weights is not None, HARDWARE=_hardware_tanh(problem),
        BT=tile.steps, BS=tile.positions, BH=tile.features, num_warps=tile.warps,
    )  # fmt: skip


def context(problem: Problem, inputs: Inputs, result: Result) -> None:
    """Write the context of all steps, computed from their scores."""
    tile = context_tile(problem)
    blocks = -(-problem.steps // tile.steps), -(-problem.value_size // tile.features)
    arguments = (
        inputs.values, inputs.lengths, *result.kept[:2], result.context,
        problem.steps, problem.batch, problem.source, problem.value_size,
        *inputs.values.stride()[:2], *result.context.stride()[:2],
    )  # fmt: skip
    _launch(
        "context_program", (*blocks, problem.batch), arguments,
        RAGGED=problem.ragged, PRECISION=_precision(problem, inputs.values),
        BT=tile.steps, BS=tile.positions, BV=tile.features, num_warps=tile.warps,
    )  # fmt: skip


def step_gradient(
    problem: Problem,
    inputs: Inputs,
    result: Result,
    above: tuple[Tensor, Tensor | None],
    dscores: Tensor,
    found: Gradients,
    parameters: Tensor | None,
    needs: Needs,
    tile: StepTile,
    *,
    add: bool,
) -> None:
    """Write all gradients of a single step; those of the parameters as one partial sum per sequence."""
    scores, lse, statistics = (*result.kept, None)[:3]
    dcontext, dweights = above
    arguments = (
        *inputs[:5], *inputs[6:], scores, lse, statistics, dcontext, dweights,
        dscores, found.query, found.keys, found.values, parameters,
        problem.batch, problem.source, problem.hidden_size, problem.value_size,
        inputs.query.stride(1), *inputs.keys.stride()[:2], *inputs.values.stride()[:2],
        dcontext.stride(1), *_strides(dweights)[1:], *_strides(found.query)[1:],
    )  # fmt: skip
    _launch(
        "step_gradient_program", (problem.batch,), arguments,
        ADDITIVE=problem.additive, NORM=problem.layer_norm, RAGGED=problem.ragged, WEIGHTS=dweights is not None,
        QUERY=needs.query, SOURCE=needs.source, ADD=add, HARDWARE=_hardware_tanh(problem), **_step_constants(tile),
    )  # fmt: skip


def short_gradient(
    problem: Problem,
    inputs: Inputs,
    result: Result,
    above: tuple[Tensor, Tensor | None],
    dscores: Tensor,
    dvalues: Tensor,
    tile: Tile,
    *,
    add: bool,
) -> None:
    """Write the gradients of the scores, and write or add those of the values."""
    dcontext, dweights = above
    arguments = (
        inputs.values, inputs.lengths, *result.kept[:2], dcontext, dweights, dscores, dvalues,
        problem.steps, problem.batch, problem.source, problem.value_size,
        *inputs.values.stride()[:2], *dcontext.stride()[:2], *_strides(dweights),
    )  # fmt: skip
    _launch(
        "short_gradient_program", (problem.batch,), arguments,
        RAGGED=problem.ragged, WEIGHTS=dweights is not None, ADD=add, PRECISION=_precision(problem, dscores),
        BT=tile.steps, BS=tile.positions, BV=tile.features, num_warps=tile.warps,
    )  # fmt: skip


def score_gradient(
    problem: Problem, inputs: Inputs, result: Result, above: tuple[Tensor, Tensor | None], dscores: Tensor
) -> None:
    """Write the gradients of the scores."""
    tile = score_gradient_tile(problem)
    dcontext, dweights = above
    arguments = (
        inputs.values, inputs.lengths, *result.kept[:2], dcontext, dweights, dscores,
        problem.steps, problem.batch, problem.source, problem.value_size,
        *inputs.values.stride()[:2], *dcontext.stride()[:2], *_strides(dweights),
    )  # fmt: skip
    _launch(
        "score_gradient_program", (-(-problem.steps // tile.steps), problem.batch), arguments,
        RAGGED=problem.ragged, WEIGHTS=dweights is not None, PRECISION=_precision(problem, dscores),
        BT=tile.steps, BS=tile.positions, BV=tile.features, num_warps=tile.warps,
    )  # fmt: skip


def value_gradient(
    problem: Problem, inputs: Inputs, result: Result, dcontext: Tensor, dvalues: Tensor, *, add: bool
) -> None:
    """Write the gradient of the values, or add it."""
    tile = value_gradient_tile(problem)
    blocks = -(-problem.source // tile.positions), -(-problem.value_size // tile.features)
    arguments = (
        inputs.lengths, *result.kept[:2], dcontext, dvalues,
        problem.steps, problem.batch, problem.source, problem.value_size, *dcontext.stride()[:2],
    )  # fmt: skip
    _launch(
        "value_gradient_program", (*blocks, problem.batch), arguments,
        RAGGED=problem.ragged, ADD=add, PRECISION=_precision(problem, dcontext),
        BT=tile.steps, BS=tile.positions, BV=tile.features, num_warps=tile.warps,
    )  # fmt: skip


def input_gradient(
    problem: Problem,
    inputs: Inputs,
    result: Result,
    dscores: Tensor,
    found: Gradients,
    parameters: Tensor | None,
    needs: Needs,
    *,
    add: bool,
) -> None:
    """Write the gradients of queries and keys, and those of the parameters as one partial sum per sequence."""
    tile = input_tile(problem)
    sums = None
    if needs.query and problem.source > tile.positions:
        sums = dscores.new_empty(problem.steps, problem.batch, problem.hidden_size)
    arguments = (
        inputs.query, inputs.keys, inputs.lengths, inputs.v, inputs.norm_weight, inputs.norm_bias,
        (*result.kept, None)[2], dscores, found.query, sums, found.keys, parameters,
        problem.steps, problem.batch, problem.source, problem.hidden_size,
        *inputs.query.stride()[:2], *inputs.keys.stride()[:2], *_strides(found.query),
    )  # fmt: skip
    _launch(
        "input_gradient_program", (-(-problem.hidden_size // tile.features), problem.batch), arguments,
        ADDITIVE=problem.additive, NORM=problem.layer_norm, RAGGED=problem.ragged, HARDWARE=_hardware_tanh(problem),
        QUERY=needs.query, SOURCE=needs.source, ADD=add, SUMS=sums is not None,
        BS=tile.positions, BH=tile.features, num_warps=tile.warps, maxnreg=input_registers(problem),
    )  # fmt: skip


def parameter_gradient(problem: Problem, parameters: Tensor, found: Gradients, *, add: bool) -> None:
    """Sum the parameters' gradients over sequences and write them, or add them."""
    blocks = -(-problem.hidden_size // 32), parameters.shape[0]
    arguments = (
        parameters, found.v, found.norm_weight, found.norm_bias, problem.batch, problem.hidden_size,
    )  # fmt: skip
    _launch(
        "parameter_gradient_program", blocks, arguments,
        NORM=problem.layer_norm, ADD=add, BB=64, BH=32, num_warps=4,
    )  # fmt: skip


def _launch(name: str, grid: tuple[int, ...], arguments: tuple[Any, ...], **options: Any) -> None:
    """Launch a Triton kernel of `gatewise.attention.fused.programs`; see `triton_kernels.launch`."""
    triton_kernels.launch(_function(name), grid, arguments, **options)


@functools.cache
def _function(name: str) -> triton_kernels.TritonFunction:
    def load() -> Any:
        from gatewise.attention.fused import programs

        return getattr(programs, name)

    return triton_kernels.TritonFunction(load)


def _hardware_tanh(problem: Problem) -> bool:
    # The relative error of the GPU's tanh is 2^-11: 1/8 of the unit roundoff of bfloat16, 1/2 of that of float16.
    return problem.dtype != torch.float32


def _precision(problem: Problem, tensor: Tensor) -> str:
    if problem.dtype != torch.float32 or tensor.is_cpu or _capability(tensor.device.index) < (8, 0):
        return "ieee"
    return "tf32" if problem.allow_tf32 else "tf32x3"


def _capability(device: int | None) -> tuple[int, int]:
    if device is not None:
        return _capability_of(device)
    # Launches with tensors of the device "meta" are noted for the current GPU, or without one for a newer one.
    return _capability_of(torch.cuda.current_device()) if torch.cuda.is_available() else (9, 0)


@functools.cache
def _capability_of(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _strides(tensor: Tensor | None) -> tuple[int, ...]:
    return (0, 0) if tensor is None else tensor.stride()[:2]


def _step_constants(tile: StepTile) -> dict[str, int]:
    return {
        "BS": tile.positions,
        "CH": tile.feature_pieces,
        "WH": tile.features,
        "CV": tile.value_pieces,
        "WV": tile.values,
        "num_warps": tile.warps,
    }
