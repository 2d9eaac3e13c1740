"""A run of the benchmark: every case in every precision is checked, then timed in turn with PyTorch's layer."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from gatewise.benchmarks.cases import LSTM, LSTMCase
from gatewise.benchmarks.lstm import agreement, curve
from gatewise.benchmarks.lstm.call import Call, draw
from gatewise.benchmarks.lstm.floor import Products, floor
from gatewise.benchmarks.lstm.record import EAGER, GRAPH, OURS, TRAIN, LayerRecord, rival_of
from gatewise.benchmarks.lstm.side import Side, gatewise_side, rival_side
from gatewise.benchmarks.observer import Observer
from gatewise.benchmarks.outcome import Outcome, first_line
from gatewise.benchmarks.precision import Precision
from gatewise.benchmarks.record import AGREED, FAILED, MEASURED, REFUSED, WRONG, Run
from gatewise.benchmarks.sampling import Sampling, current, finite, sampled, short
from gatewise.contract.capture import for_cuda_graph
from gatewise.contract.decision import Decision
from gatewise.contract.device import Device
from gatewise.contract.errors import GatewiseError
from gatewise.selection import explain
from gatewise.selection.timing import captured, peak_memory


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a run.

    Attributes:
        benchmark: The name of the benchmark in the records.
        cases: The shapes.
        precisions: The precisions.
        directions: "train", "inference" or both.
        kernels: The kernels, with a row each; "auto" is the choice that users get, "lean" the same with
            `memory="lean"`.
        device: The device.
        seconds, least, most, warmups, rounds, leads, sample: See `Sampling`.
        cell: "lstm" or "gru".
    """

    benchmark: str
    cases: tuple[LSTMCase, ...]
    precisions: tuple[Precision, ...]
    directions: tuple[str, ...]
    kernels: tuple[str, ...]
    device: torch.device
    seconds: float = 0.15
    least: int = 5
    most: int = 50
    warmups: int = 2
    rounds: int = 3
    leads: int = 3
    sample: float = 0.01
    cell: str = LSTM

    @property
    def sampling(self) -> Sampling:
        """The settings of samples."""
        return Sampling(
            self.device,
            self.seconds,
            least=self.least,
            most=self.most,
            warmups=self.warmups,
            rounds=self.rounds,
            leads=self.leads,
            sample=self.sample,
        )


def run(settings: Settings, observer: Observer, keep: Callable[[LayerRecord], None]) -> Outcome[LayerRecord]:
    """Check all kernels on all cases, time those with correct results, and return a record of each.

    Args:
        settings: The settings.
        observer: The observer of the progress.
        keep: A function that is called with each record as soon as it is complete.
    """
    about = Run.now(settings.device)
    records: list[LayerRecord] = []
    rounds = len(settings.cases) * len(settings.precisions) * len(settings.directions)
    products = {precision: Products(settings.device, precision) for precision in settings.precisions}
    observer.begin("", rounds)
    try:
        with current(settings.device), warnings.catch_warnings():
            # In bfloat16, PyTorch's layer does not pack its weights and warns in every call; it is measured as it is.
            warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
            for case in settings.cases:
                cell = _Cell(settings, case, about)
                for precision in settings.precisions:
                    for direction in settings.directions:
                        observer.step(f"{case.name}, {precision.name}, {direction}")
                        with precision.applied():
                            for record in cell.rows(precision, direction, products[precision]):
                                records.append(record)
                                keep(record)
    except KeyboardInterrupt:
        return Outcome(records, True)
    return Outcome(records, False)


