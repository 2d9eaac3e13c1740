"""The cause of a step that was not finite: a wrong result of a kernel, or training that diverged."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gatewise._version import __version__
from gatewise.contract.errors import CheckpointError, GatewiseError, KernelFault, NotFinite, TrainingDiverged
from gatewise.training.options import TrainingOptions
from gatewise.training.processes import Processes
from gatewise.training.randomness import restore_random_states
from gatewise.training.recorded_step import RecordedStep, write_step
from gatewise.training.reference import Reference
from gatewise.training.step import Measured

Measure = Callable[[Any, Any], Measured]
"""A function that repeats a step in this process alone: from batch and state to its loss and gradients."""


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """A repetition of a step in one process.

    Attributes:
        measured: The result of the step; None if it could not be repeated, or if there was nothing to repeat.
        error: The reason why it could not be repeated; empty otherwise.
    """

    measured: Measured | None = None
    error: str = ""

    @property
    def finite(self) -> bool:
        """Whether the result is finite, or there is none."""
        return not self.error and (self.measured is None or self.measured.finite)

    def facts(self) -> dict[str, Any]:
        """Return the trial for the record of the step, as JSON values."""
        return ({} if self.measured is None else self.measured._asdict()) | {"error": self.error}

    def __str__(self) -> str:
        """Return the trial in a few words."""
        if self.measured is None:
            return self.error or "nothing to repeat"
        state = "" if math.isfinite(self.measured.state) else f", largest state {self.measured.state:g}"
        return f"loss {self.measured.loss:g}, gradients {self.measured.gradients:g}{state}"


@dataclasses.dataclass(frozen=True, slots=True)
class Inquiry:
    """The search for the cause of a step that was not finite.

    Attributes:
        model: The model, with the weights before the step.
        processes: The processes of the distributed training.
        options: The options of the training.
        reference: The reference implementation on which a step is repeated; None if there is none.
        report: The file for the record of the step.
        facts: Information about the model and the run for the record, as JSON values.
    """

    model: nn.Module
    processes: Processes
    options: TrainingOptions
    reference: Reference | None
    report: Path
    facts: Mapping[str, Any]

    def error(self, what: str, own: RecordedStep | None, measure: Measure, kept: str, **facts: Any) -> NotFinite:
        """Repeat a step, first as it ran and then on the reference, and return the error; all processes must call it.

        Args:
            what: The name of the step, as the beginning of a sentence.
            own: The step of this process; None if it has no part in the failure.
            measure: A function that repeats the step, without a CUDA graph and without an update.
            kept: A sentence about the state in which the run was saved.
            facts: Further information about the step for the record, as JSON values.
        """
        again = self._repeated(own, measure, contextlib.nullcontext)
        if self.reference is None:
            return NotFinite(
                f"{what} was not finite ({_worst(again)} when it was repeated). There is no `reference` to repeat it "
                f"on, which would show whether training diverged or the model's implementation is at fault. "
                f"{self._advice()} {kept}"
            )
        trusted = self._repeated(own, measure, self.reference.context)
        name, running = self.reference.name, self.reference.running
        if any(trial.measured is not None and not trial.measured.finite for trial in trusted):
            return TrainingDiverged(
                f"{what} was not finite, nor was it when it was repeated on {name} ({_worst(trusted)}): training "
                f"diverged. {self._advice()} {kept}"
            )
        recorded = self._recorded(own, what, again, trusted, facts)
        because = f"{what} was not finite on {running} ({_worst(again)} when it was repeated there)"
        if not all(trial.finite for trial in trusted):
            return NotFinite(
                f"{because}, and could not be repeated on {name}: {_worst(trusted)}. Either {running} is at fault, or "
                f"training diverged. {kept} {recorded}\n{self.reference.advice}"
            )
        return KernelFault(
            f"{because}. Repeated on {name}, from the same weights, state, batch and random numbers, it was finite "
            f"({_worst(trusted)}), so {running} is at fault. {kept} {recorded}\n{self.reference.advice}"
        )

    def _repeated(
        self, own: RecordedStep | None, measure: Measure, context: Callable[[], AbstractContextManager[Any]]
    ) -> Sequence[Trial]:
        """Return the trials of all processes, by rank; errors in a trial become part of its result."""
        trial = Trial()
        if own is not None:
            buffers = [(each, each.clone()) for each in self.model.buffers()]
            restore_random_states(own.random, self.processes.device)
            try:
                with context():
                    trial = Trial(measure(own.batch, own.state))
            except (RuntimeError, GatewiseError) as error:
                trial = Trial(error=next(iter(str(error).splitlines()), type(error).__name__))
            with torch.no_grad():
                for each, copy in buffers:
                    each.copy_(copy)
        return self.processes.all_gather(trial)

    def _recorded(
        self,
        own: RecordedStep | None,
        what: str,
        again: Sequence[Trial],
        trusted: Sequence[Trial],
        facts: Mapping[str, Any],
    ) -> str:
        """Write the record of the step, and return a sentence about it."""
        assert self.reference is not None
        device = self.processes.device
        found = {
            "what": what,
            "running": self.reference.running,
            "reference": self.reference.name,
            "again": [trial.facts() for trial in again],
            "on the reference": [trial.facts() for trial in trusted],
            **facts,
            **self.facts,
            "run": dict(self.reference.facts),
            "options": dataclasses.asdict(self.options),
            "processes": self.processes.count,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
            "versions": {
                "gatewise": __version__,
                "torch": torch.__version__,
                "cuda": torch.version.cuda,
                "cudnn": torch.backends.cudnn.version(),
                "python": platform.python_version(),
            },
            "environment": {name: value for name, value in os.environ.items() if name.startswith("GATEWISE_")},
        }
        try:
            write_step(self.report, self.model, own, self.processes, found)
        except CheckpointError as error:
            written = f"The step could not be recorded: {error}"
        else:
            written = f"The step is recorded in {self.report}: please report it with that file."
        return self.processes.broadcast(written)  # which also makes all processes wait until the file is written

    def _advice(self) -> str:
        rate, clip = self.options.learning_rate, self.options.clip
        norm = f"it is {clip:g}" if clip else "it is 0, which does not clip; try 1"
        return f"Lower `learning_rate` (it is {rate:g}) or the norm `clip` that gradients are clipped to ({norm})."


def _worst(trials: Sequence[Trial]) -> str:
    """Return the first trial that was not finite, otherwise the first one with a result, and its process."""
    made = [rank for rank, trial in enumerate(trials) if trial.measured is not None or trial.error]
    bad = [rank for rank in made if not trials[rank].finite]
    rank = next(iter(bad or made), 0)
    return f"{trials[rank]}{f' in process {rank}' if len(trials) > 1 else ''}"
