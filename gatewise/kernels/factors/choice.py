"""Decide by measured times whether the products after the loop are made of float16 factors, and state their work."""

from __future__ import annotations

import functools

from gatewise.contract import ranking
from gatewise.contract.device import Device
from gatewise.contract.kernel import Work
from gatewise.contract.problem import Problem
from gatewise.kernels.cuda.deep_products import widens
from gatewise.kernels.factors.padding import hidden_of
from gatewise.kernels.sums import SUMS

_MEASURED = (9, 0)  # the compute capability of the GPU on which products were timed
_ROUNDED = 6  # bytes to read a float32 value and write a float16 one


def are_possible(device: Device) -> bool:
    """Whether PyTorch has products of float16 factors with float32 results, and products were timed on such a GPU."""
    return widens() and device.capability == _MEASURED


@functools.lru_cache(maxsize=4096)
def save_time(problem: Problem, features: int, device: Device, *, x: bool, weights: bool) -> bool:
    """Whether float16 factors take less time than TF32 products, by measured times of products and copies.

    Args:
        problem: The problem.
        features: The number of input features of the layer.
        device: The device.
        x: Whether the gradient of x is wanted.
        weights: Whether the gradients of the weights are wanted.
    """
    measured = ranking.weights(device, "products after the loop")
    if not (x or weights) or problem.time * problem.batch < measured["least_tokens"]:
        return False
    around = work(problem, features, x=x, weights=weights)
    cost = around.launches * measured["launch"] + around.bytes_moved / measured["bytes"]
    kinds = (("product", x, [_of_input(problem, features)]), ("transposed", weights, _of_weights(problem, features)))
    for name, wanted, products in kinds:
        for flops in products if wanted else ():
            saved = measured[name] + flops / measured[f"{name}_flops"]
            saved -= measured["half"] + flops / measured["half_flops"]
            cost -= problem.num_directions * saved
    return cost < 0


def work(problem: Problem, features: int, *, x: bool, weights: bool) -> Work:
    """Return what float16 factors add to the work of a layer: the operations are part of what is stated anyway."""
    directions, tokens, rows = problem.num_directions, problem.time * problem.batch, problem.gate_rows
    columns = hidden_of(features)
    moved, launches, flops = directions * tokens * SUMS * hidden_of(problem.hidden_size) * _ROUNDED, 2, 0.0
    if x:
        moved += directions * rows * columns * (4 + _ROUNDED)
        moved += tokens * columns * 4 * (directions + 1)
        launches += directions + 1
        flops += _of_input(problem, features)
    if weights:
        states = hidden_of(problem.state_size)
        moved += tokens * (columns + directions * states) * 4  # the largest of them
        moved += directions * (tokens * _ROUNDED + rows * 8) * (columns + states)
        launches += 1 + directions
        flops += sum(_of_weights(problem, features))
    return Work(half_flops=directions * flops, bytes_moved=moved, launches=launches)


def workspace_bytes(problem: Problem, features: int) -> int:
    """Return the bytes that the products of a layer take besides its gradients."""
    directions, tokens, rows = problem.num_directions, problem.time * problem.batch, problem.gate_rows
    columns, free = hidden_of(features), len(problem.cell.sums) * problem.hidden_size  # float16 values of a row
    exponents, matrix = 4 * directions * tokens, 2 * rows * columns
    # Products for the gradient of x where they are neither in its memory nor in that of the gradients of gate sums.
    others = directions - (columns == features)
    products = 4 * others * tokens * columns if 2 * columns > free else 0
    inputs = 2 * directions * tokens * columns if columns > free - problem.state_size else 0
    padded = 4 * rows * columns if columns != features else 0
    return exponents + max(matrix + products, inputs + padded)


def _of_input(problem: Problem, features: int) -> float:
    # The operations of a direction's product of the input, or for its gradient, or that of its weights.
    return 2.0 * problem.time * problem.batch * problem.gate_rows * features


def _of_weights(problem: Problem, features: int) -> list[float]:
    return [_of_input(problem, features), _of_input(problem, problem.state_size)]
