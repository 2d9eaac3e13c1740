"""Which layers of a stack are computed in pairs: both in one launch, the second a time step behind the first."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from gatewise.cells import Regularised
from gatewise.contract import ranking
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.kernels.persistent.sizes.exactness import exact_products
from gatewise.kernels.persistent.sizes.free_multiprocessors import device_of_pass
from gatewise.kernels.persistent.sizes.memory import is_laid_out
from gatewise.kernels.persistent.sizes.step import has_fused_passes
from gatewise.kernels.persistent.sizes.tiling import Tiling
from gatewise.kernels.persistent.sizes.tiling_choice import stacked_tiling, tiling


def turns(problem: Problem, device: Device, *, backward: bool) -> list[tuple[int, ...]]:
    """Return the layers of a stack in the order of the forward pass, in pairs or one by one."""
    together = 2 if stacked_cut(problem, device, backward=backward) else 1
    layers = range(problem.num_layers)
    return [tuple(layers[first : first + together]) for first in layers[::together]]


@functools.lru_cache(maxsize=4096)
def stacked_cut(problem: Problem, device: Device, *, backward: bool) -> Tiling | None:
    """Return the tiling of a pair of layers; None if it does not fit, or ranks behind two single layers."""
    device = device_of_pass(problem, device, backward=backward)
    both = room_for_two(problem, device, backward=backward)
    if both is None:
        return None
    sizes = problem.hidden_size, problem.batch, 1, device, backward
    # Blocks of pairs multiply one group of batch rows at a time, and were timed beside single layers that do so, too. A
    # single layer that multiplies several takes less, by the ratio of the clock cycles in a ranking of their own.
    options, ragged = {"one_step": problem.time == 1}, problem.layout is not Layout.DENSE
    alone, best = (tiling(*sizes, *_number(problem), one_group=one, **options) for one in (True, ragged))
    if alone is None or best is None:
        return None
    ratio = best.step_clocks(device) / alone.replace(wide=best.wide).step_clocks(device)
    weights = ranking.weights(device, f"persistent pairs {both.ranking.removeprefix('persistent ')}")
    step = weights["wide_step" if both.cells > 1 else "step"] * both.step_clocks(device)
    together = (problem.time + weights["lag"]) * step + _start(problem, both, weights)
    in_turn = 2 * (problem.time * ratio * alone.step_clocks(device) + _start(problem, alone, weights))
    return both if together < in_turn else None


def _start(problem: Problem, cut: Tiling, weights: Mapping[str, float]) -> float:
    """Return the clock cycles until a block has its weights."""
    start = weights["start_of_one_step" if problem.time == 1 else "start"]
    return start + weights["loaded_bytes"] * 4 * cut.units * cut.hidden * cut.value_bytes


def room_for_two(problem: Problem, device: Device, *, backward: bool) -> Tiling | None:
    """Return the tiling of a pair of layers; None if two layers of the problem cannot be computed in one launch."""
    if problem.num_layers < 2 or problem.bidirectional or problem.rebuilds_gates or not has_fused_passes(problem.cell):
        return None
    if not is_laid_out(problem) or isinstance(problem.cell, Regularised):
        return None
    return stacked_tiling(problem.hidden_size, problem.batch, device, backward, *_number(problem))


def _number(problem: Problem) -> tuple[int, bool]:
    return problem.element_bytes, exact_products(problem)
