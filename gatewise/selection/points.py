"""Measured calls as data: the results of `gatewise tune` and of the benchmarks, in one file per GPU.

The files of GPUs that were measured for gatewise lie in `rates` beside this module; those that `gatewise tune` writes
lie in the user's cache and are read instead. Each line is one measured call, or the record that calls belong to.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable, Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import torch

from gatewise.cells import LSTM, cell_named
from gatewise.contract.cache import cache_folder
from gatewise.contract.device import Device
from gatewise.contract.kernel import Work
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.ranking import slug
from gatewise.kernels import ALL

FORMAT = "gatewise rates 1"
"""What the first line of a file of `gatewise tune` says, so that no other file is ever replaced."""

PRECISIONS = {
    "bf16": (torch.bfloat16, False),
    "fp16": (torch.float16, False),
    "tf32": (torch.float32, True),
    "fp32": (torch.float32, False),
}
"""The dtype of each precision, and whether products may be rounded to TF32."""

_SAMPLED = 32  # calls whose work is stated again
_STATED = tuple(field.name for field in dataclasses.fields(Work) if field.name != "held_bytes")


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """Where, when and with what calls were measured.

    Attributes:
        name: The name by which the lines of its calls refer to it.
        device: The numbers of the device as they were stated then: the estimates that are corrected were made of them.
        source: The command or the file that the times come from.
        commit: The commit of gatewise.
        date: The day.
        torch: The version of PyTorch.
    """

    name: str
    device: Device
    source: str
    commit: str
    date: str
    torch: str


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """One measured call.

    Attributes:
        kernel: The name of the kernel.
        problem: The call, in a CUDA graph.
        work: The work that the kernel states of it.
        graph: Seconds of a replay of it as a CUDA graph; on a CPU, of a call.
        eager: Seconds of a call from Python; None where that was not measured.
        record: Where, when and with what.
    """

    kernel: str
    problem: Problem
    work: Work
    graph: float
    eager: float | None
    record: Record


def precision_of(problem: Problem) -> str | None:
    """Return the name of a problem's precision; None where there is none, as for float64."""
    tf32 = problem.allow_tf32 and problem.dtype == torch.float32
    return next(
        (name for name, (dtype, allowed) in PRECISIONS.items() if (problem.dtype, tf32) == (dtype, allowed)), None
    )


@functools.lru_cache(maxsize=16)
def points(device: str) -> tuple[Point, ...]:
    """Return the calls that were measured on a device, by its name; the user's own where there are any.

    The files are read once in a process. The user's own calls count only as long as they are `current`.
    """
    if (own := users_own(device)) and current(own):
        return own
    path = packaged_folder() / f"{slug(device)}.jsonl"
    return read(path.read_text().splitlines()) if path.is_file() else ()


def users_own(device: str) -> tuple[Point, ...]:
    """Return the calls that `gatewise tune` measured on a device, whether or not they are current."""
    path = user_folder() / f"{slug(device)}.jsonl"
    return read(path.read_text().splitlines()) if path.is_file() else ()


