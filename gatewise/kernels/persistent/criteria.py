"""What the persistent kernel demands."""

from __future__ import annotations

import torch

from gatewise.contract.criterion import Criterion
from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from gatewise.kernels.criteria import NOT_EMPTY
from gatewise.kernels.persistent.plan import tiling

_DTYPES = (torch.bfloat16, torch.float16)


def _fits(problem: Problem, device: Device) -> bool:
    if device.kind != "cuda" or device.capability < (8, 0):
        return True
    # Any batch works if one group of rows does: the others take turns.
    forward = tiling(problem.hidden_size, 1, 1, device, False)
    backward = tiling(problem.hidden_size, 1, 1, device, True) if problem.needs_grad else forward
    return forward is not None and backward is not None


def _largest(device: Device) -> int:
    sizes = range(8, 4097, 8)
    fitting = [size for size in sizes if tiling(size, 1, 1, device, False) and tiling(size, 1, 1, device, True)]
    return max(fitting, default=0)


def _weight_size(problem: Problem, device: Device) -> str:
    megabytes = 4 * problem.hidden_size**2 * problem.element_bytes / 2**20
    registers = device.multiprocessors * 256 / 1024
    return (
        f"{problem.hidden_size} ({megabytes:.3g} MiB of recurrent weights; {device.multiprocessors} multiprocessors "
        f"have {registers:.3g} MiB of registers, of which weights can take about half)"
    )


CRITERIA = (
    Criterion(
        "packages",
        allowed="cuda-core and NVRTC installed",
        actual=lambda problem, device: "not installed",
        holds=lambda problem, device: device.kind != "cuda" or device.compiles,
        violation=lambda problem, device: (problem, device.replace(kind="cuda", compiles=False)),
        advice="pip install 'gatewise[cuda]'",
    ),
    Criterion(
        "device",
        allowed="a CUDA GPU of compute capability 8.0 or later",
        actual=lambda problem, device: (
            f"{device.name} (sm_{device.capability[0]}{device.capability[1]})" if device.kind == "cuda" else device.name
        ),
        holds=lambda problem, device: device.kind == "cuda" and device.capability >= (8, 0),
        violation=lambda problem, device: (problem, Device.named("t4")),
    ),
    Criterion(
        "dtype",
        allowed="bfloat16, float16",
        actual=lambda problem, device: str(problem.dtype).removeprefix("torch."),
        holds=lambda problem, device: problem.dtype in _DTYPES,
        violation=lambda problem, device: (problem.replace(dtype=torch.float64), device),
        advice="use autocast, or a 16-bit copy of the model",
    ),
    Criterion(
        "proj_size",
        allowed="0",
        actual=lambda problem, device: str(problem.proj_size),
        holds=lambda problem, device: problem.proj_size == 0,
        violation=lambda problem, device: (
            problem.replace(proj_size=1, hidden_size=max(2, problem.hidden_size)),
            device,
        ),
    ),
    Criterion(
        "hidden_size",
        allowed="what the registers hold",
        actual=_weight_size,
        holds=_fits,
        violation=lambda problem, device: (
            problem.replace(hidden_size=1 << 14),
            device if device.kind == "cuda" and device.capability >= (8, 0) else Device.named("h200"),
        ),
    ),
    NOT_EMPTY,
)
