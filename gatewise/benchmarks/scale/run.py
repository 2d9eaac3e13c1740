"""The run of the benchmark: 1, 2, 4, ... processes, one start of torchrun for each number."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from gatewise.benchmarks.observer import Observer
from gatewise.benchmarks.outcome import Outcome
from gatewise.benchmarks.precision import Precision
from gatewise.benchmarks.record import MEASURED, Record, Run
from gatewise.benchmarks.scale.launch import answers
from gatewise.benchmarks.scale.training import Training
from gatewise.benchmarks.scale.ways import Way
from gatewise.benchmarks.scale.worker import Task
from gatewise.selection.timing import Timing

BENCHMARK = "scale"
QUICK_BENCHMARK = "scale_quick"  # in a separate file, so that reports do not include quick runs


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a run.

    Attributes:
        benchmark: The name of the benchmark in records.
        training: The training that is measured; its batch is not used.
        batches: The numbers of sequences or sentence pairs in the batch of each process.
        processes: The numbers of processes.
        ways: The ways.
        precision: The precision.
        device: The kind of device; each process has its own GPU.
        runs: The number of samples.
        calls: The number of training steps per sample.
        limit: The largest time in seconds that a row may take.
    """

    benchmark: str
    training: Training
    batches: tuple[int, ...]
    processes: tuple[int, ...]
    ways: tuple[Way, ...]
    precision: Precision
    device: torch.device
    runs: int
    calls: int
    limit: float


def run(settings: Settings, observer: Observer, write: Callable[[Record], None]) -> Outcome[Record]:
    """Measure all ways on all numbers of processes.

    Args:
        settings: The settings.
        observer: The observer of the progress.
        write: A function that is called with each record when it is complete.

    Raises:
        WorkersFailed: A process failed, or a row took longer than the limit; earlier records are written.
    """
    about, records = Run.now(settings.device), []
    names = tuple(way.name for way in settings.ways)
    task = Task(
        settings.training.model,
        settings.training,
        settings.batches,
        names,
        settings.precision.name,
        settings.device.type,
        settings.runs,
        settings.calls,
        answers="",
    )
    try:
        for processes in settings.processes:
            observer.begin(f"{processes} processes", len(settings.batches) * len(names))
            for answer in answers(task, processes, settings.limit):
                if "begins" in answer:
                    observer.step(f"{answer['begins']}, batch {answer['batch']}")
                    continue
                record = _record(settings, about, processes, answer)
                write(record)
                records.append(record)
    except KeyboardInterrupt:
        return Outcome(records, True)
    return Outcome(records, False)


def _record(settings: Settings, about: Run, processes: int, answer: dict) -> Record:
    training = settings.training.with_batch(answer["batch"])
    record = Record(
        benchmark=settings.benchmark,
        case=training.name,
        settings={
            "model": training.model,
            **training.settings,
            "steps_a_sample": settings.calls,
            "processes": processes,
        },
        way=answer["way"],
        kernel=None,
        dtype=settings.precision.name,
        status=answer["status"],
        note=answer["note"],
        run=dataclasses.replace(about, device=answer["device"]),
    )
    if answer["status"] != MEASURED:
        return record
    record = dataclasses.replace(record, allocated_bytes=answer["allocated_bytes"])
    return record.timed(Timing.of(answer["samples"]), training.words * processes)
