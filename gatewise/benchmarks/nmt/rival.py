"""The plain PyTorch implementation: the same model with torch.nn, and the usual training loop.

The encoder is `nn.LSTM`, whose bidirectional layer computes both directions in one library call. The decoder calls
`nn.LSTMCell`s step by step, since with input feeding a step depends on the previous one. Attention is a few lines of
PyTorch; the loss is one call of `cross_entropy` for all steps. Adam is fused.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from gatewise.benchmarks.nmt.cases import TranslationCase
from gatewise.benchmarks.nmt.rival_attention import AdditiveAttention
from gatewise.data import PairBatch
from gatewise.data.sentences import PADDING

# The parameters whose names differ from those of `Seq2Seq`.
_NAMES = {
    "attention.query.weight": "attention.weight_query",
    "attention.key.weight": "attention.weight_key",
    "attention.key.bias": "attention.bias",
    "attention.score.weight": "attention.v",
    "attention.norm.weight": "attention.norm_weight",
    "attention.norm.bias": "attention.norm_bias",
}


def seq2seq_name(name: str) -> str:
    """Return the name in `gatewise.models.Seq2Seq` of a parameter of the plain model."""
    return _NAMES.get(name, name)


class PlainSeq2Seq(nn.Module):
    """The model of `gatewise.models.Seq2Seq` in plain PyTorch, with additive attention and input feeding.

    Args:
        case: The sizes.
        packed: Whether sentences have different lengths and are packed for the encoder, which copies the lengths to the
            CPU; otherwise all have the length of the batch.
    """

    def __init__(self, case: TranslationCase, packed: bool = False) -> None:
        super().__init__()
        size, half = case.hidden_size, case.hidden_size // 2
        self.packed = packed
        self.source_embedding = nn.Embedding(case.source_size, case.embedding_size)
        self.target_embedding = nn.Embedding(case.target_size, case.embedding_size)
        self.encoder = nn.ModuleList([nn.LSTM(case.embedding_size, half, bidirectional=True)])
        if case.encoder_layers > 1:
            between = case.dropout if case.encoder_layers > 2 else 0.0
            self.encoder.append(nn.LSTM(size, size, case.encoder_layers - 1, dropout=between))
        self.start = nn.Linear(size, 2 * case.decoder_layers * size)
        inputs = [case.embedding_size + size, *[size] * (case.decoder_layers - 1)]
        self.decoder = nn.ModuleList([nn.LSTMCell(features, size) for features in inputs])
        self.attention = AdditiveAttention(size, case.layer_norm)
        self.attended = nn.Linear(2 * size, size, bias=False)
        self.output = nn.Linear(size, case.target_size)
        if case.tied:
            self.output.weight = self.target_embedding.weight
        self.dropout = nn.Dropout(case.dropout)
        self.label_smoothing = case.label_smoothing

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Load the weights of a `Seq2Seq`, by its names."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(weights[seq2seq_name(name)].view_as(parameter))

    def forward(self, batch: PairBatch) -> Tensor:
        """Return the mean loss of the target tokens."""
        values, keys, beyond, hidden, cell = self.encode(batch.source, batch.source_lengths)
        attended = self.decode(batch.inputs, values, keys, beyond, hidden, cell)
        return self.loss(attended, batch.targets)

    def encode(self, source: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor, list[Tensor], list[Tensor]]:
        """Run the encoder; return values and keys [B, S, H], the mask of padding, and the decoder's initial states."""
        x = self.dropout(self.source_embedding(source))
        if self.packed:
            x = pack_padded_sequence(x, lengths.cpu(), enforce_sorted=False)
        y, (final, _) = self.encoder[0](x)
        final = torch.cat([final[0], final[1]], -1)
        for layer in self.encoder[1:]:
            between = y._replace(data=self.dropout(y.data)) if self.packed else self.dropout(y)
            y, (states, _) = layer(between)
            final = states[-1]
        values = (pad_packed_sequence(y)[0] if self.packed else y).transpose(0, 1).contiguous()
        beyond = torch.arange(len(source), device=source.device) >= lengths[:, None]
        hidden, cell = self.start(final).chunk(2, -1)
        hidden, cell = (list(start.chunk(len(self.decoder), -1)) for start in (hidden.tanh(), cell))
        return values, self.attention.keys(values), beyond, hidden, cell

    def decode(
        self, inputs: Tensor, values: Tensor, keys: Tensor, beyond: Tensor, hidden: list[Tensor], cell: list[Tensor]
    ) -> Tensor:
        """Run the decoder on given tokens [T, B]; return its attended outputs [T, B, H]."""
        attended, outputs = torch.zeros_like(hidden[0]), []
        for embedded in self.dropout(self.target_embedding(inputs)):
            x = torch.cat([embedded, attended.to(embedded.dtype)], -1)
            for layer, step in enumerate(self.decoder):
                if layer:
                    x = self.dropout(hidden[layer - 1])
                hidden[layer], cell[layer] = step(x, (hidden[layer], cell[layer]))
            context = self.attention(hidden[-1], keys, values, beyond)
            attended = self.dropout(torch.tanh(self.attended(torch.cat([hidden[-1], context], -1))))
            outputs.append(attended)
        return torch.stack(outputs)

    def loss(self, attended: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss over all target tokens except padding."""
        scores = self.output(attended).flatten(0, 1)
        return functional.cross_entropy(
            scores, targets.flatten(), ignore_index=PADDING, label_smoothing=self.label_smoothing
        )


def plain_optimizer(model: PlainSeq2Seq, case: TranslationCase) -> torch.optim.Adam:
    """Return a fused Adam optimizer, whose learning rate is a tensor on the model's device."""
    weights = list(model.parameters())
    device = weights[0].device
    rate = torch.tensor(case.learning_rate, device=device)
    return torch.optim.Adam(weights, lr=rate, fused=True, capturable=device.type == "cuda")


class PlainStep:
    """One step of a usual training loop: forward, loss, backward, clipping, update.

    Args:
        model: The model, on its device, or `DistributedDataParallel` around it.
        optimizer: The optimizer of its parameters.
        clip: The largest norm of the gradient.
        autocast: Whether the forward pass runs under bfloat16 autocast.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, clip: float, autocast: bool) -> None:
        self._model, self._optimizer, self._clip, self._autocast = model, optimizer, clip, autocast

    def __call__(self, batch: PairBatch, state: None) -> tuple[Tensor, None]:
        """Train on a batch; return its loss, and no state."""
        self._optimizer.zero_grad(set_to_none=True)
        with torch.autocast(batch.source.device.type, torch.bfloat16, enabled=self._autocast):
            loss = self._model(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self._model.parameters(), self._clip)
        self._optimizer.step()
        return loss.detach(), None
