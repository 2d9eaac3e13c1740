"""A run of the benchmark: every way on every case is checked, then timed in turn."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from gatewise.benchmarks.curve import followed, not_finite
from gatewise.benchmarks.nmt import sentences
from gatewise.benchmarks.nmt.cases import TranslationCase
from gatewise.benchmarks.nmt.check import Check
from gatewise.benchmarks.nmt.learning import seconds_to_loss
from gatewise.benchmarks.nmt.peaks import allocated, clear, largest_of, peak_memory
from gatewise.benchmarks.nmt.planned import predicted_bytes, ways_of
from gatewise.benchmarks.nmt.record import EAGER, GRAPH, TranslationRecord
from gatewise.benchmarks.nmt.side import Side
from gatewise.benchmarks.nmt.ways import OWN, Way, starting_weights
from gatewise.benchmarks.observer import Observer
from gatewise.benchmarks.outcome import Outcome, first_line
from gatewise.benchmarks.precision import PRECISIONS, Precision
from gatewise.benchmarks.record import AGREED, FAILED, MEASURED, REFUSED, WRONG, Run
from gatewise.contract.errors import GatewiseError, KernelRefused, OutOfMemoryPredicted
from gatewise.selection.timing import Timing, sample_in_turn

# Weights are float32 in all precisions; bf16 means autocast, as in the training loop.
TRANSLATION_PRECISIONS = {
    "tf32": PRECISIONS["tf32"],
    "bf16": dataclasses.replace(PRECISIONS["bf16-autocast"], name="bf16"),
    "fp32": PRECISIONS["fp32"],
}


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a run.

    Attributes:
        benchmark: The name of the benchmark in the records.
        cases: The models and batches.
        precisions: The precisions.
        ways: The ways, with a row each.
        device: The device.
        seconds: The time in seconds after which sampling for a table stops.
        least: The smallest number of samples of each time, however long they take.
        calls: The number of steps per sample.
        budget: The memory budget in bytes of the search for the largest batch of the first case; None for no search.
        loss: The loss in nats per token that training on the first case is to reach; None for no such training.
        most_steps: The largest number of steps of that training.
    """

    benchmark: str
    cases: tuple[TranslationCase, ...]
    precisions: tuple[Precision, ...]
    ways: tuple[Way, ...]
    device: torch.device
    seconds: float = 4.0
    least: int = 3
    calls: int = 3
    budget: int | None = None
    loss: float | None = None
    most_steps: int = 1000


def run(
    settings: Settings, observer: Observer, keep: Callable[[TranslationRecord], None]
) -> Outcome[TranslationRecord]:
    """Check all ways on all cases, measure those with correct results, and return a record of each.

    Args:
        settings: The settings.
        observer: The observer of the progress.
        keep: A function that is called with each record as soon as it is complete.
    """
    about = Run.now(settings.device)
    records: list[TranslationRecord] = []
    tables = [(case, precision) for precision in settings.precisions for case in settings.cases]
    rounds = len(tables) * len(settings.ways) + len(settings.precisions) * len(_within_budget(settings))
    observer.begin("", rounds)
    try:
        with _current(settings.device):
            for precision in settings.precisions:
                for case in settings.cases:
                    cell = _Cell(settings, case, precision, about, observer)
                    for record in cell.rows(settings.ways):
                        records.append(record)
                        keep(record)
                if settings.budget is not None:
                    for record in _largest(settings, precision, about, observer):
                        records.append(record)
                        keep(record)
    except KeyboardInterrupt:
        return Outcome(records, True)
    return Outcome(records, False)


def _within_budget(settings: Settings) -> list[Way]:
    """Return the ways for which the largest batch is searched."""
    return [] if settings.budget is None else [way for way in settings.ways if way.plain or way.lstm == OWN]


