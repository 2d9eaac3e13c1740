"""`gatewise bench lm`: the PTB language model, with one row for every implementation of its LSTM."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path

import torch

from gatewise.benchmarks import curve, rivals
from gatewise.benchmarks.agreement import Judge
from gatewise.benchmarks.cases import QUICK_LANGUAGE_MODEL, LanguageModelCase
from gatewise.benchmarks.language_model_curve import Curves
from gatewise.benchmarks.observer import Observer
from gatewise.benchmarks.outcome import Outcome, first_line
from gatewise.benchmarks.precision import Precision
from gatewise.benchmarks.record import AGREED, FAILED, REFUSED, WRONG, Record, Run
from gatewise.benchmarks.rivals import Loop, Way
from gatewise.benchmarks.training_step import TrainingStep, new_model, starting_weights
from gatewise.contract.errors import ArgumentError, CorpusError, KernelRefused, sentence
from gatewise.data import TokenStream, Window, WordTokenizer, read_text
from gatewise.selection.explain import explain
from gatewise.selection.timing import Timing, peak_memory, sample_in_turn

BENCHMARK = "lm"
QUICK_BENCHMARK = "lm_quick"  # in a separate file, so that reports do not include quick runs
_SEED = 1
_BATCHES = 8  # different batches, used in turn
# Steps right before a sample, which find memory and caches as the steps of another way left them. A kernel that replays
# its calls captures graphs in them.
_LEADS = 12


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a run.

    Attributes:
        case: The size of the model; the timed model has its dropout.
        vocabularies: The vocabulary sizes V, one table for each.
        precisions: The precisions, one table for each.
        device: The device.
        runs: The number of samples of each way.
        calls: The number of training steps per sample.
        warmups: The number of steps of each way before the first sample.
        budget: The time in seconds after which sampling for a table stops, if there are three samples of each way; None
            for no limit.
        corpus: The text with the tokens; None for random tokens.
        only: Parts of names; other ways are left out. Empty for all ways.
    """

    case: LanguageModelCase
    vocabularies: tuple[int, ...]
    precisions: tuple[Precision, ...]
    device: torch.device
    runs: int = 20
    calls: int = 1
    warmups: int = 3
    budget: float | None = None
    corpus: Path | None = None
    only: tuple[str, ...] = ()


def run(settings: Settings, observer: Observer, ways: Sequence[Way] | None = None) -> Outcome[Record]:
    """Check all ways, time those with correct results, and return a record of each.

    Args:
        settings: The settings.
        observer: The observer of the progress.
        ways: The ways to compare; None for all implementations in plain PyTorch and all kernels.

    Raises:
        ArgumentError: No way is left to run.
        CorpusError: The text cannot be used.
    """
    ways = [way for way in (rivals.ways() if ways is None else ways) if _wanted(way, settings.only)]
    if not ways:
        known = ", ".join(repr(way.name) for way in rivals.ways())  # there are commas in names
        raise ArgumentError(sentence("--way", f"part of one of: {known}", ", ".join(map(repr, settings.only))))
    about = Run.now(settings.device)
    records: list[Record] = []
    try:
        for vocabulary in settings.vocabularies:
            tables = _Tables(settings, vocabulary, about)
            for precision in settings.precisions:
                observer.begin(f"{vocabulary:,} words, {precision.name}", 1 + len(ways) * (1 + settings.runs))
                tables.run(precision, ways, observer, records)
    except KeyboardInterrupt:
        return Outcome(records, True)
    return Outcome(records, False)


