"""What a pass takes inside a call, as a share of the time that `plan` predicts for its tiling.

`plan` is fitted to tilings timed by themselves, which is enough to order them. In a call their data comes from the
products before, other work shares the second-level cache, and sources have become faster since. The shares are read off
whole calls under CUDA graphs, the rows of `persistent` in tests/selection/measured.jsonl: what is left of a call's time
without its products and launches, over the plan's time; of the backward pass, less the forward pass of the same shape.
(One H200; most exact products from the record of `gatewise bench lstm` at commit 191f4af; 16 bits, TF32 and single
steps when launches began sooner; pairs of layers, and what is rounded to TF32 with at most 256 units, when gates were
fetched ahead.)
"""

from __future__ import annotations

from gatewise.contract.problem import Problem
from gatewise.kernels.persistent.plan import Tiling
from gatewise.kernels.persistent.sizes.exactness import exact_products

FEW_STEPS = 8
_ONE_ROW = 0.75
_BEHIND = 4  # steps from the end of a layer to that of the one above it, which runs beside it
_NARROWEST, _NARROW, _WIDE = 128, 256, 768  # hidden units
_MANY = 64  # rows of the batch
_CACHE_BYTES = 50e6  # of the second-level cache


def seconds(problem: Problem, cut: Tiling) -> float:
    """Return the time of a pass over a layer, or over two stacked ones."""
    in_turn = 1 if cut.stacked else problem.num_directions / cut.directions
    steps = problem.time * in_turn + _BEHIND * cut.stacked
    return cut.step_seconds() * steps * share(problem, cut) + start_seconds(problem, cut)


def start_seconds(problem: Problem, cut: Tiling) -> float:
    """Return the time until a block has its weights, and in the backward pass that of adding up what biases get."""
    weights = 4 * cut.units * cut.hidden * cut.value_bytes
    loading = 2.7e-11 * weights
    if problem.time == 1:
        return _of_one_step(problem, cut, loading)
    narrow = 2.0 if cut.value_bytes == 2 and problem.hidden_size % 8 else 1.0  # words of rows that begin anywhere
    return 1e-6 + loading * narrow + (3e-6 if cut.backward else 0.0)


def _of_one_step(problem: Problem, cut: Tiling, loading: float) -> float:
    # What is stated for launches, traffic and products is that of longer calls: 32 calls of one step leave this.
    alone, narrow = problem.batch == 1, cut.value_bytes == 2
    if cut.backward:
        return loading + ((6e-6 if alone else 0.2e-6) if narrow else (0.0 if alone else 8e-6))
    if narrow:
        return max(0.0, loading - 1.9e-6)
    return 4.5e-6 - 0.9 * loading if alone else loading + 3e-6


def share(problem: Problem, cut: Tiling) -> float:
    """Return the time of a pass in a call of this problem over that of its tiling."""
    if problem.batch == 1:
        return _ONE_ROW
    beside = _beside(problem, cut) if cut.stacked else 1.0
    if exact_products(problem):
        return beside * _exact(problem, cut)
    if problem.element_bytes == 4:
        return beside * _rounded(problem, cut)
    return beside * _in_16_bits(problem, cut)


def _in_16_bits(problem: Problem, cut: Tiling) -> float:
    hidden, many = problem.hidden_size, problem.batch >= _MANY
    if cut.backward:
        if hidden <= _NARROW:
            return (0.8 if many else 0.82) * (1.3 if problem.bidirectional else 1.0)
        return 0.8 if cut.cells > 1 else 0.97
    if hidden <= _NARROW:
        return 0.68 if many else 0.8
    both = 1.08 if problem.bidirectional else 1.0
    if cut.cells > 1:
        return both * (0.97 if cut.rows <= 16 else 0.79)
    return both * (1.15 if hidden >= _WIDE else 0.9)


def _rounded(problem: Problem, cut: Tiling) -> float:
    hidden, both = problem.hidden_size, problem.bidirectional
    if cut.backward:
        if hidden <= _NARROW:
            return 1.55 if both else 1.2
        return 0.9 if hidden >= _WIDE and problem.batch >= _MANY else 1.15
    if hidden <= _NARROW:
        return 1.15 if _leaves_cache(problem) else 1.0
    return 1.15 if both else 1.0


def _exact(problem: Problem, cut: Tiling) -> float:
    hidden, many, in_turn = problem.hidden_size, problem.batch >= _MANY, cut.groups > cut.together
    if cut.backward:
        if hidden <= _NARROW:
            return 1.25 if many and hidden > _NARROWEST else 1.2
        if cut.cells > 1 and problem.batch > _MANY:
            return 0.87 if in_turn or problem.bidirectional else 1.04
        return 1.18 if hidden >= _WIDE else 1.05
    if hidden <= _NARROW:
        if _leaves_cache(problem):
            return 1.3
        return 0.93 if many or hidden <= _NARROWEST else 1.08
    if many and (in_turn or hidden >= _WIDE):
        return 1.2 if hidden >= _WIDE else 1.0
    return 1.0 + 0.42 * min(1.0, (hidden - _NARROW) / (_WIDE - _NARROW)) ** 1.6


def _beside(problem: Problem, cut: Tiling) -> float:
    # Two layers in one launch, over what one layer takes of the same plan; from 22 pairs timed on an H200.
    if exact_products(problem):
        return 1.1 if cut.backward else 0.9
    if problem.element_bytes == 4:
        return 0.8 if cut.backward else 0.9
    if cut.cells > 1:
        return 1.4
    return 0.8 if cut.backward and problem.hidden_size > _NARROW else 1.0


def _leaves_cache(problem: Problem) -> bool:
    # The sums of all steps, which the products before have written.
    tokens = problem.num_directions * problem.time * problem.batch
    return 4 * tokens * problem.hidden_size * problem.element_bytes > _CACHE_BYTES
