"""The run of the benchmark: every way of every model is first compared with plain PyTorch, then timed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch

from gatewise.benchmarks.models import agreement, layers
from gatewise.benchmarks.models.agreement import Agreement
from gatewise.benchmarks.models.record import GRAPH, INFERENCE, LAYERS, STEP, TRAIN, Measurement, ModelRecord
from gatewise.benchmarks.models.step import InferenceStep, TrainingStep
from gatewise.benchmarks.models.ways import Way, ways
from gatewise.benchmarks.models.workload import Workload
from gatewise.benchmarks.observer import Observer
from gatewise.benchmarks.outcome import Outcome, first_line
from gatewise.benchmarks.record import AGREED, FAILED, MEASURED, WRONG, Run
from gatewise.contract.errors import KernelRefused
from gatewise.selection.timing import Function, Timing, captured, peak_memory, sample_in_turn

_SEED = 1
_BATCHES = 4  # different batches, used in turn
_WARMUPS = 2
# Before the first sample. A training loop repeats its addresses, and gatewise records the calls of a step with many
# calls, such as one for each step of a rollout, in the first log2(n) of its iterations.
_ITERATIONS = 10
_LEADS = 1  # before each sample, because other models were trained meanwhile
_FAILURES = (RuntimeError, KernelRefused)  # out of memory, or a library's error: the other ways still run


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a run.

    Attributes:
        benchmark: The name of the benchmark in records.
        workloads: The models.
        device: The device.
        steps: The number of training steps over which losses are compared.
        seconds: The time of all samples of a table in seconds, once for steps and once for the layers alone.
        graphs: Whether steps are also timed as CUDA graphs.
    """

    benchmark: str
    workloads: tuple[Workload, ...]
    device: torch.device
    steps: int = 50
    seconds: float = 1.0
    graphs: bool = True


def run(settings: Settings, observer: Observer, write: Callable[[ModelRecord], None]) -> Outcome[ModelRecord]:
    """Measure every model.

    Args:
        settings: The settings.
        observer: The observer of the progress.
        write: A function that is called with each record when it is complete.

    Returns:
        The records; for each model training before inference.
    """
    about, records = Run.now(settings.device), []
    try:
        for workload in settings.workloads:
            for direction in (TRAIN, INFERENCE) if workload.inference else (TRAIN,):
                observer.begin(f"{workload.name}, {direction}", 3 * len(ways(workload)) + 2)
                found = _Table(settings, workload, direction, observer).run()
                about_model = workload.name, workload.about, workload.settings
                record = ModelRecord(settings.benchmark, *about_model, direction, about, found)
                write(record)
                records.append(record)
    except KeyboardInterrupt:
        return Outcome(records, True)
    return Outcome(records, False)


class _Table:
    """All ways of one model in one direction."""

    def __init__(self, settings: Settings, workload: Workload, direction: str, observer: Observer) -> None:
        self._settings = settings
        self._workload = workload
        self._training = direction == TRAIN
        self._observer = observer
        self._data = agreement.batches(workload, _SEED, _BATCHES, settings.device)
        self._curves: list[list[float]] = []

    def run(self) -> dict[str, Measurement]:
        """Return the measurement of each way."""
        found: dict[str, Measurement] = {}
        steps: dict[str, TrainingStep | InferenceStep] = {}
        alone: dict[str, Function] = {}
        used = ways(self._workload)
        for way in used:
            self._observer.step(f"checking {way.name}")
            try:
                found[way.name] = self._checked(way)
                if found[way.name].status == AGREED:
                    self._observer.step(f"warming up {way.name}")
                    found[way.name], steps[way.name], alone[way.name] = self._warm(way, found[way.name])
            except _FAILURES as error:
                found[way.name] = Measurement(FAILED, first_line(error))
        self._observer.step("timing steps")
        of_steps = self._timed_in_turn(steps, found)
        self._observer.step("timing the layers alone")
        of_layers = self._timed_in_turn({name: alone[name] for name in of_steps}, found)
        times = {name: {STEP: of_steps[name], LAYERS: timing} for name, timing in of_layers.items()}
        for way in used:
            if way.name in times:
                note = self._replayed(way, times[way.name]) if self._training and self._settings.graphs else ""
                found[way.name] = dataclasses.replace(
                    found[way.name], status=MEASURED, note=note, times=times[way.name]
                )
        return found

    def _checked(self, way: Way) -> Measurement:
        workload, device = self._workload, self._settings.device
        if not self._training:
            return _compared(agreement.same_output(workload, way, ways(workload)[0], device))
        if not self._curves:
            self._curves = agreement.curves(workload, ways(workload)[0], self._settings.steps, device)
        plain = not way.accelerated
        own = self._curves[0] if plain else agreement.losses(workload, way, 0, self._settings.steps, device)
        return _compared(agreement.same_curve(own, self._curves))

    def _warm(self, way: Way, found: Measurement) -> tuple[Measurement, TrainingStep | InferenceStep, Function]:
        """Return the measurement with memory and kernels, the step, and a function that calls its layers alone."""
        workload, device = self._workload, self._settings.device
        kind = TrainingStep if self._training else InferenceStep
        step = kind(workload, way.model(workload, _SEED, device), self._data)
        for _ in range(_WARMUPS):
            step()
        peak, calls = peak_memory(step, device), layers.recorded(step)
        kernels = layers.kernels_of(calls, workload, device)
        measured = dataclasses.replace(found, peak_bytes=peak, kernels=kernels, calls=len(calls))
        return measured, step, layers.repeated(calls, workload, device)

    def _timed_in_turn(self, functions: Mapping[str, Function], found: dict[str, Measurement]) -> dict[str, Timing]:
        """Time functions in turn; if one fails, its way has failed, and the others are timed again without it."""
        remaining, running = dict(functions), ""

        def named(name: str, function: Function) -> Function:
            def call() -> None:
                nonlocal running
                running = name
                function()

            return call

        while remaining:
            try:
                return self._timed({name: named(name, function) for name, function in remaining.items()})
            except _FAILURES as error:
                found[running] = Measurement(FAILED, first_line(error))
                del remaining[running]
        return {}

    def _timed(self, functions: Mapping[str, Function]) -> dict[str, Timing]:
        samples: dict[str, list[float]] = {}
        device, budget = self._settings.device, self._settings.seconds
        leads = dict.fromkeys(functions, _LEADS)
        timing = sample_in_turn(functions, device=device, warmups=_ITERATIONS, leads=leads, budget=budget)
        for name, seconds in timing:
            samples.setdefault(name, []).append(seconds)
        return {name: Timing.of(values) for name, values in samples.items()}

    def _replayed(self, way: Way, times: dict[str, Timing]) -> str:
        """Time the step as a CUDA graph; return the reason if there is none."""
        settings, workload = self._settings, self._workload
        if settings.device.type != "cuda":
            return f"No CUDA graph on a {settings.device.type.upper()}"
        if not workload.capturable:
            return "No CUDA graph: packing a batch copies from memory that is not pinned"
        self._observer.step(f"{way.name} as a CUDA graph")
        try:
            model = way.model(workload, _SEED, settings.device)
            replay = captured(TrainingStep(workload, model, self._data[:1], capturable=True))
            times[GRAPH] = self._timed({GRAPH: replay})[GRAPH]
        except RuntimeError as error:
            return f"No CUDA graph: {first_line(error)}"
        return ""


def _compared(found: Agreement) -> Measurement:
    return Measurement(WRONG if found.note else AGREED, found.note, worst=found.worst, largest=found.largest)
