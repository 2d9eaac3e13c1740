"""The description of one call of a decoder with input feeding as sizes, dtypes and flags, without any tensor.

The letters are those of `gatewise.contract.problem` and `gatewise.attention.problem`, and:

| letter | meaning |
|---|---|
| `E` | features of an embedding |
| `A` | features of the additive score; 0 for the dot and the general score |
"""

from __future__ import annotations

import dataclasses

import torch

from gatewise import attention
from gatewise.contract.hashing import hash_once
from gatewise.feeding.call import fit_halves


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """The description of a decoder's call. It is hashable, so that choices can be cached and tested without a GPU.

    Attributes:
        time: The number of decoder steps, T.
        source: The number of source positions, S.
        batch: The batch size, B.
        units: The number of units of a layer, H.
        layers: The number of LSTM layers, L.
        embedding_size: The size of an embedding, E.
        features: The number of features of the additive score, A; 0 for the dot and the general score.
        value_size: The number of features of the encoder's outputs, V.
        layer_norm: Whether the additive score has a layer norm.
        dtype: The dtype of the computation.
        dropout: Whether the attentional outputs have dropout.
        layer_dropout: Whether the inputs of the layers above the first have dropout.
        allow_tf32: Whether float32 products may be rounded to TensorFloat-32; operands may then be stored in float16.
        ragged: Whether the source has a length for each sequence.
        needs_grad: Whether a backward pass may follow.
        recompute: Whether the backward pass recomputes the gates for a chunk of steps at a time (gradient
            checkpointing).
        attention_kernel: The name of an attention kernel, or "auto".
    """

    time: int
    source: int
    batch: int
    units: int
    layers: int
    embedding_size: int
    features: int
    value_size: int
    layer_norm: bool = False
    dtype: torch.dtype = torch.float32
    dropout: bool = False
    layer_dropout: bool = False
    allow_tf32: bool = False
    ragged: bool = True
    needs_grad: bool = True
    recompute: bool = False
    attention_kernel: str = "auto"
    _hash: int | None = dataclasses.field(default=None, init=False, repr=False, compare=False)

    def __hash__(self) -> int:
        return hash_once(self)

    @property
    def halves(self) -> bool:
        """Whether the operands of the steps' products can be stored in float16 on a GPU."""
        return fit_halves(self.dtype, self.units, self.features, rounded=self.allow_tf32)

    @property
    def attention(self) -> attention.Problem:
        """The attention problem of all steps together."""
        return attention.Problem(
            steps=self.time,
            source=self.source,
            batch=self.batch,
            hidden_size=self.features or self.units,
            value_size=self.units,
            score=attention.Score.ADDITIVE if self.features else attention.Score.DOT,
            layer_norm=self.layer_norm,
            ragged=self.ragged,
            dtype=self.dtype,
            needs_grad=self.needs_grad,
            allow_tf32=self.allow_tf32,
        )

    @property
    def step_flops(self) -> float:
        """The floating-point operations of the products of one step's forward pass; a multiply-add counts as two."""
        return 2.0 * self.batch * (self.step_weights + 4 * self.units * self.embedding_size)

    @property
    def step_weights(self) -> int:
        """The number of weights that every step reads: those of the layers, the query and the attentional output."""
        return self.layers * 8 * self.units**2 + (self.features + self.units) * self.units

    def replace(self, **changes: object) -> Problem:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def __str__(self) -> str:
        """Return one line: sizes, dtype and every flag that differs from its default."""
        sizes = f"T {self.time}, S {self.source}, B {self.batch}, H {self.units}, E {self.embedding_size}"
        extras = [
            f"A {self.features}" if self.features else "dot score",
            f"V {self.value_size}",
            f"{self.layers} layers" if self.layers > 1 else "",
            "layer norm" if self.layer_norm else "",
            "lengths" if self.ragged else "",
            "dropout" if self.dropout or self.layer_dropout else "",
            str(self.dtype).removeprefix("torch."),
            "TF32 allowed" if self.allow_tf32 and self.dtype == torch.float32 else "",
            "training" if self.needs_grad else "inference",
            "gates recomputed" if self.recompute else "",
            f"attention {self.attention_kernel}" if self.attention_kernel != "auto" else "",
        ]
        return ", ".join(["decoder with input feeding", sizes, *filter(None, extras)])
