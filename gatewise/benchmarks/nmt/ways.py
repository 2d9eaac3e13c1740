"""The rows: plain PyTorch, then gatewise's model with each attention, on either library's LSTM."""

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

_AWAKE = {
    "source_embedding.weight": 10.0,
    "target_embedding.weight": 10.0,
    "attention.weight_query": 4.0,
    "attention.weight_key": 4.0,
    "attention.v": 4.0,
}

LIBRARY, OWN, AUTO = "nn.LSTM", "gatewise", "auto"


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """One way to train the model.

    Attributes:
        name: As it is written in tables.
        attention: The attention kernel; empty for the plain program.
        lstm: Whose LSTM layers: "nn.LSTM" or "gatewise".
        planned: Whether a plan of memory decides what is kept and what is computed again, and the attention kernel.
    """

    name: str
    attention: str = ""
    lstm: str = LIBRARY
    planned: bool = False

    @property
    def plain(self) -> bool:
        """Whether nothing of gatewise is in it."""
        return not self.attention


PLAIN = Way("plain PyTorch")
PLANNED = Way("planned, gatewise", AUTO, OWN, planned=True)


def ways() -> list[Way]:
    """Return every way: the plain program, then attention from what keeps most to what keeps least, then the plan's."""
    known = [name for name in ("reference", "recompute", "fused") if name in kernel_names()]
    known += [name for name in kernel_names() if name not in known]
    return [PLAIN, *(Way(f"{name}, {lstm}", name, lstm) for name in known for lstm in (LIBRARY, OWN)), PLANNED]


class LibraryLSTM(nn.LSTM):
    """`torch.nn.LSTM` in the place of `gatewise.LSTM`, for batches in which all sentences have the same length."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] - no batch of the benchmark is packed
        self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Run the layer over the whole length."""
        return super().forward(input, hx)


def new_model(way: Way, case: TranslationCase, device: torch.device) -> PlainSeq2Seq | Seq2Seq:
    """Make the model of a way; its weights are to be loaded.

    Args:
        way: Which.
        case: Its sizes; dropout too.
        device: Where it lives.
    """
    if way.plain:
        return PlainSeq2Seq(case).to(device)
    model = seq2seq(case, device, way.attention)
    if way.lstm == LIBRARY:
        _on_library(model)
    return model


def seq2seq(case: TranslationCase, device: torch.device, attention: str = AUTO) -> Seq2Seq:
    """Make gatewise's model of a case."""
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
    """Draw what every way starts from, by the names of `Seq2Seq`, the same for a seed on a kind of device."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        model = seq2seq(case, device)
    return {name: weight.detach() for name, weight in model.named_parameters()}


def awake(start: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Make weights of a model that reads and looks: its words differ, and its attention prefers some positions.

    A fresh model looks at all positions alike, and the gradients of its attention are all but zero: rounding errors are
    large beside them, and a wrong one would not be seen.
    """
    return {name: weight * _AWAKE.get(name, 1.0) for name, weight in start.items()}


def _on_library(model: nn.Module) -> None:
    """Put `torch.nn.LSTM` in the place of every `gatewise.LSTM`."""
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
