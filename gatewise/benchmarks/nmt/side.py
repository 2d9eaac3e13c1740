"""One way with everything that training needs: model, optimizer, and the step, eager and replayed."""

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
    """A way that is ready to train, with given initial weights.

    Args:
        way: The way.
        case: The sizes.
        precision: The precision of the forward pass; weights have its dtype.
        batches: The batches, used in turn.
        start: The initial weights by the names of `Seq2Seq`; None for those of a new model.
        budget: The memory budget in bytes of a planned way; None for the memory of the device.

    Attributes:
        plan: The memory plan of a planned way; None in others.

    Raises:
        OutOfMemoryPredicted: No plan fits into the budget.
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
        """The reason why the step was not captured; empty if it was, or has not been tried."""
        return self._replayed.refusal

    def launch(self) -> Tensor:
        """Train on the next batch without a CUDA graph; return its loss."""
        return self._step(next(self._batches), None)[0]

    def replay(self) -> Tensor:
        """Train on the next batch by replaying the captured step; return its loss."""
        return self._replayed(next(self._batches), None)[0]

    def record(self) -> None:
        """Train on as many batches as needed until steps are replayed."""
        for _ in range(WARMUPS + 1):
            self.replay()

    def forget(self) -> None:
        """Delete the gradients."""
        self._optimizer.zero_grad(set_to_none=True)

    def restart(self, start: Mapping[str, Tensor]) -> None:
        """Restart on the first batch, with given weights and with moments of zero; captured steps stay valid.

        Args:
            start: The weights by the names of `Seq2Seq`.
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
    def frozen_weights(self) -> Iterator[None]:
        """Set the learning rate to 0 inside the context, so that steps do not change the weights."""
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
        """Return the results of one step on the first batch by name: the loss, and each weight's clipped gradient.

        The weights do not change, because the learning rate, which steps read from the device, is 0 meanwhile.

        Args:
            replayed: Whether the step is replayed, after capturing it if necessary.
        """
        with self.frozen_weights():
            step: Callable[[PairBatch, None], tuple[Tensor, None]] = self._step
            if replayed:
                self.record()
                step = self._replayed
            loss, _ = step(self._all_batches[0], None)
            found = {"loss": loss.detach().clone()}
            found |= {f"gradient of {name}": gradient_of(weight) for name, weight in self._weights.items()}
        self.forget()
        return found
