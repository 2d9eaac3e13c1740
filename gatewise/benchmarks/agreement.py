"""The comparison of every implementation with float64, which comes before its timing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gatewise.benchmarks.cases import LanguageModelCase
from gatewise.benchmarks.precision import FLOAT64, Precision
from gatewise.benchmarks.rivals import Loop, Way, torch_lstm
from gatewise.benchmarks.training_step import TrainingStep, new_model, parameter_shapes
from gatewise.data import Window
from gatewise.training.graph import WARMUPS, Capture, cuda_graph

_REPLAYS = 3

YARDSTICK = Way("nn.LSTM", torch_lstm)


@dataclasses.dataclass(frozen=True, slots=True)
class Evidence:
    """The results of one training step.

    Attributes:
        tensors: The tensors by name: the loss of every token of the first batch, the LSTM's output and final state, the
            gradient of every parameter; then loss, output and state for the second batch, after one update and starting
            from the carried state.
    """

    tensors: dict[str, Tensor]

    def errors(self, truth: Evidence) -> dict[str, float]:
        """Return the relative error of each tensor: the norm of the difference, divided by the norm of the truth."""
        return {
            name: float((self.tensors[name].double() - expected.double()).norm() / expected.double().norm())
            for name, expected in truth.tensors.items()
        }


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """The largest error of one way, relative to its allowance.

    Attributes:
        quantity: The name of the tensor.
        error: The relative error with respect to float64.
        allowed: The allowance: the largest allowed error.
    """

    quantity: str
    error: float
    allowed: float

    @property
    def agrees(self) -> bool:
        """Whether the error is allowed; NaN is not."""
        return self.error <= self.allowed

    def __str__(self) -> str:
        """Return one sentence."""
        relation = "within" if self.agrees else "more than"
        return f"{self.quantity} is {self.error:.1e} from float64, {relation} the allowed {self.allowed:.1e}"


class Judge:
    """The comparison of ways on one model, with the same initial weights and batches, without dropout.

    The allowance is twice the sum of the error of `torch.nn.LSTM` in the same precision and one rounding unit of the
    precision's coarsest format. It is derived for each tensor and each run, never tuned.

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
        self._truth = self._evidence(YARDSTICK, FLOAT64)
        self._allowed: dict[str, dict[str, float]] = {}

    def judge(self, way: Way, precision: Precision) -> Finding:
        """Return the largest error of one way relative to its allowance."""
        errors = self._evidence(way, precision).errors(self._truth)
        allowed = self._allowance(precision)
        # NaN compares false with everything, so `max` would not find it.
        shares = {name: error / allowed[name] for name, error in errors.items()}
        worst = max(shares, key=lambda name: math.inf if math.isnan(shares[name]) else shares[name])
        finding = Finding(worst, errors[worst], allowed[worst])
        if way.loop is not Loop.GRAPH or not finding.agrees:
            return finding
        replayed = self._replayed(way, precision)
        return finding if replayed.error / replayed.allowed <= finding.error / finding.allowed else replayed

    def _replayed(self, way: Way, precision: Precision) -> Finding:
        """Compare the weights after a few replayed steps with those after the same steps without a CUDA graph."""
        ends = []
        for loop in (Loop.LIBRARY, Loop.GRAPH):
            device = self._start[0].device
            model = new_model(way, self._case, self._vocabulary, precision, device, dropout=0.0, start=self._start)
            with precision.applied():
                step = TrainingStep(model, self._batches, self._case, precision, loop, self._capture)
                for _ in range(WARMUPS + _REPLAYS):
                    step()
            ends.append([parameter.detach().double() for parameter in model.parameters()])
        shares = [
            float((replayed - launched).norm() / (launched - start.double()).norm())
            for launched, replayed, start in zip(*ends, self._start, strict=True)
        ]
        worst = math.nan if any(map(math.isnan, shares)) else max(shares)
        # Both run the same kernels in the same order, so that at most the order of additions differs: one rounding
        # unit.
        return Finding(f"a weight after {_REPLAYS} replays", worst, precision.rounding)

    def _allowance(self, precision: Precision) -> dict[str, float]:
        if precision.name not in self._allowed:
            errors = self._evidence(YARDSTICK, precision).errors(self._truth)
            self._allowed[precision.name] = {name: 2 * (error + precision.rounding) for name, error in errors.items()}
        return self._allowed[precision.name]

    def _evidence(self, way: Way, precision: Precision) -> Evidence:
        device = self._start[0].device
        model = new_model(way, self._case, self._vocabulary, precision, device, dropout=0.0, start=self._start)
        names = parameter_shapes(self._case, self._vocabulary)
        calls: list[tuple[Tensor, ...]] = []
        model.layer.register_forward_hook(lambda layer, inputs, output: calls.append((output[0], *output[1])))
        with precision.applied():
            step = TrainingStep(model, self._batches, self._case, precision, way.loop)
            before = step.losses()
            before.sum().div(self._case.batch).backward()
            gradients = [_gradient(parameter) for parameter in model.parameters()]
            step.update()
            with torch.no_grad():
                after = step.losses()
        tensors = {"loss": before.detach(), "loss after one step": after}
        tensors |= {f"gradient of {name}": gradient for name, gradient in zip(names, gradients, strict=True)}
        # The loss of a new model is about log V whatever its LSTM computes; only the outputs show an error in the
        # state.
        for call, when in zip(calls, ("", " after one step"), strict=True):
            found = zip(("output", "final hidden state", "final cell state"), call, strict=True)
            tensors |= {f"{name}{when}": tensor.detach() for name, tensor in found}
        return Evidence(tensors)


def _gradient(parameter: Tensor) -> Tensor:
    # A missing gradient is an error, like one that is NaN.
    if parameter.grad is None:
        return torch.full_like(parameter, math.nan, requires_grad=False)
    # A copy, because the update clips the gradient in place.
    return parameter.grad.clone()