def _largest(settings: Settings, precision: Precision, about: Run, observer: Observer) -> Iterator[TranslationRecord]:
    """Yield a record for each way with the largest batch of the first case that fits into the budget.

    Only plain PyTorch and ways with gatewise's LSTM layers: those with nn.LSTM need about as much memory.
    """
    case, budget = settings.cases[0], settings.budget
    assert budget is not None
    name = f"{case.name.rpartition('-')[0]}-largest"
    for way in _within_budget(settings):
        observer.step(f"{name}, {precision.name}: {way.name}")
        status = note = ""
        batch = None
        try:
            batch = largest_of(way, case, precision, settings.device, budget)
            if batch is None:
                status, note = REFUSED, "Not even the smallest batch fits the budget."
        except (KernelRefused, OutOfMemoryPredicted) as refusal:
            status, note = REFUSED, _reason(refusal)
        except (RuntimeError, GatewiseError) as error:  # as below
            status, note = FAILED, first_line(error)
        found = dataclasses.replace(case, name=name, batch=batch or 0)
        alone = dataclasses.replace(settings, loss=None, seconds=settings.seconds / len(_within_budget(settings)))
        cell = _Cell(alone, found, precision, about, None, budget)
        rows = cell.rows([way]) if batch else [dataclasses.replace(cell.blank(way), status=status, note=note)]
        yield from rows


class _Cell:
    """One case in one precision: its ways share batches, initial weights and the float64 results."""

    def __init__(
        self,
        settings: Settings,
        case: TranslationCase,
        precision: Precision,
        about: Run,
        observer: Observer | None,
        budget: int | None = None,
    ) -> None:
        self._settings = settings
        self._case = case
        self._precision = precision
        self._about = about
        self._observer = observer
        self._budget = budget

    def blank(self, way: Way) -> TranslationRecord:
        """Return a record of a way without any results."""
        return TranslationRecord(
            benchmark=self._settings.benchmark,
            case=self._case.name,
            settings=dataclasses.asdict(self._case) | {"steps_a_sample": self._settings.calls},
            dtype=self._precision.name,
            way=way.name,
            attention=way.attention,
            lstm=way.lstm,
            status=AGREED,
            note="",
            run=self._about,
            budget_bytes=self._budget,
        )

    def rows(self, ways: Sequence[Way]) -> list[TranslationRecord]:
        """Return a record for each way."""
        device = self._settings.device
        sides: dict[str, Side] = {}
        rows: dict[str, TranslationRecord] = {}
        clear(device)
        with self._precision.applied():
            try:
                check = Check(self._case, self._precision, device)
            except RuntimeError as error:  # out of memory, or a library's error: the other cases still run
                note = f"plain PyTorch: {first_line(error)}"
                return [dataclasses.replace(self.blank(way), status=FAILED, note=note) for way in ways]
            for way in ways:
                self._tell(way.name)
                row, side = self._checked(way, check)
                rows[way.name] = row
                if side is not None:
                    sides[way.name] = side
            self._time(rows, sides)
            if self._settings.loss is not None and self._case == self._settings.cases[0]:
                names = list(sides)
                sides.clear()
                for name in names:
                    clear(device)
                    rows[name] = self._learnt(rows[name], next(way for way in ways if way.name == name))
        return list(rows.values())

    def _tell(self, what: str) -> None:
        if self._observer is not None:
            self._observer.step(f"{self._case.name}, {self._precision.name}: {what}")

    def _checked(self, way: Way, check: Check) -> tuple[TranslationRecord, Side | None]:
        """Return the record before timing, and the side to time if its results are correct."""
        row, device = self.blank(way), self._settings.device
        try:
            before = allocated(device)
            side = check.side(way, self._budget)
            finding = check.finding(side)
            replays = device.type == "cuda"
            if finding.agrees and replays:
                if not self._case.dropout:
                    row = self._with_memory(row, side, before)
                replayed = check.finding(side, replayed=True)
                finding = max(finding, replayed, key=lambda each: each.error / each.allowed)
            row = dataclasses.replace(row, error=finding.error, allowed=finding.allowed)
            if not finding.agrees:
                return _wrong(row, str(finding)), None
            for how, step in _steps(side, device).items():
                learning = check.learning(side, step)
                if not learning.agrees:
                    return _wrong(row, f"{how}: {learning}"), None
                row = dataclasses.replace(row, note=f"{finding}; {learning}.")
            if side.plan is not None:
                note = f"{row.note} Planned: {ways_of(side.plan)}."
                row = dataclasses.replace(row, note=note, predicted_bytes=predicted_bytes(side.plan))
            if side.refusal:
                row = dataclasses.replace(row, note=f"{row.note} No CUDA graph: {side.refusal}.")
            if self._case.dropout:
                del side
                clear(device)
                side = Side(way, self._case, self._precision, check.batches, check.start, self._budget)
                if replays:
                    row = self._with_memory(row, side, before)
                # Implementations draw different dropout masks, so with dropout there are no losses to compare with.
                for how, step in _steps(side, device).items():
                    if wrong := not_finite(followed(step)):
                        return _wrong(row, f"{how}: {wrong}"), None
            return row, side
        except (KernelRefused, OutOfMemoryPredicted) as refusal:
            return dataclasses.replace(row, status=REFUSED, note=_reason(refusal)), None
        except (RuntimeError, GatewiseError) as error:  # as above
            return dataclasses.replace(row, status=FAILED, note=first_line(error)), None

    def _with_memory(self, row: TranslationRecord, side: Side, before: int) -> TranslationRecord:
        peaks, parts = peak_memory(side, self._settings.device, before)
        return dataclasses.replace(row, peak_bytes=peaks, parts=parts)

    def _time(self, rows: dict[str, TranslationRecord], sides: Mapping[str, Side]) -> None:
        settings = self._settings
        functions: dict[str, Callable[[], object]] = {}
        keys: dict[str, tuple[str, str]] = {}
        for name, side in sides.items():
            for how, function in _steps(side, settings.device).items():
                functions[f"{name} {how}"], keys[f"{name} {how}"] = function, (name, how)
        samples: dict[str, list[float]] = {name: [] for name in functions}
        began = time.perf_counter()
        try:
            for name, seconds in sample_in_turn(
                functions, device=settings.device, runs=1000, warmups=2, calls=settings.calls
            ):
                samples[name].append(seconds)
                whole = name == next(reversed(functions)) and len(samples[name]) >= settings.least
                if whole and time.perf_counter() - began >= settings.seconds:
                    break
        except (RuntimeError, GatewiseError) as error:
            for name in sides:
                rows[name] = dataclasses.replace(rows[name], status=FAILED, note=first_line(error))
            return
        for name in sides:
            times = {how: _short(Timing.of(samples[key])) for key, (whose, how) in keys.items() if whose == name}
            rows[name] = dataclasses.replace(rows[name], status=MEASURED, times=times)

    def _learnt(self, row: TranslationRecord, way: Way) -> TranslationRecord:
        """Add the time of training until the loss, from the initial weights of a new model."""
        settings, device = self._settings, self._settings.device
        loss = settings.loss
        assert loss is not None
        batches = sentences.draw(self._case, 64, device)
        start = starting_weights(self._case, device)
        seconds, steps = {}, {}
        for how in row.times:
            try:
                side = Side(way, self._case, self._precision, batches, start)
                side.evidence(
                    replayed=how == GRAPH
                )  # initialises libraries and the graph, without changing the weights
                found = seconds_to_loss(_steps(side, device)[how], loss, settings.most_steps, device)
            except RuntimeError as error:  # as above
                row = dataclasses.replace(row, note=f"{row.note} Training, {how}: {first_line(error)}.")
                continue
            if found is not None:
                seconds[how], steps[how] = found
        return dataclasses.replace(row, loss=loss, seconds_to_loss=seconds, steps_to_loss=steps)


