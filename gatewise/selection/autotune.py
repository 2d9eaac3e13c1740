"""The policy "measure": time all kernels that accept, once for each kind of problem, and store the times."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import torch
from torch import Tensor

from gatewise._version import __version__
from gatewise.contract.cache import cache_folder
from gatewise.contract.decision import Decision
from gatewise.contract.device import Device
from gatewise.contract.errors import CheckpointError
from gatewise.contract.masks import mask_specs
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.saved import Inputs, Needs, OutputGradients
from gatewise.files import write_text
from gatewise.selection import admit
from gatewise.selection.predict import predicted
from gatewise.selection.timing import time_callable


def measured(problem: Problem, device: Device) -> Decision:
    """Choose the kernel with the least measured time.

    Times are stored in `cache_folder()` by device, versions and problem, with time and batch rounded up to a power of
    two, so that a new batch size seldom requires a new measurement. Nothing can be measured while a CUDA graph is
    captured; calls in a capture use the times that the warm-up calls measured, or predicted times.
    """
    kind = bucketed(problem)
    if problem.captured and not _known(kind, problem, device):
        return predicted(problem, device)
    return _measured(kind, problem, device)


def bucketed(problem: Problem) -> Problem:
    """Return the problem under which times are stored: time and batch rounded up to a power of two, not captured."""
    return problem.replace(
        time=_power_of_two(problem.time), batch=_power_of_two(problem.batch), captured=False, announced=False
    )


@functools.lru_cache(maxsize=4096)
def _measured(kind: Problem, problem: Problem, device: Device) -> Decision:
    verdicts = admit.verdicts(problem, device)
    accepted = [verdict.kernel for verdict in verdicts if verdict.accepted]
    if len(accepted) == 1 or kind.time * kind.batch == 0:
        return Decision(problem, device, verdicts, accepted[0], "the only kernel that accepts")
    times = _remembered(kind, device, tuple(accepted))
    with_times = tuple(
        dataclasses.replace(verdict, seconds=times[verdict.kernel], measured=True) if verdict.accepted else verdict
        for verdict in verdicts
    )
    best = min(accepted, key=times.__getitem__)
    return Decision(problem, device, with_times, best, "least measured time")


def _known(kind: Problem, problem: Problem, device: Device) -> bool:
    accepted = {verdict.kernel for verdict in admit.verdicts(problem, device) if verdict.accepted}
    return len(accepted) == 1 or accepted <= _read(_path()).get(_key(kind, device), {}).keys()


def _remembered(kind: Problem, device: Device, kernels: tuple[str, ...]) -> dict[str, float]:
    path, key = _path(), _key(kind, device)
    known = _read(path)
    times = known.get(key, {})
    missing = [name for name in kernels if name not in times]
    if missing:
        times = times | {name: _time(name, kind, device) for name in missing}
        _write(path, _read(path) | {key: times})
    return times


def _path() -> Path:
    return cache_folder() / "measured.json"


def _key(kind: Problem, device: Device) -> str:
    versions = f"gatewise {__version__}, torch {torch.__version__}, cuDNN {device.cudnn_version}"
    return f"{kind}{', traced' if kind.traced else ''} | {device.name} | {versions}"


def _time(name: str, kind: Problem, device: Device) -> float:
    kernel = admit.kernel_named(name)
    problem = kind.replace(layout=_readable_layout(kind.layout, kernel.layouts))
    inputs = _random_inputs(problem, device)
    gradient = OutputGradients(torch.ones(()), None, None)

    def call() -> None:
        result = kernel.forward(problem, inputs)
        if problem.needs_grad:
            kernel.backward(problem, inputs, result, gradient._replace(y=torch.ones_like(result.y)), Needs())

    with torch.no_grad():
        return time_callable(call, device=inputs.x.device).median


def _readable_layout(layout: Layout, readable: frozenset[Layout]) -> Layout:
    # The measured sequences all have the full length, in the layout that the kernel would receive.
    if layout in readable:
        return layout
    return Layout.PACKED if Layout.PACKED in readable else Layout.HOST_LENGTHS


def _random_inputs(problem: Problem, device: Device) -> Inputs:
    where = torch.device("cuda" if device.kind == "cuda" else "cpu")
    generator = torch.Generator(device=where).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator, device=where) * 0.1).to(problem.dtype)

    rows = problem.num_layers * problem.num_directions
    weights: list[Tensor] = []
    for layer in range(problem.num_layers):
        for _ in range(problem.num_directions):
            gates = problem.gate_rows
            weights += [random(gates, problem.layer_input_size(layer)), random(gates, problem.state_size)]
            weights += [random(gates), random(gates)] if problem.bias else []
            weights += [random(problem.proj_size, problem.hidden_size)] if problem.proj_size else []
            weights += [random(problem.hidden_size) for _ in problem.cell.parameters]
    time, batch = problem.time, problem.batch
    packed = problem.layout is Layout.PACKED
    sequence = (time * batch,) if packed else (time, batch)
    ragged = problem.layout in (Layout.HOST_LENGTHS, Layout.DEVICE_LENGTHS)
    states = (rows, batch, problem.state_size)
    masks = [torch.ones(shape, dtype=torch.bool, device=where) for shape, _ in mask_specs(problem, sequence, states)]
    return Inputs(
        random(*sequence, problem.x_size),
        random(*states),
        random(rows, batch, problem.states_size),
        tuple(weights),
        torch.full((batch,), time, device=where) if ragged else None,
        torch.full((time,), batch, device="cpu") if packed else None,
        tuple(masks),
        torch.zeros(time, batch, dtype=torch.bool, device=where) if problem.resets else None,
    )


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length() if size > 0 else 0


def _read(path: Path) -> dict[str, dict[str, float]]:
    # Any other content of the file is ignored, and measured again.
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return {key: times for key, times in known.items() if isinstance(times, dict)} if isinstance(known, dict) else {}


def _write(path: Path, known: dict[str, dict[str, float]]) -> None:
    # A failure to write the cache only means that the next process measures again.
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(known, indent=1))
    except (OSError, CheckpointError):
        return
