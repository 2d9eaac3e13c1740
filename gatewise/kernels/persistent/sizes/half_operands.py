"""Decide whether the products after the loop, of problems that round to TF32, are made of float16 factors."""

from __future__ import annotations

from gatewise.contract.device import Device
from gatewise.contract.kernel import Work
from gatewise.contract.problem import Problem
from gatewise.kernels.factors import choice
from gatewise.kernels.persistent.sizes import layer_pairs
from gatewise.kernels.persistent.sizes.exactness import rounds_to_tf32
from gatewise.kernels.persistent.sizes.step import has_fused_passes


def halves_factors(problem: Problem, device: Device) -> bool:
    """Whether a problem may use float16 factors: it rounds to TF32, on a GPU on which products were timed."""
    # The other schedules add up products of segments, or have gradients of sums in two tensors.
    fits = rounds_to_tf32(problem) and has_fused_passes(problem.cell) and not problem.rebuilds_gates
    return fits and choice.are_possible(device)


def uses_halves(problem: Problem, features: int, device: Device, *, x: bool, weights: bool) -> bool:
    """Whether the products of a layer are made of float16 factors; the arguments are those of `choice.save_time`."""
    return halves_factors(problem, device) and choice.save_time(problem, features, device, x=x, weights=weights)


def work(problem: Problem, device: Device) -> Work:
    """Return what float16 factors add to the work of a training call."""
    total = Work()
    if not problem.needs_grad or not halves_factors(problem, device):
        return total
    together = layer_pairs.stacked_cut(problem, device, backward=True) is not None
    for layer in range(problem.num_layers):
        features, x = (
            problem.layer_input_size(layer),
            not (together and layer % 2),
        )  # the loop of a pair makes the other
        if uses_halves(problem, features, device, x=x, weights=True):
            total += choice.work(problem, features, x=x, weights=True)
    return total
