"""Compile the forward and backward kernels of many problems ahead of time, several at once."""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib
import math
import os
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Protocol

import torch

from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.kernels.persistent.launches import Launch, backward_launch, forward_launch, pair_launch
from gatewise.kernels.persistent.launches.auxiliary import Copying
from gatewise.kernels.persistent.launches.half_products import Rounding
from gatewise.kernels.persistent.sizes import half_operands, layer_pairs
from gatewise.kernels.persistent.sizes.padding import hidden_of
from gatewise.kernels.sums import SUMS


class Compilation(Protocol):
    """What can be compiled ahead of its first launch, such as a `Launch` or a `TritonLaunch`."""

    @property
    def source(self) -> Hashable:
        """The key of the machine code."""
        ...

    @property
    def compile(self) -> Callable[[], object]:
        """A function that compiles the source, or takes it from the cache on the disk."""
        ...


def launches_of(problem: Problem, device: Device) -> list[Launch]:
    """Return the passes that a call launches on a device."""
    ragged, directions, needed = problem.layout is not Layout.DENSE, problem.num_directions, []
    for name, launch in (("forward", forward_launch), ("backward", backward_launch))[: 1 + problem.needs_grad]:
        in_pairs = layer_pairs.stacked_cut(problem, device, backward=name == "backward") is not None
        if in_pairs:
            needed.append(pair_launch(name, problem, problem.batch, ragged, device))
        if problem.num_layers % 2 or not in_pairs:
            needed.append(launch(problem, problem.batch, directions, ragged, device))
    return needed


def copies_of(problem: Problem, device: Device) -> list[Compilation]:
    """Return the kernels that copy and scale rows whose addresses are aligned, around the passes of a call."""
    size, architecture = problem.dtype.itemsize, device.architecture
    padded = {each for each in (problem.hidden_size, problem.input_size) if hidden_of(each) != each}
    found: list[Compilation] = [Copying("fit", math.gcd(16, size * each), architecture) for each in padded]
    if problem.needs_grad and (problem.layout is not Layout.DENSE or problem.resets):
        word = math.gcd(16, size * problem.hidden_size)
        found.append(Copying("operands", word, architecture, problem.resets))
    return [*found, *_around_half_products(problem, device)]


def _around_half_products(problem: Problem, device: Device) -> Iterator[Compilation]:
    # As the schedule `half_products` launches them.
    architecture, resets = device.architecture, problem.resets
    for features, x in half_operands.layers(problem, device):
        of_x, of_states = (math.gcd(16, 4 * each) for each in (features, problem.state_size))
        both = math.gcd(of_x, of_states)
        yield Rounding.of_rows(SUMS * hidden_of(problem.hidden_size), architecture)
        # With frozen weights, the exponents are those of the input weights alone.
        yield from (Rounding.of_columns(word, architecture, resets=resets) for word in dict.fromkeys((both, of_x)))
        yield Copying("operands", both, architecture, resets, halves=True)
        yield from (Rounding.of_results(word, architecture) for word in (of_x, of_states))
        if x:
            yield Copying("fit", of_x, architecture, halves=True)


def build_launches(problem: Problem, device: torch.device) -> None:
    """Compile the kernels of a layer's passes, or take them from the cache on the disk."""
    for launch in launches_of(problem, Device.probe(device)):
        launch.compile()


@contextlib.contextmanager
def building(
    needed: Iterable[Compilation], workers: int | None = None, device: torch.device | None = None
) -> Iterator[int]:
    """Compile kernels in other threads while the context runs, the same code once; yield the number of compilations.

    A kernel that is launched before it is compiled waits for its compilation. An error of a compilation is raised where
    the kernel is launched, not here. An error of finding the kernels, that is of the iteration over `needed`, is raised
    here, before the context runs.

    Args:
        needed: The kernels, the most urgent first; the first ones are compiled while the others are found.
        workers: The number of threads; None for this process's share of the CPUs.
        device: The CUDA device that is the current one of the threads; None for the first.
    """

    def begin() -> None:
        if device is not None and device.index is not None:
            torch.cuda.set_device(device)

    # The derivation of a cell's code imports sympy. Once, when 15 threads did so first, the package was left without
    # its attribute `core`, which PyTorch reads in a first backward pass; and a failure in a thread is not seen.
    importlib.import_module("sympy")
    pool = concurrent.futures.ThreadPoolExecutor(workers or _share_of_cpus(), initializer=begin)
    begun = set()
    try:
        for each in needed:
            if each.source not in begun:
                begun.add(each.source)
                pool.submit(each.compile)  # what fails here fails again, with its error, where it is launched
        yield len(begun)
    finally:
        pool.shutdown(cancel_futures=True)


def _share_of_cpus() -> int:
    """Return how many CPUs this process may use, divided among the processes that torchrun started on this machine."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on every system
    cpus = len(affinity(0)) if affinity else os.cpu_count() or 1
    processes = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, cpus // max(1, int(processes) if processes.isdecimal() else 1))
