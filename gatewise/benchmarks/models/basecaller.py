"""Basecallers: convolutions over the signal of a nanopore, and LSTM layers of alternating direction."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from gatewise.benchmarks.models.workload import Batch
from gatewise.nn import LSTM

_BASES, _LARGEST_SCORE, _SIGNAL_NOISE = 4, 5.0, 0.1


@dataclasses.dataclass(frozen=True, slots=True)
class Basecaller:
    """The sizes of a basecaller.

    Attributes:
        samples: The number of samples of the signal in a chunk.
        stride: The stride of the last convolution, which makes samples / stride time steps.
        batch: B, the number of chunks.
        hidden_size: H, the number of hidden units.
        num_layers: The number of LSTM layers; the first, third, ... run from the end of the sequence.
        bases: The number of bases of a transition; the head has 4 ** bases outputs.
    """

    samples: int
    stride: int
    batch: int
    hidden_size: int
    num_layers: int
    bases: int

    @property
    def transitions(self) -> int:
        """The number of transitions from one state to another, which are the outputs of the head."""
        return _BASES**self.bases

    def build(self, adapted: bool) -> nn.Module:
        """Return the model on the default device; the adapted one has reversed layers in place of two flips."""
        return SignalModel(self, adapted)

    def batches(self, generator: torch.Generator) -> Iterator[Batch]:
        """Yield signals [B, 1, samples], and the transition of every time step [T, B].

        The level of the signal says the transition, under noise. The first transitions are frequent, so that a model
        learns at once.
        """
        device = generator.device
        steps = (self.samples - 1) // self.stride + 1
        while True:
            uniform = torch.rand(self.batch, steps, generator=generator, device=device)
            found = (self.transitions * uniform**4).long()
            levels = (2.0 * found / self.transitions - 1.0).repeat_interleave(self.stride, 1)[:, : self.samples]
            noise = torch.randn(self.batch, self.samples, generator=generator, device=device)
            yield (levels + _SIGNAL_NOISE * noise).unsqueeze(1), found.t().contiguous()


class Flipped(nn.Module):
    """bonito's reversed layer: an LSTM between two flips."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.rnn = nn.LSTM(size, size)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Run the layer over [T, B, H] from the last step to the first."""
        y, state = self.rnn(x.flip(0))
        return y.flip(0), state


class SignalModel(nn.Module):
    """bonito's encoder with a linear head; the loss is the cross entropy of every step, not that of its CRF."""

    def __init__(self, sizes: Basecaller, adapted: bool) -> None:
        super().__init__()
        size = sizes.hidden_size
        self.stem = nn.Sequential(
            *(nn.Conv1d(1, 16, 5, padding=2), nn.BatchNorm1d(16), nn.SiLU()),
            *(nn.Conv1d(16, 16, 5, padding=2), nn.BatchNorm1d(16), nn.SiLU()),
            *(nn.Conv1d(16, size, 19, stride=sizes.stride, padding=9), nn.BatchNorm1d(size), nn.Tanh()),
        )
        self.layers = nn.ModuleList(_layer(size, place % 2 == 0, adapted) for place in range(sizes.num_layers))
        self.head = nn.Linear(size, sizes.transitions, bias=False)

    def predict(self, signal: Tensor, *targets: Tensor) -> Tensor:
        """Return the scores of the transitions at every step [T, B, transitions]."""
        y = self.stem(signal).permute(2, 0, 1)
        for layer in self.layers:
            y, _ = layer(y)
        return self.head(y).clamp(-_LARGEST_SCORE, _LARGEST_SCORE)

    def forward(self, signal: Tensor, transitions: Tensor) -> Tensor:
        """Return the mean cross entropy."""
        return functional.cross_entropy(self.predict(signal).flatten(0, 1), transitions.flatten())


def _layer(size: int, reverse: bool, adapted: bool) -> nn.Module:
    if adapted:
        return LSTM(size, size, reverse=reverse)
    return Flipped(size) if reverse else nn.LSTM(size, size)
