"""The comparison of the loss over a few training steps with that of plain PyTorch, which comes before timing.

One call can be correct and the next one wrong, if memory is reused, weights change in place, or a CUDA graph is
replayed. So everything that is timed in training is first trained for a few steps, with the precision and the kind of
launch with which it is timed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from gatewise.contract.capture import for_cuda_graph
from gatewise.selection.timing import captured

STEPS = 8
_SHARE = 0.05  # the relative change of a weight's norm in a step of `descent`
_NUDGES = 8
_FLOAT32 = 2.0**-24  # the largest relative error of one rounding
_NEARLY_SURELY = 4.0

Curve = tuple[float, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """A loss curve compared with that of plain PyTorch.

    Attributes:
        ours: The loss before each step.
        theirs: The loss of plain PyTorch from the same weights.
        allowed: The allowed difference at each step.
        rival: The name of the plain PyTorch implementation.
    """

    ours: Curve
    theirs: Curve
    allowed: Curve
    rival: str = "nn.LSTM"

    @property
    def agrees(self) -> bool:
        """Whether the difference is allowed at every step; NaN is not."""
        return self._first_beyond is None

    @property
    def _first_beyond(self) -> int | None:
        steps = enumerate(zip(self.ours, self.theirs, self.allowed, strict=True))
        return next((step for step, (own, other, most) in steps if not abs(own - other) <= most), None)

    def __str__(self) -> str:
        """Return one sentence, about the first step with a difference that is not allowed if there is one."""
        step = self._first_beyond
        if step is None:
            return f"the loss of {len(self.ours)} steps of training is that of {self.rival}"
        own, other, most = self.ours[step], self.theirs[step], self.allowed[step]
        return f"after {step} steps of training the loss is {own:.6g}, {self.rival}'s {other:.6g} (allowed: {most:.1e})"


@dataclasses.dataclass(frozen=True, slots=True)
class Nudge:
    """A small change of all weights in random directions.

    Attributes:
        share: The relative change of each number.
        seed: The seed of the directions.
    """

    share: float
    seed: int

    @torch.no_grad()
    def move(self, weights: Iterable[Tensor]) -> None:
        """Change every number of the weights, up or down."""
        for number, weight in enumerate(weights):
            generator = torch.Generator(weight.device).manual_seed(1000 * self.seed + number)
            signs = 2 * torch.randint(0, 2, weight.shape, generator=generator, device=weight.device) - 1
            weight.add_((weight.float() * signs * self.share).to(weight.dtype))


class Rival:
    """The loss curve of plain PyTorch, and the allowed difference of others from it.

        allowed = 2 * (largest difference from its own curves whose initial weights are changed by one
                       rounding unit + one rounding unit of the loss)

    Two curves can cross, so the difference is the largest of eight such curves and of all steps. With this rule, fewer
    than one in a hundred language models in bfloat16 exceeded the allowance of a curve with changed weights; with two
    curves, and each step by itself, half of them did.

    A small layer in float32 can be insensitive to its weights and still be farther from float64 than a better one is.
    Implementations in 16 bits may round states between steps that nn.LSTM does not. So where the losses of the same
    training in a wider dtype are given, twice the largest distance of the curve from them is allowed in addition.

    Args:
        losses: A function that trains from the given weights, changed by the nudge if there is one, and returns the
            loss of each step.
        rounding: The rounding unit of the precision, relative to a number.
        loss_rounding: The rounding unit of the loss.
        name: The name of the implementation.
        exact: A function that returns the losses of the same training in float64, or in float32 for 16 bits. It is
            called if a curve differs by more than is allowed without it.
    """

    def __init__(
        self,
        losses: Callable[[Nudge | None], Curve],
        rounding: float,
        loss_rounding: float,
        name: str = "nn.LSTM",
        exact: Callable[[], Curve] | None = None,
    ) -> None:
        self._name, self._exact = name, exact
        self._curve = losses(None)
        nudged = [losses(Nudge(rounding, seed)) for seed in range(1, _NUDGES + 1)]
        apart = [abs(loss - own) for curve in nudged for loss, own in zip(curve, self._curve, strict=True)]
        # If one of them is infinite or NaN, nothing can be compared with them.
        largest = max(apart) if all(map(math.isfinite, apart)) else math.nan
        self._allowed = tuple(2 * (largest + loss_rounding * abs(own)) for own in self._curve)

    def beside(self, curve: Curve) -> Finding:
        """Compare another curve with this one."""
        found = Finding(curve, self._curve, self._allowed, self._name)
        if self._exact is None or found.agrees:
            return found
        distance = max(abs(loss - own) for loss, own in zip(self._exact(), self._curve, strict=True))
        return dataclasses.replace(found, allowed=tuple(each + 2 * distance for each in self._allowed))


def rounding_of_sum(tokens: int) -> float:
    """Return a probabilistic bound on the relative error of a loss that float32 sums over tokens in any order.

    The rounding errors of a sum of N numbers are within 4 sqrt(N) rounding units (Higham and Mary, A New Approach to
    Probabilistic Rounding Error Analysis, 2019, theorem 2.4, with probability 1 - 2 exp(-4^2 / 2)); the result adds one
    unit.

    Args:
        tokens: N, the number of tokens.
    """
    return (2 + _NEARLY_SURELY * math.sqrt(tokens)) * _FLOAT32


def not_finite(curve: Curve) -> str:
    """Return a sentence about a loss with dropout that is infinite or NaN; empty if all are finite."""
    found = next((loss for loss in curve if not math.isfinite(loss)), None)
    return "" if found is None else f"the loss of a step of training with dropout is {found}"


def followed(step: Callable[[], Tensor]) -> Curve:
    """Train for a few steps and return the loss of each.

    Args:
        step: A function that trains on the next batch and returns its loss, which the next call may overwrite.
    """
    # No step synchronises with the device, as in the timed loop.
    return tuple(torch.stack([step().detach().double().clone() for _ in range(STEPS)]).tolist())


def descent(
    output: Callable[[], Tensor],
    shape: torch.Size,
    weights: Sequence[Tensor],
    *,
    replayed: bool = False,
    nudge: Nudge | None = None,
) -> Curve:
    """Train for a few steps, restore the weights, and return the loss before each step.

    The task is to reproduce random outputs. Every step moves each weight against its gradient by a fixed fraction of
    the weight's norm.

    Args:
        output: A function that computes the output [..., features] from the weights.
        shape: The shape of the output.
        weights: The weights to train, which require gradients.
        replayed: Whether the forward and backward pass are replayed as a CUDA graph.
        nudge: The random change of the weights before the first step; None for no change.
    """
    device = weights[0].device
    loss = torch.zeros((), dtype=torch.float64, device=device)
    generator = torch.Generator(device).manual_seed(0)
    target = torch.randn(shape, generator=generator, device=device) * 0.5
    # Gradients of a mean over millions of numbers underflow in float16. Scaling by a power of two is exact.
    scale = 2.0 ** round(math.log2(max(1.0, shape[-1] * math.sqrt(shape[:-1].numel()))))

    def step() -> None:
        for weight in weights:
            weight.grad = None
        error = (output().float() - target).square().mean()
        (error * scale).backward()
        loss.copy_(error.detach())

    with _restored(weights):
        if nudge is not None:
            nudge.move(weights)
        with torch.enable_grad(), for_cuda_graph(replayed):
            run = captured(step, warmups=2) if replayed else step
            found = []
            for _ in range(STEPS):
                run()
                found.append(loss.clone())
                _descend(weights)
    for weight in weights:
        weight.grad = None
    return tuple(torch.stack(found).tolist())


@torch.no_grad()
def _descend(weights: Sequence[Tensor]) -> None:
    for weight in weights:
        if weight.grad is not None:
            gradient = weight.grad.float()
            scale = weight.float().norm() / gradient.norm().clamp(min=torch.finfo(torch.float32).tiny)
            weight.sub_((gradient * (_SHARE * scale)).to(weight.dtype))


@contextlib.contextmanager
def _restored(weights: Sequence[Tensor]) -> Iterator[None]:
    before = [weight.detach().clone() for weight in weights]
    try:
        yield
    finally:
        with torch.no_grad():
            for weight, value in zip(weights, before, strict=True):
                weight.copy_(value)
