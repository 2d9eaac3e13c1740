"""A run of the benchmark: every cell on every case in every precision and direction."""

from __future__ import annotations

import dataclasses
import functools
import gc
import math
import warnings
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from gatewise.benchmarks.cases import LSTMCase
from gatewise.benchmarks.cells.call import RESET_RATE, CellCall, draw, options_with_masks
from gatewise.benchmarks.cells.cases import WHOLE_TIME
from gatewise.benchmarks.cells.kinks import has_kinks, slack
from gatewise.benchmarks.cells.loop import Loop, compiled, loop_of, step_of
from gatewise.benchmarks.cells.record import (
    CELL,
    LIBRARY,
    LOOP,
    OPTIONAL,
    PLAIN,
    RESETS,
    STEP,
    WHOLE,
    WITH_MASKS,
    CellRecord,
    Measurement,
)
from gatewise.benchmarks.cells.row import Row, Way
from gatewise.benchmarks.cells.side import layer_side, loop_side
from gatewise.benchmarks.curve import rounding_of_sum
from gatewise.benchmarks.lstm import agreement
from gatewise.benchmarks.lstm import call as lstm_call
from gatewise.benchmarks.lstm.record import TRAIN
from gatewise.benchmarks.lstm.side import gatewise_side, rival_side
from gatewise.benchmarks.observer import Observer
from gatewise.benchmarks.outcome import Outcome, first_line
from gatewise.benchmarks.precision import Precision
from gatewise.benchmarks.record import FAILED, Run
from gatewise.benchmarks.sampling import Sampling, current
from gatewise.cells import LSTM, Cell
from gatewise.selection import AUTO

Truth = dict[str, Tensor]

_SEED = 3  # of the masks


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a run.

    Attributes:
        benchmark: The name of the benchmark in the records.
        cells: The cells.
        cases: The shapes.
        precisions: The precisions.
        directions: "train", "inference" or both.
        sampling: The device, and the settings of samples.
        ways: The names of the ways beside the layer of the cell.
    """

    benchmark: str
    cells: tuple[Cell, ...]
    cases: tuple[LSTMCase, ...]
    precisions: tuple[Precision, ...]
    directions: tuple[str, ...]
    sampling: Sampling
    ways: tuple[str, ...] = OPTIONAL


def run(settings: Settings, observer: Observer, keep: Callable[[CellRecord], None]) -> Outcome[CellRecord]:
    """Check all ways on all cells and cases, time those with correct results, and return the records.

    Args:
        settings: The settings.
        observer: The observer of the progress.
        keep: A function that is called with each record as soon as it is complete.
    """
    device = settings.sampling.device
    about = Run.now(device)
    records: list[CellRecord] = []
    axes = settings.cells, settings.cases, settings.precisions, settings.directions
    observer.begin("", math.prod(map(len, axes)))
    compilations = Compilations()
    try:
        with current(device), warnings.catch_warnings():
            # In bfloat16, PyTorch's layer does not pack its weights and warns in every call; it is measured as it is.
            warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
            for case in settings.cases:
                layer = _Layer(case, device)
                for cell in settings.cells:
                    values = _Values(cell, case, device)
                    for precision in settings.precisions:
                        for direction in settings.directions:
                            observer.step(f"{cell.name}, {case.name}, {precision.name}, {direction}")
                            with precision.applied():
                                ways = _measured(settings, values, layer, precision, direction == TRAIN, compilations)
                            record = CellRecord(
                                benchmark=settings.benchmark,
                                cell=cell.name,
                                case=case.name,
                                settings=dataclasses.asdict(case)
                                | {"seconds_a_sample": settings.sampling.sample, "reset_rate": RESET_RATE},
                                dtype=precision.name,
                                direction=direction,
                                run=about,
                                ways=ways,
                            )
                            records.append(record)
                            keep(record)
    except KeyboardInterrupt:
        return Outcome(records, True)
    return Outcome(records, False)


class Compilations:
    """The compiled steps of a run, which cases share that differ in T and B only."""

    def __init__(self) -> None:
        self._steps: dict[tuple[object, ...], Loop] = {}

    def loop_with_step(self, cell: Cell, size: int, precision: Precision, training: bool) -> Loop:
        """Return a loop over the compiled step, which is compiled in its first call."""
        key = cell.name, size, precision.name, training
        if key not in self._steps:
            self._steps[key] = loop_of(cell, compiled(step_of(cell)), dynamic_batch=True)
        return self._steps[key]


class _Layer:
    """The LSTM on one case, with which all cells are compared: its values and results in float64."""

    def __init__(self, case: LSTMCase, device: torch.device) -> None:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()  # against fragmentation by the previous case
        self._case, self._device = case, device

    @functools.cached_property
    def call(self) -> lstm_call.Call:
        """The values of the call."""
        return lstm_call.draw(self._case, self._device)

    @functools.cached_property
    def truth(self) -> Truth:
        """The results in float64."""
        return agreement.truth(self.call)


class _Values:
    """A cell on one case: its precisions and directions share the values and the float64 results."""

    def __init__(self, cell: Cell, case: LSTMCase, device: torch.device) -> None:
        self.cell, self.case, self._device = cell, case, device
        self._truths_of_masks: dict[str, Truth] = {}

    @functools.cached_property
    def call(self) -> CellCall:
        """The values of the call."""
        return draw(self.cell, self.case, self._device)

    @functools.cached_property
    def truth(self) -> Truth:
        """The results in float64, by a loop over the cell's step."""
        return self._exact(resets=False)

    @functools.cached_property
    def truth_of_resets(self) -> Truth:
        """The results in float64 with resets."""
        return self._exact(resets=True)

    def truth_of_masks(self, way: str) -> Truth:
        """The results in float64 with the masks that a way of `WITH_MASKS` draws, by the kernel eager."""
        if way not in self._truths_of_masks:
            options = {**(options_with_masks(self.cell, way) or {}), "kernel": "eager"}
            exact = Way(lambda: layer_side(self.call, torch.float64, **options), {}, "", seed=_SEED)
            self._truths_of_masks[way] = exact.evidence(exact.make(), training=True)
        return self._truths_of_masks[way]

    @functools.cached_property
    def kinks(self) -> bool:
        """Whether the step of the cell is not smooth."""
        return has_kinks(self.cell)

    def _exact(self, *, resets: bool) -> Truth:
        loop = loop_of(self.cell, step_of(self.cell))
        return loop_side(self.call, torch.float64, loop, resets=resets).evidence(training=True)


