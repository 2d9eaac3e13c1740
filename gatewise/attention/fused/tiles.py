"""How many steps, positions and features a Triton program works on at once; chosen by measurement on an H200."""

from __future__ import annotations

from typing import NamedTuple

from gatewise.attention.problem import Problem

_LANES = 32
_WIDEST_STEP = 1024  # features, and values, that a program for one step holds at once
_MOST_STEPS = 4  # that are computed one by one: more of them share what they read


class Tile(NamedTuple):
    """The sizes of a tile; each a power of two.

    Attributes:
        steps: BT, decoder steps.
        positions: BS, source positions.
        features: BH, features; a warp's lanes times the warps, so that sums over steps and positions need no exchange.
        warps: Of a program.
    """

    steps: int
    positions: int
    features: int
    warps: int


class StepTile(NamedTuple):
    """The sizes of a tile of a single step; each a power of two.

    Attributes:
        positions: BS, source positions.
        features: BH, all of them.
        values: BV, all of them.
        warps: Of a program.
        stages: Blocks of positions that are on their way or being computed.
    """

    positions: int
    features: int
    values: int
    warps: int
    stages: int


def score_tile(problem: Problem) -> Tile:
    """Return the tile of the program that computes scores."""
    # With layer norm a tile has three sums instead of one: half the steps, or registers are spilled.
    steps = 1 if problem.steps == 1 else 2 if problem.steps <= 3 or problem.layer_norm else 4
    warps = 1
    while warps < 4 and warps * _LANES < problem.hidden_size:
        warps *= 2
    return Tile(steps, 16, _LANES * warps, warps)


def context_tile(problem: Problem) -> Tile:
    """Return the tile of the context's product; its features are those of a value."""
    return Tile(min(32, _power_of_two(problem.steps)), 32, 128, 4)


def score_gradient_tile(problem: Problem) -> Tile:
    """Return the tile of the product of values and the context's gradient; its features are those of a value."""
    return Tile(min(32, _power_of_two(problem.steps)), min(64, _power_of_two(problem.source)), 64, 4)


def value_gradient_tile(problem: Problem) -> Tile:
    """Return the tile of the values' gradient; its features are those of a value."""
    return Tile(min(32, _power_of_two(problem.steps)), min(64, _power_of_two(problem.source)), 64, 4)


def input_tile(problem: Problem) -> Tile:
    """Return the tile of the program whose grid is over features and sequences."""
    return Tile(1, 32 if problem.source > 16 and not problem.layer_norm else 16, _LANES, 1)


def step_tile(problem: Problem) -> StepTile | None:
    """Return the tile of the programs of a single step; None where there are too many steps, or features."""
    features, values = _power_of_two(problem.hidden_size), _power_of_two(problem.value_size)
    if problem.steps > _MOST_STEPS or max(features, values) > _WIDEST_STEP:
        return None
    widest = max(features, values)
    warps = max(1, min(16, widest * 16 // 512))
    return StepTile(16 if problem.source > 8 else 8, features, values, warps, 2)


def _power_of_two(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())
