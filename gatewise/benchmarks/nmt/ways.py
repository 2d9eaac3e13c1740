"""The rows: plain PyTorch, then gatewise's model with each attention kernel, and with either library's LSTM."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gatewise.attention import kernel_names
from gatewise.benchmarks.nmt.cases import TranslationCase
from gatewise.benchmarks.nmt.rival import PlainSeq2Seq
from gatewise.data.sentences import PADDING
from gatewise.models import Seq2Seq
from gatewise.nn import LSTM

_SCALES = {
    "source_embedding.weight": 10.0,
    "target_embedding.weight": 10.0,
    "attention.weight_query": 4.0,
    "attention.weight_key": 4.0,
    "attention.v": 4.0,
}

LIBRARY, OWN, AUTO = "nn.LSTM", "gatewise", "auto"


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """One implementation of the model, which is one row of the benchmark.

    Attributes:
        name: The name in tables.
        attention: The attention kernel; empty for plain PyTorch.
        lstm: The library of the LSTM layers: "nn.LSTM" or "gatewise".
        planned: Whether a memory plan determines the attention kernel and what is recomputed.
    """

    name: str
    attention: str = ""
    lstm: str = LIBRARY
    planned: bool = False

    @property
    def plain(self) -> bool:
        """Whether the way is plain PyTorch, without any code of gatewise."""
        return not self.attention


PLAIN = Way("plain PyTorch")
PLANNED = Way("planned, gatewise", AUTO, OWN, planned=True)


def ways() -> list[Way]:
    """Return all ways: plain PyTorch, attention kernels from the most to the least memory, and the planned way."""
    known = [name for name in ("reference", "recompute", "fused") if name in kernel_names()]
    known += [name for name in kernel_names() if name not in known]
    return [PLAIN, *(Way(f"{name}, {lstm}", name, lstm) for name in known for lstm in (LIBRARY, OWN)), PLANNED]


class LibraryLSTM(nn.LSTM):
    """`torch.nn.LSTM` with the signature of `gatewise.LSTM`, for batches of sentences of the same length."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] - no batch of the benchmark is packed
        self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Run the layer over all time steps."""
        return super().forward(input, hx)


def new_model(way: Way, case: TranslationCase, device: torch.device) -> PlainSeq2Seq | Seq2Seq:
    """Create the model of a way; its weights must be loaded afterwards.

    Args:
        way: The way.
        case: The sizes and the dropout.
        device: The device.
    """
    if way.plain:
        return PlainSeq2Seq(case).to(device)
    model = seq2seq(case, device, way.attention)
    if way.lstm == LIBRARY:
        _on_library(model)
    return model


def seq2seq(case: TranslationCase, device: torch.device, attention: str = AUTO) -> Seq2Seq:
    """Create gatewise's model for a case."""
    return Seq2Seq(
        case.source_size,
        case.target_size,
        case.embedding_size,
        case.hidden_size,
        case.encoder_layers,
        case.decoder_layers,
        attention_layer_norm=case.layer_norm,
        dropout=case.dropout,
        layer_dropout=case.dropout,
        tied="target" if case.tied else "none",
        label_smoothing=case.label_smoothing,
        attention_kernel=attention,
        padding=PADDING,
        device=device,
    )


def starting_weights(case: TranslationCase, device: torch.device, seed: int = 1) -> dict[str, Tensor]:
    """Draw the initial weights of every way, by the names of `Seq2Seq`; a seed gives the same weights again."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        model = seq2seq(case, device)
    return {name: weight.detach() for name, weight in model.named_parameters()}


def with_distinct_attention(start: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights with which words have different embeddings and attention prefers some positions.

    A new model attends equally to all positions, and the gradients of its attention are almost zero: rounding errors
    would be large in comparison, and hide a wrong gradient.
    """
    return {name: weight * _SCALES.get(name, 1.0) for name, weight in start.items()}


def _on_library(model: nn.Module) -> None:
    """Replace every `gatewise.LSTM` with `torch.nn.LSTM`."""
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, LSTM):
                same = LibraryLSTM(
                    layer.input_size,
                    layer.hidden_size,
                    layer.num_layers,
                    dropout=layer.dropout,
                    bidirectional=layer.bidirectional,
                    device=next(layer.parameters()).device,
                )
                setattr(parent, name, same)
