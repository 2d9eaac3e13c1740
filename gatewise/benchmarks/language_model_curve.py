"""The loss of a language model over a few steps of training, which is held to that of nn.LSTM before it is timed."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gatewise.benchmarks.agreement import YARDSTICK
from gatewise.benchmarks.cases import LanguageModelCase
from gatewise.benchmarks.curve import Curve, Finding, Nudge, Rival, followed, rounding_of_sum
from gatewise.benchmarks.precision import Precision
from gatewise.benchmarks.rivals import Way
from gatewise.benchmarks.training_step import TrainingStep, new_model
from gatewise.data import Window
from gatewise.training.graph import Capture, cuda_graph


class Curves:
    """The losses of ways on one model, from one start and without dropout, which no two ways apply alike.

    A few steps on two batches in turn are enough for the loss to fall. Where steps are replayed, the first ones are
    those that come before the capture.

    Args:
        case: The model's sizes.
        vocabulary: V.
        start: The weights that every way starts from.
        batches: Two or more.
        capture: Records the work of a step and returns what repeats it.
    """

    def __init__(
        self,
        case: LanguageModelCase,
        vocabulary: int,
        start: Sequence[Tensor],
        batches: Sequence[Window],
        capture: Capture = cuda_graph,
    ) -> None:
        self._case = case
        self._vocabulary = vocabulary
        self._start = start
        self._batches = batches[:2]
        self._capture = capture
        self._rivals: dict[str, Rival] = {}

    def finding(self, way: Way, precision: Precision) -> Finding:
        """Hold the loss of a way, in the loop in which it is timed, to that of nn.LSTM in the usual loop."""
        if precision.name not in self._rivals:
            self._rivals[precision.name] = Rival(
                lambda nudge: self._losses(YARDSTICK, precision, nudge),
                precision.rounding,
                rounding_of_sum(self._case.words),
            )
        return self._rivals[precision.name].beside(self._losses(way, precision))

    def _losses(self, way: Way, precision: Precision, nudge: Nudge | None = None) -> Curve:
        device = self._start[0].device
        model = new_model(way, self._case, self._vocabulary, precision, device, dropout=0.0, start=self._start)
        if nudge is not None:
            nudge.move(model.parameters())
        with precision.applied():
            return followed(TrainingStep(model, self._batches, self._case, precision, way.loop, self._capture))
