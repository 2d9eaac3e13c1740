"""The error of estimates on a device, as a smooth function of sizes through the calls that were measured on it.

The function is the mean of a Gaussian process: of the logarithm of measured over estimated seconds, for each kernel and
pass, over logarithms of sizes, what is aligned, and what the estimate is made of. Near measured calls it follows them,
far from them it goes back to their median (Rasmussen and Williams, Gaussian Processes for Machine Learning, chapter 2).
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
from gatewise.selection import points
from gatewise.selection.estimate import estimated, issue
from gatewise.selection.features import features, fitted

_LEAST_POINTS = 4  # fewer points do not show how estimates differ from measured times
_BEYOND = 0.3  # how far corrections may leave the range of the measured ones, as a logarithm
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
    """Return the factors for the estimates of a call; 1 where nothing was measured on the device."""
    found = _fitted(kernel, problem.needs_grad, device.name)
    if found is None or points.precision_of(problem) not in found.precisions:
        return Factors()
    place = _place(features(work, problem, found.device), found.settings)
    return Factors(found.busy.at(place), 1.0 if found.issue is None else found.issue.at(place))


def is_measured(kernel: str, problem: Problem, device: Device) -> bool:
    """Return whether calls of a kernel in a problem's precision and pass were measured on the device."""
    plain = problem.proj_size == 0 and not problem.projected
    known = _fitted(kernel, problem.needs_grad, device.name)
    return plain and known is not None and (problem.cell, points.precision_of(problem)) in known.measured


class Settings(NamedTuple):
    """The settings of the Gaussian process of a kernel, which `benchmarks/scales.py` fits to measured calls.

    Attributes:
        names: The names of the `features`.
        scales: For each of them, the distance between calls that differ by 1 in it.
        spread: The standard deviation of the logarithms of errors.
        slope: The standard deviation of their change over a unit of distance, however far.
        noise: The standard deviation of the logarithm of a measurement.
    """

    names: tuple[str, ...]
    scales: np.ndarray
    spread: float
    slope: float
    noise: float


@functools.cache
def settings_of(kernel: str) -> Settings:
    """Return the settings of a kernel's Gaussian process; those of no kernel in particular for an unknown one."""
    kernels = fitted()["kernels"]
    found = kernels.get(kernel, kernels["any"])
    scales = np.array(list(found["scales"].values()), dtype=float)
    return Settings(tuple(found["scales"]), scales, found["spread"], found["slope"], found["noise"])


def _place(found: dict[str, float], settings: Settings) -> np.ndarray:
    return np.array([found[name] for name in settings.names], dtype=float) * settings.scales


class _Process:
    """The mean of a Gaussian process through known values."""

    def __init__(self, places: np.ndarray, values: np.ndarray, settings: Settings) -> None:
        self._places, self._settings = places, settings
        self._squares = (places**2).sum(1)
        self._middle = float(np.median(values))
        self._range = float(values.min()) - _BEYOND, float(values.max()) + _BEYOND
        covariance = self._covariance(places) + settings.noise**2 * np.eye(len(values))
        self._weights = _solved(covariance, values - self._middle)

    def at(self, place: np.ndarray) -> float:
        """Return the factor at a place."""
        return math.exp(self.logarithms(place[None])[0])

    def logarithms(self, places: np.ndarray) -> np.ndarray:
        """Return the logarithms of the factors at several places."""
        return np.clip(self._middle + self._covariance(places) @ self._weights, *self._range)

    def _covariance(self, others: np.ndarray) -> np.ndarray:
        # Matern's function, once differentiable, and a plane. In place, because between thousands of measured calls
        # every array has tens of megabytes, whose allocation takes longer than the arithmetic.
        inner = others @ self._places.T
        distance = np.multiply(2, inner)
        np.subtract((others**2).sum(1)[:, None] + self._squares, distance, out=distance)
        np.maximum(distance, 0.0, out=distance)
        distance *= 3
        np.sqrt(distance, out=distance)
        found = np.add(1, distance)
        found *= self._settings.spread**2
        found *= np.exp(np.negative(distance, out=distance), out=distance)
        inner += 1
        inner *= self._settings.slope**2
        found += inner
        return found


def _solved(matrix: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Solve a system with a symmetric positive definite matrix, in a fraction of the time of `numpy.linalg.solve`.

    PyTorch has a solver for this too, but this may run while PyTorch traces a graph with fake tensors.
    """
    lower, found = np.linalg.cholesky(matrix), right.copy()
    for row in range(len(found)):
        found[row] = (found[row] - lower[row, :row] @ found[:row]) / lower[row, row]
    upper = np.ascontiguousarray(lower.T)
    for row in reversed(range(len(found))):
        found[row] = (found[row] - upper[row, row + 1 :] @ found[row + 1 :]) / upper[row, row]
    return found


class _Fitted(NamedTuple):
    busy: _Process
    issue: _Process | None
    device: Device
    settings: Settings
    precisions: frozenset[str | None]
    measured: frozenset[tuple[Cell, str | None]]


@functools.lru_cache(maxsize=64)
def _fitted(kernel: str, training: bool, device: str) -> _Fitted | None:
    known = [each for each in points.points(device) if each.kernel == kernel and each.problem.needs_grad == training]
    if len(known) < _LEAST_POINTS:
        return None
    numbers = known[-1].record.device
    others = [
        each
        for each in points.of_the_same_architecture(numbers)
        if each.kernel == kernel and each.problem.needs_grad == training
    ]
    settings = settings_of(kernel)
    places = np.array([_place(features(each.work, each.problem, numbers), settings) for each in known])
    elsewhere = [_place(features(each.work, each.problem, each.record.device, 1.0), settings) for each in others]
    every = np.vstack([places, *elsewhere])
    misses = np.array([math.log(each.graph / _estimated(each)) for each in (*known, *others)])
    measured = frozenset((each.problem.cell, points.precision_of(each.problem)) for each in known)
    precisions = frozenset(precision for _, precision in measured)
    busy_process = _Process(every, misses, settings)
    issue_process = _issue_process(known, places, numbers, settings)
    return _Fitted(busy_process, issue_process, numbers, settings, precisions, measured)


def _issue_process(
    known: Sequence[points.Point], places: np.ndarray, numbers: Device, settings: Settings
) -> _Process | None:
    """Fit the time of the CPU: known where a call waits for it, and bounded by the time of every other call."""
    timed = [(place, each) for place, each in zip(places, known, strict=True) if each.eager is not None]
    seen = np.array([(each.eager or 0.0) > _ISSUE_BOUND * each.graph for _, each in timed], dtype=bool)
    if seen.sum() < _LEAST_POINTS:
        return None
    at = np.array([place for place, _ in timed])
    bounds = np.log([(each.eager or 0.0) / issue(each.work, numbers) for _, each in timed])
    first = _Process(at[seen], bounds[seen], settings)
    used = seen | (first.logarithms(at) > bounds)
    return _Process(at[used], bounds[used], settings)


def _estimated(point: points.Point) -> float:
    return estimated(point.work, point.problem, point.record.device)
