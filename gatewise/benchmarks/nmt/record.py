"""Records of the translation benchmark: one for each case, precision and way."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from gatewise.benchmarks.nmt.parts import ATTENTION, LSTM, OUTPUT
from gatewise.benchmarks.record import Run, of_device
from gatewise.selection.timing import Timing

BENCHMARK = "nmt"
QUICK_BENCHMARK = "nmt_quick"  # in a separate file, so that reports do not include quick runs

EAGER, GRAPH = "eager", "graph"
REST = "rest"


@dataclasses.dataclass(frozen=True, slots=True)
class TranslationRecord:
    """One row: one way of training one model with one batch size, in one precision.

    Attributes:
        benchmark: "nmt", or "nmt_quick" for a quick run.
        case: The name of the case; for the largest batch it ends in "-largest".
        settings: All values that define the case, by name, including its batch.
        dtype: The name of the precision.
        way: The name of the way.
        attention: The attention kernel; empty for plain PyTorch.
        lstm: The library of the LSTM layers, "nn.LSTM" or "gatewise".
        status: "measured", "refused", "wrong" or "failed".
        note: The reason if it was not measured; otherwise the agreement with float64, and what failed.
        run: The run of the record.
        times: The times of a step, "eager" and "graph" (CUDA graph replay); empty if it was not measured.
        peak_bytes: The peak memory of a step, including weights and optimizer, "eager" (before the capture) and "graph"
            (during the capture), without cuBLAS's workspace. Empty on a CPU.
        parts: The bytes of each part at the peak of an eager step (`gatewise.benchmarks.nmt.memory`); empty on a CPU.
        predicted_bytes: The peak memory of an eager step that a memory plan predicted; None without a plan.
        budget_bytes: The memory budget of a search for the largest batch; None for other records.
        loss: The loss that training was to reach; None if there was no such training.
        seconds_to_loss: The time to that loss in seconds, "eager" and "graph"; without entries that did not reach it.
        steps_to_loss: The number of steps to that loss.
        error: The relative error that is largest relative to its allowance.
        allowed: The allowance of that error.
    """

    benchmark: str
    case: str
    settings: dict[str, Any]
    dtype: str
    way: str
    attention: str
    lstm: str
    status: str
    note: str
    run: Run
    times: dict[str, Timing] = dataclasses.field(default_factory=dict)
    peak_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    parts: dict[str, int] = dataclasses.field(default_factory=dict)
    predicted_bytes: int | None = None
    budget_bytes: int | None = None
    loss: float | None = None
    seconds_to_loss: dict[str, float] = dataclasses.field(default_factory=dict)
    steps_to_loss: dict[str, int] = dataclasses.field(default_factory=dict)
    error: float | None = None
    allowed: float | None = None

    @property
    def plain(self) -> bool:
        """Whether the way is plain PyTorch, without any code of gatewise."""
        return not self.attention

    @property
    def batch(self) -> int:
        """B, the number of sentence pairs."""
        return self.settings["batch"]

    def samples_per_second(self, how: str) -> float | None:
        """Return the sentence pairs per second, "eager" or "graph"; None if it was not measured."""
        timing = self.times.get(how)
        return None if timing is None else self.batch / timing.median

    @property
    def fastest(self) -> float | None:
        """The sentence pairs per second, eager or as a graph, whichever is more."""
        return max(filter(None, map(self.samples_per_second, self.times)), default=None)

    @property
    def quickest(self) -> float | None:
        """The time to the loss in seconds, eager or as a graph, whichever is less."""
        return min(self.seconds_to_loss.values(), default=None)

    def shares(self) -> dict[str, int]:
        """Return the bytes of attention, LSTM, output and all other parts at the peak; empty if it was not measured."""
        if not self.parts:
            return {}
        named = {part: self.parts[part] for part in (ATTENTION, LSTM, OUTPUT)}
        return named | {REST: sum(self.parts.values()) - sum(named.values())}

    @classmethod
    def from_line(cls, line: str) -> TranslationRecord:
        """Parse one line of a file."""
        fields = json.loads(line)
        times = {how: Timing(**timing) for how, timing in fields["times"].items()}
        return cls(**fields | {"run": Run(**fields["run"]), "times": times})


def newest(records: Sequence[TranslationRecord], device: str = "") -> list[TranslationRecord]:
    """Return the newest record of every case, precision and way on one device, with cases in order of first occurrence.

    A run can be split by case or precision, so a table can have rows of several runs.

    Args:
        records: All records of a file, oldest first.
        device: A part of the device's name, in upper or lower case; empty for the device of the newest record.

    Raises:
        ArgumentError: No record is from such a device; the message lists the devices.
    """
    found = {(record.case, record.dtype, record.way): record for record in of_device(records, device)}
    return list(found.values())
