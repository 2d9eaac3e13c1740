"""How long one call of a layer takes on one kernel: from Python, and replayed as a CUDA graph."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import itertools
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from gatewise.benchmarks.precision import LAYER_PRECISIONS
from gatewise.contract.capture import for_cuda_graph
from gatewise.contract.device import Device
from gatewise.contract.errors import GatewiseError
from gatewise.contract.problem import LEAN, NORMAL, Layout, Problem
from gatewise.nn import GRU, LSTM
from gatewise.selection import kernel_named, points, predicted
from gatewise.selection.points import Point, Record
from gatewise.selection.timing import captured, time_callable, time_side_by_side

_AT_ONCE = 24  # problems whose kernels are built together, before any of them is measured
_SAMPLED = 0.02  # seconds of samples of a quantity
_LONGEST = 0.1  # seconds; calls that are predicted to take longer say little for their time
_MOST_STEPS = 250  # of loops in Python, whose capture takes long
_FAILURES = RuntimeError, GatewiseError, ValueError  # out of memory, or a library's own error: the others still run


class Times(NamedTuple):
    """Seconds of a call.

    Attributes:
        graph: The seconds of a replay; on a CPU those of a call.
        eager: The seconds of a call from Python; None on a CPU.
    """

    graph: float
    eager: float | None


Stopwatch = Callable[[str, Problem, torch.device], Times]
"""What measures a call of a kernel, by its name."""


def stopwatch(kernel: str, problem: Problem, device: torch.device) -> Times:
    """Measure a call of `gatewise.LSTM` or `GRU` on a kernel: a forward pass, in training with the backward pass.

    Raises:
        RuntimeError: The call failed, or ran out of memory.
        GatewiseError: The kernel refuses.
    """
    precision = LAYER_PRECISIONS[points.precision_of(problem) or ""]
    with precision.applied(), warnings.catch_warnings(action="ignore"):
        step = step_of(kernel, problem, device)
        eager = time_callable(step, device=device, runs=5, warmups=3, budget=_SAMPLED).median
        if device.type == "cpu":
            return Times(eager, None)
        with for_cuda_graph():
            replay = captured(step, warmups=2)
        return Times(time_callable(replay, device=device, runs=7, warmups=2, budget=_SAMPLED).median, eager)


def in_turn(kernels: Sequence[str], problem: Problem, device: torch.device) -> dict[str, Times]:
    """Measure a call on several kernels in turn, so that other programs on a CPU change the times of all of them alike.

    Args:
        kernels: The names of the kernels; those that fail are left out.
        problem: The call.
        device: The CPU.
    """
    precision = LAYER_PRECISIONS[points.precision_of(problem) or ""]
    with precision.applied(), warnings.catch_warnings(action="ignore"):
        steps = {}
        for kernel in kernels:
            with contextlib.suppress(*_FAILURES):
                step = step_of(kernel, problem, device)
                step()
                steps[kernel] = step
        timings = time_side_by_side(steps, device=device, runs=7, warmups=1, budget=len(steps) * _SAMPLED)
    return {kernel: Times(timing.median, None) for kernel, timing in timings.items()}


def step_of(kernel: str, problem: Problem, device: torch.device) -> Callable[[], None]:
    """Return a function that makes a call of a problem on random numbers."""
    options = {"bidirectional": problem.bidirectional, "bias": problem.bias, "memory": LEAN if problem.lean else NORMAL}
    layer = {"lstm": LSTM, "gru": GRU}[problem.cell.name](
        problem.input_size,
        problem.hidden_size,
        problem.num_layers,
        dtype=problem.dtype,
        device=device,
        kernel=kernel,
        **options,
    ).train(problem.needs_grad)
    generator = torch.Generator(device).manual_seed(0)

    def random(features: int) -> torch.Tensor:
        shape = problem.time, problem.batch, features
        return torch.randn(shape, generator=generator, device=device).to(problem.dtype)

    x, dy = random(problem.input_size).requires_grad_(problem.needs_grad), random(problem.output_size)
    lengths = None
    if problem.layout is not Layout.DENSE:
        drawn = torch.Generator().manual_seed(1)
        lengths = torch.randint(max(1, problem.time // 4), problem.time + 1, (problem.batch,), generator=drawn)
        lengths[0] = problem.time
        lengths = lengths.to(device) if problem.layout is Layout.DEVICE_LENGTHS else lengths
    leaves = [x, *layer.parameters()]

    def train() -> None:
        for leaf in leaves:
            leaf.grad = None
        torch.autograd.backward(layer(x, None, lengths)[0], dy)

    def infer() -> None:
        with torch.no_grad():
            layer(x, None, lengths)

    return train if problem.needs_grad else infer


def measured(
    problems: Iterable[Problem],
    device: torch.device,
    record: Record,
    *,
    seconds: float,
    watch: Stopwatch = stopwatch,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[list[Point]]:
    """Measure problems on every kernel that accepts them until the time is over, and yield the calls of each problem.

    On a CPU, the kernels are measured in turn unless another stopwatch is given.

    Args:
        problems: The problems, which may be without end.
        device: The device of the calls.
        record: The record that the measured calls refer to.
        seconds: The time after which no further problem begins.
        watch: The stopwatch, which measures a call.
        clock: The clock, in seconds.
    """
    numbers, began = record.device, clock()
    left = iter(problems)
    while clock() - began < seconds and (several := list(itertools.islice(left, _AT_ONCE))):
        build(several, device)
        for problem in several:
            if clock() - began >= seconds:
                return
            kernels = [
                verdict.kernel
                for verdict in predicted(problem, numbers).verdicts
                if verdict.accepted and not _takes_long(verdict.kernel, verdict.seconds or 0.0, problem)
            ]
            if device.type == "cpu" and watch is stopwatch:
                times = in_turn(kernels, problem, device)
            else:
                times = _one_by_one(kernels, problem, device, watch)
            yield [
                Point(kernel, problem, kernel_named(kernel).work(problem, numbers), *each, record)
                for kernel, each in times.items()
            ]
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _one_by_one(kernels: Sequence[str], problem: Problem, device: torch.device, watch: Stopwatch) -> dict[str, Times]:
    found = {}
    for kernel in kernels:
        with contextlib.suppress(*_FAILURES):
            found[kernel] = watch(kernel, problem, device)
    return found


def build(problems: Iterable[Problem], device: torch.device) -> None:
    """Build what the kernels of problems launch, several at a time, so that no measured call waits for a compiler."""
    if device.type != "cuda":
        return
    from gatewise.kernels.persistent.launches.builds import build_launches

    numbers = Device.probe(device)
    wanted = [
        problem
        for problem in problems
        if any(each.accepted and each.kernel == "persistent" for each in predicted(problem, numbers).verdicts)
    ]

    def built(problem: Problem) -> None:
        # What cannot be built fails again where it is measured, and is left out there.
        with contextlib.suppress(RuntimeError, GatewiseError, ValueError):
            build_launches(problem, device)

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(built, wanted))


def _takes_long(kernel: str, seconds: float, problem: Problem) -> bool:
    in_python = kernel in ("aten", "eager")
    steps = problem.time * problem.num_layers * problem.num_directions
    return seconds > _LONGEST or (in_python and problem.captured and steps > _MOST_STEPS)
