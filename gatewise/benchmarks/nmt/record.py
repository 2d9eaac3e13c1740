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
QUICK_BENCHMARK = "nmt_quick"  # trials have a file of their own, so that no report takes one for a figure

EAGER, GRAPH = "eager", "graph"
REST = "rest"


@dataclasses.dataclass(frozen=True, slots=True)
class TranslationRecord:
    """One row: one way to train one model on batches of one size, in one precision.

    Attributes:
        benchmark: "nmt", or "nmt_quick" for a trial.
        case: Name of the case; that of a largest batch ends in "-largest".
        settings: Everything that defines the case, by name, its batch too.
        dtype: Name of the precision.
        way: What was trained.
        attention: The attention kernel; empty for plain PyTorch.
        lstm: Whose LSTM layers, "nn.LSTM" or "gatewise".
        status: "measured", "refused", "wrong" or "failed".
        note: Why, when not measured; otherwise how well it agreed, and what could not be done.
        run: Where, when and with what.
        times: A step "eager", launch by launch, and "graph", replayed; empty when not measured.
        peak_bytes: What a step allocates at most, weights and optimizer included, "eager" (before there is a graph) and
            "graph" (while it is captured); without cuBLAS's own memory. Empty on a CPU.
        parts: Bytes of each part at the peak of an eager step (`gatewise.benchmarks.nmt.memory`); empty on a CPU.
        predicted_bytes: The peak that a plan of memory predicted for an eager step; None without a plan.
        budget_bytes: The budget that a largest batch fits; None for another case.
        loss: The loss that training was to reach; None when that was not tried.
        seconds_to_loss: How long it took, "eager" and "graph"; without what did not come so far.
        steps_to_loss: How many steps.
        error: The error that is largest beside its allowance, as a share of the norm.
        allowed: That allowance.
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
        """Whether nothing of gatewise is in it."""
        return not self.attention

    @property
    def batch(self) -> int:
        """B, sentence pairs."""
        return self.settings["batch"]

    def samples_per_second(self, how: str) -> float | None:
        """Return the sentence pairs a second, "eager" or "graph"; None when that was not measured."""
        timing = self.times.get(how)
        return None if timing is None else self.batch / timing.median

    @property
    def fastest(self) -> float | None:
        """The sentence pairs a second of the way it is fastest."""
        return max(filter(None, map(self.samples_per_second, self.times)), default=None)

    @property
    def quickest(self) -> float | None:
        """Seconds to the loss, the way it took least."""
        return min(self.seconds_to_loss.values(), default=None)

    def shares(self) -> dict[str, int]:
        """Return the bytes of attention, LSTM, output and everything else at the peak; empty when not measured."""
        if not self.parts:
            return {}
        named = {part: self.parts[part] for part in (ATTENTION, LSTM, OUTPUT)}
        return named | {REST: sum(self.parts.values()) - sum(named.values())}

    @classmethod
    def from_line(cls, line: str) -> TranslationRecord:
        """Read one line of a file."""
        fields = json.loads(line)
        times = {how: Timing(**timing) for how, timing in fields["times"].items()}
        return cls(**fields | {"run": Run(**fields["run"]), "times": times})


def newest(records: Sequence[TranslationRecord], device: str = "") -> list[TranslationRecord]:
    """Return the newest record of every case, precision and way on one device, cases in the order they first came.

    A run may be split by case or precision, so a table may hold the rows of several.

    Args:
        records: All of a file, oldest first.
        device: Part of the device's name, in any case; empty for that of the newest record.

    Raises:
        ArgumentError: No record is from such a device; the message lists those there are.
    """
    found = {(record.case, record.dtype, record.way): record for record in of_device(records, device)}
    return list(found.values())
