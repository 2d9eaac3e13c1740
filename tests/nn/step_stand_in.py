"""A stand-in for CUDA graphs on a CPU: a capture leaves all tensors as they were, and a replay calls the work again."""

from __future__ import annotations

import torch
from torch import nn


class Captures:
    """Captures work of a step, and counts captures and replays.

    Args:
        models: The modules whose tensors the work changes.
        optimizers: Their optimizers.
        restores_generator: Whether a capture leaves the CPU's generator as it was too, from which dropout draws here.
    """

    def __init__(self, models, optimizers, *, restores_generator=True):
        self._models, self._optimizers = models, optimizers
        self._restores_generator = restores_generator
        self.captures = self.replays = 0

    def __call__(self, work):
        tensors = [tensor for model in self._models for tensor in model.state_dict().values()]
        states = [state for optimizer in self._optimizers for state in optimizer.state.values()]
        tensors += [each for state in states for each in state.values() if isinstance(each, torch.Tensor)]
        before, random = [tensor.clone() for tensor in tensors], torch.get_rng_state()
        self.captures += 1
        work()
        if self._restores_generator:
            torch.set_rng_state(random)
        with torch.no_grad():
            for tensor, value in zip(tensors, before, strict=True):
                tensor.copy_(value)

        def replay():
            self.replays += 1
            work()

        return replay


class Model(nn.Module):
    """A recurrent layer, a buffer that counts calls, dropout and a linear layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.dropout, self.head = layer, nn.Dropout(0.3), nn.Linear(layer.hidden_size, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, state=None):
        self.calls += 1
        y, state = self.layer(x, state)
        return self.head(self.dropout(y)), state


def step_of(model, optimizer):
    """Return a step from (x, target, state) to (loss, state)."""

    def step(x, target, state=None):
        y, state = model(x, state)
        loss = (y - target).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss, "state": state}

    return step
