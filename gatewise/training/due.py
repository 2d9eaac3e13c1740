"""When a training run is evaluated and saved, and when it ends."""

from __future__ import annotations

import math
import time

from gatewise.training.options import TrainingOptions
from gatewise.training.snapshot import Run


class Due:
    """What the options of a run ask for after its last step.

    Args:
        run: The run, in the state in which it begins or is resumed.
        options: The options.
        batches: The number of batches of each process in an epoch.

    Attributes:
        saved_step: The number of steps of the last checkpoint.
    """

    def __init__(self, run: Run, options: TrainingOptions, batches: int) -> None:
        self._run, self._options, self._batches = run, options, batches
        parts = options.evaluations_per_epoch
        self._evaluated_batches = {math.ceil(batches * part / parts) for part in range(1, parts + 1)}
        self.saved()

    def saved(self) -> None:
        """Note that the run has a checkpoint of its present state."""
        self._saved_at, self.saved_step = time.perf_counter(), self._run.step

    def evaluation(self) -> bool:
        """Return whether the run must be evaluated."""
        epoch, options = self._run.epoch + 1, self._options
        this_epoch = epoch % options.epochs_per_evaluation == 0 or epoch == options.epochs
        return this_epoch and self._run.batch in self._evaluated_batches

    def checkpoint(self) -> bool:
        """Return whether the time or the steps since the last checkpoint ask for another."""
        steps = self._options.checkpoint_steps
        return (
            time.perf_counter() - self._saved_at >= self._options.checkpoint_seconds
            or 0 < steps <= self._run.step - self.saved_step
        )

    def checkpoint_after_evaluation(self) -> bool:
        """Return whether the evaluation that has just ended asks for a checkpoint."""
        run, options = self._run, self._options
        last = run.epoch + 1 == options.epochs and run.batch == self._batches
        return last or self.end() or len(run.history) % options.checkpoint_evaluations == 0

    def end(self) -> bool:
        """Return whether too many evaluations have brought no improvement."""
        patience, history = self._options.patience, self._run.history
        return 0 < patience <= len(history) and not any(evaluation.best for evaluation in history[-patience:])
