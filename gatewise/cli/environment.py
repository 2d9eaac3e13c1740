"""What is installed and what the machine has: versions, optional packages, GPUs."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import subprocess
import tomllib
from pathlib import Path
from typing import NamedTuple

import torch

import gatewise
from gatewise.contract.decision import format_cudnn
from gatewise.contract.device import Device

# What each extra adds. `dev` is for work on gatewise itself.
ADDS = {
    "cuda": "CUDA kernels, compiled for the GPU of the machine",
    "train": "training, sampling, benchmarks, plots",
    "keras": "the Keras layer, and reading Keras' weights",
    "parquet": "Parquet tables for classifiers",
}
_FOR_DEVELOPERS = "dev"


class Requirement(NamedTuple):
    """A package that gatewise or one of its extras needs.

    Attributes:
        package: The package's name on PyPI.
        least: The oldest version that works; empty if any version does.
        installed: The installed version; empty if there is none.
    """

    package: str
    least: str
    installed: str

    @property
    def missing(self) -> bool:
        """Whether the package is not installed."""
        return not self.installed

    @property
    def too_old(self) -> bool:
        """Whether the installed version is too old."""
        return bool(self.installed and self.least) and _release(self.installed) < _release(self.least)


class Extra(NamedTuple):
    """An optional set of packages.

    Attributes:
        name: The name, as in `pip install 'gatewise[NAME]'`.
        adds: The features that it adds.
        requirements: The packages.
    """

    name: str
    adds: str
    requirements: tuple[Requirement, ...]

    @property
    def lacking(self) -> tuple[Requirement, ...]:
        """The packages that are missing or too old."""
        return tuple(requirement for requirement in self.requirements if requirement.missing or requirement.too_old)

    @property
    def installed(self) -> bool:
        """Whether all packages are there, of whatever version; some also come with others, such as PyTorch 2.10."""
        return not any(requirement.missing for requirement in self.requirements)

    @property
    def command(self) -> str:
        """The command that installs the extra."""
        return f"pip install 'gatewise[{self.name}]'"


class Gpu(NamedTuple):
    """A GPU as its driver reports it, whether or not PyTorch can use it."""

    name: str
    driver: str


class Versions(NamedTuple):
    """Versions of the software that gatewise depends on; empty for software that is not installed."""

    gatewise: str
    python: str
    system: str
    torch: str
    cuda: str
    cudnn: str
    driver: str


def versions(gpus: tuple[Gpu, ...]) -> Versions:
    """Return the versions of the software that this process uses."""
    cudnn = (torch.backends.cudnn.version() or 0) if torch.backends.cudnn.is_available() else 0
    return Versions(
        gatewise=gatewise.__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        torch=torch.__version__,
        cuda=torch.version.cuda or "",
        cudnn=format_cudnn(cudnn) if cudnn else "",
        driver=gpus[0].driver if gpus else "",
    )


def gpus() -> tuple[Gpu, ...]:
    """Return the NVIDIA GPUs that the driver knows; none without a driver."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(Gpu(*(part.strip() for part in line.rsplit(",", 1))) for line in lines if "," in line)


def devices() -> dict[str, Device]:
    """Return the devices that PyTorch can use on this machine, by their names in PyTorch."""
    names = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    return {name: Device.probe(name) for name in names}


def core() -> tuple[Requirement, ...]:
    """Return the requirements of gatewise itself."""
    return _requirements().get("", ())


def extras() -> tuple[Extra, ...]:
    """Return all extras except `dev`."""
    return tuple(
        Extra(name, ADDS.get(name, ""), requirements)
        for name, requirements in _requirements().items()
        if name not in ("", _FOR_DEVELOPERS)
    )


def _requirements() -> dict[str, tuple[Requirement, ...]]:
    # By extra, "" for the core. In a source tree, its pyproject.toml takes precedence over an older installation.
    project = Path(gatewise.__file__).parents[1] / "pyproject.toml"
    if project.is_file():
        declared = tomllib.loads(project.read_text("utf-8"))["project"]
        lines = {"": declared["dependencies"], **declared["optional-dependencies"]}
    else:
        lines = _installed_requirements()
    return {extra: tuple(_requirement(line) for line in several) for extra, several in lines.items()}


def _installed_requirements() -> dict[str, list[str]]:
    lines: dict[str, list[str]] = {}
    for line in importlib.metadata.requires("gatewise") or ():
        marker = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", line)
        lines.setdefault(marker.group(1) if marker else "", []).append(line.partition(";")[0])
    return lines


def _requirement(line: str) -> Requirement:
    found = re.match(r"\s*([A-Za-z0-9._-]+)", line)
    package = found.group(1) if found else line
    least = re.search(r">=\s*([0-9][0-9.]*)", line)
    try:
        installed = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        installed = ""
    return Requirement(package, least.group(1) if least else "", installed)


def _release(version: str) -> tuple[int, ...]:
    numbers = [int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3]]
    return tuple(numbers + [0] * (3 - len(numbers)))