class _Tables:
    """The tables for one vocabulary size, which share tokens, initial weights and the float64 results."""

    def __init__(self, settings: Settings, vocabulary: int, about: Run) -> None:
        self._settings = settings
        self._leads = _LEADS if settings.device.type == "cuda" else 0
        self._vocabulary = vocabulary
        self._about = about
        self._batches = _batches(settings, vocabulary)
        self._start = starting_weights(settings.case, vocabulary, settings.device, _SEED)
        self._judge: Judge | None = None
        self._curves = Curves(settings.case, vocabulary, self._start, self._batches)

    def run(self, precision: Precision, ways: Sequence[Way], observer: Observer, finished: list[Record]) -> None:
        """Check and time all ways in one precision; complete records are added to `finished` even after Ctrl-C."""
        rows: dict[str, Record] = {}
        steps: dict[str, TrainingStep] = {}
        samples: dict[str, list[float]] = {}
        try:
            for way in ways:
                observer.step(f"checking {way.name}")
                rows[way.name], step = self._checked(way, precision)
                if step is not None:
                    steps[way.name] = step
            observer.step("warming up")
            with precision.applied():
                self._sample(steps, samples, observer)
        finally:
            for name, seconds in samples.items():
                rows[name] = rows[name].timed(Timing.of(seconds), self._settings.case.words)
            finished += (row for row in rows.values() if row.status != AGREED)

    def _checked(self, way: Way, precision: Precision) -> tuple[Record, TrainingStep | None]:
        """Return the record before timing, and the step to time if there is one."""
        if way.loop is Loop.GRAPH and self._settings.device.type != "cuda":
            note = f"device is {self._settings.device.type}, allowed: a CUDA GPU, which can replay a graph"
            return self._record(way, precision, REFUSED, note), None
        if self._judge is None:
            self._judge = Judge(self._settings.case, self._vocabulary, self._start, self._batches)
        try:
            finding = self._judge.judge(way, precision)
            record = self._record(way, precision, AGREED if finding.agrees else WRONG, str(finding))
            record = dataclasses.replace(record, error=finding.error, allowed=finding.allowed)
            if not finding.agrees:
                return record, None
            learning = self._curves.finding(way, precision)
            record = dataclasses.replace(record, note=f"{finding}; {learning}")
            if not learning.agrees:
                return dataclasses.replace(record, status=WRONG, note=str(learning)), None
            step = self._new_step(way, precision)
            with precision.applied():
                step.warm_up()
                record = dataclasses.replace(record, peak_bytes=peak_memory(step, self._settings.device))
                if step.refusal:
                    return self._record(way, precision, REFUSED, step.refusal), None
                # Implementations draw different dropout masks, so with dropout there are no losses to compare with.
                wrong = curve.not_finite(curve.followed(step)) if self._settings.case.dropout else ""
            return (dataclasses.replace(record, status=WRONG, note=wrong), None) if wrong else (record, step)
        except KernelRefused as refusal:
            return self._record(way, precision, REFUSED, self._reason(way, precision, refusal)), None
        except RuntimeError as error:  # out of memory, or a library's error: the other ways still run
            return self._record(way, precision, FAILED, first_line(error)), None

    def _sample(self, steps: dict[str, TrainingStep], samples: dict[str, list[float]], observer: Observer) -> None:
        settings = self._settings
        for name, seconds in sample_in_turn(
            steps,
            device=settings.device,
            runs=settings.runs,
            warmups=settings.warmups,
            calls=settings.calls,
            leads=dict.fromkeys(steps, self._leads),
            budget=settings.budget,
        ):
            observer.step(f"timing {name}")
            samples.setdefault(name, []).append(seconds)

    def _new_step(self, way: Way, precision: Precision) -> TrainingStep:
        settings = self._settings
        model = new_model(
            way,
            settings.case,
            self._vocabulary,
            precision,
            settings.device,
            dropout=settings.case.dropout,
            start=self._start,
        )
        return TrainingStep(model, self._batches, settings.case, precision, way.loop)

    def _reason(self, way: Way, precision: Precision, refusal: KernelRefused) -> str:
        case = self._settings.case
        if way.kernel is not None:
            with torch.device("meta"):
                layer = way.layer(case.hidden_size, case.num_layers, case.dropout)
            shape = (case.time, case.batch, case.hidden_size)
            with precision.applied():
                decision = explain(layer, shape, device=self._settings.device, dtype=precision.compute_dtype)  # type: ignore[arg-type]
            refusals = decision.verdict(way.kernel).refusals
            if refusals:
                return str(refusals[0])
        return first_line(refusal)

    def _record(self, way: Way, precision: Precision, status: str, note: str) -> Record:
        settings, case = self._settings, self._settings.case
        return Record(
            benchmark=QUICK_BENCHMARK if case.name == QUICK_LANGUAGE_MODEL.name else BENCHMARK,
            case=case.name,
            settings={
                **dataclasses.asdict(case),
                "vocabulary": self._vocabulary,
                "corpus": settings.corpus.name if settings.corpus else "random tokens",
                "steps_a_sample": settings.calls,
                "steps_before_a_sample": self._leads,
            },
            way=way.name,
            kernel=way.kernel,
            dtype=precision.name,
            status=status,
            note=note,
            run=self._about,
        )


def _wanted(way: Way, only: Sequence[str]) -> bool:
    return not only or any(part.lower() in way.name.lower() for part in only)


def _batches(settings: Settings, vocabulary: int) -> list[Window]:
    case = settings.case
    if settings.corpus is None:
        generator = torch.Generator().manual_seed(_SEED)
        columns = torch.randint(vocabulary, (case.batch, _BATCHES * case.time + 1), generator=generator)
        tokens = columns.flatten()
    else:
        text = read_text(settings.corpus)
        tokens = WordTokenizer.from_text(text, vocabulary).encode(text)
        needed = case.batch * (2 * case.time + 1)
        if len(tokens) < needed:
            found = f"{len(tokens):,} words in {settings.corpus}"
            raise CorpusError(sentence("--train", f"a text of at least {needed:,} words, two batches", found))
    stream = TokenStream(tokens, case.batch, case.time, device=settings.device)
    whole = (window for window in stream.windows() if window.count == case.words)
    return list(itertools.islice(whole, _BATCHES))