def _measured(
    settings: Settings,
    values: _Values,
    layer: _Layer,
    precision: Precision,
    training: bool,
    compilations: Compilations,
) -> dict[str, Measurement]:
    tokens, size = values.case.time * values.case.batch, values.case.hidden_size
    # The library adds up the products of the loop in another order than a kernel does: the longest sums are over all
    # tokens, for the gradients of weights, or over the rows of the recurrent weights.
    rounding = precision.rounding + rounding_of_sum(max(tokens, len(values.cell.gates) * size))
    wanted = [way for way in settings.ways if _applies(way, values, training)]
    try:
        ways = _ways(wanted, values, layer, precision, training, compilations)
    except RuntimeError as error:  # out of memory, or a library's error: the other rows still run
        return dict.fromkeys((CELL, *wanted), Measurement(FAILED, note=f"float64: {first_line(error)}"))
    row = Row(
        ways,
        rounding,
        training,
        settings.sampling,
        lambda error: slack(tokens * size, error + precision.rounding) if values.kinks else 0.0,
    )
    return row.measurements()


def _applies(way: str, values: _Values, training: bool) -> bool:
    if way in WITH_MASKS:
        return training and options_with_masks(values.cell, way) is not None
    if way == PLAIN:
        return type(values.cell) is not LSTM  # whose own layer it is
    return way != WHOLE or values.case.time == WHOLE_TIME


def _ways(
    wanted: Sequence[str],
    values: _Values,
    layer: _Layer,
    precision: Precision,
    training: bool,
    compilations: Compilations,
) -> Mapping[str, Way]:
    cell, case, call, dtype = values.cell, values.case, values.call, precision.dtype

    plain = loop_of(cell, step_of(cell))
    ways = {
        LOOP: Way(lambda: loop_side(call, dtype, plain), values.truth, "", LOOP in wanted),
        CELL: Way(lambda: layer_side(call, dtype), values.truth, LOOP),
    }
    if RESETS in wanted:
        ways[RESETS] = Way(lambda: layer_side(call, dtype, resets=True), values.truth_of_resets, LOOP)
    for way in WITH_MASKS:
        if way in wanted:
            options = options_with_masks(cell, way) or {}
            make = functools.partial(layer_side, call, dtype, **options)
            ways[way] = Way(make, values.truth_of_masks(way), LOOP, seed=_SEED)
    if STEP in wanted:
        size = case.hidden_size
        ways[STEP] = Way(
            lambda: loop_side(call, dtype, compilations.loop_with_step(cell, size, precision, training)),
            values.truth,
            LOOP,
        )
    if WHOLE in wanted:
        ways[WHOLE] = Way(lambda: loop_side(call, dtype, compiled(plain)), values.truth, LOOP)
    if LIBRARY in wanted or PLAIN in wanted:
        ways[LIBRARY] = Way(lambda: rival_side(layer.call, dtype), layer.truth, "", LIBRARY in wanted)
    if PLAIN in wanted:
        ways[PLAIN] = Way(lambda: gatewise_side(layer.call, dtype, AUTO), layer.truth, LIBRARY)
    return ways
