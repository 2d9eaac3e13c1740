"""The loss of a language model over a few training steps, which is compared with nn.LSTM's before anything is timed."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gatewise.benchmarks.agreement import YARDSTICK
from gatewise.benchmarks.cases import LanguageModelCase
from gatewise.benchmarks.curve import Curve, Finding, Nudge, Rival, followed, rounding_of_sum
from gatewise.benchmarks.precision import PRECISIONS, Precision
from gatewise.benchmarks.rivals import Way
from gatewise.benchmarks.training_step import TrainingStep, new_model
from gatewise.data import Window
from gatewise.training.graph import Capture, cuda_graph


class Curves:
    """The loss curves of ways on one model, with equal initial weights, and without dropout, whose masks would differ.

    A few steps on two alternating batches are enough for the loss to fall. If steps are replayed, the first ones run
    before the capture.

    Args:
        case: The sizes of the model.
        vocabulary: V, the size of the vocabulary.
        start: The initial weights of every way.
        batches: The batches, at least two.
        capture: A function that captures the work of a step and returns its replay.
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
        """Compare the loss of a way in the training loop in which it is timed with that of nn.LSTM in a plain loop."""
        if precision.name not in self._rivals:
            self._rivals[precision.name] = Rival(
                lambda nudge: self._losses(YARDSTICK, precision, nudge),
                precision.rounding,
                rounding_of_sum(self._case.words),
                # The native loop rounds the cell state to 16 bits in every step, which no change of weights shows.
                exact=lambda: self._losses(YARDSTICK, PRECISIONS["fp32"]),
            )
        return self._rivals[precision.name].beside(self._losses(way, precision))

    def _losses(self, way: Way, precision: Precision, nudge: Nudge | None = None) -> Curve:
        device = self._start[0].device
        model = new_model(way, self._case, self._vocabulary, precision, device, dropout=0.0, start=self._start)
        if nudge is not None:
            nudge.move(model.parameters())
        with precision.applied():
            return followed(TrainingStep(model, self._batches, self._case, precision, way.loop, self._capture))
