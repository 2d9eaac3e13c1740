"""The training loop: truncated backpropagation through time with a carried state, evaluations, checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gatewise.contract.errors import CheckpointError, NotFinite
from gatewise.training.averaging import WeightAverage
from gatewise.training.carried import flatten
from gatewise.training.checkpoint import read_tensors, write_tensors
from gatewise.training.due import Due
from gatewise.training.fault import Inquiry
from gatewise.training.graph import Capture, ReplayedStep, TrainBatch, cuda_graphs, refusal
from gatewise.training.history import Evaluation, Progress, merit
from gatewise.training.interruption import interruptible
from gatewise.training.optimizers import build_optimizer
from gatewise.training.options import TrainingOptions
from gatewise.training.precision import arithmetic
from gatewise.training.processes import Processes
from gatewise.training.protocols import Batch, Batches, Observer
from gatewise.training.recorded_step import RecordedStep
from gatewise.training.reference import Reference
from gatewise.training.run_folder import RunFolder
from gatewise.training.schedule import Schedule
from gatewise.training.snapshot import Run, capture, check, restore, weights_of
from gatewise.training.step import MeanLoss, Step
from gatewise.training.validation import evaluate, evaluation_error
from gatewise.training.watch import Watch

CHECKPOINT = "checkpoint"
MODEL = "model"

_REPORT_SECONDS = 0.5
_AGREE_EVERY = 25
"""The number of steps after which several processes agree on stopping or saving."""


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a training run.

    Attributes:
        history: All evaluations, including those before an interruption.
        step: The number of optimizer steps.
        seconds: The time of training, evaluations and checkpoints, including that before an interruption.
        interrupted: Whether the run was stopped by a signal; it can be resumed from its checkpoint.
    """

    history: tuple[Evaluation, ...]
    step: int
    seconds: float
    interrupted: bool


def fit(
    model: nn.Module,
    train: Batches,
    valid: Batches,
    options: TrainingOptions,
    folder: RunFolder,
    processes: Processes,
    *,
    identity: Mapping[str, Any],
    model_facts: Mapping[str, Any],
    observers: Sequence[Observer] = (),
    score: Callable[[], Mapping[str, float]] | None = None,
    record_step: Capture | None = None,
    reference: Reference | None = None,
) -> Outcome:
    """Train a model, or resume from the checkpoint in the folder.

    On a CPU with a constant number of threads, a run that was interrupted any number of times, by Ctrl-C or by ``kill
    -9``, ends with the same bits as an uninterrupted run.

    Args:
        model: A `Trainable` on the device of `processes`.
        train: The training data. With several processes, each reads its own part, and all parts have the same size;
            they start with the weights of the first process.
        valid: The validation data, by which the best weights are chosen; see `TrainingOptions.best_by`.
        options: The training options.
        folder: The folder for checkpoints and the best weights; `RunFolder.prepare` has been called.
        processes: The processes of the distributed training.
        identity: Values that must be the same when the run is resumed, by name, as JSON values.
        model_facts: Metadata for the file of the best weights, as JSON values.
        observers: The objects that are notified, in the first process only.
        score: A function that is called in every process at each evaluation, with the evaluated weights in the model;
            its result is stored with the losses.
        record_step: A function that captures the work of a step and returns its replay; None captures CUDA graphs if
            this is possible and `options` allow it.
        reference: The reference implementation, on which a step that is not finite is repeated, so that the error can
            say whether training diverged or a kernel computed a wrong result; None if there is none.

    Returns:
        The evaluations, and whether the run was interrupted.

    Raises:
        TrainingDiverged: A loss or a gradient is not finite, nor is it on the reference.
        KernelFault: A loss or a gradient is not finite, but it is on the reference; the folder contains a record of the
            step.
        NotFinite: A loss or a gradient is not finite, and there is no reference, or the step could not be repeated on
            it.
        CheckpointError: The checkpoint in the folder cannot be used, or a new one cannot be written.
    """
    processes.broadcast_tensors(weights_of(model).values())
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = build_optimizer(parameters, options)
    run = Run(
        model=model,
        optimizer=optimizer,
        schedule=Schedule(optimizer, options, options.epochs * len(train)),
        average=WeightAverage(parameters, options),
        loss_sum=torch.zeros((), dtype=torch.float64, device=processes.device),
    )
    resumed = folder.checkpoint.exists()
    if resumed:
        restore(run, processes, identity, *read_tensors(folder.checkpoint, CHECKPOINT), folder.checkpoint)
    fitting = _Fitting(
        run, train, valid, options, folder, processes, identity, model_facts, observers, score, record_step, reference
    )
    if not resumed:
        fitting.save()
    with arithmetic(options.precision):
        return fitting.until_done()


