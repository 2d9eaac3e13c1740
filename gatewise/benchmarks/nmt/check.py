"""The checks that every way of a case must pass before it is timed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from gatewise.benchmarks.curve import Finding, Rival, followed
from gatewise.benchmarks.nmt import agreement, curve, sentences
from gatewise.benchmarks.nmt.cases import TranslationCase
from gatewise.benchmarks.nmt.peaks import clear
from gatewise.benchmarks.nmt.side import Side
from gatewise.benchmarks.nmt.ways import Way, starting_weights, with_distinct_attention
from gatewise.benchmarks.precision import FLOAT64, Precision

_BATCHES = 4  # different batches, used in turn


class Check:
    """The exact results of one case, and the allowed errors in one precision.

    Args:
        case: The sizes; its dropout is ignored, because implementations draw different masks.
        precision: The precision of the computation.
        device: The device.

    Attributes:
        batches: The batches of every way.
        start: The initial weights of every way.
    """

    def __init__(self, case: TranslationCase, precision: Precision, device: torch.device) -> None:
        self._case = dataclasses.replace(case, dropout=0.0)
        self._precision = precision
        self._device = device
        self._rival: Rival | None = None
        self.batches = sentences.draw(case, _BATCHES, device)
        self.start = with_distinct_attention(starting_weights(case, device))
        moved = agreement.nudge(self.start, precision.rounding)
        self._truth, exact = (self._plain(start, FLOAT64) for start in (self.start, moved))
        # One result in the same precision may be accurate by chance, so the larger error of two counts.
        errors = (
            agreement.errors(self._plain(self.start, precision), self._truth),
            agreement.errors(self._plain(moved, precision), exact),
        )
        yardstick = {name: max(each[name] for each in errors) for name in self._truth}
        nudged = agreement.errors(exact, self._truth)
        self._allowed = agreement.allowance(
            yardstick, nudged, precision.rounding, case.batch * max(case.source, case.target)
        )

    def side(self, way: Way, budget: int | None = None) -> Side:
        """Return a way that is ready to train; if its memory is planned, within a budget."""
        return Side(way, self._case, self._precision, self.batches, self.start, budget)

    def finding(self, side: Side, replayed: bool = False) -> agreement.Finding:
        """Return the largest error in a step of a side, relative to its allowance."""
        return agreement.finding(agreement.errors(side.evidence(replayed), self._truth), self._allowed)

    def learning(self, side: Side, step: Callable[[], Tensor]) -> Finding:
        """Train a side for a few steps from the initial weights, and compare its loss with that of the plain model.

        Args:
            side: A side that the method `side` returned; its weights change.
            step: A function that trains it on its next batch, as in the timed loop, and returns the loss.
        """
        if self._rival is None:
            self._rival = curve.rival(self._case, self.batches, self.start, self._precision)
            clear(self._device)
        side.restart(self.start)
        return self._rival.beside(followed(step))

    def _plain(self, start: Mapping[str, Tensor], precision: Precision) -> dict[str, Tensor]:
        return agreement.plain_result(self._case, self.batches[0], start, precision)
