"""Which form a problem gets, and what a step takes in it: pure arithmetic on sizes and device numbers.

The library's products come in kernels of very different quality, which no rule derives. The factors below are times of
each form relative to the best one, measured over batches of 64 to 512 and hidden sizes of 512 to 2048 on one H200.
"""

from __future__ import annotations

import enum
import functools
import itertools
from typing import NamedTuple

import torch

from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from gatewise.kernels.stepwise.form import Form

RUNS = (32, 16, 8, 4, 2, 1)
FEWEST_STEPS = 4  # that are worth recording: below, entering costs more than launches do


class Products(enum.Enum):
    """The arithmetic of matrix products."""

    SIXTEEN_BITS = "16-bit"
    TF32 = "TF32"
    EXACT = "exact"


class Step(NamedTuple):
    """Seconds of one time step of one layer, all its directions.

    Attributes:
        forward: Of the forward pass.
        backward: Of the backward pass; 0 in inference.
    """

    forward: float
    backward: float


# By (column_major, turned).
_FORWARD = {
    Products.SIXTEEN_BITS: {(False, False): 1.0, (False, True): 1.02, (True, False): 1.05, (True, True): 1.04},
    Products.TF32: {(False, False): 1.0, (False, True): 1.4, (True, False): 1.3, (True, True): 1.5},
    Products.EXACT: {(False, False): 1.08, (False, True): 1.0, (True, False): 1.02, (True, True): 1.02},
}
# By (column_major, turned, parts), relative to the forward product, which has as much to multiply.
_BACKWARD = {
    Products.SIXTEEN_BITS: {
        (False, False, 1): 1.5,
        (False, True, 1): 1.5,
        (False, False, 4): 1.0,
        (False, True, 4): 1.02,
        (True, False, 1): 1.6,
        (True, True, 1): 1.55,
        (True, False, 4): 1.05,
        (True, True, 4): 1.05,
    },
    Products.TF32: {
        (False, False, 1): 1.8,
        (False, True, 1): 1.6,
        (False, False, 4): 1.3,
        (False, True, 4): 1.1,
        (True, False, 1): 1.8,
        (True, True, 1): 1.6,
        (True, False, 4): 1.4,
        (True, True, 4): 1.2,
    },
    Products.EXACT: {
        (False, False, 1): 1.0,
        (False, True, 1): 1.1,
        (False, False, 4): 1.2,
        (False, True, 4): 1.25,
        (True, False, 1): 1.0,
        (True, True, 1): 1.03,
        (True, False, 4): 1.2,
        (True, True, 4): 1.25,
    },
}
# Of a large product's rate; of the device's memory, from which weights that fit the second-level cache need not come
# anew; the shortest product from 512 units on, and its share for the narrowest; what a product takes to begin and end.
# Fitted to this kernel in the shapes of `gatewise bench lstm`, 16 bits and TF32 at commit 3dd8495, exact at 191f4af.
_EFFICIENCY = {Products.SIXTEEN_BITS: 0.85, Products.TF32: 0.75, Products.EXACT: 0.82}
_BANDWIDTH = {Products.SIXTEEN_BITS: 1.25, Products.TF32: 0.8, Products.EXACT: 1.0}
_SHORTEST = {Products.SIXTEEN_BITS: 3.4e-6, Products.TF32: 7.2e-6, Products.EXACT: 5e-6}
_NARROWEST = 0.35
_PRODUCT_SECONDS = {Products.SIXTEEN_BITS: 2.3e-6, Products.TF32: 2.3e-6, Products.EXACT: 9.2e-6}
_TILE_ROWS = {Products.SIXTEEN_BITS: 1, Products.TF32: 1, Products.EXACT: 64}  # fewer take as long
_MISALIGNED = 3.0  # times as long where rows do not begin at multiples of 16 bytes
_BATCHED_EXACT = 1.6  # times as long as two products for two directions in one call, unless cut by gate
_LONG_PRODUCT_SECONDS = 8.7e-6
_LAUNCH_SECONDS = 2.2e-6
_CACHE_SPEEDUP = 1.4  # of an element-wise launch over device memory: much of what it reads was written just before
_TRANSPOSED_SPEED = 0.35  # of a copy that exchanges axes, relative to device memory


@functools.lru_cache(maxsize=4096)
def form_of(problem: Problem, device: Device) -> Form:
    """Return the form with the least predicted time."""
    return min(forms(problem), key=lambda form: sum(step(problem, device, form)))


def forms(problem: Problem) -> list[Form]:
    """Return the layouts in which a problem can be computed, simpler ones first."""
    if problem.proj_size:  # a second product a step, which reads rows
        return [Form()]
    flags = (False, True)
    backward = itertools.product(flags, (1, len(problem.cell.gates))) if problem.needs_grad else [(False, 1)]
    # What is compiled is promised tensors whose rows lie side by side.
    columns = (False,) if problem.traced else flags
    return [Form(column, turned, *rest) for column, turned, rest in itertools.product(columns, flags, list(backward))]


def products_of(problem: Problem) -> Products:
    """Return the arithmetic of a problem's matrix products."""
    if problem.dtype.itemsize == 2:
        return Products.SIXTEEN_BITS
    return Products.TF32 if problem.dtype == torch.float32 and problem.allow_tf32 else Products.EXACT