def _steps(side: Side, device: torch.device) -> dict[str, Callable[[], Tensor]]:
    """Return the functions that run a training step of a side, eager and replayed."""
    if device.type != "cuda" or side.refusal:
        return {EAGER: side.launch}
    return {EAGER: side.launch, GRAPH: side.replay}


def _wrong(row: TranslationRecord, why: str) -> TranslationRecord:
    """Return a row without results other than the reason."""
    return dataclasses.replace(row, status=WRONG, note=f"{why}.", peak_bytes={}, parts={})


def _short(timing: Timing) -> Timing:
    # Further digits would be longer than the measurement is precise.
    median, q20, q80 = (float(f"{value:.5g}") for value in (timing.median, timing.q20, timing.q80))
    return Timing(median, q20, q80, timing.runs)


def _reason(refusal: GatewiseError) -> str:
    """Return the first reason in a printed decision, which follows the first dash."""
    lines = str(refusal).splitlines()
    first = next((number for number, line in enumerate(lines) if line.lstrip().startswith("- ")), None)
    if first is None:
        return first_line(refusal)
    indent = lines[first].index("- ") + 2
    more = itertools.takewhile(lambda line: line.startswith(" " * indent), lines[first + 1 :])
    return " ".join([lines[first].strip(" -"), *(line.strip() for line in more)])


@contextlib.contextmanager
def _current(device: torch.device) -> Iterator[None]:
    # Graphs are captured on the current device.
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        yield
