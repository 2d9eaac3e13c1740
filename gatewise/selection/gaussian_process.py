"""The mean of a Gaussian process through known values.

Source: Rasmussen and Williams, Gaussian Processes for Machine Learning, chapter 2.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import numpy as np

_BEYOND = 0.3  # how far the mean may leave the range of the known values


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


@dataclasses.dataclass(frozen=True, eq=False)
class Process:
    """The mean through known values.

    Attributes:
        places: The places of the known values, one in each row.
        weights: The weight of the covariance with each known value.
        middle: The median of the known values.
        least: The smallest mean.
        most: The largest mean.
        settings: The settings.
    """

    places: np.ndarray
    weights: np.ndarray
    middle: float
    least: float
    most: float
    settings: Settings

    @classmethod
    def through(cls, places: np.ndarray, values: np.ndarray, settings: Settings) -> Process:
        """Return the mean through known values at places, one in each row."""
        middle, bounds = float(np.median(values)), (float(values.min()) - _BEYOND, float(values.max()) + _BEYOND)
        without = cls(places, np.zeros(len(values)), middle, *bounds, settings)
        matrix = without.covariance(places) + settings.noise**2 * np.eye(len(values))
        return dataclasses.replace(without, weights=_solved(matrix, values - middle))

    def at(self, place: np.ndarray) -> float:
        """Return the exponential of the mean at a place."""
        return math.exp(self.means(place[None])[0])

    def means(self, places: np.ndarray) -> np.ndarray:
        """Return the mean at several places."""
        return np.clip(self.middle + self.covariance(places) @ self.weights, self.least, self.most)

    def errors(self) -> np.ndarray:
        """Return how far each known value is from the mean through all others (Rasmussen and Williams, eq. 5.12)."""
        matrix = self.covariance(self.places) + self.settings.noise**2 * np.eye(len(self.places))
        return self.weights / np.linalg.inv(matrix).diagonal()

    def covariance(self, places: np.ndarray) -> np.ndarray:
        """Return the covariance of values at places with each known value."""
        # Matern's function, once differentiable, and a plane. In place, because between thousands of measured calls
        # every array has tens of megabytes, whose allocation takes longer than the arithmetic.
        inner = places @ self.places.T
        distance = np.multiply(2, inner)
        np.subtract((places**2).sum(1)[:, None] + self._squares, distance, out=distance)
        np.maximum(distance, 0.0, out=distance)
        distance *= 3
        np.sqrt(distance, out=distance)
        found = np.add(1, distance)
        found *= self.settings.spread**2
        found *= np.exp(np.negative(distance, out=distance), out=distance)
        inner += 1
        inner *= self.settings.slope**2
        found += inner
        return found

    @functools.cached_property
    def _squares(self) -> np.ndarray:
        return (self.places**2).sum(1)


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
