"""Records of the benchmark of models: one for each model, in training and in inference."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from gatewise.benchmarks.models.ways import BEFORE
from gatewise.benchmarks.models.workload import Workload
from gatewise.benchmarks.record import FAILED, MEASURED, WRONG, Run, of_device
from gatewise.contract.errors import ArgumentError, sentence
from gatewise.selection.timing import Timing

BENCHMARK = "models"
QUICK_BENCHMARK = "models_quick"  # in a separate file, so that reports do not include quick runs

TRAIN, INFERENCE = "train", "inference"
STEP, LAYERS, GRAPH = "step", "layers", "graph"
"""The names of the times: of the whole step, of the recurrent layers alone, and of the whole step as a CUDA graph."""


@dataclasses.dataclass(frozen=True, slots=True)
class Measurement:
    """One way to run a model.

    Attributes:
        status: "measured", "wrong" or "failed".
        note: The reason if it was not measured; otherwise the reason why there is no CUDA graph, if there is none.
        kernels: The kernels of gatewise that run the recurrent layers; empty for plain PyTorch.
        calls: The number of calls of recurrent layers in a step.
        times: The times in seconds, "step", "layers" and "graph", those that were measured.
        peak_bytes: The peak memory of a step in addition to weights and the state of the optimizer; None on a CPU.
        worst: The distance from the loss curve of plain PyTorch relative to the spread of its seeds; in inference the
            error of the output relative to what is allowed.
        largest: The largest difference of a loss from plain PyTorch, relative to the largest loss; in inference the
            relative difference of the output.
    """

    status: str
    note: str = ""
    kernels: tuple[str, ...] = ()
    calls: int = 0
    times: dict[str, Timing] = dataclasses.field(default_factory=dict)
    peak_bytes: int | None = None
    worst: float | None = None
    largest: float | None = None

    def median(self, what: str) -> float | None:
        """Return a median time in seconds, "step", "layers" or "graph"; None if it was not measured."""
        timing = self.times.get(what)
        return None if timing is None else timing.median

    @property
    def share(self) -> float | None:
        """The share of the recurrent layers in the time of a step; None if it was not measured."""
        layers, step = self.median(LAYERS), self.median(STEP)
        return layers / step if layers and step else None


@dataclasses.dataclass(frozen=True, slots=True)
class ModelRecord:
    """One row: a model in one direction.

    Attributes:
        benchmark: "models", or "models_quick" for a quick run.
        case: The name of the model.
        about: The published model, in a few words.
        settings: All values that define the case, by name.
        direction: "train" or "inference".
        run: The run of the record.
        ways: The measurement of each way, by name, that of plain PyTorch first.
    """

    benchmark: str
    case: str
    about: str
    settings: dict[str, Any]
    direction: str
    run: Run
    ways: dict[str, Measurement] = dataclasses.field(default_factory=dict)

    @property
    def status(self) -> str:
        """The worst status of the ways."""
        found = {measured.status for measured in self.ways.values()}
        return next((status for status in (WRONG, FAILED) if status in found), MEASURED)

    def speed_up(self, way: str, what: str) -> float | None:
        """Return the time of plain PyTorch over that of a way; `what` is "step", "layers" or "graph"."""
        if way not in self.ways or BEFORE not in self.ways:
            return None
        before, after = self.ways[BEFORE].median(what), self.ways[way].median(what)
        return before / after if before and after else None

    @classmethod
    def from_line(cls, line: str) -> ModelRecord:
        """Parse one line of a file."""
        fields = json.loads(line)
        ways = {
            name: Measurement(
                **way
                | {
                    "kernels": tuple(way["kernels"]),
                    "times": {what: Timing(**timing) for what, timing in way["times"].items()},
                }
            )
            for name, way in fields["ways"].items()
        }
        return cls(**fields | {"run": Run(**fields["run"]), "ways": ways})


def newest(records: Sequence[ModelRecord], workloads: Sequence[Workload], device: str = "") -> list[ModelRecord]:
    """Return the newest record of every model and direction on one device, in order of first occurrence.

    Records of a model whose settings were changed since are left out.

    Args:
        records: All records of a file, oldest first.
        workloads: The models of the benchmark as they are now.
        device: A part of the device's name, in upper or lower case; empty for the device of the newest record.

    Raises:
        ArgumentError: No record is of a model as it is now, or none of these is from such a device; the message then
            lists the devices.
    """
    settings = {workload.name: workload.settings for workload in workloads}
    current = [record for record in records if record.settings == settings.get(record.case)]
    if not current:
        advice = "Run `gatewise bench models` again."
        raise ArgumentError(sentence("--results", "records of the models as they are now", "older ones only", advice))
    return list({(record.case, record.direction): record for record in of_device(current, device)}.values())
