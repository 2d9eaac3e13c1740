"""Compile the forward and backward kernels of a problem ahead of time, as benchmarks do for many problems."""

from __future__ import annotations

import torch

from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.kernels.persistent.launches import backward_launch, forward_launch, pair_launch
from gatewise.kernels.persistent.sizes import layer_pairs


def build_launches(problem: Problem, device: torch.device) -> None:
    """Compile the kernels of a layer's passes, or take them from the cache on the disk."""
    numbers = Device.probe(device)
    ragged, directions = problem.layout is not Layout.DENSE, problem.num_directions
    for name, launch in (("forward", forward_launch), ("backward", backward_launch))[: 1 + problem.needs_grad]:
        in_pairs = layer_pairs.stacked_cut(problem, numbers, backward=name == "backward") is not None
        needed = [pair_launch(name, problem, problem.batch, ragged, numbers)] if in_pairs else []
        if problem.num_layers % 2 or not in_pairs:
            needed.append(launch(problem, problem.batch, directions, ragged, numbers))
        for own in needed:
            own.compile()
