"""A process of the benchmark, which torchrun starts: `python -m gatewise.benchmarks.scale.worker TASK`."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gatewise import files
from gatewise.benchmarks.curve import STEPS, Curve, Nudge, Rival, rounding_of_sum
from gatewise.benchmarks.outcome import first_line
from gatewise.benchmarks.precision import PRECISIONS, Precision
from gatewise.benchmarks.record import FAILED, MEASURED, WRONG, Run
from gatewise.benchmarks.scale.captions import NO_GRAPH
from gatewise.benchmarks.scale.step import in_turn
from gatewise.benchmarks.scale.training import TRAININGS, Training
from gatewise.benchmarks.scale.ways import Way
from gatewise.contract.errors import ProcessFailed
from gatewise.training.graph import ReplayedStep
from gatewise.training.processes import Processes, join_processes

_SEED = 1
_BATCHES = 4  # different batches, used in turn
_BFLOAT16 = 2.0**-8
_WARMUPS = 12
"""Steps before the first sample, in which DistributedDataParallel orders its buckets and graphs are captured."""


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """What the processes of one start measure.

    Attributes:
        model: The name of the model in `TRAININGS`.
        training: The training that is measured, with any batch.
        batches: The numbers of sequences in the batch of each process.
        ways: The names of the ways.
        precision: The name of the precision.
        device: "cpu" or "cuda".
        runs: The number of samples of each way.
        calls: The number of steps per sample.
        answers: The file to which the first process appends a line for each row that it begins, and for each result.
    """

    model: str
    training: Training
    batches: tuple[int, ...]
    ways: tuple[str, ...]
    precision: str
    device: str
    runs: int
    calls: int
    answers: str

    @classmethod
    def from_line(cls, line: str) -> Task:
        """Parse a line of JSON."""
        fields = json.loads(line)
        training = TRAININGS[fields["model"]].from_fields(fields["training"])
        lists = {"batches": tuple(fields["batches"]), "ways": tuple(fields["ways"])}
        return cls(**fields | {"training": training} | lists)


def measure(task: Task, processes: Processes) -> None:
    """Measure all ways with all batches; the first process writes the answers."""
    precision = PRECISIONS[task.precision]
    device = Run.now(processes.device).device if processes.first else ""  # with the threads of this process
    start = task.training.starting_weights(processes.device, _SEED)
    with precision.applied():
        for batch in task.batches:
            row = _Rows(task, task.training.with_batch(batch), precision, start, processes)
            for way in task.training.ways.named(task.ways):
                _answer(task, processes, {"begins": way.name, "batch": batch})
                _answer(task, processes, {"way": way.name, "batch": batch, "device": device, **row.measured(way)})


class _Rows:
    """All ways with one batch."""

    def __init__(
        self,
        task: Task,
        training: Training,
        precision: Precision,
        start: Any,
        processes: Processes,
    ) -> None:
        self._task, self._training, self._precision = task, training, precision
        self._start, self._processes = start, processes
        self._batches = training.batches(_BATCHES, processes.device, _SEED + processes.rank)
        self._rivals: dict[bool, Rival] = {}

    def measured(self, way: Way) -> dict[str, Any]:
        """Return the status of a way, a note, and the samples in seconds per step if its results are right."""
        first = self._training.ways.yardstick
        if way.bfloat16 not in self._rivals:
            # Rows that send bfloat16 are compared with PyTorch's own hook, which rounds the same numbers.
            yardstick = dataclasses.replace(first, bfloat16=way.bfloat16)
            self._rivals[way.bfloat16] = Rival(
                lambda nudge: self._losses(yardstick, nudge),
                max(self._precision.rounding, _BFLOAT16 if way.bfloat16 else 0.0),
                rounding_of_sum(self._training.words * self._processes.count),
                f"{yardstick.name} in bfloat16" if way.bfloat16 else yardstick.name,
                lambda: self._losses(first, precision=PRECISIONS["fp32"]),
            )
        finding = self._rivals[way.bfloat16].beside(self._losses(way))
        if not finding.agrees:
            return {"status": WRONG, "note": str(finding)}
        note = str(finding)
        with self._step(way, self._training.dropout, self._precision) as (step, model):
            train = in_turn(step, self._batches, self._first_state())
            for _ in range(_WARMUPS):
                train()
            if self._processes.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            samples = [self._sample(train) for _ in range(self._task.runs)]
            allocated = torch.cuda.max_memory_allocated() if self._processes.device.type == "cuda" else None
            # All processes learn of a loss in one of them: those that went on would wait for it.
            bad = self._processes.all_gather_number(int(not math.isfinite(float(train()))))
            if any(bad):
                loss = f"the loss of a step of training with dropout in process {bad.index(1)}"
                return {"status": WRONG, "note": f"{loss} is not finite"}
            if len(set(self._processes.all_gather(_digest(model)))) > 1:
                return {"status": WRONG, "note": "the weights of the processes differ"}
            if isinstance(step, ReplayedStep) and step.refusal:
                note = f"{note}; {NO_GRAPH}: {step.refusal}"
        return {"status": MEASURED, "note": note, "samples": samples, "allocated_bytes": allocated}

    def _losses(self, way: Way, nudge: Nudge | None = None, precision: Precision | None = None) -> Curve:
        """Return the mean losses of all processes in a few steps without dropout, whose masks would differ."""
        processes, precision = self._processes, precision or self._precision
        with precision.applied(), self._step(way, 0.0, precision) as (step, model):
            if nudge is not None:
                nudge.move(model.parameters())
            train = in_turn(step, self._batches[:2], self._first_state())
            found = torch.stack([train().detach().double().clone() for _ in range(STEPS)]).cpu()
        return tuple((processes.all_reduce_sum(found) / processes.count).tolist())

    def _step(self, way: Way, dropout: float, precision: Precision) -> Any:
        torch.manual_seed(_SEED + self._processes.rank)
        return self._training.step(way, self._start, precision, self._processes, dropout=dropout)

    def _first_state(self) -> Any:
        return self._training.first_state(self._processes.device)

    def _sample(self, train: Any) -> float:
        self._wait()
        self._processes.barrier()
        began = time.perf_counter()
        for _ in range(self._task.calls):
            train()
        self._wait()
        return (time.perf_counter() - began) / self._task.calls

    def _wait(self) -> None:
        if self._processes.device.type == "cuda":
            torch.cuda.synchronize()


def _digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    for weight in model.parameters():
        # Of weights that are divided among processes; importing their class takes most of a second.
        gathered = getattr(weight, "full_tensor", None)
        whole = gathered() if gathered else weight
        found.update(whole.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _answer(task: Task, processes: Processes, fields: dict[str, Any]) -> None:
    if processes.first:
        files.append_line(Path(task.answers), json.dumps(fields))


def main() -> None:
    """Measure the task of the command line; on an error, write the reason and exit with status 1."""
    task = Task.from_line(sys.argv[1])
    try:
        with join_processes(task.device) as processes:
            measure(task, processes)
    except ProcessFailed:
        sys.exit(1)  # the process that failed says why
    except Exception as error:
        files.append_line(Path(task.answers), json.dumps({"status": FAILED, "note": first_line(error)}))
        raise


if __name__ == "__main__":
    main()
