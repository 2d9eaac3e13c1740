"""The error of estimates on a device, as a smooth function of sizes through the calls that were measured on it.

The function is the mean of a Gaussian process: of the logarithm of measured over estimated seconds, for each kernel and
pass, over logarithms of sizes, what is aligned, and what the estimate is made of. Near measured calls it follows them,
far from them it goes back to their median.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gatewise.cells import Cell
from gatewise.contract.device import Device
from gatewise.contract.kernel import Work
from gatewise.contract.problem import Problem
from gatewise.contract.ranking import slug
from gatewise.selection import points, stored_fits
from gatewise.selection.estimate import estimated, issue
from gatewise.selection.features import features, fitted
from gatewise.selection.gaussian_process import Process, Settings
from gatewise.selection.stored_fits import Fit

_LEAST_POINTS = 4  # fewer points do not show how estimates differ from measured times
_MEASURED = "NVIDIA H200"  # on which most calls were measured; its factors are those of GPUs without measured calls
_ISSUE_BOUND = 1.6  # a call from Python that takes so many times its replay waits for the CPU


class Factors(NamedTuple):
    """The factors that estimates are multiplied by.

    Attributes:
        busy: The factor of the time of the device.
        issue: The factor of the time of the CPU.
    """

    busy: float = 1.0
    issue: float = 1.0


def factors(kernel: str, work: Work, problem: Problem, device: Device) -> Factors:
    """Return the factors for the estimates of a call.

    On a GPU on which no such call was measured, they are those of another GPU: most of the error of an estimate comes
    from the algorithm, and not from the device. On a CPU they are those of calls of the same cell, because PyTorch has
    different algorithms for LSTMs and GRUs there. Without any measured calls they are 1.
    """
    found = fit_for(kernel, problem, device)
    return Factors() if found is None else factors_of(found, work, problem)


def fit_for(kernel: str, problem: Problem, device: Device) -> Fit | None:
    """Return the fit that corrects the estimates of a call; None if no such calls were measured."""
    for name in (device.name, _MEASURED) if device.kind == "cuda" else (device.name,):
        found = _fitted(kernel, problem.needs_grad, name, _cell(problem, device))
        if found is not None and points.precision_of(problem) in found.precisions:
            return found
    return None


def factors_of(found: Fit, work: Work, problem: Problem) -> Factors:
    """Return the factors of a call by fitted errors."""
    place = _place(features(work, problem, found.device), found.busy.settings)
    return Factors(found.busy.at(place), 1.0 if found.issue is None else found.issue.at(place))


def is_measured(kernel: str, problem: Problem, device: Device) -> bool:
    """Return whether calls of a kernel in a problem's precision and pass were measured on the device."""
    plain = problem.proj_size == 0 and not problem.projected
    known = _fitted(kernel, problem.needs_grad, device.name, _cell(problem, device))
    return plain and known is not None and (problem.cell, points.precision_of(problem)) in known.measured


@functools.cache
def settings_of(kernel: str) -> Settings:
    """Return the settings of a kernel's Gaussian process; those of no kernel in particular for an unknown one."""
    kernels = fitted()["kernels"]
    found = kernels.get(kernel, kernels["any"])
    scales = np.array(list(found["scales"].values()), dtype=float)
    return Settings(tuple(found["scales"]), scales, found["spread"], found["slope"], found["noise"])


def _place(found: dict[str, float], settings: Settings) -> np.ndarray:
    return np.array([found[name] for name in settings.names], dtype=float) * settings.scales


def _cell(problem: Problem, device: Device) -> Cell | None:
    return problem.cell if device.kind == "cpu" else None


@functools.lru_cache(maxsize=64)
def _fitted(kernel: str, training: bool, device: str, cell: Cell | None = None) -> Fit | None:
    if points.users_own(device):  # these are few
        return fit(kernel, training, device, cell=cell)
    of_cell = () if cell is None else (slug(cell.name),)
    name = "-".join((slug(device), kernel, "training" if training else "inference", *of_cell))
    found = stored_fits.read(name, settings_of(kernel))
    if found is None and (found := fit(kernel, training, device, cell=cell)):
        stored_fits.write(name, found)
    return found


def measured_calls(kernel: str, training: bool, device: str, cell: Cell | None) -> list[points.Point]:
    """Return the calls on a device that the errors of a kernel's estimates are fitted to, in the order of the fit.

    Args:
        kernel: The name of the kernel.
        training: Whether the calls compute gradients.
        device: The name of the device.
        cell: The cell of the calls; None for all cells.
    """
    return [
        each
        for each in points.points(device)
        if each.kernel == kernel and each.problem.needs_grad == training and cell in (None, each.problem.cell)
    ]


def fit(kernel: str, training: bool, device: str, *, alone: bool = False, cell: Cell | None = None) -> Fit | None:
    """Fit the errors of the estimates of a kernel's passes; None if too few calls were measured.

    Args:
        kernel: The name of the kernel.
        training: Whether the calls compute gradients.
        device: The name of the device.
        alone: Whether calls on other devices of the same architecture are left out.
        cell: The cell of the calls; None for all cells.
    """
    known = measured_calls(kernel, training, device, cell)
    if len(known) < _LEAST_POINTS:
        return None
    numbers = known[-1].record.device
    others = [
        each
        for each in (() if alone else points.of_the_same_architecture(numbers))
        if each.kernel == kernel and each.problem.needs_grad == training
    ]
    settings = settings_of(kernel)
    places = np.array([_place(features(each.work, each.problem, numbers), settings) for each in known])
    elsewhere = [_place(features(each.work, each.problem, each.record.device, 1.0), settings) for each in others]
    every = np.vstack([places, *elsewhere])
    misses = np.array([math.log(each.graph / _estimated(each)) for each in (*known, *others)])
    measured = frozenset((each.problem.cell, points.precision_of(each.problem)) for each in known)
    busy_process = Process.through(every, misses, settings)
    issue_process = _issue_process(known, places, numbers, settings)
    return Fit(busy_process, issue_process, numbers, measured)


def _issue_process(
    known: Sequence[points.Point], places: np.ndarray, numbers: Device, settings: Settings
) -> Process | None:
    """Fit the time of the CPU: known where a call waits for it, and bounded by the time of every other call."""
    timed = [(place, each) for place, each in zip(places, known, strict=True) if each.eager is not None]
    seen = np.array([(each.eager or 0.0) > _ISSUE_BOUND * each.graph for _, each in timed], dtype=bool)
    if seen.sum() < _LEAST_POINTS:
        return None
    at = np.array([place for place, _ in timed])
    bounds = np.log([(each.eager or 0.0) / issue(each.work, numbers) for _, each in timed])
    first = Process.through(at[seen], bounds[seen], settings)
    used = seen | (first.means(at) > bounds)
    return Process.through(at[used], bounds[used], settings)


def _estimated(point: points.Point) -> float:
    return estimated(point.work, point.problem, point.record.device)
