"""The multiprocessors that the backward passes of a problem leave free for kernels on other streams."""

from __future__ import annotations

import functools

from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from gatewise.kernels.persistent.sizes.cell_size import cell_size_of
from gatewise.kernels.persistent.sizes.exactness import exact_products
from gatewise.kernels.persistent.sizes.tiling_choice import tiling


def device_of_pass(problem: Problem, device: Device, *, backward: bool) -> Device:
    """Return the device as a pass may use it: without the multiprocessors that a backward pass leaves free.

    A backward pass whose weights do not fit on the other multiprocessors gets all of them.
    """
    return _without(problem, device) if backward and problem.reserved else device


@functools.lru_cache(maxsize=1024)
def _without(problem: Problem, device: Device) -> Device:
    left = device.replace(multiprocessors=max(1, device.multiprocessors - problem.reserved))
    size = problem.element_bytes, exact_products(problem), cell_size_of(problem.cell, backward=True)
    # Any batch size fits if one group of rows does, because groups can follow each other; a single row needs less room.
    return device if tiling(problem.hidden_size, 2, 1, left, True, *size) is None else left
