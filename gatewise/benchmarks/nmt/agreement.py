"""The comparison of loss and gradients with float64, which comes before any timing.

    allowed = 2 * (plain PyTorch's error in the same precision + rounding band + band of sums)

The rounding band of a tensor is the change of the exact result when every weight changes by one rounding unit of the
precision's coarsest format, up or down at random, plus one rounding unit of the result (as in
`gatewise.testing.budgets`). The band of sums is for tensors that are sums over all N tokens of a batch: such a sum may
be computed in float32 in any order, and its rounding errors are almost certainly within 4 sqrt(N) units (Higham and
Mary, A New Approach to Probabilistic Rounding Error Analysis, 2019, theorem 2.4, with probability 1 - 2 exp(-4^2 / 2)).
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

_FLOAT32 = 2.0**-24  # the largest relative error of one rounding
_NEARLY_SURELY = 4.0

# The largest size in bytes of each feature map of attention that is kept at a time.
_MAP = 2**31


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """The error that is largest relative to its allowance.

    Attributes:
        quantity: The name of the tensor.
        error: The relative error with respect to float64.
        allowed: The allowance: the largest allowed error.
        beyond: The number of tensors whose error exceeds the allowance.
    """

    quantity: str
    error: float
    allowed: float
    beyond: int = 0

    @property
    def agrees(self) -> bool:
        """Whether all errors are allowed; NaN is not."""
        return self.error <= self.allowed

    def __str__(self) -> str:
        """Return one sentence."""
        relation = "within" if self.agrees else "more than"
        others = f"; {self.beyond} tensors are" if self.beyond > 1 else ""
        return f"{self.quantity} is {self.error:.1e} from float64, {relation} the allowed {self.allowed:.1e}{others}"


def plain_result(
    case: TranslationCase, batch: PairBatch, start: Mapping[str, Tensor], precision: Precision
) -> dict[str, Tensor]:
    """Compute the loss of a batch and its clipped gradient with the plain model, some rows at a time.

    In float64 this is the truth; in another precision, it shows the error of plain PyTorch.

    Args:
        case: The sizes; dropout must be 0.
        batch: The batch; all its sentences have the same length.
        start: The weights, by the names of `Seq2Seq`.
        precision: The precision of the computation.
    """
    model = plain_model(case, start, batch.source.device, precision)
    loss = plain_gradient(model, case, batch, precision)
    nn.utils.clip_grad_norm_(model.parameters(), case.clip)
    gradients = {f"gradient of {seq2seq_name(name)}": gradient_of(weight) for name, weight in model.named_parameters()}
    return {"loss": loss, **gradients}


def plain_model(
    case: TranslationCase, start: Mapping[str, Tensor], device: torch.device, precision: Precision
) -> PlainSeq2Seq:
    """Return the plain PyTorch model with the given weights, by the names of `Seq2Seq`."""
    model = PlainSeq2Seq(case).to(device, precision.dtype).train()
    model.load(start)
    return model


def plain_gradient(model: PlainSeq2Seq, case: TranslationCase, batch: PairBatch, precision: Precision) -> Tensor:
    """Accumulate the gradient of a batch, some rows at a time, and return the loss.

    Args:
        model: The plain PyTorch model.
        case: The sizes.
        batch: The batch; all its sentences have the same length.
        precision: The precision of the computation.
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
    """Return a copy of a weight's gradient; NaN if there is none, because that is an error."""
    return torch.full_like(weight, torch.nan, requires_grad=False) if weight.grad is None else weight.grad.clone()


def errors(found: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> Errors:
    """Return |found - exact| / |exact| for every exact tensor, in Frobenius norms; infinite for a missing tensor."""
    return {name: _error(found.get(name), tensor) for name, tensor in exact.items()}


def allowance(yardstick: Errors, nudged: Errors, rounding: float, tokens: int) -> Errors:
    """Return the allowance for the error of each tensor.

    Args:
        yardstick: The errors of plain PyTorch in the same precision.
        nudged: The changes of the exact results when the weights are nudged.
        rounding: The rounding unit of the precision.
        tokens: N, the largest number of terms in a sum.
    """
    sums = _NEARLY_SURELY * math.sqrt(tokens) * _FLOAT32
    return {name: 2 * (yardstick[name] + nudged[name] + rounding + sums) for name in yardstick}


def nudge(start: Mapping[str, Tensor], rounding: float, seed: int = 1) -> dict[str, Tensor]:
    """Change every weight by one rounding unit relative to itself, up or down at random, in float64."""
    moved = {}
    for number, (name, weight) in enumerate(start.items()):
        generator = torch.Generator(weight.device).manual_seed(seed + number)
        up = torch.randint(2, weight.shape, generator=generator, device=weight.device)
        moved[name] = weight.double() * (1 + rounding * (2 * up - 1))
    return moved


def finding(found: Errors, allowed: Errors) -> Finding:
    """Return the largest error of one way relative to its allowance."""
    # NaN compares false with everything, so `max` would not find it.
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
