"""Fits of measured calls in the cache folder, which a process reads in less time than it makes them.

A fit is not out of date, because the name of its file has a digest of everything that it is made of: the measured calls
and the settings that come with gatewise, and the sources that read and describe them.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import zipfile
import zlib
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gatewise.cells import Cell, cell_named
from gatewise.contract.cache import cache_folder
from gatewise.contract.device import Device
from gatewise.contract.errors import CheckpointError
from gatewise.files import write_bytes
from gatewise.selection import points
from gatewise.selection.gaussian_process import Process, Settings

_SOURCES = "cells", "contract", "selection"  # the packages that read and describe measured calls
_DAMAGED = (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error)


class Fit(NamedTuple):
    """What measured calls of a kernel say about its estimates on a device, in training or in inference.

    Attributes:
        busy: The logarithm of the factor of the time of the device.
        issue: The logarithm of the factor of the time of the CPU; None if too few calls show it.
        device: The device, as it was when the calls were measured.
        measured: The cells and precisions of the calls.
    """

    busy: Process
    issue: Process | None
    device: Device
    measured: frozenset[tuple[Cell, str | None]]

    @property
    def precisions(self) -> frozenset[str | None]:
        """The precisions of the calls."""
        return frozenset(precision for _, precision in self.measured)


def read(name: str, settings: Settings) -> Fit | None:
    """Return a stored fit, or None if there is none that can be read.

    Args:
        name: The name of the fit.
        settings: The settings of its Gaussian processes.
    """
    try:
        with np.load(_path(name), allow_pickle=False) as stored:
            about = json.loads(str(stored["about"]))
            arrays = {key: stored[key] for key in stored.files if key != "about"}
        device = points.device_of(about["device"])
        measured = frozenset((cell_named(cell), precision) for cell, precision in about["measured"])
        issue = _process("issue", arrays, settings) if about["issue"] else None
        return Fit(_process("busy", arrays, settings), issue, device, measured)
    except _DAMAGED:
        return None


def write(name: str, fit: Fit) -> None:
    """Store a fit for other processes; nothing happens if the folder cannot be written to."""
    about = {
        "device": points.numbers_of(fit.device),
        "measured": sorted([cell.name, precision] for cell, precision in fit.measured),
        "issue": fit.issue is not None,
    }
    arrays: dict[str, Any] = {"about": np.array(json.dumps(about)), **_arrays("busy", fit.busy)}
    if fit.issue is not None:
        arrays |= _arrays("issue", fit.issue)
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)
    path = _path(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, content.getvalue())
    except (OSError, CheckpointError):
        return


def _arrays(name: str, process: Process) -> dict[str, np.ndarray]:
    bounds = np.array([process.middle, process.least, process.most])
    return {f"{name} places": process.places, f"{name} weights": process.weights, f"{name} bounds": bounds}


def _process(name: str, arrays: dict[str, np.ndarray], settings: Settings) -> Process:
    places, weights, bounds = (arrays[f"{name} {kind}"] for kind in ("places", "weights", "bounds"))
    middle, least, most = map(float, bounds)
    return Process(places, weights, middle, least, most, settings)


def _path(name: str) -> Path:
    return cache_folder() / "corrections" / f"{name}-{_digest()}.npz"


@functools.cache
def _digest() -> str:
    """Return a digest of the measured calls and settings, and of the sources that read and describe them."""
    digest = hashlib.sha256()
    package = resources.files("gatewise")
    for folder in (points.packaged_folder(), *(package / name for name in _SOURCES)):
        for file in _files(folder):
            digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:24]


def _files(folder: Traversable) -> list[Traversable]:
    found = [each for each in folder.iterdir() if each.name.endswith((".py", ".json", ".jsonl"))]
    return sorted(found, key=lambda each: each.name)
