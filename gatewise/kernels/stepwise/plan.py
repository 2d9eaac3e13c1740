"""Which layout a problem gets: pure arithmetic on sizes, device numbers and measured weights.

The library's products come in kernels of very different quality, which no rule derives. What each layout takes relative
to the best one was measured, and is data (`gatewise.contract.ranking`).
"""

from __future__ import annotations

import enum
import functools
import itertools
import math
from collections.abc import Mapping

import torch

from gatewise.cells import step_cell
from gatewise.contract import ranking
from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from gatewise.derivation.fused import carried_states
from gatewise.kernels.criteria import is_fused
from gatewise.kernels.cuda.few_rows import MOST_ROWS
from gatewise.kernels.stepwise.product_layout import ProductLayout

RUNS = (32, 16, 8, 4, 2, 1)
FEWEST_STEPS = 4  # that are worth recording: below, entering costs more than launches do


class Products(enum.Enum):
    """The arithmetic of matrix products."""

    SIXTEEN_BITS = "16-bit"
    TF32 = "TF32"
    EXACT = "exact"


@functools.lru_cache(maxsize=4096)
def product_layout_of(problem: Problem, device: Device) -> ProductLayout:
    """Return the layout that ranks first; the simpler one of two that rank alike."""
    return min(product_layouts(problem), key=lambda layout: rank(problem, device, layout))


def product_layouts(problem: Problem) -> list[ProductLayout]:
    """Return the layouts in which a problem can be computed, simpler ones first."""
    if problem.proj_size:  # a second product a step, which reads rows
        return [ProductLayout()]
    flags = (False, True)
    backward = itertools.product(flags, (1, len(problem.cell.gates))) if problem.needs_grad else [(False, 1)]
    # What is compiled is promised tensors whose rows lie side by side.
    # A cell that is not fused is computed a row at a time.
    columns = (False,) if problem.traced or not is_fused(problem.cell) else flags
    return [
        ProductLayout(column, transposed, *rest)
        for column, transposed, rest in itertools.product(columns, flags, list(backward))
    ]


def products_of(problem: Problem) -> Products:
    """Return the arithmetic of a problem's matrix products."""
    if problem.dtype.itemsize == 2:
        return Products.SIXTEEN_BITS
    return Products.TF32 if problem.dtype == torch.float32 and problem.allow_tf32 else Products.EXACT


def rank(problem: Problem, device: Device, layout: ProductLayout) -> float:
    """Return the predicted cost of a step in a layout, by measured weights, for comparison with other layouts."""
    kind, cells = products_of(problem), problem.num_directions * problem.batch * problem.hidden_size
    weights = ranking.weights(device, f"stepwise products {kind.value}")
    number, state = problem.element_bytes, 8 if problem.element_bytes == 2 else 2 * problem.element_bytes
    product = _product(problem, device, weights)
    transposed = cells * 2 * number / (device.memory_bandwidth * weights["transposed_speed"]) * layout.column_major

    def launch(moved: float) -> float:
        return weights["launch"] + moved / (device.memory_bandwidth * weights["cache_speedup"])

    order = "columns" if layout.column_major else "rows"
    factors = ranking.weights(device, f"stepwise forward {kind.value}")
    moved = cells * (8 * number + state + 2 * number + (5 * number if problem.needs_grad else 0))
    forward = product * factors[order + " turned" * layout.transposed_forward] + launch(moved) + transposed
    if not problem.needs_grad:
        return forward
    factors = ranking.weights(device, f"stepwise backward {kind.value}")
    factor = factors[f"{order}{' turned' * layout.transposed_backward} in {4 if layout.split_k > 1 else 1}"]
    if layout.split_k == 1 and problem.bidirectional:
        factor *= weights["both_directions"]
    moved = cells * ((16 + layout.split_k) * number + state)
    return forward + product * factor + launch(moved) + transposed


@functools.lru_cache(maxsize=4096)
def memory_bytes(problem: Problem) -> int:
    """Return the bytes of the buffers that all steps share: states, sums, a copy of the recurrent weights, zeros."""
    states = problem.batch * (9 * problem.hidden_size + 4 * problem.state_size)
    weights = problem.gate_rows * problem.state_size
    carried = problem.batch * problem.hidden_size * len(carried_states(step_cell(problem.cell)))
    every = (states + weights) * problem.element_bytes + max(4, problem.element_bytes) * carried
    zeros = problem.gate_rows if problem.batch <= MOST_ROWS else 0  # for products of a few rows
    return problem.num_directions * every + zeros * problem.element_bytes


def held_bytes(problem: Problem) -> int:
    """Return the bytes of the buffers of captured steps, which stay allocated between calls; 0 without capture."""
    is_recorded = problem.time >= FEWEST_STEPS and not (problem.proj_size or problem.captured)
    return memory_bytes(problem) if is_recorded else 0


def runs_of(time: int) -> list[int]:
    """Return the lengths of the captured runs of steps that together make T steps, in the order of their replay."""
    longest = RUNS[0]
    rest = [count for count in RUNS[1:] if time & count]
    return [longest] * (time // longest) + rest


@functools.lru_cache(maxsize=4096)
def starts_early(problem: Problem, device: Device) -> bool:
    """Return whether launches should start before the preceding product ends: not if it is short or 16-bit."""
    kind = products_of(problem)
    weights = ranking.weights(device, f"stepwise products {kind.value}")
    return kind is not Products.SIXTEEN_BITS and _product(problem, device, weights) > weights["long"]


def _product(problem: Problem, device: Device, weights: Mapping[str, float]) -> float:
    matrix = problem.gate_rows * problem.state_size
    rate = device.matmul_rate(problem.dtype, allow_tf32=problem.allow_tf32) * weights["efficiency"]
    rows = math.ceil(problem.batch / weights["rows"]) * weights["rows"]
    arithmetic = 2.0 * problem.num_directions * rows * matrix / rate
    traffic = problem.num_directions * matrix * problem.element_bytes / (device.memory_bandwidth * weights["bandwidth"])
    narrowest = weights["narrowest"]
    shortest = weights["shortest"] * min(1.0, narrowest + (1 - narrowest) * problem.hidden_size / 512)
    misaligned = problem.hidden_size * problem.element_bytes % 16 > 0
    product = max(shortest, max(arithmetic, traffic) + weights["seconds"])
    return product * (weights["misaligned"] if misaligned else 1.0)
