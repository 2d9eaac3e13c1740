"""Text-to-speech in the way of StyleTTS 2 and Kokoro: bidirectional LSTMs over sentences of unequal lengths."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from gatewise.benchmarks.models.workload import Batch

_SYMBOLS = 178
_DURATIONS = (1, 2, 3, 4)  # frames of a symbol


@dataclasses.dataclass(frozen=True, slots=True)
class Speech:
    """The sizes of the text encoder and the prosody predictor.

    Attributes:
        time: T, the number of symbols of the longest sentence; lengths are uniform in [T/4, T].
        frames: The number of frames of a segment, from which pitch and energy are predicted.
        batch: B, the number of sentences.
        hidden_size: The number of features, which is twice that of the hidden units of a direction.
        style: The number of features of a style.
        num_layers: The number of layers of the duration encoder.
        dropout: The probability of dropping a value after convolutions and layers.
    """

    time: int
    frames: int
    batch: int
    hidden_size: int
    style: int
    num_layers: int
    dropout: float

    def build(self, adapted: bool) -> nn.Module:
        """Return the model on the default device."""
        return SpeechModel(self)

    def batches(self, generator: torch.Generator) -> Iterator[Batch]:
        """Yield symbols [B, T], their number [B] on the CPU, styles, the symbol of each frame, and what is predicted.

        The duration of a symbol and the pitch and energy of its frames depend on the symbol.
        """
        device, on_cpu = generator.device, torch.Generator().manual_seed(generator.initial_seed())
        options = {"generator": generator, "device": device}
        while True:
            lengths = torch.randint(max(1, self.time // 4), self.time + 1, (self.batch,), generator=on_cpu)
            lengths[0] = self.time
            symbols = torch.randint(_SYMBOLS, (self.batch, self.time), **options)
            style = torch.randn(self.batch, self.style, **options)
            durations = torch.tensor(_DURATIONS, device=device)[symbols % len(_DURATIONS)].float()
            step = torch.arange(self.frames, device=device) // 2
            sources = step.expand(self.batch, -1) % lengths.to(device).unsqueeze(1)
            level = symbols.gather(1, sources) / _SYMBOLS
            yield symbols, lengths, style, sources, durations, 2.0 * level - 1.0, 1.0 - level


class SpeechModel(nn.Module):
    """The text encoder and the prosody predictor, which are the parts that have LSTMs."""

    def __init__(self, sizes: Speech) -> None:
        super().__init__()
        size, style = sizes.hidden_size, sizes.style
        self.text = TextEncoder(size, sizes.dropout)
        self.encoder = DurationEncoder(size, style, sizes.num_layers, sizes.dropout)
        self.lstm = _bidirectional(size + style, size)
        self.duration = nn.Linear(size, 1)
        self.shared = _bidirectional(size + style, size)
        self.pitch, self.energy = FrameHead(size, style), FrameHead(size, style)

    def predict(self, symbols: Tensor, lengths: Tensor, style: Tensor, sources: Tensor, *targets: Tensor) -> Tensor:
        """Return durations, pitches and energies side by side [B, T + 2 * frames]."""
        padding = torch.arange(symbols.shape[1], device=symbols.device) >= lengths.to(symbols.device).unsqueeze(1)
        d = self.encoder(self.text(symbols, lengths, padding), lengths, style, padding)
        duration = self.duration(_run(self.lstm, d, lengths)).squeeze(-1).masked_fill(padding, 0.0)
        aligned = d.gather(1, sources.unsqueeze(-1).expand(-1, -1, d.shape[-1]))
        frames, _ = self.shared(aligned)
        return torch.cat([duration, self.pitch(frames, style), self.energy(frames, style)], dim=1)

    def forward(
        self,
        symbols: Tensor,
        lengths: Tensor,
        style: Tensor,
        sources: Tensor,
        durations: Tensor,
        pitches: Tensor,
        energies: Tensor,
    ) -> Tensor:
        """Return the sum of three smooth L1 losses; the padding's durations are not predicted."""
        found = self.predict(symbols, lengths, style, sources)
        duration, pitch, energy = found.split([symbols.shape[1], *(sources.shape[1],) * 2], dim=1)
        valid = torch.arange(symbols.shape[1], device=symbols.device) < lengths.to(symbols.device).unsqueeze(1)
        of_durations = functional.smooth_l1_loss(duration[valid], durations[valid])
        return of_durations + functional.smooth_l1_loss(pitch, pitches) + functional.smooth_l1_loss(energy, energies)


class TextEncoder(nn.Module):
    """An embedding, three convolutions and an LSTM."""

    def __init__(self, size: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_SYMBOLS, size)
        self.convolutions = nn.ModuleList(nn.Conv1d(size, size, 5, padding=2) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(size) for _ in range(3))
        self.dropout = nn.Dropout(dropout)
        self.lstm = _bidirectional(size, size)

    def forward(self, symbols: Tensor, lengths: Tensor, padding: Tensor) -> Tensor:
        """Return [B, T, H]."""
        x = self.embedding(symbols).masked_fill(padding.unsqueeze(-1), 0.0)
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = norm(convolution(x.transpose(1, 2)).transpose(1, 2))
            x = self.dropout(functional.leaky_relu(x, 0.2)).masked_fill(padding.unsqueeze(-1), 0.0)
        return _run(self.lstm, x, lengths)


class DurationEncoder(nn.Module):
    """LSTMs, each followed by a layer normalization whose gain and shift are those of the style."""

    def __init__(self, size: int, style: int, num_layers: int, dropout: float) -> None:
        super().__init__()
        self.lstms = nn.ModuleList(_bidirectional(size + style, size) for _ in range(num_layers))
        self.norms = nn.ModuleList(AdaptiveLayerNorm(size, style) for _ in range(num_layers))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, lengths: Tensor, style: Tensor, padding: Tensor) -> Tensor:
        """Return [B, T, H + style]."""
        styles = style.unsqueeze(1).expand(-1, x.shape[1], -1)
        x = torch.cat([x, styles], dim=-1).masked_fill(padding.unsqueeze(-1), 0.0)
        for lstm, norm in zip(self.lstms, self.norms, strict=True):
            y = norm(self.dropout(_run(lstm, x, lengths)), style)
            x = torch.cat([y, styles], dim=-1).masked_fill(padding.unsqueeze(-1), 0.0)
        return x


class AdaptiveLayerNorm(nn.Module):
    """Layer normalization whose gain and shift are linear in the style."""

    def __init__(self, size: int, style: int) -> None:
        super().__init__()
        self.size = size
        self.affine = nn.Linear(style, 2 * size)

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        """Return [B, T, H]."""
        gain, shift = self.affine(style).unsqueeze(1).chunk(2, dim=-1)
        return (1.0 + gain) * functional.layer_norm(x, (self.size,)) + shift


class FrameHead(nn.Module):
    """Convolutions over frames, normalized by the style, and one value for each frame."""

    def __init__(self, size: int, style: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv1d(size, size, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(AdaptiveLayerNorm(size, style) for _ in range(3))
        self.output = nn.Linear(size, 1)

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        """Return [B, frames]."""
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = x + convolution(functional.leaky_relu(norm(x, style), 0.2).transpose(1, 2)).transpose(1, 2)
        return self.output(x).squeeze(-1)


def _bidirectional(inputs: int, size: int) -> nn.LSTM:
    return nn.LSTM(inputs, size // 2, batch_first=True, bidirectional=True)


def _run(lstm: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    y, _ = lstm(packed)
    return pad_packed_sequence(y, batch_first=True, total_length=x.shape[1])[0]
