"""One row: a cell on one case in one precision and one direction, checked and timed in every way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from gatewise.benchmarks.cells.record import LIBRARY, LOOP, OWN, RESETS, Measurement
from gatewise.benchmarks.lstm import agreement
from gatewise.benchmarks.lstm.record import EAGER, GRAPH
from gatewise.benchmarks.lstm.side import Outputs, Side
from gatewise.benchmarks.outcome import first_line
from gatewise.benchmarks.record import AGREED, FAILED, MEASURED, REFUSED, WRONG
from gatewise.benchmarks.sampling import Sampling, finite, sampled, short, short_timing
from gatewise.contract.capture import for_cuda_graph
from gatewise.contract.decision import Decision
from gatewise.contract.errors import GatewiseError
from gatewise.selection import explain
from gatewise.selection.timing import Timing, captured, clock_for, peak_memory, time_callable

Found = TypeVar("Found")

_IN_TURN = 0.05  # seconds; ways that take longer are timed one after the other
_ONCE = 1.0  # seconds; of ways that take longer the checked call is the only one

_LAYERS = (*OWN, LIBRARY)


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """A way to compute a row.

    Attributes:
        make: A function that creates the side.
        truth: The results in float64, by name.
        rival: The name of the way with whose errors its own are compared; empty for one that is not compared.
        wanted: Whether it is timed; otherwise only its errors are computed.
        seed: The seed of PyTorch's generator before each call that is checked, if the calls draw random numbers.
    """

    make: Callable[[], Side]
    truth: Mapping[str, Tensor]
    rival: str
    wanted: bool = True
    seed: int | None = None

    def evidence(self, side: Side, training: bool) -> dict[str, Tensor]:
        """Return the results of one call of its side."""
        self.begin()
        return side.evidence(training)

    def begin(self) -> None:
        """Set the generator before a call whose results are checked."""
        if self.seed is not None:
            torch.manual_seed(self.seed)


@dataclasses.dataclass(slots=True)
class _Entry:
    """A way with its side and what has been found so far."""

    way: Way
    measured: Measurement
    side: Side | None = None
    errors: agreement.Errors = dataclasses.field(default_factory=dict)
    seconds: float = 0.0


class Row:
    """The measurement of the ways of a row.

    Args:
        ways: The ways by name; one comes after the way with which it is compared.
        rounding: The error that is allowed beside that of the rival, relative to a number.
        training: Whether the row is a training step.
        sampling: The settings of samples.
        slack: A function that returns the allowed error of gradients in addition, from the error of the loop's output.
    """

    def __init__(
        self,
        ways: Mapping[str, Way],
        rounding: float,
        training: bool,
        sampling: Sampling,
        slack: Callable[[float], float],
    ) -> None:
        self._rounding = rounding
        self._training = training
        self._sampling = sampling
        self._device = sampling.device
        self._graphs = has_graphs(sampling.device)
        self._slack = slack
        self._entries = {name: _Entry(way, Measurement(AGREED)) for name, way in ways.items()}

    def measurements(self) -> dict[str, Measurement]:
        """Check all ways, time those with correct results, and return the measurements of the wanted ones."""
        for name, entry in self._entries.items():
            try:
                self._check(name, entry)
            except (RuntimeError, GatewiseError) as error:  # out of memory, or a library's error: the others still run
                self._fail(entry, error)
        self._time({name: entry for name, entry in self._entries.items() if entry.side and entry.way.wanted})
        return {name: entry.measured for name, entry in self._entries.items() if entry.way.wanted}

    def _fail(self, entry: _Entry, error: Exception) -> None:
        entry.side = None
        entry.measured = dataclasses.replace(entry.measured, status=FAILED, note=_reason(error), times={})

    def _check(self, name: str, entry: _Entry) -> None:
        side = entry.way.make()
        side.prepare(self._training)
        if name in OWN:
            side, entry.measured = self._decided(name, side, entry.measured)
            if entry.measured.status == REFUSED:
                return
        first = None
        if name != LOOP:  # which compiles nothing, and takes long
            first = self._clocked(lambda: entry.way.evidence(side, self._training))[0]
        seconds: list[float] = []
        found: dict[str, Tensor] = {}

        def call() -> None:
            spent, results = self._clocked(lambda: entry.way.evidence(side, self._training))
            seconds.append(spent)
            found.update(results)

        peak = peak_memory(call, self._device)
        entry.side, (entry.seconds,) = side, seconds
        entry.errors = _errors(found, entry.way.truth)
        entry.measured = dataclasses.replace(
            entry.measured,
            first_seconds=None if first is None else short(first),
            # Memory that is held between calls was allocated in earlier calls.
            peak_bytes=None if peak is None else peak + side.held_bytes,
            owned_bytes=side.owned_bytes(self._training),
        )
        self._judge(entry)

    def _clocked(self, function: Callable[[], Found]) -> tuple[float, Found]:
        clock = clock_for(self._device)
        clock.start()
        found = function()
        return clock.stop(), found

    def _decided(self, name: str, side: Side, measured: Measurement) -> tuple[Side, Measurement]:
        def decide(*, captured: bool) -> Decision:
            return explain(side.module, side.x, resets=name == RESETS, captured=captured)  # type: ignore[arg-type]

        decision = decide(captured=False)
        if decision.chosen is None:
            return side, dataclasses.replace(measured, status=REFUSED, note=decision.reason)
        work = decision.verdict(decision.chosen).work
        inside = decide(captured=True).chosen if self._graphs else None
        side = dataclasses.replace(side, held_bytes=0 if work is None else work.held_bytes)
        return side, dataclasses.replace(measured, ran=decision.chosen, ran_captured=inside or "")

    def _judge(self, entry: _Entry) -> None:
        """Compare the errors with those of the rival, and forget the times of what is wrong."""
        entry.measured = dataclasses.replace(
            entry.measured,
            errors={kind: finite(error) for kind, error in agreement.by_kind(entry.errors).items()},
        )
        if not entry.way.rival:
            return
        rival = self._entries[entry.way.rival]
        if not rival.errors:
            raise RuntimeError(f"not compared: {entry.way.rival}: {rival.measured.note}")
        slack = self._slack(rival.errors["y"]) if entry.way.rival == LOOP else 0.0
        finding = agreement.Agreement(entry.errors, rival.errors, self._rounding, slack)
        changes = {"note": f"{finding}.", "error_ratio": finite(finding.over_rival)}
        if not finding.agrees:
            entry.side = None
            changes |= {"status": WRONG, "times": {}}
        entry.measured = dataclasses.replace(entry.measured, **changes)

    def _time(self, entries: Mapping[str, _Entry]) -> None:
        functions: dict[tuple[str, str], Callable[[], object]] = {}
        seconds: dict[tuple[str, str], float] = {}
        replayed: dict[str, dict[str, Tensor]] = {}
        for name, entry in entries.items():
            assert entry.side is not None
            functions[name, EAGER] = entry.side.train if self._training else entry.side.infer
            seconds[name, EAGER] = entry.seconds
            if not self._graphs:
                continue
            try:
                replay, written = self._captured(entry.side, entry.seconds)
                seconds[name, GRAPH], _ = self._clocked(replay)
                functions[name, GRAPH], replayed[name] = replay, written
            except (RuntimeError, GatewiseError) as error:
                note = f"{entry.measured.note} No CUDA graph: {_reason(error)}.".lstrip()
                entry.measured = dataclasses.replace(entry.measured, note=note)
            entry.side.forget()
        timings: dict[tuple[str, str], Timing] = {}
        with torch.set_grad_enabled(self._training):
            for keys in _groups(seconds):
                try:
                    timings |= self._timed({key: functions[key] for key in keys}, seconds[keys[0]])
                except (RuntimeError, GatewiseError) as error:
                    for name in dict.fromkeys(name for name, _ in keys):
                        self._fail(entries[name], error)
        for name, entry in entries.items():
            if entry.side is not None:
                times = {how: timings[key] for how in (EAGER, GRAPH) if (key := (name, how)) in timings}
                entry.measured = dataclasses.replace(entry.measured, status=MEASURED, times=times)
                if entry.way.seed is not None and name in replayed:
                    entry.way.begin()
                    functions[name, GRAPH]()
                self._check_again(name, entry, replayed.get(name, {}))

    def _captured(self, side: Side, seconds: float) -> tuple[Callable[[], None], dict[str, Tensor]]:
        """Return a replay, and the tensors into which it writes its results."""
        outputs: list[Tensor] = []

        def step() -> None:
            side.forget()
            found: Outputs = side.call()
            if self._training:
                torch.autograd.backward(found, side.given)
            outputs[:] = [output.detach() for output in found]

        with torch.set_grad_enabled(self._training), for_cuda_graph():
            replay = captured(step, warmups=1 if seconds > _IN_TURN else 2)
        return replay, side.named(tuple(outputs), self._training)

    def _timed(
        self, functions: Mapping[tuple[str, str], Callable[[], object]], seconds: float
    ) -> dict[tuple[str, str], Timing]:
        """Return the times of functions, the first of which took some seconds in an earlier call."""
        if len(functions) > 1 or seconds <= self._sampling.sample:
            return sampled(functions, self._sampling)
        (key,) = functions
        if seconds > _ONCE:
            return {key: short_timing(Timing.of([seconds]))}
        timing = time_callable(
            functions[key],
            device=self._device,
            runs=self._sampling.most,
            warmups=0 if seconds > _IN_TURN else 1,
            calls=1,
            budget=self._sampling.seconds,
        )
        return {key: short_timing(timing)}

    def _check_again(self, name: str, entry: _Entry, replayed: Mapping[str, Tensor]) -> None:
        """Check the results of the last replay, and for gatewise those of one more call, after all others."""
        assert entry.side is not None
        try:
            if replayed:
                entry.errors = agreement.larger(_errors(replayed, entry.way.truth), entry.errors)
            if name in OWN:
                again = _errors(entry.way.evidence(entry.side, self._training), entry.way.truth)
                entry.errors = agreement.larger(again, entry.errors)
            note = entry.measured.note
            self._judge(entry)
            if "No CUDA graph" in note and entry.measured.status == MEASURED:
                entry.measured = dataclasses.replace(entry.measured, note=note)
        except (RuntimeError, GatewiseError) as error:
            self._fail(entry, error)


def _groups(seconds: Mapping[tuple[str, str], float]) -> Iterator[list[tuple[str, str]]]:
    """Yield the layers, which are timed in turn, then all others one by one, from the seconds of a call of each."""
    together = [key for key, spent in seconds.items() if key[0] in _LAYERS and spent <= _IN_TURN]
    if together:
        yield together
    yield from ([key] for key in seconds if key not in together)


def has_graphs(device: torch.device) -> bool:
    """Return whether calls on a device can be replayed as CUDA graphs."""
    return device.type == "cuda"


def _errors(found: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> agreement.Errors:
    # The states of a layer have a dimension for layers and directions, those of a loop do not.
    same = {name: tensor.numel() == truth[name].numel() for name, tensor in found.items()}
    shaped = {name: tensor.reshape(truth[name].shape) if same[name] else tensor for name, tensor in found.items()}
    return agreement.errors(shaped, truth)


def _reason(error: Exception) -> str:
    # The first line of an error of `torch.compile` only says which part of it failed.
    first = first_line(error)
    return " ".join(str(error).splitlines()[:2]) if first.endswith(":") else first
