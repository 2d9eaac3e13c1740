"""One function for each Triton program: its grid, its arguments, and what it is compiled for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gatewise.attention.call import EPSILON, Gradients, Inputs, Needs, Result
from gatewise.attention.fused.tiles import (
    StepTile,
    context_tile,
    input_tile,
    score_gradient_tile,
    score_tile,
    value_gradient_tile,
)
from gatewise.attention.problem import Problem


def step(problem: Problem, inputs: Inputs, result: Result, tile: StepTile) -> None:
    """Write context, weights and what is kept of a few steps, each computed by itself."""
    scores, lse, statistics = (*result.kept, None, None, None)[:3]
    _programs().step_program[(problem.batch, problem.steps)](
        *inputs[:5], *inputs[6:], result.context, result.weights, scores, lse, statistics,
        problem.batch, problem.source, problem.hidden_size, problem.value_size, EPSILON,
        *inputs.query.stride()[:2], *inputs.keys.stride()[:2], *inputs.values.stride()[:2],
        *result.context.stride()[:2],
        ADDITIVE=problem.additive, NORM=problem.layer_norm, RAGGED=problem.ragged, KEEP=problem.needs_grad,
        WEIGHTS=result.weights is not None, HARDWARE=_hardware(problem), **_of_step(tile),
    )  # fmt: skip


def scores(problem: Problem, inputs: Inputs, result: Result) -> None:
    """Write the scores of all steps, what normalises them, and the weights if they are wanted."""
    tile = score_tile(problem)
    scores, lse, statistics = (*result.kept, None)[:3]
    _programs().score_program[(-(-problem.steps // tile.steps), problem.batch)](
        inputs.query, inputs.keys, inputs.lengths, inputs.v, inputs.norm_weight, inputs.norm_bias,
        result.weights, scores, lse, statistics,
        problem.steps, problem.batch, problem.source, problem.hidden_size, EPSILON,
        *inputs.query.stride()[:2], *inputs.keys.stride()[:2],
        ADDITIVE=problem.additive, NORM=problem.layer_norm, RAGGED=problem.ragged, KEEP=problem.needs_grad,
        WEIGHTS=result.weights is not None, HARDWARE=_hardware(problem),
        BT=tile.steps, BS=tile.positions, BH=tile.features, num_warps=tile.warps,
    )  # fmt: skip


def context(problem: Problem, inputs: Inputs, result: Result) -> None:
    """Write the context of all steps from their scores."""
    tile = context_tile(problem)
    blocks = -(-problem.steps // tile.steps), -(-problem.value_size // tile.features)
    _programs().context_program[(*blocks, problem.batch)](
        inputs.values, inputs.lengths, *result.kept[:2], result.context,
        problem.steps, problem.batch, problem.source, problem.value_size,
        *inputs.values.stride()[:2], *result.context.stride()[:2],
        RAGGED=problem.ragged, PRECISION=_precision(problem, inputs.values),
        BT=tile.steps, BS=tile.positions, BV=tile.features, num_warps=tile.warps,
    )  # fmt: skip


def step_gradient(
    problem: Problem,
    inputs: Inputs,
    result: Result,
    above: tuple[Tensor, Tensor | None],
    found: Gradients,
    parameters: Tensor | None,
    needs: Needs,
    tile: StepTile,
    *,
    add: bool,
) -> None:
    """Write all gradients of a single step, those of parameters as a sum for each sequence."""
    scores, lse, statistics = (*result.kept, None)[:3]
    dcontext, dweights = above
    _programs().step_gradient_program[(problem.batch,)](
        *inputs[:5], *inputs[6:], scores, lse, statistics, result.context, dcontext, dweights,
        found.query, found.keys, found.values, parameters,
        problem.batch, problem.source, problem.hidden_size, problem.value_size,
        inputs.query.stride(1), *inputs.keys.stride()[:2], *inputs.values.stride()[:2], result.context.stride(1),
        dcontext.stride(1), *_strides(dweights)[1:], *_strides(found.query)[1:],
        ADDITIVE=problem.additive, NORM=problem.layer_norm, RAGGED=problem.ragged, WEIGHTS=dweights is not None,
        QUERY=needs.query, SOURCE=needs.source, ADD=add, HARDWARE=_hardware(problem), **_of_step(tile),
    )  # fmt: skip


def score_gradient(
    problem: Problem, inputs: Inputs, result: Result, above: tuple[Tensor, Tensor | None], dscores: Tensor
) -> None:
    """Write the gradients of the scores."""
    tile = score_gradient_tile(problem)
    dcontext, dweights = above
    blocks = -(-problem.steps // tile.steps), -(-problem.source // tile.positions)
    _programs().score_gradient_program[(*blocks, problem.batch)](
        inputs.values, inputs.lengths, *result.kept[:2], result.context, dcontext, dweights, dscores,
        problem.steps, problem.batch, problem.source, problem.value_size,
        *inputs.values.stride()[:2], *result.context.stride()[:2], *dcontext.stride()[:2], *_strides(dweights),
        RAGGED=problem.ragged, WEIGHTS=dweights is not None, PRECISION=_precision(problem, dscores),
        BT=tile.steps, BS=tile.positions, BV=tile.features, num_warps=tile.warps,
    )  # fmt: skip


def value_gradient(
    problem: Problem, inputs: Inputs, result: Result, dcontext: Tensor, dvalues: Tensor, *, add: bool
) -> None:
    """Write the values' gradient, or add it."""
    tile = value_gradient_tile(problem)
    blocks = -(-problem.source // tile.positions), -(-problem.value_size // tile.features)
    _programs().value_gradient_program[(*blocks, problem.batch)](
        inputs.lengths, *result.kept[:2], dcontext, dvalues,
        problem.steps, problem.batch, problem.source, problem.value_size, *dcontext.stride()[:2],
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
    """Write the gradients of queries, keys and, as a sum for each sequence, parameters."""
    tile = input_tile(problem)
    sums = None
    if needs.query and problem.source > tile.positions:
        sums = dscores.new_empty(problem.steps, problem.batch, problem.hidden_size)
    _programs().input_gradient_program[(-(-problem.hidden_size // tile.features), problem.batch)](
        inputs.query, inputs.keys, inputs.lengths, inputs.v, inputs.norm_weight, inputs.norm_bias,
        (*result.kept, None)[2], dscores, found.query, sums, found.keys, parameters,
        problem.steps, problem.batch, problem.source, problem.hidden_size,
        *inputs.query.stride()[:2], *inputs.keys.stride()[:2], *_strides(found.query),
        ADDITIVE=problem.additive, NORM=problem.layer_norm, RAGGED=problem.ragged, HARDWARE=_hardware(problem),
        QUERY=needs.query, SOURCE=needs.source, ADD=add, SUMS=sums is not None,
        BS=tile.positions, BH=tile.features, num_warps=tile.warps,
    )  # fmt: skip


def parameter_gradient(problem: Problem, parameters: Tensor, found: Gradients, *, add: bool) -> None:
    """Write the parameters' gradients from their sums for each sequence, or add them."""
    blocks = -(-problem.hidden_size // 32), parameters.shape[0]
    _programs().parameter_gradient_program[blocks](
        parameters, found.v, found.norm_weight, found.norm_bias, problem.batch, problem.hidden_size,
        NORM=problem.layer_norm, ADD=add, BB=64, BH=32, num_warps=4,
    )  # fmt: skip


def _programs() -> Any:
    # Imported by the first call: Triton takes a second to load.
    from gatewise.attention.fused import programs

    return programs


def _hardware(problem: Problem) -> bool:
    # The GPU's tanh is off by 2^-11 of its value: an eighth of bfloat16's rounding unit, half of float16's.
    return problem.dtype != torch.float32


def _precision(problem: Problem, tensor: Tensor) -> str:
    if problem.allow_tf32:
        return "tf32"
    ampere = tensor.is_cuda and torch.cuda.get_device_capability(tensor.device) >= (8, 0)
    return "tf32x3" if ampere else "ieee"


def _strides(tensor: Tensor | None) -> tuple[int, ...]:
    return (0, 0) if tensor is None else tensor.stride()[:2]


def _of_step(tile: StepTile) -> dict[str, int]:
    return {
        "BS": tile.positions,
        "BH": tile.features,
        "BV": tile.values,
        "STAGES": tile.stages,
        "num_warps": tile.warps,
    }
