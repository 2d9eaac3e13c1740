"""Records: one JSON line for each row of each run, which is appended to a file and never changed."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import torch

from gatewise import files
from gatewise._version import __version__
from gatewise.contract.device import Device
from gatewise.contract.errors import ArgumentError, sentence
from gatewise.selection.timing import Timing

L = TypeVar("L", bound="Line")

RESULTS = Path("benchmarks/results")
REPORTS = Path("benchmarks/reports")

# The status of a row; "agreed" means that it is still to be measured, and is never written.
AGREED, MEASURED, REFUSED, WRONG, FAILED = "agreed", "measured", "refused", "wrong", "failed"


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """The environment of a run, which is the same in all its records.

    Attributes:
        date: The date and time of the start, UTC to the second, ISO 8601.
        command: The command line.
        device: The name of the GPU or CPU.
        driver: The version of the GPU's driver; empty on a CPU.
        python: The version of Python.
        torch: The version of PyTorch.
        cuda: The CUDA version that PyTorch was built for; empty without CUDA.
        cudnn: The result of `torch.backends.cudnn.version()`; 0 without cuDNN.
        gatewise: The version of gatewise.
        commit: The commit of the checkout from which gatewise was imported; empty if it was not a checkout.
        dirty: Whether the package's files differ from that commit.
    """

    date: str
    command: str
    device: str
    driver: str
    python: str
    torch: str
    cuda: str
    cudnn: int
    gatewise: str
    commit: str
    dirty: bool

    @classmethod
    def now(cls, device: torch.device) -> Run:
        """Return the environment of this process."""
        probed = Device.probe(device)
        on_gpu = device.type == "cuda"
        commit, dirty = _checkout()
        return cls(
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            command=shlex.join(["gatewise", *sys.argv[1:]]),
            device=probed.name if on_gpu else f"{_processor()}, {torch.get_num_threads()} threads",
            driver=_driver() if on_gpu else "",
            python=platform.python_version(),
            torch=torch.__version__,
            cuda=torch.version.cuda or "",
            cudnn=probed.cudnn_version,
            gatewise=__version__,
            commit=commit,
            dirty=dirty,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """One row: one way on one case.

    Attributes:
        benchmark: The name of the benchmark: "lm", ...
        case: The name of the case.
        settings: All values that define the case, by name.
        way: The name of the way that was timed.
        kernel: The kernel of gatewise; None for plain PyTorch.
        dtype: The name of the precision.
        status: "measured", "refused", "wrong" or "failed".
        note: The reason if it was not measured; otherwise the agreement with float64.
        median: The median time in seconds per batch; None if it was not measured.
        q20: The 20 % quantile in seconds.
        q80: The 80 % quantile in seconds.
        runs: The number of samples.
        words_per_second: The words of a batch divided by the median.
        peak_bytes: The peak memory of one step in addition to weights and state; None on a CPU.
        allocated_bytes: The peak of all memory of the first process, weights and graphs included; None if unknown.
        error: The relative error that is largest relative to its allowance.
        allowed: The allowance of that error.
        run: The run of the record.
    """

    benchmark: str
    case: str
    settings: dict[str, Any]
    way: str
    kernel: str | None
    dtype: str
    status: str
    note: str
    run: Run
    median: float | None = None
    q20: float | None = None
    q80: float | None = None
    runs: int = 0
    words_per_second: float | None = None
    peak_bytes: int | None = None
    allocated_bytes: int | None = None
    error: float | None = None
    allowed: float | None = None

    @property
    def timing(self) -> Timing | None:
        """The times; None if it was not measured."""
        if self.median is None or self.q20 is None or self.q80 is None:
            return None
        return Timing(self.median, self.q20, self.q80, self.runs)

    def timed(self, timing: Timing, words: int) -> Record:
        """Return the record with the given times."""
        return dataclasses.replace(
            self,
            status=MEASURED,
            median=timing.median,
            q20=timing.q20,
            q80=timing.q80,
            runs=timing.runs,
            words_per_second=words / timing.median,
        )

    @classmethod
    def from_line(cls, line: str) -> Record:
        """Parse one line of a file."""
        fields = json.loads(line)
        return cls(**fields | {"run": Run(**fields["run"])})


def path_of(folder: Path, benchmark: str) -> Path:
    """Return the file of a benchmark's records."""
    return folder / f"{benchmark}.jsonl"