def current(found: Sequence[Point]) -> bool:
    """Return whether the kernels still state the work that is stored with calls, by a sample of the calls.

    Another version of gatewise may state the work of a kernel differently. Its estimates, and the errors that were
    measured of them, then do not apply any more.
    """
    names = {kernel.name for kernel in ALL}
    sample = found[:: -(-len(found) // _SAMPLED)]
    return all(point.kernel in names and stated(point.work) == stated(restated(point).work) for point in sample)


def restated(point: Point) -> Point:
    """Return a measured call with the work that its kernel states of it now, for the device of its record."""
    (kernel,) = (kernel for kernel in ALL if kernel.name == point.kernel)
    return dataclasses.replace(point, work=kernel.work(point.problem, point.record.device))


def stated(work: Work) -> dict[str, float | int]:
    """Return the quantities of a work that are not zero, with the digits that a file has."""
    return {name: _short(value) for name in _STATED if (value := getattr(work, name))}


@functools.lru_cache(maxsize=16)
def of_the_same_architecture(device: Device) -> tuple[Point, ...]:
    """Return the calls that came with gatewise and were measured on other GPUs of a device's compute capability."""
    found: list[Point] = []
    for path in sorted(packaged_folder().iterdir(), key=lambda each: each.name):
        if device.kind == "cuda" and path.name.endswith(".jsonl") and path.name != f"{slug(device.name)}.jsonl":
            every = read(path.read_text().splitlines())
            found += [point for point in every if point.record.device.capability == device.capability]
    return tuple(found)


def user_folder() -> Path:
    """Return the folder that `gatewise tune` writes to."""
    return cache_folder() / "rates"


def packaged_folder() -> Traversable:
    """Return the folder of the GPUs that were measured for gatewise."""
    return resources.files("gatewise") / "selection" / "rates"


def read(lines: Iterable[str]) -> tuple[Point, ...]:
    """Return the calls of a file; lines that are neither a record nor a call are left out."""
    records: dict[str, Record] = {}
    found = []
    for line in lines:
        try:
            fields = json.loads(line)
            if "kernel" in fields:
                found.append(_point(fields, records[fields["record"]]))
            elif "device" in fields:
                records[fields["record"]] = _record(fields)
        except (ValueError, KeyError, TypeError):
            continue
    return tuple(found)


def lines(found: Sequence[Point]) -> list[str]:
    """Return calls and their records as the lines of a file, which `read` reads."""
    records = {point.record.name: point.record for point in found}
    return [
        json.dumps({"format": FORMAT}),
        *(record_line(record) for record in records.values()),
        *map(point_line, found),
    ]


def record_line(record: Record) -> str:
    """Return a record as a line."""
    numbers = numbers_of(record.device)
    fields = {name: getattr(record, name) for name in ("source", "commit", "date", "torch")}
    return json.dumps({"record": record.name, "device": numbers, **fields})


def numbers_of(device: Device) -> dict[str, Any]:
    """Return the numbers and the name of a device for a record."""
    return {
        field.name: getattr(device, field.name)
        for field in dataclasses.fields(Device)
        if field.init and not isinstance(getattr(device, field.name), bool)
    }


def device_of(numbers: dict[str, Any]) -> Device:
    """Return the device of a record."""
    rates = tuple((name, rate) for name, rate in numbers["matmul_rates"])
    return Device(**{**numbers, "capability": tuple(numbers["capability"]), "matmul_rates": rates})


def point_line(point: Point) -> str:
    """Return a call as a line."""
    problem = point.problem
    sizes = [problem.time, problem.batch, problem.input_size, problem.hidden_size, problem.num_layers]
    flags = {"lean": problem.lean, "lengths": problem.layout is not Layout.DENSE}
    return json.dumps(
        {
            "kernel": point.kernel,
            "precision": precision_of(problem),
            "pass": "training" if problem.needs_grad else "inference",
            "sizes": [*sizes, problem.num_directions],
            **{name: 1 for name, value in flags.items() if value},
            **({} if type(problem.cell) is LSTM else {"cell": problem.cell.name}),
            "graph_us": _short(point.graph * 1e6),
            **({} if point.eager is None else {"eager_us": _short(point.eager * 1e6)}),
            "work": stated(point.work),
            "record": point.record.name,
        },
        separators=(",", ":"),
    )


def problem_of(fields: dict[str, Any]) -> Problem:
    """Return the problem of a line: the layer of these sizes, in a CUDA graph."""
    time, batch, features, hidden, layers, directions = fields["sizes"]
    dtype, tf32 = PRECISIONS[fields["precision"]]
    return Problem(
        time=time,
        batch=batch,
        input_size=features,
        hidden_size=hidden,
        num_layers=layers,
        bidirectional=directions == 2,
        dtype=dtype,
        layout=Layout.DEVICE_LENGTHS if fields.get("lengths") else Layout.DENSE,
        needs_grad=fields["pass"] == "training",
        allow_tf32=tf32,
        lean=bool(fields.get("lean")),
        captured=True,
        announced=True,
        cell=cell_named(fields.get("cell", LSTM.name)),
    )


def _point(fields: dict[str, Any], record: Record) -> Point:
    eager = fields.get("eager_us")
    return Point(
        fields["kernel"],
        problem_of(fields),
        Work(**fields["work"]),
        fields["graph_us"] * 1e-6,
        None if eager is None else eager * 1e-6,
        record,
    )


def _record(fields: dict[str, Any]) -> Record:
    texts = {name: fields[name] for name in ("source", "commit", "date", "torch")}
    return Record(fields["record"], device_of(fields["device"]), **texts)


def _short(value: float) -> float | int:
    # More digits than were measured would only make the file large.
    short = float(f"{value:.4g}")
    return int(short) if short.is_integer() else short
