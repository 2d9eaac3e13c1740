"""The models and batches that are measured, as data."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class TranslationCase:
    """A translation model and the shape of its batches; all sentences of a batch have the same length.

    Attributes:
        name: The name in tables and for `--case`.
        source: S, the number of tokens of a source sentence.
        target: T, the number of tokens of a target sentence.
        batch: B, the number of sentence pairs.
        source_size: The size of the source vocabulary.
        target_size: The size of the target vocabulary.
        embedding_size: The number of features of embeddings.
        hidden_size: H, the number of hidden units of a layer.
        encoder_layers: The number of encoder layers; the first is bidirectional, with H/2 units for each direction.
        decoder_layers: The number of decoder layers; the decoder has input feeding.
        layer_norm: Whether the additive score has a layer norm.
        tied: Whether target embedding and softmax share one matrix.
        dropout: The dropout probability of embeddings, between layers and before the softmax.
        label_smoothing: The probability that is spread over all tokens in the targets.
        learning_rate: The learning rate of Adam.
        clip: The largest norm of the gradient.
    """

    name: str
    source: int
    target: int
    batch: int
    source_size: int = 7_710
    target_size: int = 17_192
    embedding_size: int = 512
    hidden_size: int = 512
    encoder_layers: int = 2
    decoder_layers: int = 2
    layer_norm: bool = False
    tied: bool = False
    dropout: float = 0.0
    label_smoothing: float = 0.0
    learning_rate: float = 3e-3
    clip: float = 1.0

    def with_batch(self, batch: int) -> TranslationCase:
        """Return the same model with another batch size."""
        return dataclasses.replace(self, name=f"{self.name.rpartition('-')[0]}-{batch}", batch=batch)


# IWSLT15 English to Vietnamese as in EcoRNN (Zheng et al., 2018); the name ends in S-T-B.
IWSLT = TranslationCase("iwslt-50-50-128", 50, 50, 128)

CASES = (
    IWSLT,
    IWSLT.with_batch(256),
    TranslationCase("iwslt-100-100-128", 100, 100, 128),
    TranslationCase("iwslt-100-100-256", 100, 100, 256),
    TranslationCase(
        "groundhog-50-50-80",
        50,
        50,
        80,
        embedding_size=500,
        hidden_size=1000,
        encoder_layers=1,
        decoder_layers=1,
        layer_norm=True,
        dropout=0.3,
        learning_rate=2e-4,
    ),
    TranslationCase(
        "best-50-50-64",
        50,
        50,
        64,
        encoder_layers=4,
        decoder_layers=4,
        layer_norm=True,
        tied=True,
        dropout=0.1,
        label_smoothing=0.1,
        learning_rate=2e-4,
    ),
)

# For --quick.
QUICK_CASES = (IWSLT,)

# Small enough for a CPU and for tests: all code runs, but the times mean nothing.
TINY_CASES = (
    TranslationCase(
        "tiny-6-5-4",
        6,
        5,
        4,
        source_size=30,
        target_size=40,
        embedding_size=8,
        hidden_size=8,
        learning_rate=1e-2,
    ),
    TranslationCase(
        "tiny-best-6-5-4",
        6,
        5,
        4,
        source_size=30,
        target_size=40,
        embedding_size=8,
        hidden_size=8,
        encoder_layers=3,
        decoder_layers=3,
        layer_norm=True,
        tied=True,
        dropout=0.1,
        label_smoothing=0.1,
        learning_rate=1e-2,
    ),
)
