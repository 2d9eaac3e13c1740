"""The models and shapes that are measured, as data."""

from __future__ import annotations

import dataclasses

LSTM, GRU = "lstm", "gru"
"""The cells whose layers are measured over the grid."""


@dataclasses.dataclass(frozen=True, slots=True)
class LSTMCase:
    """The shape of one call of a layer; input size and hidden size are equal.

    Attributes:
        name: A well-known name, or T-B-H.
        time: T, the number of time steps.
        batch: B, the number of sequences.
        hidden_size: I and H, the number of input features and of hidden units.
        num_layers: L, the number of layers.
        directions: D, the number of directions.
        ragged: Whether lengths are uniform in [T/4, T] instead of all T; the name then ends in "_ragged".
    """

    name: str
    time: int
    batch: int
    hidden_size: int
    num_layers: int = 1
    directions: int = 1
    ragged: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class LanguageModelCase:
    """A size of the well-known PTB language model; all have T = 35 and B = 20.

    Attributes:
        name: "ptb_small", "ptb_medium" or "ptb_large".
        hidden_size: I and H, the number of input features and of hidden units.
        dropout: The dropout probability on the embeddings, between the layers and before the decoder.
        clip_norm: The norm to which the gradient is clipped.
        initial_scale: The bound of the uniform distribution of initial weights.
        num_layers: L, the number of layers.
        time: T, the number of steps of truncated backpropagation.
        batch: B, the number of sequences.
    """

    name: str
    hidden_size: int
    dropout: float
    clip_norm: float
    initial_scale: float
    num_layers: int = 2
    time: int = 35
    batch: int = 20

    @property
    def words(self) -> int:
        """The number of words in a batch."""
        return self.time * self.batch


# Zaremba et al., "Recurrent Neural Network Regularization" (2014), section 4.1; there, the small model has T = 20.
LANGUAGE_MODELS = {
    "small": LanguageModelCase("ptb_small", 200, dropout=0.0, clip_norm=5.0, initial_scale=0.1),
    "medium": LanguageModelCase("ptb_medium", 650, dropout=0.5, clip_norm=5.0, initial_scale=0.05),
    "large": LanguageModelCase("ptb_large", 1500, dropout=0.65, clip_norm=10.0, initial_scale=0.04),
}

# Small enough for a CPU and for tests: every way runs, but the times mean nothing.
QUICK_LANGUAGE_MODEL = LanguageModelCase(
    "ptb_quick", 32, dropout=0.5, clip_norm=5.0, initial_scale=0.1, time=6, batch=4
)


def _plain(time: int, batch: int, hidden_size: int) -> LSTMCase:
    return LSTMCase(f"{time}-{batch}-{hidden_size}", time, batch, hidden_size)


_SPEECH = LSTMCase("speech", 512, 32, 256)
_TAGGER = LSTMCase("tagger", 40, 64, 256, num_layers=2, directions=2)

LSTM_GRID = (
    LSTMCase("ptb_small", 35, 20, 200, num_layers=2),
    LSTMCase("ptb_medium", 35, 20, 650, num_layers=2),
    LSTMCase("ptb_large", 35, 20, 1500, num_layers=2),
    LSTMCase("awd", 70, 80, 1150, num_layers=3),
    LSTMCase("chars", 1000, 16, 128),
    _SPEECH,
    LSTMCase("asr", 500, 32, 512, num_layers=5, directions=2),
    _TAGGER,
    LSTMCase("nmt_encoder", 50, 128, 512, num_layers=2, directions=2),
    LSTMCase("flashrnn_cell", 1024, 16, 768),
    _plain(100, 16, 256),
    _plain(100, 64, 256),
    _plain(200, 8, 512),
    _plain(100, 64, 512),
    _plain(50, 128, 512),
    _plain(200, 1, 1024),
    _plain(100, 16, 1024),
    _plain(100, 64, 1024),
    _plain(50, 256, 512),
    _plain(50, 256, 1024),
    _plain(50, 512, 1024),
    _plain(100, 64, 2048),
    dataclasses.replace(_SPEECH, name="speech_ragged", ragged=True),
    dataclasses.replace(_TAGGER, name="tagger_ragged", ragged=True),
    LSTMCase("decode_1_512", 1, 1, 512),
    LSTMCase("decode_64_512", 1, 64, 512),
    LSTMCase("decode_1_1024", 1, 1, 1024),
    LSTMCase("decode_64_1024", 1, 64, 1024),
)

# Takes less than a minute on an H200: short and long, narrow and wide, stacked, bidirectional, ragged, a single step.
LSTM_QUICK = tuple(
    case
    for case in LSTM_GRID
    if case.name in ("ptb_medium", "tagger", "tagger_ragged", "100-16-256", "50-128-512", "100-64-1024", "decode_1_512")
)

# Small enough for a CPU and for tests: all code runs, but the times mean nothing.
LSTM_TINY = (
    LSTMCase("tiny", 6, 3, 8),
    LSTMCase("tiny_stack", 5, 4, 8, num_layers=2, directions=2),
    LSTMCase("tiny_stack_ragged", 5, 4, 8, num_layers=2, directions=2, ragged=True),
    LSTMCase("tiny_decode", 1, 1, 8),
)
