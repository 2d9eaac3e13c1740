"""No speed for a wrong answer: loss and gradients are held against float64 before anything is timed.

    allowed = 2 * (plain PyTorch's error in the same precision + one rounding band + the band of sums)

The rounding band of a tensor is how far the truth itself moves when every weight moves by one rounding of the
precision's coarsest format, up or down at random, plus one rounding of the result (as in `gatewise.testing.budgets`).
The band of sums is for what all N tokens of a batch add to: such a sum may be taken in float32 in any order, and its
roundings are nearly surely within 4 sqrt(N) units (Higham and Mary, A New Approach to Probabilistic Rounding Error
Analysis, 2019, theorem 2.4, whose probability is 1 - 2 exp(-4^2 / 2)).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gatewise.benchmarks.nmt.cases import TranslationCase
from gatewise.benchmarks.nmt.rival import PlainSeq2Seq, seq2seq_name
from gatewise.benchmarks.precision import Precision
from gatewise.data import PairBatch

Errors = dict[str, float]

_FLOAT32 = 2.0**-24  # the most that one rounding is off by, as a share
_NEARLY_SURELY = 4.0

# Bytes of each of attention's feature maps that are kept at once.
_MAP = 2**31


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """The error that is largest beside its allowance.

    Attributes:
        quantity: Which tensor.
        error: Its distance from float64, as a share of its norm.
        allowed: What it may be.
        beyond: How many tensors are further off than they may be.
    """

    quantity: str
    error: float
    allowed: float
    beyond: int = 0

    @property
    def agrees(self) -> bool:
        """Whether every error is allowed; an error that is not a number is not."""
        return self.error <= self.allowed

    def __str__(self) -> str:
        """One sentence."""
        relation = "within" if self.agrees else "more than"
        others = f"; {self.beyond} tensors are" if self.beyond > 1 else ""
        return f"{self.quantity} is {self.error:.1e} from float64, {relation} the allowed {self.allowed:.1e}{others}"


def plain_result(
    case: TranslationCase, batch: PairBatch, start: Mapping[str, Tensor], precision: Precision
) -> dict[str, Tensor]:
    """Compute the loss of a batch and its clipped gradient with the plain program, some rows at a time.

    In float64 this is the truth; in another precision, how well plain PyTorch does.

    Args:
        case: Sizes; without dropout.
        batch: The batch to compute on; its sentences all have the same length.
        start: Weights, by the names of `Seq2Seq`.
        precision: In which.
    """
    model = plain_model(case, start, batch.source.device, precision)
    loss = plain_gradient(model, case, batch, precision)
    nn.utils.clip_grad_norm_(model.parameters(), case.clip)
    gradients = {f"gradient of {seq2seq_name(name)}": gradient_of(weight) for name, weight in model.named_parameters()}
    return {"loss": loss, **gradients}


def plain_model(
    case: TranslationCase, start: Mapping[str, Tensor], device: torch.device, precision: Precision
) -> PlainSeq2Seq:
    """Return the plain program's model with given weights, by the names of `Seq2Seq`."""
    model = PlainSeq2Seq(case).to(device, precision.dtype).train()
    model.load(start)
    return model


def plain_gradient(model: PlainSeq2Seq, case: TranslationCase, batch: PairBatch, precision: Precision) -> Tensor:
    """Add the gradient of a batch, some rows at a time, to what the weights hold, and return the loss.

    Args:
        model: The plain program's model.
        case: Its sizes.
        batch: The batch to compute on; its sentences all have the same length.
        precision: In which.
    """
    device = batch.source.device
    loss = torch.zeros((), dtype=precision.dtype, device=device)
    rows = max(1, _MAP // (case.source * case.target * case.hidden_size * precision.dtype.itemsize))
    with precision.applied():
        for first in range(0, case.batch, rows):
            piece = _rows(batch, slice(first, first + rows))
            with precision.autocasting(device):
                part = model(piece) * (piece.source.shape[1] / case.batch)
            part.backward()
            loss += part.detach()
    return loss


def gradient_of(weight: Tensor) -> Tensor:
    """Return a copy of a weight's gradient; one that was forgotten is wrong, as one that is not a number."""
    return torch.full_like(weight, torch.nan, requires_grad=False) if weight.grad is None else weight.grad.clone()


def errors(found: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> Errors:
    """Return |found - exact| / |exact| of every exact tensor, Frobenius norms; infinite where there is none."""
    return {name: _error(found.get(name), tensor) for name, tensor in exact.items()}


def allowance(yardstick: Errors, nudged: Errors, rounding: float, tokens: int) -> Errors:
    """Return what the error of each tensor may be.

    Args:
        yardstick: Plain PyTorch's errors in the same precision.
        nudged: How far the truth moves when the weights are nudged.
        rounding: Of the precision.
        tokens: N, the most that one number is a sum over.
    """
    sums = _NEARLY_SURELY * math.sqrt(tokens) * _FLOAT32
    return {name: 2 * (yardstick[name] + nudged[name] + rounding + sums) for name in yardstick}


def nudge(start: Mapping[str, Tensor], rounding: float, seed: int = 1) -> dict[str, Tensor]:
    """Move every weight by one rounding, relative to itself, up or down at random; float64."""
    moved = {}
    for number, (name, weight) in enumerate(start.items()):
        generator = torch.Generator(weight.device).manual_seed(seed + number)
        up = torch.randint(2, weight.shape, generator=generator, device=weight.device)
        moved[name] = weight.double() * (1 + rounding * (2 * up - 1))
    return moved


def finding(found: Errors, allowed: Errors) -> Finding:
    """Return the worst of one way's errors."""
    # A NaN compares false with everything: left to `max`, it would get lost.
    shares = {name: error / allowed[name] for name, error in found.items()}
    shares = {name: math.inf if math.isnan(share) else share for name, share in shares.items()}
    worst = max(shares, key=lambda name: shares[name])
    beyond = sum(not error <= allowed[name] for name, error in found.items())
    return Finding(worst, found[worst], allowed[worst], beyond)


def _rows(batch: PairBatch, rows: slice) -> PairBatch:
    source, lengths, inputs, targets, weight, numbers = batch
    return PairBatch(source[:, rows], lengths[rows], inputs[:, rows], targets[:, rows], weight, numbers[rows])


def _error(value: Tensor | None, exact: Tensor) -> float:
    if value is None or value.numel() != exact.numel():
        return math.inf
    return float((value.double().view_as(exact) - exact).norm() / exact.norm())
