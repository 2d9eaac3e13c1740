"""Records of the benchmark: one for each cell, case, precision and direction, with all ways that were measured."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from gatewise.benchmarks.record import FAILED, MEASURED, WRONG, Run, of_device
from gatewise.selection.timing import Timing

BENCHMARK, QUICK_BENCHMARK = "cells", "cells_quick"

CELL, RESETS, PLAIN = "gatewise", "resets", "gatewise.LSTM"
"""Ways of gatewise: the layer of the cell, the same with resets at 3 % of the steps, and the layer of the LSTM."""

WEIGHT_DROPOUT, RECURRENT_DROPOUT = "weight-dropout", "recurrent-dropout"
ZONEOUT, CANDIDATE_DROPOUT = "zoneout", "candidate-dropout"
WITH_MASKS = (WEIGHT_DROPOUT, RECURRENT_DROPOUT, ZONEOUT, CANDIDATE_DROPOUT)
"""Ways of gatewise in training: the layer of the cell with dropout or zoneout in the recurrence, and new masks for each
call."""

LIBRARY, LOOP, STEP, WHOLE = "nn.LSTM", "loop", "compiled-step", "compiled-loop"
"""Ways of PyTorch: its LSTM, a loop over the cell's step, with `torch.compile` of the step, and of the whole loop."""

OWN = (CELL, RESETS, *WITH_MASKS, PLAIN)
OPTIONAL = (RESETS, *WITH_MASKS, PLAIN, LIBRARY, LOOP, STEP, WHOLE)
"""The ways that a run can leave out."""


@dataclasses.dataclass(frozen=True, slots=True)
class Measurement:
    """One way to compute one cell on one case, in one precision and one direction.

    Attributes:
        status: "measured", "refused", "wrong" or "failed".
        note: The reason if it was not measured; otherwise the agreement with float64, and what failed.
        ran: The chosen kernel; empty for ways of PyTorch.
        ran_captured: The chosen kernel in a CUDA graph; empty if there is none.
        first_seconds: The seconds of the first call, which compiles what is not in a cache; None if not known.
        times: The times "eager" and "graph", those that were measured. Their `runs` are the numbers of samples, which
            are single calls for ways that take long.
        peak_bytes: The peak memory in addition to inputs and weights, including memory held between calls; None on a
            CPU.
        owned_bytes: The size of the outputs, and in training of the gradients; a part of `peak_bytes`.
        errors: The relative errors with respect to float64, by kind of tensor; None if infinite or NaN.
        error_ratio: The largest ratio of an error to that of the loop, for `PLAIN` to that of nn.LSTM, of all kinds.
    """

    status: str
    note: str = ""
    ran: str = ""
    ran_captured: str = ""
    first_seconds: float | None = None
    times: dict[str, Timing] = dataclasses.field(default_factory=dict)
    peak_bytes: int | None = None
    owned_bytes: int | None = None
    errors: dict[str, float | None] = dataclasses.field(default_factory=dict)
    error_ratio: float | None = None

    @property
    def extra_bytes(self) -> int | None:
        """The peak memory in addition to inputs, weights, outputs and gradients."""
        if self.peak_bytes is None or self.owned_bytes is None:
            return None
        return max(0, self.peak_bytes - self.owned_bytes)


@dataclasses.dataclass(frozen=True, slots=True)
class CellRecord:
    """One row: a cell on one case, in one precision and one direction.

    Attributes:
        benchmark: "cells", or "cells_quick" for a quick run.
        cell: The name of the cell.
        case: The name of the case.
        settings: All values that define the case, by name.
        dtype: The name of the precision.
        direction: "train" or "inference".
        run: The run of the record.
        ways: The measurement of each way, by name.
    """

    benchmark: str
    cell: str
    case: str
    settings: dict[str, Any]
    dtype: str
    direction: str
    run: Run
    ways: dict[str, Measurement] = dataclasses.field(default_factory=dict)

    @property
    def status(self) -> str:
        """The worst status of the ways of gatewise; what PyTorch cannot compute is a result, not a failure."""
        found = {self.ways[way].status for way in OWN if way in self.ways}
        return next((status for status in (WRONG, FAILED) if status in found), MEASURED)

    def median(self, way: str, how: str) -> float | None:
        """Return the median time of a way in seconds, "eager" or "graph"; None if it was not measured."""
        timing = self.ways[way].times.get(how) if way in self.ways else None
        return None if timing is None else timing.median

    def ratio(self, way: str, how: str) -> float | None:
        """Return the time of a way over that of the cell's layer, "eager" or "graph"."""
        theirs, ours = self.median(way, how), self.median(CELL, how)
        return theirs / ours if theirs and ours else None

    @classmethod
    def from_line(cls, line: str) -> CellRecord:
        """Parse one line of a file."""
        fields = json.loads(line)
        ways = {
            name: Measurement(**way | {"times": {how: Timing(**timing) for how, timing in way["times"].items()}})
            for name, way in fields["ways"].items()
        }
        return cls(**fields | {"run": Run(**fields["run"]), "ways": ways})


def newest(records: Sequence[CellRecord], device: str = "") -> list[CellRecord]:
    """Return the newest record of every cell, case, precision and direction on one device.

    A run can measure some of the ways; the others then are those of older records.

    Args:
        records: All records of a file, oldest first.
        device: A part of the device's name, in upper or lower case; empty for the device of the newest record.

    Raises:
        ArgumentError: No record is from such a device; the message lists the devices.
    """
    found: dict[tuple[str, str, str, str], CellRecord] = {}
    for record in of_device(records, device):
        key = record.cell, record.case, record.dtype, record.direction
        ways = (found[key].ways if key in found else {}) | record.ways
        found[key] = dataclasses.replace(record, ways=ways)
    return list(found.values())
