"""Tile sizes of the Triton kernels (decoder steps, positions, features), chosen by measurement on an H200."""

from __future__ import annotations

from typing import NamedTuple

import torch

from gatewise.attention.problem import Problem

_LANES = 32
_WIDEST_STEP = 1024  # the most features, and the most values, of the kernels for a single step
_SHORT = 64  # the most steps and positions of a sequence that fit into one tile of `short_gradient_program`
_MOST_STEPS = 4  # the most steps that are computed one by one; with more, sharing the loads pays off


class Tile(NamedTuple):
    """The sizes of a tile; each is a power of two.

    Attributes:
        steps: BT, the number of decoder steps.
        positions: BS, the number of source positions.
        features: BH, the number of features; the number of lanes of all warps, so that sums over steps and positions
            need no exchange.
        warps: The number of warps of a program.
    """

    steps: int
    positions: int
    features: int
    warps: int


class StepTile(NamedTuple):
    """The sizes of a tile of a single step; each is a power of two.

    Attributes:
        positions: BS, the number of source positions, spread over the warps.
        feature_pieces: CH, the number of pieces of a position's features.
        features: WH, the number of features in a piece, spread over the lanes of a warp.
        value_pieces: CV, the number of pieces of a position's values.
        values: WV, the number of values in a piece.
        warps: The number of warps of a program.
    """

    positions: int
    feature_pieces: int
    features: int
    value_pieces: int
    values: int
    warps: int


def score_tile(problem: Problem) -> Tile:
    """Return the tile of the program that computes scores."""
    warps = 1
    while warps < 4 and warps * _LANES < problem.hidden_size:
        warps *= 2
    if problem.layer_norm:  # it needs three sums instead of one: with as many steps, registers would be spilled
        return Tile(2, 16, _LANES * warps, warps)
    if problem.dtype == torch.float32 and problem.source > 16:
        warps = min(warps, 2)
    positions = 16 if problem.source <= 16 or (problem.dtype != torch.float32 and problem.source > 64) else 8
    return Tile(4, positions, _LANES * warps, warps)


def context_tile(problem: Problem) -> Tile:
    """Return the tile of the context's matrix product; its features are those of a value."""
    return Tile(min(32, _power_of_two(problem.steps)), 32, min(256, _power_of_two(problem.value_size)), 8)


def short_gradient_tile(problem: Problem) -> Tile | None:
    """Return the tile of the gradients of scores and values in one program; None if they do not fit into one tile."""
    if max(problem.steps, problem.source) > _SHORT:
        return None
    steps, positions = _power_of_two(problem.steps), _power_of_two(problem.source)
    most = max(steps, positions)
    if problem.dtype == torch.float32:  # computed by three TF32 products instead of one
        return Tile(steps, positions, 128, 4) if most == 16 else Tile(steps, positions, 32, 8)
    return Tile(steps, positions, 64, 8 if most > 32 else 4)


def score_gradient_tile(problem: Problem) -> Tile:
    """Return the tile of the product of values and the context's gradient; its features are those of a value."""
    steps, positions = min(64, _power_of_two(problem.steps)), min(64, _power_of_two(problem.source))
    if problem.dtype == torch.float32:  # computed by three TF32 products instead of one
        return Tile(min(32, steps), positions, 32, 4)
    return Tile(steps, positions, 64, 8 if steps == positions == 64 else 4)


def value_gradient_tile(problem: Problem) -> Tile:
    """Return the tile of the values' gradient; its features are those of a value."""
    return Tile(16, min(64, _power_of_two(problem.source)), 128, 4)


def input_tile(problem: Problem) -> Tile:
    """Return the tile of `input_gradient_program`, whose grid is over features and sequences."""
    return Tile(1, 32 if problem.source > 16 and not problem.layer_norm else 16, _LANES, 1)


def input_registers(problem: Problem) -> int | None:
    """Return the maximum number of registers per thread of `input_gradient_program`; None for no limit.

    B = 128 and H = 512 give 16 programs for each of 132 multiprocessors; with 128 registers all of them are resident at
    once.
    """
    return None if problem.layer_norm else 128


def step_tile(problem: Problem, *, source: bool = False) -> StepTile | None:
    """Return the tile of the kernels for a single step; None if there are too many steps or features.

    Args:
        problem: The description of the call.
        source: Whether the gradients of keys and values are computed, too.
    """
    features, values = _power_of_two(problem.hidden_size), _power_of_two(problem.value_size)
    if problem.steps > _MOST_STEPS or max(features, values) > _WIDEST_STEP or (source and problem.layer_norm):
        return None
    piece = _LANES * 16 // problem.dtype.itemsize  # a lane loads 16 bytes
    # Two programs share a multiprocessor when there are more programs than multiprocessors.
    few = source or problem.layer_norm or problem.source <= 8 or problem.batch * problem.steps > 128
    warps = 8 if few else 16
    wide, long = min(features, piece), min(values, piece)
    return StepTile(warps, features // wide, wide, values // long, long, warps)


def _power_of_two(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())
