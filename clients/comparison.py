"""The comparison of a client's runs: as it is, and after one line of gatewise."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import math
import platform
import subprocess
from collections.abc import Mapping
from typing import Any

import numpy as np

from clients.paths import ROOT
from gatewise import __version__

AMPLIFIED = 16.0
"""The greatest factor by which the kernel `eager` may differ from PyTorch's more than PyTorch's two differ."""

ROUNDED = 2.0**-20
"""A relative difference that is rounding of float32, after some hundred operations."""

_WITHOUT_LAYERS = frozenset({"opacus"})
"""The clients that call no recurrent layer, because they replace all of them by their own."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The results of one client's runs, compared.

    Attributes:
        client: The name of the client in the package index.
        version: Its version.
        torch: The version of PyTorch.
        line: The line of gatewise.
        layers: The layers and cells that were called with gradients after the line, by class.
        kernels: The kernels that ran after the line.
        count: The number of numbers that were compared.
        difference: The greatest difference after the line, relative to the largest number of the same name.
        eager: The same on gatewise's own kernel for CPUs, `eager`.
        plain: The difference of PyTorch's own results when it does not use oneDNN, as a measure of rounding.
        saved: The way in which the model was saved and loaded after the line, and the layers of the loaded model.
        error: The first line of an error; empty if there was none.
        python: The version of Python.
        gatewise: The version of gatewise.
        commit: The commit of gatewise, with "-dirty" if it had changes.
        date: The date, in UTC.
    """

    client: str
    version: str = ""
    torch: str = ""
    line: str = ""
    layers: Mapping[str, int] = dataclasses.field(default_factory=dict)
    kernels: tuple[str, ...] = ()
    count: int = 0
    difference: float | None = None
    eager: float | None = None
    plain: float | None = None
    saved: tuple[Mapping[str, Any], ...] = ()
    error: str = ""
    python: str = ""
    gatewise: str = ""
    commit: str = ""
    date: str = ""

    @property
    def agrees(self) -> bool:
        """Whether the line replaced all layers, numbers agree, and saved models load."""
        return not self.error and not self.problem

    @property
    def problem(self) -> str:
        """The first thing that does not agree; empty if everything does."""
        if any(name.startswith("torch.nn.") for name in self.layers):
            return "not all layers were replaced"
        if not self.layers and self.client not in _WITHOUT_LAYERS:
            return "no layer was called"
        if not math.isfinite(self.plain or 0.0):
            return f"the numbers without oneDNN differ by {self.plain}"
        allowed = max(ROUNDED, AMPLIFIED * (self.plain or 0.0))
        for found, name in ((self.difference, "the numbers"), (self.eager, "the numbers of eager")):
            if found is None or not found <= allowed:  # NaN too
                return f"{name} differ by {found}"
        if not all(each["same"] for each in self.saved):
            return "a loaded model answers otherwise"
        return ""

    @property
    def verdict(self) -> str:
        """The result in a few words."""
        return f"error: {self.error}" if self.error else self.problem or "agrees"


def compared(client: str, reports: Mapping[str, Mapping[str, Any]]) -> Comparison:
    """Return the comparison of all runs of a client.

    Args:
        client: The name of the client in the package index.
        reports: The reports of its program, by way.
    """
    before, after = reports["pytorch"], reports["gatewise"]
    return Comparison(
        client=client,
        version=after["version"],
        torch=after["torch"],
        line=after["line"],
        layers=after["layers"],
        kernels=tuple(after["kernels"]),
        count=sum(map(len, before["numbers"].values())),
        difference=difference(before["numbers"], after["numbers"]),
        eager=difference(before["numbers"], reports["eager"]["numbers"]),
        plain=difference(before["numbers"], reports["plain"]["numbers"]),
        saved=tuple(after["saved"]),
        **_origin(),
    )


def failed(client: str, error: str) -> Comparison:
    """Return the comparison of a client that could not be installed or run.

    Args:
        client: The name of the client in the package index.
        error: The first line of the error.
    """
    return Comparison(client=client, error=error, **_origin())


def difference(expected: Mapping[str, list[float]], found: Mapping[str, list[float]]) -> float:
    """Return the greatest difference of two runs, relative to the largest number of the same name.

    Args:
        expected: The numbers of one run, by name.
        found: The numbers of the other run. If there are not as many, or none of a name, the result is infinite.
    """
    lengths = {name: len(numbers) for name, numbers in expected.items()}
    if not lengths or not all(lengths.values()) or lengths != {name: len(all_) for name, all_ in found.items()}:
        return float("inf")
    pairs = [(np.asarray(numbers), np.asarray(found[name])) for name, numbers in expected.items()]
    # NumPy's maximum of anything and NaN is NaN, which no comparison accepts.
    return float(np.max([np.abs(one - other).max() / (np.abs(one).max() or 1.0) for one, other in pairs]))


@functools.cache  # the first record of a run would make the commits of the others dirty
def _commit() -> str:
    words = ["git", "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def _origin() -> dict[str, str]:
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"python": platform.python_version(), "gatewise": __version__, "commit": _commit(), "date": date}
