"""The models, as data."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A model and how it is trained.

    Attributes:
        name: The name in reports.
        task: "words" (a language model whose state is carried), "classes" (of sequences with lengths), "series" (a
            number for each step), or "pairs" (an encoder, a decoder and attention).
        hidden: H, the number of hidden units.
        time: T, the number of time steps.
        batch: B, the number of sequences in each process.
        layers: L, the number of layers.
        bidirectional: Whether the layers are bidirectional; for "pairs", those of the encoder.
        projection: P, the number of features of the projected hidden state; 0 for none.
        dtype: The dtype of the parameters.
        autocast: The dtype of autocast; empty without autocast.
        scaled: Whether a GradScaler scales the loss.
        tf32: Whether float32 products may be rounded to TF32.
        dropout: The probability of dropout between layers and before the output.
        optimizer: "sgd" or "adam".
        rate: The learning rate.
        processes: The number of GPUs that train together with `DistributedDataParallel`.
    """

    name: str
    task: str
    hidden: int
    time: int
    batch: int
    layers: int = 1
    bidirectional: bool = False
    projection: int = 0
    dtype: str = "float32"
    autocast: str = ""
    scaled: bool = False
    tf32: bool = True
    dropout: float = 0.0
    optimizer: str = "adam"
    rate: float = 2e-3
    processes: int = 1


CASES = (
    Case("ptb_small", "words", 200, 35, 20, layers=2, rate=2e-3),
    Case("ptb_medium_autocast", "words", 650, 35, 20, layers=2, autocast="bfloat16", dropout=0.5, rate=1e-3),
    Case("ptb_large_autocast", "words", 1500, 35, 20, layers=2, autocast="bfloat16", rate=5e-4),
    Case("ptb_large_scaled", "words", 1500, 35, 18, layers=2, autocast="float16", scaled=True, rate=5e-4),
    Case("odd_1100_autocast", "words", 1100, 20, 7, autocast="bfloat16", rate=5e-4),
    Case("odd_1300_scaled", "words", 1300, 16, 12, autocast="float16", scaled=True, rate=5e-4),
    Case("odd_651_tf32", "words", 651, 35, 9, layers=2, rate=1e-3),
    Case("odd_333_exact", "words", 333, 30, 33, tf32=False, rate=1e-3),
    Case("projected", "words", 512, 35, 20, layers=2, projection=128, autocast="bfloat16", rate=1e-3),
    Case("characters", "words", 128, 200, 16, rate=2e-3),
    Case("characters_autocast", "words", 128, 200, 16, autocast="bfloat16", rate=2e-3),
    Case("characters_scaled", "words", 200, 100, 24, autocast="float16", scaled=True, rate=2e-3),
    Case("bfloat16_weights", "words", 512, 35, 64, layers=2, dtype="bfloat16", rate=1e-3),
    Case("classifier", "classes", 64, 50, 32, layers=2, bidirectional=True, rate=1e-3),
    Case("classifier_odd_autocast", "classes", 61, 40, 31, layers=2, bidirectional=True, autocast="bfloat16"),
    Case("hydrology", "series", 128, 365, 64, tf32=False, rate=1e-3),
    Case("tagger_autocast", "series", 300, 40, 48, bidirectional=True, autocast="float16", scaled=True, rate=1e-3),
    Case("translation", "pairs", 256, 24, 48, layers=2, bidirectional=True, autocast="bfloat16", rate=1e-3),
    Case("ptb_large_ddp", "words", 1500, 35, 18, layers=2, autocast="bfloat16", rate=5e-4, processes=2),
)
