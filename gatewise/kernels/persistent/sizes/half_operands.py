"""Decide whether the products after the loop, of problems that round to TF32, are made of float16 factors."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

from gatewise.contract import ranking
from gatewise.contract.device import Device
from gatewise.contract.kernel import Work
from gatewise.contract.problem import Problem
from gatewise.kernels.cuda.deep_products import widens
from gatewise.kernels.persistent.sizes import layer_pairs
from gatewise.kernels.persistent.sizes.exactness import rounds_to_tf32
from gatewise.kernels.persistent.sizes.memory import copies_states
from gatewise.kernels.persistent.sizes.padding import hidden_of
from gatewise.kernels.persistent.sizes.step import has_fused_passes
from gatewise.kernels.sums import SUMS

_MEASURED = (9, 0)  # the compute capability of the GPU on which products were timed
_ROUNDED = 6  # bytes to read a float32 value and write a float16 one


def halves_factors(problem: Problem, device: Device) -> bool:
    """Whether a problem may use float16 factors: it rounds to TF32, on a GPU on which products were timed."""
    # The other schedules add up products of segments, or have gradients of sums in two tensors.
    fits = rounds_to_tf32(problem) and has_fused_passes(problem.cell) and not problem.rebuilds_gates
    return fits and widens() and device.capability == _MEASURED


@functools.lru_cache(maxsize=4096)
def uses_halves(problem: Problem, features: int, device: Device, *, x: bool, weights: bool) -> bool:
    """Whether the products of a layer are made of float16 factors, by measured times of products and copies.

    Args:
        problem: The problem.
        features: The number of input features of the layer.
        device: The device.
        x: Whether the gradient of x is wanted.
        weights: Whether the gradients of the weights are wanted.
    """
    if not halves_factors(problem, device) or not (x or weights):
        return False
    measured = ranking.weights(device, "persistent float16 factors")
    if problem.time * problem.batch < measured["least_tokens"]:
        return False
    around = _around(problem, features, x=x, weights=weights)
    cost = around.launches * measured["launch"] + around.bytes_moved / measured["bytes"]
    directions = problem.num_directions
    # Where nothing is copied, the TF32 products of both directions for the weights are one batch.
    batches = directions if copies_states(problem) else 1
    kinds = (
        ("product", directions, [_of_input(problem, features)] * x),
        ("transposed", batches, _of_weights(problem, features) * weights),
    )
    for name, calls, products in kinds:
        for flops in products:
            cost -= calls * measured[name] + directions * flops / measured[f"{name}_flops"]
            cost += directions * (measured["half"] + flops / measured["half_flops"])
    further = x * (_parts_for_x(problem, features) - 1) + weights * _further_parts_for_weights(problem, features)
    return cost + directions * further * measured["half"] < 0


def columns_at_once(problem: Problem, features: int) -> int:
    """Return the number of columns of the gradient of x that are computed at once, a multiple of 8 unless all are.

    A product that is not in the memory of the gradient, because it is padded or that of the second direction, takes
    the half of each row of dG that float16 gradients leave free.
    """
    needs_room = features % 8 > 0 or problem.num_directions > 1
    return min(features, _room(problem) // 2) if needs_room else features


def _room(problem: Problem) -> int:
    # The float16 numbers that a row of dG has room for behind the gradients.
    return SUMS * hidden_of(problem.hidden_size)


def _parts_for_x(problem: Problem, features: int) -> int:
    # The number of products for the gradient of x, each of some columns.
    return math.ceil(features / columns_at_once(problem, features))


def _further_parts_for_weights(problem: Problem, features: int) -> int:
    # The number of products for the gradient of the input weights, beyond the first one.
    return math.ceil(hidden_of(features) / (_room(problem) - hidden_of(problem.state_size))) - 1


def layers(problem: Problem, device: Device) -> Iterator[tuple[int, bool]]:
    """Yield the input features of each layer with float16 factors in a training call, and whether for x, too."""
    if not problem.needs_grad or not halves_factors(problem, device):
        return
    together = layer_pairs.stacked_cut(problem, device, backward=True) is not None
    for layer in range(problem.num_layers):
        features = problem.layer_input_size(layer)
        x = not (together and layer % 2)  # the loop of a pair makes the other
        if uses_halves(problem, features, device, x=x, weights=True):
            yield features, x


def work(problem: Problem, device: Device) -> Work:
    """Return the additional work of a training call with float16 factors, with the operations in float16 products."""
    total = Work()
    for features, x in layers(problem, device):
        flops = sum(_of_weights(problem, features)) + x * _of_input(problem, features)
        total += Work(half_flops=problem.num_directions * flops)
        total += _around(problem, features, x=x, weights=True)
    return total


def _of_input(problem: Problem, features: int) -> float:
    # The operations of a direction's product of the input, or for its gradient, or that of its weights.
    return 2.0 * problem.time * problem.batch * problem.gate_rows * features


def _of_weights(problem: Problem, features: int) -> list[float]:
    return [_of_input(problem, features), _of_input(problem, problem.state_size)]


def _around(problem: Problem, features: int, *, x: bool, weights: bool) -> Work:
    """Return the work of rounding factors and scaling results, beyond that of TF32 products."""
    directions, tokens, rows = problem.num_directions, problem.time * problem.batch, problem.gate_rows
    columns = hidden_of(features)
    moved, launches = directions * tokens * SUMS * hidden_of(problem.hidden_size) * _ROUNDED, 3
    if x:
        moved += directions * rows * columns * (4 + _ROUNDED)
        moved += tokens * columns * 4 * (directions + 1)
        launches += (directions + 1) * _parts_for_x(problem, features)
    if weights:
        states = hidden_of(problem.state_size)
        moved += directions * tokens * (columns + states) * 4  # the largest of them
        moved += directions * (tokens * _ROUNDED + rows * 8) * (columns + states)
        further = _further_parts_for_weights(problem, features)
        launches += 1 + directions * (1 + further - copies_states(problem))
    return Work(bytes_moved=moved, launches=launches)
