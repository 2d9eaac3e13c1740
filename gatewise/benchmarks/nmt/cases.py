"""The models and batches that are measured, as data."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class TranslationCase:
    """A translation model and the batches it is trained on; every sentence of a batch has the same length.

    Attributes:
        name: As it is written in tables and after `--case`.
        source: S, tokens of a source sentence.
        target: T, tokens of a target sentence.
        batch: B, sentence pairs.
        source_size: Tokens of the source vocabulary.
        target_size: Tokens of the target vocabulary.
        embedding_size: Size of an embedding.
        hidden_size: Units of a layer, H.
        encoder_layers: The first reads from both ends, H/2 units each.
        decoder_layers: With input feeding.
        layer_norm: Whether the additive score is normalised.
        tied: Whether target embedding and softmax are one matrix.
        dropout: Of embeddings, between layers and before the softmax.
        label_smoothing: Share of the target that is spread over all tokens.
        learning_rate: Adam's.
        clip: Largest norm of the gradient.
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

    def of_batch(self, batch: int) -> TranslationCase:
        """Return the same model on batches of another size."""
        return dataclasses.replace(self, name=f"{self.name.rpartition('-')[0]}-{batch}", batch=batch)


# IWSLT15 English to Vietnamese as EcoRNN trains it: S-T-B after the name. (Zheng and others, EcoRNN, 2018.)
IWSLT = TranslationCase("iwslt-50-50-128", 50, 50, 128)

CASES = (
    IWSLT,
    IWSLT.of_batch(256),
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

# A look.
QUICK_CASES = (IWSLT,)

# Small enough for a CPU and a test: every path is taken, no figure means anything.
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
