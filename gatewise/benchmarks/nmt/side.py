"""One way with everything that training takes: model, optimizer, and the step as it is and replayed."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from gatewise.benchmarks.nmt.agreement import gradient_of
from gatewise.benchmarks.nmt.cases import TranslationCase
from gatewise.benchmarks.nmt.planned import apply_plan, training_options
from gatewise.benchmarks.nmt.rival import PlainSeq2Seq, PlainStep, plain_optimizer, seq2seq_name
from gatewise.benchmarks.nmt.ways import Way, new_model
from gatewise.benchmarks.precision import Precision
from gatewise.data import PairBatch
from gatewise.planning import Plan
from gatewise.training.graph import WARMUPS, ReplayedStep, cuda_graph
from gatewise.training.optimizers import build_optimizer
from gatewise.training.step import MeanLoss, Step


class Side:
    """A way that is ready to train, from given weights.

    Args:
        way: Which.
        case: Its sizes.
        precision: In which the forward pass runs; weights are of its dtype.
        batches: Used in turn.
        start: Weights by the names of `Seq2Seq`; None to keep those that a model starts with.
        budget: Bytes that a planned way is to keep to; None for what the device has.

    Attributes:
        plan: How a planned way's memory is planned; None in others.

    Raises:
        OutOfMemoryPredicted: Nothing keeps to the budget.
    """

    def __init__(
        self,
        way: Way,
        case: TranslationCase,
        precision: Precision,
        batches: Sequence[PairBatch],
        start: Mapping[str, Tensor] | None,
        budget: int | None = None,
    ) -> None:
        self.way = way
        self._all_batches = batches
        self._batches = itertools.cycle(batches)
        device = batches[0].source.device
        self.plan: Plan | None = None
        self.model = new_model(way, case, device).to(precision.dtype).train()
        if isinstance(self.model, PlainSeq2Seq):
            self._weights = {seq2seq_name(name): weight for name, weight in self.model.named_parameters()}
            self._optimizer: torch.optim.Optimizer = plain_optimizer(self.model, case)
            step = PlainStep(self.model, self._optimizer, case.clip, precision.autocast)
        else:
            if way.planned:
                self.plan = apply_plan(self.model, case, precision, device, budget)
            self._weights = dict(self.model.named_parameters())
            options = training_options(case, precision)
            self._optimizer = build_optimizer(self.model.parameters(), options)
            step = Step(MeanLoss(self.model), self._optimizer, options.clip, options.precision, device)
        if start is not None:
            self._load(start)
        self._step = step
        self._replayed = ReplayedStep(step, cuda_graph, lambda sentence: None, list(self._weights.values()))

    @property
    def refusal(self) -> str:
        """Why the step was not captured as a graph; empty when it was, or was not to be."""
        return self._replayed.refusal

    def launch(self) -> Tensor:
        """Train on the next batch, launch by launch; return its loss."""
        return self._step(next(self._batches), None)[0]

    def replay(self) -> Tensor:
        """Train on the next batch by replaying the recorded step."""
        return self._replayed(next(self._batches), None)[0]

    def record(self) -> None:
        """Train on as many batches as it takes until steps are replayed."""
        for _ in range(WARMUPS + 1):
            self.replay()

    def forget(self) -> None:
        """Drop the gradients."""
        self._optimizer.zero_grad(set_to_none=True)

    def restart(self, start: Mapping[str, Tensor]) -> None:
        """Begin anew on the first batch, from given weights and moments of zero; what was recorded stays valid.

        Args:
            start: Weights by the names of `Seq2Seq`.
        """
        self._load(start)
        for moments in self._optimizer.state.values():
            for moment in moments.values():
                moment.zero_()
        self._batches = itertools.cycle(self._all_batches)

    @torch.no_grad()
    def _load(self, start: Mapping[str, Tensor]) -> None:
        for name, weight in self._weights.items():
            weight.copy_(start[name].view_as(weight))

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[None]:
        """Let the learning rate be 0 for a while: steps leave the weights as they are."""
        rates = [group["lr"] for group in self._optimizer.param_groups]
        before = [rate.clone() for rate in rates]
        for rate in rates:
            rate.zero_()
        try:
            yield
        finally:
            for rate, value in zip(rates, before, strict=True):
                rate.copy_(value)

    def evidence(self, replayed: bool = False) -> dict[str, Tensor]:
        """Return what one step computes on the first batch, by name: the loss, and each weight's clipped gradient.

        The weights stay as they are: the learning rate, which steps read from the device, is 0 meanwhile.

        Args:
            replayed: Whether the step is replayed, and recorded before where it was not.
        """
        with self.standing_still():
            step: Callable[[PairBatch, None], tuple[Tensor, None]] = self._step
            if replayed:
                self.record()
                step = self._replayed
            loss, _ = step(self._all_batches[0], None)
            found = {"loss": loss.detach().clone()}
            found |= {f"gradient of {name}": gradient_of(weight) for name, weight in self._weights.items()}
        self.forget()
        return found
