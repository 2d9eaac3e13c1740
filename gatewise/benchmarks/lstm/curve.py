"""No speed for a layer that does not learn: its loss over a few steps of training, beside that of nn.LSTM.

One call can be right and the next one wrong, where memory is taken up again, weights change in place, or a recording is
replayed. So each side is trained, in the way in which it is timed, before it is timed. The task is to reproduce random
outputs; every step moves each weight against its gradient by a fixed share of the weight's norm.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from gatewise.benchmarks.lstm.side import Side
from gatewise.contract.capture import for_cuda_graph
from gatewise.selection.timing import captured

STEPS = 8
_SHARE = 0.05  # of a weight's norm that a step moves it
_NUDGES = 2

Curve = tuple[float, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """A side's loss beside nn.LSTM's.

    Attributes:
        ours: The loss before each step.
        theirs: The loss of nn.LSTM from the same weights.
        allowed: The distance between both that is allowed at each step: twice that of nn.LSTM from itself when it
            begins with weights moved by one rounding, plus one rounding.
    """

    ours: Curve
    theirs: Curve
    allowed: Curve

    @property
    def agrees(self) -> bool:
        """Whether the loss is allowed at every step; a loss that is not a number is not."""
        return all(
            abs(own - other) <= most for own, other, most in zip(self.ours, self.theirs, self.allowed, strict=True)
        )

    def __str__(self) -> str:
        """One sentence about the first step that is not allowed."""
        for step, (own, other, most) in enumerate(zip(self.ours, self.theirs, self.allowed, strict=True)):
            if not abs(own - other) <= most:
                return (
                    f"after {step} steps of training the loss is {own:.6g}, nn.LSTM's {other:.6g} (allowed: {most:.1e})"
                )
        return f"the loss of {len(self.ours)} steps of training is that of nn.LSTM"


class Rival:
    """The loss of nn.LSTM from the weights of a case, and from weights that are moved by one rounding.

    Args:
        side: nn.LSTM's side.
        rounding: The spacing of the precision's numbers, relative to them.
    """

    def __init__(self, side: Side, rounding: float) -> None:
        self._curve = losses(side)
        nudged = [losses(side, nudge=rounding, seed=seed) for seed in range(1, _NUDGES + 1)]
        self._allowed = tuple(
            2 * (max(abs(curve[step] - own) for curve in nudged) + rounding * abs(own))
            for step, own in enumerate(self._curve)
        )

    def beside(self, curve: Curve) -> Finding:
        """Hold another side's curve to this one."""
        return Finding(curve, self._curve, self._allowed)


def losses(side: Side, *, replayed: bool = False, nudge: float = 0.0, seed: int = 0) -> Curve:
    """Train a side for a few steps and return its loss before each; its weights are as before afterwards.

    Args:
        side: The layer to train.
        replayed: Whether the forward and backward pass are replayed as a CUDA graph.
        nudge: The distance by which weights are moved before the first step, relative to each, in random directions.
        seed: The seed of those directions.
    """
    weights = list(side.module.parameters())
    with _restored(weights):
        side.prepare(True)
        if nudge:
            _nudge(weights, nudge, seed)
        step, loss = _step(side)
        with torch.enable_grad(), for_cuda_graph(replayed):
            run = captured(step, warmups=2) if replayed else step
            found = []
            for _ in range(STEPS):
                run()
                found.append(loss.clone())
                _descend(weights)
    side.forget()
    return tuple(torch.stack(found).tolist())


def _step(side: Side) -> tuple[Callable[[], None], Tensor]:
    """Return a forward and backward pass, and where it leaves the loss."""
    loss = torch.zeros((), dtype=torch.float64, device=side.x.device)
    with torch.no_grad():
        like = side.padded(side.given[0]).float()
        generator = torch.Generator(like.device).manual_seed(0)
        target = torch.randn(like.shape, generator=generator, device=like.device) * 0.5

    def step() -> None:
        side.forget()
        y, _, _ = side.call()
        error = (side.padded(y).float() - target).square().mean()
        error.backward()
        loss.copy_(error.detach())

    return step, loss


@torch.no_grad()
def _descend(weights: Sequence[Tensor]) -> None:
    for weight in weights:
        if weight.grad is not None:
            gradient = weight.grad.float()
            scale = weight.float().norm() / gradient.norm().clamp(min=torch.finfo(torch.float32).tiny)
            weight.sub_((gradient * (_SHARE * scale)).to(weight.dtype))


@torch.no_grad()
def _nudge(weights: Sequence[Tensor], share: float, seed: int) -> None:
    for number, weight in enumerate(weights):
        generator = torch.Generator(weight.device).manual_seed(1000 * seed + number)
        signs = 2 * torch.randint(0, 2, weight.shape, generator=generator, device=weight.device) - 1
        weight.add_((weight.float() * signs * share).to(weight.dtype))


@contextlib.contextmanager
def _restored(weights: Sequence[Tensor]) -> Iterator[None]:
    before = [weight.detach().clone() for weight in weights]
    try:
        yield
    finally:
        with torch.no_grad():
            for weight, value in zip(weights, before, strict=True):
                weight.copy_(value)