class Line(Protocol):
    """The interface of a record of any benchmark."""

    @property
    def run(self) -> Run:
        """The run of the record."""
        ...

    @classmethod
    def from_line(cls, line: str) -> Self:
        """Parse one line of a file."""
        ...


def append(records: Iterable[Record], folder: Path) -> Path | None:
    """Append records to the file of their benchmark; return the file, or None without records."""
    path = None
    for record in records:
        path = path_of(folder, record.benchmark)
        append_line(dataclasses.asdict(record), path)
    return path


def append_line(fields: Mapping[str, Any], path: Path) -> None:
    """Append one record, as `dataclasses.asdict` returns it, to a file."""
    files.append_line(path, json.dumps(fields))


def check_writable(folder: Path, option: str = "--results") -> None:
    """Check before a run that its records can be written.

    Args:
        folder: The folder of the records.
        option: The option that names the folder.

    Raises:
        ArgumentError: The folder cannot be created or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(sentence(option, "a folder that can be made", f"'{folder}' ({error})")) from error
    if not os.access(folder, os.W_OK):
        raise ArgumentError(sentence(option, "a folder that can be written to", f"'{folder}'"))


def read(path: Path) -> list[Record]:
    """Return all records of a language model's file, oldest first; see `read_lines`."""
    return read_lines(path, Record)


def read_lines(path: Path, kind: type[L]) -> list[L]:
    """Return all records of a file, oldest first.

    Raises:
        ArgumentError: There is no such file, or a line of it is not a record.
    """
    if not path.is_file():
        command = f"gatewise bench {path.stem.partition('_')[0]}{' --quick' if path.stem.endswith('_quick') else ''}"
        advice = f"Run `{command}` first, or give the folder with --results."
        raise ArgumentError(sentence("--results", "a folder with records", f"'{path}', which is no file", advice))
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            records.append(kind.from_line(line))
        except (ValueError, KeyError, TypeError) as error:
            raise ArgumentError(
                sentence("--results", "whole records", f"line {number} of '{path}' ({error})")
            ) from error
    return records


def newest(records: Sequence[Record], device: str = "") -> list[Record]:
    """Return the records of the newest run on a device, in their order.

    Args:
        records: All records of a file, oldest first.
        device: A part of the device's name, in upper or lower case; empty for any device.

    Raises:
        ArgumentError: No run was on such a device; the message lists the devices.
    """
    fitting = of_device(records, device)
    return [record for record in fitting if record.run == fitting[-1].run]


def of_device(records: Sequence[L], device: str = "") -> list[L]:
    """Return the records of the last used device whose name fits; arguments and errors are those of `newest`."""
    fitting = [record for record in records if device.lower() in record.run.device.lower()]
    if not fitting:
        known = ", ".join(dict.fromkeys(record.run.device for record in records)) or "none"
        raise ArgumentError(sentence("--device", f"part of a recorded device's name: {known}", repr(device)))
    return [record for record in fitting if record.run.device == fitting[-1].run.device]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    lines = _output(query).splitlines()
    return lines[0].strip() if lines else ""


def _checkout() -> tuple[str, bool]:
    # On a machine with a copy of the files alone, the variable tells the commit.
    if told := os.environ.get("GATEWISE_COMMIT"):
        return told, False
    package = Path(__file__).resolve().parent.parent
    git = ["git", "-C", str(package)]
    # An installed copy may be inside another project's checkout: only a file that git tracks belongs to the commit.
    if not _output([*git, "ls-files", "__init__.py"]):
        return "", False
    return _output([*git, "rev-parse", "HEAD"]).strip(), bool(_output([*git, "status", "--porcelain", "--", "."]))


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