def progress_at(checkpoint: Path) -> tuple[int, int]:
    """Return how many optimizer steps a run has made at a checkpoint, and how many epochs it has begun.

    Raises:
        CheckpointError: The file is not a checkpoint, or damaged.
    """
    _, facts = read_tensors(checkpoint, CHECKPOINT)
    try:
        steps, epochs = operator.index(facts["step"]), operator.index(facts["epoch"])
        return steps, epochs + bool(facts["batch"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"{checkpoint} is damaged: it does not say how far its run was. Use another copy, or start a new run."
        ) from error


def check_checkpoint(checkpoint: Path, processes: Processes) -> None:
    """Check that a run can be resumed from a checkpoint, as far as this is possible without its model.

    Raises:
        CheckpointError: The file is not a checkpoint, damaged, or of another number of processes.
    """
    check(processes, *read_tensors(checkpoint, CHECKPOINT), checkpoint)


class _Fitting:
    """The state of one call of `fit`."""

    def __init__(
        self,
        run: Run,
        train: Batches,
        valid: Batches,
        options: TrainingOptions,
        folder: RunFolder,
        processes: Processes,
        identity: Mapping[str, Any],
        model_facts: Mapping[str, Any],
        observers: Sequence[Observer],
        score: Callable[[], Mapping[str, float]] | None,
        record_step: Capture | None,
        reference: Reference | None,
    ) -> None:
        self._run, self._train, self._valid = run, train, valid
        self._options, self._folder, self._processes = options, folder, processes
        self._identity, self._model_facts, self._observers = identity, model_facts, observers
        self._score, self._record_step = score, record_step
        clip, clip_value, precision = options.clip, options.clip_value, options.precision
        mean_loss = MeanLoss(run.model)
        self._launched = Step(
            mean_loss,
            run.optimizer,
            clip,
            precision,
            processes.device,
            clip_value,
            processes,
            exchange_bfloat16=options.exchange_bfloat16,
            exchange_rows=options.exchange_rows,
            exchange_factors=options.exchange_factors,
        )
        self._replayed: ReplayedStep | None = None
        self._watch = Watch(self._launched.guard, processes.device)
        facts = {"model": model_facts}
        self._inquiry = Inquiry(run.model, processes, options, reference, folder.fault, facts)
        self._due = Due(run, options, len(train))
        self._best: dict[str, torch.Tensor] | None = None
        self._clock = time.perf_counter()
        self._reported = (self._clock, 0.0, 0)

    def until_done(self) -> Outcome:
        run, options = self._run, self._options
        run.model.train()
        for observer in self._observers:
            observer.started(run.step, run.history)
        with self._best_kept(), self._train_batch() as train_batch, interruptible() as interruption:
            self._restart_clock()
            while run.epoch < options.epochs and not self._due.end():
                for batch in self._train.windows(run.epoch, run.batch):
                    self._step(train_batch, batch)
                    self._report()
                    if self._due.evaluation():
                        self._evaluate()
                        if self._due.checkpoint_after_evaluation() or self._processes.any(self._due.checkpoint()):
                            self.save()
                        self._restart_clock()
                    elif self._agreed(self._due.checkpoint()):
                        self.save()
                    if self._agreed(interruption.requested):
                        self.save()
                        return Outcome(tuple(run.history), run.step, run.seconds, interrupted=True)
                    if self._due.end():
                        break
                self._require_finite()  # so that a step is repeated from the state in its own epoch
                run.epoch, run.batch, run.carried = run.epoch + 1, 0, None
        return Outcome(tuple(run.history), run.step, run.seconds, interrupted=False)

    @contextlib.contextmanager
    def _best_kept(self) -> Iterator[None]:
        """Write the best weights if training ends with an error after the last checkpoint."""
        try:
            yield
        except BaseException:
            self._write_best()
            raise

    def _write_best(self) -> None:
        if self._best:
            write_tensors(self._folder.model, self._best, MODEL, self._model_facts)
            self._best = None

    def save(self) -> None:
        self._require_finite()
        self._tick()
        tensors, facts = capture(self._run, self._processes, self._identity)
        self._write_best()  # first, because a run that is resumed from the checkpoint does not evaluate them again
        if self._processes.first:
            write_tensors(self._folder.checkpoint, tensors, CHECKPOINT, facts)
        self._tick(training=False)
        self._due.saved()

    @contextlib.contextmanager
    def _train_batch(self) -> Iterator[TrainBatch]:
        """Yield the function that trains on one batch, captured and replayed if possible."""
        processes, step = self._processes, self._launched
        reason = refusal(self._options.cuda_graph, processes)
        if self._record_step is not None or not reason:
            record_step = self._record_step or cuda_graphs(processes)
            weights = [weight for group in self._run.optimizer.param_groups for weight in group["params"]]
            replayed = ReplayedStep(step, record_step, self._remark, weights, processes, step.expect)
            with contextlib.closing(replayed):
                self._replayed = replayed
                yield replayed
            return
        if processes.device.type == "cuda":
            self._remark(f"steps are not captured as a CUDA graph: {reason}")
        yield step

    def _remark(self, sentence: str) -> None:
        for observer in self._observers:
            observer.remarked(sentence)

    def _step(self, train_batch: TrainBatch, batch: Batch) -> None:
        run, before = self._run, self._run.carried
        run.schedule.prepare(run.step, batch.count * self._processes.count)
        self._watch.begin()
        loss, run.carried = train_batch(batch, before)
        run.average.update()
        run.loss_sum.add_(loss, alpha=batch.count)
        run.loss_tokens += batch.count
        run.step += 1
        run.batch += 1
        # The guard can keep the state before a step only if the state after it has the same structure.
        changed = before is not None and _shapes(before) != _shapes(run.carried)
        if skipped := self._watch.skipped_now() if changed else self._watch.skipped(run.step):
            raise self._not_finite(skipped, batch, before if changed else run.carried)

    def _evaluate(self) -> None:
        self._require_finite()
        run = self._run
        train_loss = self._processes.all_reduce_sum(run.loss_sum).item() / (run.loss_tokens * self._processes.count)
        self._tick()
        speed = run.loss_tokens * self._processes.count / run.segment_seconds
        with run.average.in_place():
            valid_loss = evaluate(run.model, self._valid, self._processes, self._options.precision)
            if not math.isfinite(valid_loss):
                raise self._validation_not_finite(valid_loss)
            scores = dict(self._score()) if self._score else {}
            by = self._options.best_by
            found = merit(valid_loss, scores, by)
            best = all(found > merit(each.valid_loss, each.scores, by) for each in run.history)
            if best and self._processes.first:
                self._best = {name: each.detach().to("cpu", copy=True) for name, each in weights_of(run.model).items()}
        self._tick()
        evaluation = Evaluation(
            epoch=run.epoch + run.batch / len(self._train),
            step=run.step,
            train_loss=train_loss,
            valid_loss=valid_loss,
            learning_rate=run.schedule.prepared,
            tokens_per_second=speed,
            seconds=run.seconds,
            best=best,
            scores=scores,
        )
        run.history.append(evaluation)
        run.schedule.evaluated(valid_loss)
        run.average.evaluated(valid_loss)
        run.loss_sum.zero_()
        run.loss_tokens, run.segment_seconds = 0, 0.0
        for observer in self._observers:
            observer.evaluated(evaluation)

    def _report(self) -> None:
        """Notify the observers from time to time; only the reading of the loss synchronises with the device."""
        now = time.perf_counter()
        then, loss_before, tokens_before = self._reported
        if now - then < _REPORT_SECONDS or not self._observers:
            return
        run = self._run
        loss_sum = run.loss_sum.item()
        now = time.perf_counter()
        tokens = run.loss_tokens - tokens_before
        loss = (loss_sum - loss_before) / tokens
        if not math.isfinite(loss):
            return  # all processes must find the step at the same point
        self._reported = (now, loss_sum, run.loss_tokens)
        progress = Progress(
            epoch=run.epoch,
            step=run.step,
            total_steps=self._options.epochs * len(self._train),
            loss=loss,
            learning_rate=run.schedule.prepared,
            tokens_per_second=tokens * self._processes.count / (now - then),
        )
        for observer in self._observers:
            observer.progressed(progress)

    def _require_finite(self) -> None:
        """Synchronise with the device, and raise if a step was not finite."""
        if skipped := self._watch.skipped_now():
            raise self._not_finite(skipped, None, self._run.carried)

    def _not_finite(self, skipped: int, batch: Batch | None, state: Any) -> NotFinite:
        """Return the error for the first of the `skipped` last steps; `batch` is that of the last step."""
        run = self._run
        number = run.batch - skipped
        # Every epoch starts without a state, and ends with a check of the flag.
        state = state if number else None
        if batch is None or skipped > 1:
            batch = next(iter(self._train.windows(run.epoch, number)))
        if self._replayed is not None:
            self._replayed.close()  # to release the memory of its graphs
            run.optimizer.zero_grad(set_to_none=True)
        if self._processes.device.type == "cuda":
            torch.cuda.empty_cache()
        step = run.step - skipped
        return self._inquiry.error(
            f"step {step + 1:,} of training (epoch {run.epoch + 1}, batch {number + 1:,})",
            RecordedStep(batch, state, self._watch.random_before(skipped)),
            self._launched.measure,
            self._kept("No weight was changed by it."),
            training=True,
            step=step,
            epoch=run.epoch,
            batch=number,
            learning_rate=run.schedule.rate(step),
        )

    def _validation_not_finite(self, loss: float) -> NotFinite:
        """Return the error for a validation loss, while the evaluated weights are in the model."""
        step = self._run.step
        what, kept = f"the validation loss after {step:,} steps", self._kept(f"It was {loss}.")
        return evaluation_error(self._inquiry, self._valid, what, kept, step=step)

    def _kept(self, sentence: str) -> str:
        return f"{sentence} The checkpoint of step {self._due.saved_step:,} is as it was."

    def _agreed(self, wish: bool) -> bool:
        if self._processes.count == 1:
            return wish
        return self._run.step % _AGREE_EVERY == 0 and self._processes.any(wish)

    def _tick(self, *, training: bool = True) -> None:
        """Add the time since the last call to the time of the run."""
        now = time.perf_counter()
        self._run.seconds += now - self._clock
        if training:
            self._run.segment_seconds += now - self._clock
        self._clock = now

    def _restart_clock(self) -> None:
        self._clock = time.perf_counter()
        self._reported = (self._clock, self._run.loss_sum.item(), self._run.loss_tokens)


def _shapes(state: Any) -> tuple[Any, ...]:
    leaves, shape = flatten(state)
    return repr(shape), *(leaf.shape for leaf in leaves)
