"""Records of the grid: one for each case, precision, direction and kernel."""

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
"""The benchmarks and their cells. Trials have a file of their own, so that no report takes one for a figure."""

TRAIN, INFERENCE = "train", "inference"
EAGER, GRAPH = "eager", "graph"
OURS = "gatewise"


@dataclasses.dataclass(frozen=True, slots=True)
class LayerRecord:
    """One row: one kernel beside PyTorch's layer on one case, in one precision and one direction.

    Attributes:
        benchmark: "lstm" or "gru", or "lstm_quick" and so on for a trial.
        case: Name of the case.
        settings: Everything that defines the case, by name; `tokens` are the steps of all its sequences.
        dtype: Name of the precision.
        direction: "train" or "inference".
        kernel: What was asked for: a name, or "auto".
        status: "measured", "refused", "wrong" or "failed".
        note: Why, when not measured; otherwise how well it agreed, and what could not be done.
        run: Where, when and with what.
        ran: The kernel that the decision took.
        reason: Why that one.
        algorithm: Which of its own ways it took.
        predicted: Seconds that the decision predicts.
        ran_captured: The kernel that the decision in a CUDA graph took; empty where there is none, as in old records.
        predicted_captured: Seconds that this one predicts.
        predicted_bytes: Peak memory beyond inputs and weights that it predicts.
        times: "eager" and "graph", for "gatewise" and its rival; empty when not measured.
        floor: What no kernel can go below; None on a CPU.
        peak_bytes: Of both sides, beyond inputs and weights, with what is held between calls; empty on a CPU.
        owned_bytes: Of both sides, the outputs and in training the gradients: part of `peak_bytes`.
        errors: Of every kind of tensor, the share of its norm that each side is from float64; None for no number.
        error_ratio: The largest ratio of a kind's errors, gatewise's over its rival's.
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
        """Return the median seconds of a side, "eager" or "graph"; None when there is no such time."""
        timing = self.times.get(how, {}).get(side)
        return None if timing is None else timing.median

    def speed_up(self, how: str) -> float | None:
        """Return how many times as fast as its rival gatewise is, "eager" or "graph"."""
        ours, theirs = self.median(how, OURS), self.median(how, self.rival)
        return theirs / ours if ours and theirs else None

    @property
    def seconds(self) -> float | None:
        """The time that says most of the kernel: under a CUDA graph, otherwise the eager one."""
        return self.median(GRAPH) or self.median(EAGER)

    @property
    def over_floor(self) -> float | None:
        """How many times the floor it takes."""
        return self.seconds / self.floor.seconds if self.seconds and self.floor and self.floor.seconds else None

    def extra_bytes(self, side: str) -> int | None:
        """Return a side's peak memory beyond inputs, weights, outputs and gradients."""
        if side not in self.peak_bytes:
            return None
        return max(0, self.peak_bytes[side] - self.owned_bytes[side])

    @property
    def memory_ratio(self) -> float | None:
        """That memory over its rival's; None for a single step, which keeps next to nothing."""
        if self.settings["time"] == 1:
            return None
        ours, theirs = self.extra_bytes(OURS), self.extra_bytes(self.rival)
        return None if ours is None or not theirs else ours / theirs

    @classmethod
    def from_line(cls, line: str) -> LayerRecord:
        """Read one line of a file."""
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

    A run may be split by case or precision, so a table may hold the rows of several.

    Args:
        records: All of a file, oldest first.
        device: Part of the device's name, in any case; empty for that of the newest record.

    Raises:
        ArgumentError: No record is from such a device; the message lists those there are.
    """
    found = {
        (record.case, record.dtype, record.direction, record.kernel): record for record in of_device(records, device)
    }
    return list(found.values())
