"""Building ahead what a call will launch, so that many calls can be built at a time."""

from __future__ import annotations

import torch

from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.kernels.persistent.launches import backward_launch, forward_launch, pair_launch
from gatewise.kernels.persistent.sizes import layer_pairs


def build_launches(problem: Problem, device: torch.device) -> None:
    """Compile the kernels of a layer's passes, or take them from the cache on the disk."""
    device = torch.device(device.type, torch.cuda.current_device() if device.index is None else device.index)
    ragged, directions = problem.layout is not Layout.DENSE, problem.num_directions
    for name, launch in (("forward", forward_launch), ("backward", backward_launch))[: 1 + problem.needs_grad]:
        in_pairs = layer_pairs.stacked_cut(problem, Device.probe(device), backward=name == "backward") is not None
        if in_pairs:
            pair_launch(name, problem, problem.batch, ragged, device)
        if problem.num_layers % 2 or not in_pairs:
            launch(problem, problem.batch, directions, ragged, device)
