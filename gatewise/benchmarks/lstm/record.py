"""Records of the benchmark: one for each case, precision, direction and kernel."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from gatewise.benchmarks.cases import GRU, LSTM
from gatewise.benchmarks.lstm.floor import Floor
from gatewise.benchmarks.record import Run, of_device
from gatewise.selection.timing import Timing

BENCHMARKS = {"lstm": LSTM, "lstm_quick": LSTM, "gru": GRU, "gru_quick": GRU}
"""The benchmarks and their cells. Quick runs are in a separate file, so that reports do not include them."""

TRAIN, INFERENCE = "train", "inference"
EAGER, GRAPH = "eager", "graph"
OURS = "gatewise"


@dataclasses.dataclass(frozen=True, slots=True)
class LayerRecord:
    """One row: one kernel compared with PyTorch's layer on one case, in one precision and one direction.

    Attributes:
        benchmark: "lstm" or "gru", or "lstm_quick" and so on for a quick run.
        case: The name of the case.
        settings: All values that define the case, by name; `tokens` is the total number of time steps.
        dtype: The name of the precision.
        direction: "train" or "inference".
        kernel: The requested kernel: a name, or "auto".
        status: "measured", "refused", "wrong" or "failed".
        note: The reason if it was not measured; otherwise the agreement with float64, and what failed.
        run: The run of the record.
        ran: The chosen kernel.
        reason: The reason for the choice.
        algorithm: The algorithm of that kernel.
        predicted: The predicted time in seconds.
        ran_captured: The chosen kernel in a CUDA graph; empty if there is none, as in old records.
        predicted_captured: The predicted time in a CUDA graph in seconds.
        predicted_bytes: The predicted peak memory in addition to inputs and weights.
        times: The times "eager" and "graph", of "gatewise" and its rival ("nn.LSTM"); empty if it was not measured.
        floor: The lower bound of the time; None on a CPU.
        peak_bytes: The peak memory of both sides in addition to inputs and weights, including memory held between
            calls; empty on a CPU.
        owned_bytes: The size of the outputs of both sides, and in training of the gradients; a part of `peak_bytes`.
        errors: The relative errors of both sides with respect to float64, by kind of tensor; None if infinite or NaN.
        error_ratio: The largest ratio of gatewise's error to its rival's of all kinds.
        cell: "lstm" or "gru"; old records have none and are of LSTMs.
    """

    benchmark: str
    case: str
    settings: dict[str, Any]
    dtype: str
    direction: str
    kernel: str
    status: str
    note: str
    run: Run
    ran: str = ""
    reason: str = ""
    algorithm: str = ""
    predicted: float | None = None
    predicted_bytes: int | None = None
    times: dict[str, dict[str, Timing]] = dataclasses.field(default_factory=dict)
    floor: Floor | None = None
    peak_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    owned_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    errors: dict[str, dict[str, float | None]] = dataclasses.field(default_factory=dict)
    error_ratio: float | None = None
    ran_captured: str = ""
    predicted_captured: float | None = None
    cell: str = LSTM

    @property
    def rival(self) -> str:
        """The name of PyTorch's layer in times, bytes and errors: "nn.LSTM" or "nn.GRU"."""
        return rival_of(self.cell)

    def median(self, how: str, side: str = OURS) -> float | None:
        """Return the median time of a side in seconds, "eager" or "graph"; None if it was not measured."""
        timing = self.times.get(how, {}).get(side)
        return None if timing is None else timing.median

    def speed_up(self, how: str) -> float | None:
        """Return the speed-up of gatewise over its rival, "eager" or "graph"."""
        ours, theirs = self.median(how, OURS), self.median(how, self.rival)
        return theirs / ours if ours and theirs else None

    @property
    def seconds(self) -> float | None:
        """The most relevant median time in seconds: under a CUDA graph if there is one, otherwise eager."""
        return self.median(GRAPH) or self.median(EAGER)

    @property
    def over_floor(self) -> float | None:
        """The ratio of the time to the floor."""
        return self.seconds / self.floor.seconds if self.seconds and self.floor and self.floor.seconds else None

    def extra_bytes(self, side: str) -> int | None:
        """Return a side's peak memory in addition to inputs, weights, outputs and gradients."""
        if side not in self.peak_bytes:
            return None
        return max(0, self.peak_bytes[side] - self.owned_bytes[side])

    @property
    def memory_ratio(self) -> float | None:
        """The ratio of that memory to its rival's; None for a single step, which keeps almost nothing."""
        if self.settings["time"] == 1:
            return None
        ours, theirs = self.extra_bytes(OURS), self.extra_bytes(self.rival)
        return None if ours is None or not theirs else ours / theirs

    @classmethod
    def from_line(cls, line: str) -> LayerRecord:
        """Parse one line of a file."""
        fields = json.loads(line)
        times = {
            how: {side: Timing(**timing) for side, timing in sides.items()} for how, sides in fields["times"].items()
        }
        floor = None if fields["floor"] is None else Floor(**fields["floor"])
        return cls(**fields | {"run": Run(**fields["run"]), "times": times, "floor": floor})


def rival_of(cell: str) -> str:
    """Return the name of PyTorch's layer of a cell."""
    return f"nn.{cell.upper()}"


def newest(records: Sequence[LayerRecord], device: str = "") -> list[LayerRecord]:
    """Return the newest record of every case, precision, direction and kernel on one device, in the order of cases.

    A run can be split by case or precision, so a table can have rows of several runs.

    Args:
        records: All records of a file, oldest first.
        device: A part of the device's name, in upper or lower case; empty for the device of the newest record.

    Raises:
        ArgumentError: No record is from such a device; the message lists the devices.
    """
    found = {
        (record.case, record.dtype, record.direction, record.kernel): record for record in of_device(records, device)
    }
    return list(found.values())