def step(problem: Problem, device: Device, form: Form) -> Step:
    """Predict the seconds of one step of a layer, without the products over all steps at once."""
    kind, cells = products_of(problem), problem.num_directions * problem.batch * problem.hidden_size
    number, state = problem.element_bytes, 8 if problem.element_bytes == 2 else 2 * problem.element_bytes
    plain = _product_seconds(problem, device, kind)
    moved = cells * (8 * number + state + 2 * number + (5 * number if problem.needs_grad else 0))
    transposed = cells * 2 * number / (device.memory_bandwidth * _TRANSPOSED_SPEED) if form.column_major else 0.0
    forward = plain * _FORWARD[kind][form.column_major, form.turned_forward] + _launch_seconds(moved, device)
    projection = _projection_seconds(problem, device, kind) if problem.proj_size else 0.0
    if not problem.needs_grad:
        return Step(forward + transposed + projection, 0.0)
    moved = cells * ((16 + form.parts) * number + state)
    factor = _BACKWARD[kind][form.column_major, form.turned_backward, 4 if form.parts > 1 else 1]
    if kind is Products.EXACT and form.parts == 1 and problem.bidirectional:
        factor *= _BATCHED_EXACT
    backward = plain * factor + _launch_seconds(moved, device)
    return Step(forward + transposed + projection, backward + transposed + projection)


def memory_bytes(problem: Problem) -> int:
    """Return the bytes of the buffers that all steps share: states, sums and a copy of the recurrent weights."""
    states = problem.batch * (9 * problem.hidden_size + 4 * problem.state_size)
    weights = problem.gate_rows * problem.state_size
    return problem.num_directions * (
        (states + weights) * problem.element_bytes + 4 * problem.batch * problem.hidden_size
    )


def held_bytes(problem: Problem) -> int:
    """Return the bytes of the buffers of captured steps, which stay allocated between calls; 0 without capture."""
    is_recorded = problem.time >= FEWEST_STEPS and not (problem.proj_size or problem.captured)
    return memory_bytes(problem) if is_recorded else 0


def runs_of(time: int) -> list[int]:
    """Return the lengths of the captured runs of steps that together make T steps, in the order of their replay."""
    longest = RUNS[0]
    rest = [count for count in RUNS[1:] if time & count]
    return [longest] * (time // longest) + rest


def starts_early(problem: Problem, device: Device) -> bool:
    """Return whether launches should start before the preceding product ends: not if it is short or 16-bit."""
    kind = products_of(problem)
    return kind is not Products.SIXTEEN_BITS and _product_seconds(problem, device, kind) > _LONG_PRODUCT_SECONDS


def slow_products_seconds(problem: Problem, device: Device) -> float:
    """Predict what the products over all steps take beyond products of the same size at full rate.

    Gradients of the weights are sums over all steps and rows, the outer axis of both operands, for which the library
    has no fast kernel in TF32: 265 TFLOP/s of 390 were measured. Rows that begin anywhere cost several times as much.
    """
    kind = products_of(problem)
    if kind is Products.EXACT:
        return 0.0
    rate = device.matmul_rate(problem.dtype, allow_tf32=problem.allow_tf32)
    slow = 0.45 if problem.needs_grad and kind is Products.TF32 else 0.0
    if problem.hidden_size * problem.element_bytes % 16:
        slow += 8.0 if problem.needs_grad else 2.0
    return slow * problem.matmul_flops / rate


def _product_seconds(problem: Problem, device: Device, kind: Products) -> float:
    directions, weights = problem.num_directions, problem.gate_rows * problem.state_size
    rate = device.matmul_rate(problem.dtype, allow_tf32=problem.allow_tf32) * _EFFICIENCY[kind]
    arithmetic = 2.0 * directions * _rows_of_tiles(problem.batch, kind) * weights / rate
    traffic = directions * weights * problem.element_bytes / (device.memory_bandwidth * _BANDWIDTH[kind])
    misaligned = problem.hidden_size * problem.element_bytes % 16 > 0 and kind is not Products.EXACT
    shortest = _SHORTEST[kind] * min(1.0, _NARROWEST + (1 - _NARROWEST) * problem.hidden_size / 512)
    seconds = max(shortest, max(arithmetic, traffic) + _PRODUCT_SECONDS[kind])
    return seconds * (_MISALIGNED if misaligned else 1.0)


def _rows_of_tiles(batch: int, kind: Products) -> int:
    return -(-batch // _TILE_ROWS[kind]) * _TILE_ROWS[kind]


def _projection_seconds(problem: Problem, device: Device, kind: Products) -> float:
    rate = device.matmul_rate(problem.dtype, allow_tf32=problem.allow_tf32) * _EFFICIENCY[kind]
    flops = 2.0 * problem.num_directions * problem.batch * problem.hidden_size * problem.proj_size
    return max(_SHORTEST[kind], flops / rate + _PRODUCT_SECONDS[kind]) + _LAUNCH_SECONDS


def _launch_seconds(moved: float, device: Device) -> float:
    return _LAUNCH_SECONDS + moved / (device.memory_bandwidth * _CACHE_SPEEDUP)
