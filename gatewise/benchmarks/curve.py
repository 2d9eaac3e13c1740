"""No speed for what does not learn: the loss over a few steps of training, beside that of plain PyTorch.

One call can be right and the next one wrong, where memory is taken up again, weights change in place, or a recording is
replayed. So what is timed in training is trained first, in the precision and in the way in which it is timed.
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
_SHARE = 0.05  # of a weight's norm that a step of `descent` moves it
_NUDGES = 8
_FLOAT32 = 2.0**-24  # the most that one rounding is off by, as a share
_NEARLY_SURELY = 4.0

Curve = tuple[float, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """A loss beside that of plain PyTorch.

    Attributes:
        ours: The loss before each step.
        theirs: The loss of plain PyTorch from the same weights.
        allowed: The distance between both that is allowed at each step.
        rival: The name of what plain PyTorch computes with.
    """

    ours: Curve
    theirs: Curve
    allowed: Curve
    rival: str = "nn.LSTM"

    @property
    def agrees(self) -> bool:
        """Whether the loss is allowed at every step; a loss that is not a number is not."""
        return self._first_beyond is None

    @property
    def _first_beyond(self) -> int | None:
        steps = enumerate(zip(self.ours, self.theirs, self.allowed, strict=True))
        return next((step for step, (own, other, most) in steps if not abs(own - other) <= most), None)

    def __str__(self) -> str:
        """One sentence, about the first step that is not allowed where there is one."""
        step = self._first_beyond
        if step is None:
            return f"the loss of {len(self.ours)} steps of training is that of {self.rival}"
        own, other, most = self.ours[step], self.theirs[step], self.allowed[step]
        return f"after {step} steps of training the loss is {own:.6g}, {self.rival}'s {other:.6g} (allowed: {most:.1e})"


@dataclasses.dataclass(frozen=True, slots=True)
class Nudge:
    """A small step of all weights in random directions.

    Attributes:
        share: The distance by which each number is moved, relative to it.
        seed: The seed of the directions.
    """

    share: float
    seed: int

    @torch.no_grad()
    def move(self, weights: Iterable[Tensor]) -> None:
        """Move every number of the weights up or down."""
        for number, weight in enumerate(weights):
            generator = torch.Generator(weight.device).manual_seed(1000 * self.seed + number)
            signs = 2 * torch.randint(0, 2, weight.shape, generator=generator, device=weight.device) - 1
            weight.add_((weight.float() * signs * self.share).to(weight.dtype))


class Rival:
    """The loss of plain PyTorch, and how far others may be from it.

        allowed = 2 * (largest distance from its own losses that begin with weights moved by one rounding
                       + one rounding of the loss)

    Two losses cross here and there, so the distance is the largest of eight moves and of all steps. Of language models
    in bfloat16, fewer than one in a hundred were then beyond what others from moved weights allow; with two moves, and
    each step by itself, half of them were.

    Args:
        losses: Trains from the given weights, or from those that a nudge has moved, and returns the loss of each step.
        rounding: The spacing of the precision's numbers, relative to them.
        loss_rounding: The same of the loss.
        name: The name of what it computes with.
    """

    def __init__(
        self, losses: Callable[[Nudge | None], Curve], rounding: float, loss_rounding: float, name: str = "nn.LSTM"
    ) -> None:
        self._name = name
        self._curve = losses(None)
        nudged = [losses(Nudge(rounding, seed)) for seed in range(1, _NUDGES + 1)]
        apart = [abs(loss - own) for curve in nudged for loss, own in zip(curve, self._curve, strict=True)]
        # Where one of them is infinite or no number, nothing can be held to it.
        largest = max(apart) if all(map(math.isfinite, apart)) else math.nan
        self._allowed = tuple(2 * (largest + loss_rounding * abs(own)) for own in self._curve)

    def beside(self, curve: Curve) -> Finding:
        """Hold another curve to this one."""
        return Finding(curve, self._curve, self._allowed, self._name)


def rounding_of_sum(tokens: int) -> float:
    """Return a bound on the relative error of a loss that float32 adds up over tokens: in any order, nearly surely.

    The roundings of a sum over N numbers are within 4 sqrt(N) units (Higham and Mary, A New Approach to Probabilistic
    Rounding Error Analysis, 2019, theorem 2.4, whose probability is 1 - 2 exp(-4^2 / 2)); the result is one more.

    Args:
        tokens: N.
    """
    return (2 + _NEARLY_SURELY * math.sqrt(tokens)) * _FLOAT32


def not_finite(curve: Curve) -> str:
    """Return a sentence about a loss with dropout that is not a number; nothing where all are finite."""
    found = next((loss for loss in curve if not math.isfinite(loss)), None)
    return "" if found is None else f"the loss of a step of training with dropout is {found}"


def followed(step: Callable[[], Tensor]) -> Curve:
    """Train for a few steps and return the loss of each.

    Args:
        step: Trains on the next batch and returns its loss, which the next call may overwrite.
    """
    # Nothing waits for the device between two steps, as where they are timed.
    return tuple(torch.stack([step().detach().double().clone() for _ in range(STEPS)]).tolist())


def descent(
    output: Callable[[], Tensor],
    shape: torch.Size,
    weights: Sequence[Tensor],
    *,
    replayed: bool = False,
    nudge: Nudge | None = None,
) -> Curve:
    """Train for a few steps and return the loss before each; the weights are as before afterwards.

    The task is to reproduce random outputs; every step moves each weight against its gradient by a fixed share of the
    weight's norm.

    Args:
        output: Computes the output [..., features] from the weights.
        shape: The shape of the output.
        weights: The weights to train, which need gradients.
        replayed: Whether the forward and backward pass are replayed as a CUDA graph.
        nudge: A function that moves the weights slightly before the first step; None leaves them.
    """
    device = weights[0].device
    loss = torch.zeros((), dtype=torch.float64, device=device)
    generator = torch.Generator(device).manual_seed(0)
    target = torch.randn(shape, generator=generator, device=device) * 0.5
    # Gradients of a mean over millions are too small for float16. A power of two rounds nothing.
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
