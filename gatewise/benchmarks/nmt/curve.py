"""The loss of a translation model over a few training steps, compared with plain PyTorch's before anything is timed."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from gatewise.benchmarks.curve import Curve, Nudge, Rival, followed, rounding_of_sum
from gatewise.benchmarks.nmt.agreement import plain_gradient, plain_model
from gatewise.benchmarks.nmt.cases import TranslationCase
from gatewise.benchmarks.nmt.rival import plain_optimizer
from gatewise.benchmarks.precision import Precision
from gatewise.data import PairBatch


def rival(
    case: TranslationCase, batches: Sequence[PairBatch], start: Mapping[str, Tensor], precision: Precision
) -> Rival:
    """Return the losses of the plain model, with which others are compared.

    Gradients are accumulated some rows at a time, because the largest batches of other ways do not fit otherwise.

    Args:
        case: The sizes; dropout must be 0.
        batches: The batches, used in turn.
        start: The initial weights, by the names of `Seq2Seq`.
        precision: The precision of the forward pass.
    """

    def losses(nudge: Nudge | None) -> Curve:
        model = plain_model(case, start, batches[0].source.device, precision)
        if nudge is not None:
            nudge.move(model.parameters())
        optimizer = plain_optimizer(model, case)
        turns = itertools.cycle(batches)

        def step() -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            loss = plain_gradient(model, case, next(turns), precision)
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
            optimizer.step()
            return loss

        with torch.enable_grad():
            return followed(step)

    return Rival(losses, precision.rounding, rounding_of_sum(case.batch * case.target), "plain PyTorch")
