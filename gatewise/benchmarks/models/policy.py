"""Recurrent policies of reinforcement learning: the update of PPO on whole rollouts, which episodes begin inside of."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from gatewise.benchmarks.models.workload import Batch
from gatewise.nn import LSTM

_MEMORY = 8  # steps
_CLIP, _VALUE_WEIGHT, _ENTROPY_WEIGHT = 0.1, 0.5, 0.01

State = tuple[Tensor, Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """The sizes of a policy and of a minibatch of its update.

    Attributes:
        time: T, the number of steps of a rollout.
        batch: B, the number of environments.
        hidden_size: H, the number of hidden units.
        observations: The number of values of an observation.
        actions: The number of actions.
        episode: The mean number of steps of an episode.
    """

    time: int
    batch: int
    hidden_size: int
    observations: int
    actions: int
    episode: int

    def build(self, adapted: bool) -> nn.Module:
        """Return the model on the default device; the adapted one makes one call with `resets` of a rollout."""
        return Agent(self, adapted)

    def batches(self, generator: torch.Generator) -> Iterator[Batch]:
        """Yield observations [T, B, F], the steps at which episodes begin, actions, advantages and returns [T, B].

        The return at a step is a mean of the last observations, whatever the episode.
        """
        shape, options = (self.time, self.batch), {"generator": generator, "device": generator.device}
        while True:
            seen = torch.randn(*shape, self.observations, **options)
            begins = (torch.rand(shape, **options) < 1 / self.episode).float()
            actions = torch.randint(self.actions, shape, **options)
            total = seen[..., 0].cumsum(0)
            before = torch.cat([torch.zeros_like(total[:_MEMORY]), total])[: self.time]
            returns = (total - before) / math.sqrt(_MEMORY)
            yield seen, begins, actions, torch.randn(shape, **options), returns


class StepLoop(nn.Module):
    """CleanRL's recurrence: `torch.nn.LSTM` is called for every step, after states were set to zero at new episodes."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(size, size)

    def forward(self, x: Tensor, state: State, begins: Tensor) -> Tensor:
        """Return the output [T, B, H]."""
        outputs = []
        for step, begin in zip(x, begins, strict=True):
            kept = (1.0 - begin).view(1, -1, 1)
            y, state = self.lstm(step.unsqueeze(0), (kept * state[0], kept * state[1]))
            outputs += [y]
        return torch.cat(outputs)


class OneCall(nn.Module):
    """The same in one call."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.lstm = LSTM(size, size)

    def forward(self, x: Tensor, state: State, begins: Tensor) -> Tensor:
        """Return the output [T, B, H]."""
        y, _ = self.lstm(x, state, resets=begins.bool())
        return y


class Agent(nn.Module):
    """An encoder of two layers, the recurrence, and linear heads of the actor and the critic."""

    def __init__(self, sizes: Policy, adapted: bool) -> None:
        super().__init__()
        size = sizes.hidden_size
        self.size = size
        self.encoder = nn.Sequential(nn.Linear(sizes.observations, size), nn.Tanh(), nn.Linear(size, size), nn.Tanh())
        self.recurrence = OneCall(size) if adapted else StepLoop(size)
        self.actor = nn.Linear(size, sizes.actions)
        self.critic = nn.Linear(size, 1)
        for name, parameter in self.recurrence.named_parameters():
            nn.init.zeros_(parameter) if "bias" in name else nn.init.orthogonal_(parameter, 1.0)

    def predict(self, seen: Tensor, begins: Tensor, *targets: Tensor) -> Tensor:
        """Return the scores of the actions, then the value [T, B, actions + 1]."""
        zeros = seen.new_zeros(1, seen.shape[1], self.size)
        y = self.recurrence(self.encoder(seen), (zeros, zeros), begins)
        return torch.cat([self.actor(y), self.critic(y)], dim=-1)

    def forward(self, seen: Tensor, begins: Tensor, actions: Tensor, advantages: Tensor, returns: Tensor) -> Tensor:
        """Return the loss of PPO; the actions were drawn with equal probabilities."""
        outputs = self.predict(seen, begins)
        scores = torch.log_softmax(outputs[..., :-1], dim=-1)
        chosen = scores.gather(-1, actions.unsqueeze(-1)).squeeze(-1)
        ratio = (chosen + math.log(scores.shape[-1])).exp()
        clipped = ratio.clamp(1 - _CLIP, 1 + _CLIP)
        surrogate = -torch.min(advantages * ratio, advantages * clipped).mean()
        entropy = -(scores.exp() * scores).sum(-1).mean()
        value = 0.5 * ((outputs[..., -1] - returns) ** 2).mean()
        return surrogate + _VALUE_WEIGHT * value - _ENTROPY_WEIGHT * entropy
