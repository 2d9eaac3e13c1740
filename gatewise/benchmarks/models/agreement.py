"""The comparison of the ways to run a model, which comes before their timing: the same loss curve, the same output.

The criterion of a loss curve is that of `gatewise.benchmarks.trajectories`: a curve may be as far from that of plain
PyTorch with the same seed as the curves of plain PyTorch with three seeds are from each other. All ways draw the same
dropout masks from a seed, as these models have dropout outside of their recurrent layers only.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gatewise.benchmarks.models.step import InferenceStep, TrainingStep
from gatewise.benchmarks.models.ways import Way
from gatewise.benchmarks.models.workload import Batch, Workload
from gatewise.benchmarks.precision import PRECISIONS
from gatewise.benchmarks.trajectories.verdict import SEEDS, verdict
from gatewise.contract.device import tf32_allowed
from gatewise.testing.budgets import relative_error

_DIFFERENT = 8  # batches of a loss curve, used in turn


@dataclasses.dataclass(frozen=True, slots=True)
class Agreement:
    """A way compared with plain PyTorch.

    Attributes:
        worst: The distance relative to what is allowed, at most 1.
        largest: The largest difference of the losses of single steps, relative to the largest loss of plain PyTorch;
            for an output the norm of the difference, relative to that of the output of plain PyTorch.
        note: The problem; empty if there is none.
    """

    worst: float
    largest: float
    note: str = ""


def batches(workload: Workload, seed: int, count: int, device: torch.device, *, shorter: bool = False) -> list[Batch]:
    """Return the first batches of a seed."""
    program = (shorter and workload.shorter) or workload.program
    return list(itertools.islice(program.batches(torch.Generator(device).manual_seed(seed)), count))


def losses(workload: Workload, way: Way, seed: int, steps: int, device: torch.device) -> list[float]:
    """Return the loss of each training step from a seed, which is that of weights, data and dropout."""
    data = batches(workload, seed, _DIFFERENT, device, shorter=True)
    step = TrainingStep(workload, way.model(workload, seed, device, shorter=True), data)
    torch.manual_seed(seed)  # for dropout
    return torch.stack([step() for _ in range(steps)]).tolist()


def curves(workload: Workload, way: Way, steps: int, device: torch.device) -> list[list[float]]:
    """Return the losses of each of three seeds."""
    return [losses(workload, way, seed, steps, device) for seed in range(SEEDS)]


def same_curve(ours: Sequence[float], theirs: Sequence[Sequence[float]]) -> Agreement:
    """Compare a loss curve with those of plain PyTorch, the first of which has the same seed."""
    found = verdict([ours], theirs)
    differences = [abs(own - other) for own, other in zip(ours, theirs[0], strict=True)]
    largest = math.inf if any(map(math.isnan, differences)) else max(differences) / max(map(abs, theirs[0]))
    return Agreement(found.worst, largest, found.note)


def same_output(workload: Workload, way: Way, plain: Way, device: torch.device) -> Agreement:
    """Compare the output of a model in evaluation mode with float64.

    The allowed error is twice the sum of that of plain PyTorch in the same precision and one rounding.
    """
    (batch,) = batches(workload, 0, 1, device)
    exact = _output(dataclasses.replace(workload, autocast=None), plain, batch, device, torch.float64)
    own, other = (_output(workload, each, batch, device, torch.float32) for each in (way, plain))
    rounding = torch.finfo(workload.autocast or torch.float32).eps
    if workload.autocast is None and device.type == "cuda" and tf32_allowed():
        rounding = PRECISIONS["tf32"].rounding
    error, allowed = relative_error(own, exact), 2 * (relative_error(other, exact) + rounding)
    note = "" if error <= allowed else f"the output is {error:.1e} from float64, more than the allowed {allowed:.1e}"
    return Agreement(error / allowed, relative_error(own, other), note)


def _output(workload: Workload, way: Way, batch: Batch, device: torch.device, dtype: torch.dtype) -> Tensor:
    model = way.model(workload, 0, device).to(dtype)
    converted = tuple(tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in batch)
    return InferenceStep(workload, model, [converted])().double()