class _Cell:
    """One case: its precisions and directions share the values and the float64 results."""

    def __init__(self, settings: Settings, case: LSTMCase, about: Run) -> None:
        if settings.device.type == "cuda":
            torch.cuda.empty_cache()  # against fragmentation by the previous case
        self._settings = settings
        self._case = case
        self._about = about
        self._rival = rival_of(settings.cell)
        self._numbers: tuple[Call, dict[str, Tensor]] | None = None

    def rows(self, precision: Precision, direction: str, products: Products) -> list[LayerRecord]:
        """Return a record for each kernel."""
        blank = LayerRecord(
            benchmark=self._settings.benchmark,
            case=self._case.name,
            settings=dataclasses.asdict(self._case)
            | {"seconds_a_sample": self._settings.sample, "most_calls_before_a_sample": self._settings.leads},
            dtype=precision.name,
            direction=direction,
            kernel="",
            status=AGREED,
            note="",
            run=self._about,
            cell=self._settings.cell,
        )
        training = direction == TRAIN
        kernels = self._settings.kernels
        try:
            call, truth = self._call()
            blank.settings["tokens"] = call.tokens
            rival = rival_side(call, precision.dtype)
            rival_errors = agreement.errors(rival.evidence(training), truth)
        except RuntimeError as error:  # out of memory, or a library's error: the other cells still run
            note = f"{self._rival}: {first_line(error)}"
            return [dataclasses.replace(blank, kernel=kernel, status=FAILED, note=note) for kernel in kernels]
        rows: dict[str, LayerRecord] = {}
        sides: dict[str, Side] = {}
        for kernel in kernels:
            rows[kernel], side = self._checked(
                dataclasses.replace(blank, kernel=kernel), call, truth, rival_errors, precision
            )
            if side is not None:
                sides[kernel] = side
        if training:
            rows, sides = self._learning(rows, sides, call, rival, precision)
        if sides:
            measured = self._measured(rival, sides, training)
            bound = self._floor(call, precision, training, products)
            for kernel, fields in measured.items():
                row = dataclasses.replace(rows[kernel], floor=bound, **fields)
                rows[kernel] = dataclasses.replace(row, note=" ".join(filter(None, (rows[kernel].note, row.note))))
        return list(rows.values())

    def _call(self) -> tuple[Call, dict[str, Tensor]]:
        if self._numbers is None:
            call = draw(self._case, self._settings.device, cell=self._settings.cell)
            self._numbers = call, agreement.truth(call)
        return self._numbers

    def _checked(
        self,
        row: LayerRecord,
        call: Call,
        truth: Mapping[str, Tensor],
        rival_errors: agreement.Errors,
        precision: Precision,
    ) -> tuple[LayerRecord, Side | None]:
        """Return the record before timing, and the side to time if its results are correct."""
        training = row.direction == TRAIN
        try:
            side = gatewise_side(call, precision.dtype, row.kernel)
            side.prepare(training)
            lengths = None if call.lengths is None else self._settings.device.type == "cuda" or call.lengths
            decision = explain(side.module, side.x, lengths=lengths)  # type: ignore[arg-type]
            row = _decided(row, decision)
            if decision.chosen is None:
                return row, None
            work = decision.verdict(decision.chosen).work
            side = dataclasses.replace(side, held_bytes=0 if work is None else work.held_bytes)
            found = agreement.errors(side.evidence(training), truth)
            if decision.device.kind == "cuda":
                inside = explain(side.module, side.x, lengths=lengths, captured=True)  # type: ignore[arg-type]
                row = _decided_captured(row, inside)
                if inside.chosen != decision.chosen:
                    with for_cuda_graph():
                        found = agreement.larger(found, agreement.errors(side.evidence(training), truth))
        except (RuntimeError, GatewiseError) as error:  # as above
            return dataclasses.replace(row, status=FAILED, note=first_line(error)), None
        finding = agreement.agreement(found, rival_errors, precision)
        ours, theirs = agreement.by_kind(found), agreement.by_kind(rival_errors)
        row = dataclasses.replace(
            row,
            status=AGREED if finding.agrees else WRONG,
            note=f"{finding}.",
            errors={kind: {OURS: finite(ours[kind]), self._rival: finite(theirs[kind])} for kind in ours},
            error_ratio=finite(finding.over_rival),
        )
        return row, side if finding.agrees else None

    def _learning(
        self, rows: dict[str, LayerRecord], sides: Mapping[str, Side], call: Call, rival: Side, precision: Precision
    ) -> tuple[dict[str, LayerRecord], dict[str, Side]]:
        """Return the rows, and the sides whose losses agree with PyTorch's, eager and replayed."""
        learning: dict[str, Side] = {}
        theirs = curve.rival(rival, precision.rounding, lambda: rival_side(call, torch.float64)) if sides else None
        for kernel, side in sides.items():
            assert theirs is not None
            try:
                ways = (False, True) if self._settings.device.type == "cuda" else (False,)
                findings = [theirs.beside(curve.losses(side, replayed=replayed)) for replayed in ways]
            except (RuntimeError, GatewiseError) as error:  # as above
                rows[kernel] = dataclasses.replace(rows[kernel], status=FAILED, note=first_line(error))
                continue
            wrong = [finding for finding in findings if not finding.agrees]
            if wrong:
                rows[kernel] = dataclasses.replace(rows[kernel], status=WRONG, note=f"{wrong[0]}.")
            else:
                learning[kernel] = side
        return rows, learning

    def _measured(self, rival: Side, sides: Mapping[str, Side], training: bool) -> dict[str, dict]:
        """Return memory and times of every kernel, or the reason why there are none, as fields of its record."""
        everyone = {self._rival: rival, **sides}
        try:
            peaks = {name: self._peak(side, training) for name, side in everyone.items()}
            functions = {(EAGER, name): _step(side, training) for name, side in everyone.items()}
            graphs, complaints = self._graphs(everyone, training)
            with torch.set_grad_enabled(training):
                timings = sampled(functions | graphs, self._settings.sampling)
        except (RuntimeError, GatewiseError) as error:
            return {kernel: {"status": FAILED, "note": first_line(error)} for kernel in sides}
        found = {}
        for kernel, side in sides.items():
            pair = {OURS: kernel, self._rival: self._rival}
            found[kernel] = {
                "status": MEASURED,
                "note": " ".join(complaints[name] for name in pair.values() if name in complaints),
                "times": {
                    how: {who: timings[how, name] for who, name in pair.items() if (how, name) in timings}
                    for how in ((EAGER, GRAPH) if graphs else (EAGER,))
                },
                "peak_bytes": {who: peak for who, name in pair.items() if (peak := peaks[name]) is not None},
                "owned_bytes": {OURS: side.owned_bytes(training), self._rival: rival.owned_bytes(training)},
            }
        return found

    def _peak(self, side: Side, training: bool) -> int | None:
        side.prepare(training)
        side.forget()
        with torch.set_grad_enabled(training):
            peak = peak_memory(_step(side, training), self._settings.device)
        side.forget()
        # Memory that is held between calls was allocated in earlier calls.
        return None if peak is None else peak + side.held_bytes

    def _graphs(
        self, everyone: Mapping[str, Side], training: bool
    ) -> tuple[dict[tuple[str, str], Callable[[], object]], dict[str, str]]:
        graphs, complaints = {}, {}
        if self._settings.device.type == "cuda":
            for name, side in everyone.items():
                try:
                    with torch.set_grad_enabled(training), for_cuda_graph():
                        graphs[GRAPH, name] = captured(_step(side, training), warmups=2)
                except (RuntimeError, GatewiseError) as error:
                    complaints[name] = f"No CUDA graph of {name}: {first_line(error)}."
                side.forget()
        return graphs, complaints

    def _floor(self, call: Call, precision: Precision, training: bool, products: Products):  # noqa: ANN202
        if self._settings.device.type != "cuda":
            return None
        numbers = Device.probe(self._settings.device)
        bound = floor(
            self._case,
            call.tokens,
            precision,
            numbers,
            gates=call.gates,
            training=training,
            product_seconds=products.seconds,
        )
        return dataclasses.replace(bound, loop=short(bound.loop), around=short(bound.around))


def _step(side: Side, training: bool) -> Callable[[], None]:
    return side.train if training else side.infer


def _decided(row: LayerRecord, decision: Decision) -> LayerRecord:
    if decision.chosen is None:
        refusals = decision.verdict(row.kernel).refusals
        return dataclasses.replace(row, status=REFUSED, note=str(refusals[0]), reason=decision.reason)
    verdict = decision.verdict(decision.chosen)
    return dataclasses.replace(
        row,
        ran=decision.chosen,
        reason=decision.reason,
        algorithm=verdict.algorithm,
        predicted=None if verdict.seconds is None else short(verdict.seconds),
        predicted_bytes=verdict.peak_bytes,
    )


def _decided_captured(row: LayerRecord, decision: Decision) -> LayerRecord:
    verdict = decision.verdict(decision.chosen or row.ran)
    return dataclasses.replace(
        row,
        ran_captured=verdict.kernel,
        predicted_captured=None if verdict.seconds is None else short(verdict.seconds),
    )
