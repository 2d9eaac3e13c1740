"""An LSTM encoder and decoder with attention, for translation."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from gatewise import feeding
from gatewise.attention import Score
from gatewise.attention.choice import AUTO, kernel_named
from gatewise.contract.errors import ArgumentError, ShapeError, sentence
from gatewise.contract.ranges import PROBABILITY
from gatewise.models.arguments import TOKEN_ERRORS, check_lengths_of, check_pairs, check_sizes, check_targets, embedded
from gatewise.models.chunked_softmax import weighted_token_loss
from gatewise.models.locked_dropout import with_dropped_words
from gatewise.models.lookup import new_table
from gatewise.nn import LSTM, LSTMCell
from gatewise.nn.arguments import check_flag
from gatewise.nn.attention import Attention

TIES = ("none", "target", "all")


class Memory(NamedTuple):
    """The encoder's outputs, which the decoder's attention reads.

    Attributes:
        values: The outputs of the encoder [S, B, H].
        keys: The attention keys [S, B, attention size]; they are the same at every step.
        lengths: The number of tokens of each sentence, int64 [B].
    """

    values: Tensor
    keys: Tensor
    lengths: Tensor

    def select(self, rows: Tensor) -> Memory:
        """Return the memory of some rows, int64 [N]; a row may occur several times."""
        return Memory(self.values[:, rows], self.keys[:, rows], self.lengths[rows])


class DecoderState(NamedTuple):
    """The state of the decoder.

    Attributes:
        hidden: The hidden state of each layer [L, B, H].
        cell: The cell state of each layer [L, B, H].
        attended: The attentional output of the previous step, which input feeding reads [B, H].
    """

    hidden: Tensor
    cell: Tensor
    attended: Tensor

    def select(self, rows: Tensor) -> DecoderState:
        """Return the state of some rows, int64 [N]."""
        return DecoderState(self.hidden[:, rows], self.cell[:, rows], self.attended[rows])


class Seq2Seq(nn.Module):
    r"""Translates a sentence token by token.

        encoder   m_1 ... m_S = LSTM layers over dropout(E_s[source]); the first reads from both ends, H/2 units each
        start     h_0 = tanh(W_h m),  c_0 = W_c m           for every decoder layer; m is the encoder's final state
        decoder   h_t = LSTM layers over [dropout(E_t[y_t]); a_{t-1}]         a_{t-1} with input feeding only
        attention c_t = sum_s softmax_s(score(h_t, m_s)) m_s
        output    a_t = dropout(tanh(W_a [h_t; c_t])),   p(y_{t+1}) = softmax(W_o W_p a_t + b)

    W_p projects a_t to the size of an embedding if weights are tied and the sizes differ; otherwise it is omitted.

    Args:
        source_size: The size of the source vocabulary.
        target_size: The size of the target vocabulary.
        embedding_size: The size of a token's embedding on both sides.
        hidden_size: The number of units of each layer, H; even.
        encoder_layers: The number of LSTM layers of the encoder.
        decoder_layers: The number of LSTM layers of the decoder, L.
        score: The attention score: ``"additive"``, ``"dot"`` or ``"general"``; see `gatewise.nn.Attention`.
        attention_size: The number of features of the additive score; 0 means H.
        attention_layer_norm: Whether the additive score applies a layer norm before its tanh.
        input_feeding: Whether each step reads the attentional output of the previous step. Without input feeding, all
            decoder steps of a training batch run in one call; with it they run one after another.
        dropout: The dropout probability of the embeddings and of a_t, in training mode.
        layer_dropout: The dropout probability between two LSTM layers, in training mode.
        word_dropout: The probability of dropping all embeddings of a token in a batch, in training mode; drawn for
            each side.
        weight_dropout: The probability of dropping an element of a recurrent matrix, in training mode; 0 with input
            feeding.
        tied: The weights that share one matrix: ``"none"``; ``"target"`` for E_t and W_o; ``"all"`` for E_s too, which
            requires a joint vocabulary.
        label_smoothing: The fraction of the target distribution that is spread evenly over all tokens, in training.
        kernel: The kernel of the LSTMs; ``"auto"`` lets gatewise choose. A decoder with input feeding has kernels of
            its own, in `gatewise.feeding`, of which `gatewise.use_kernel` can name ``"eager"``.
        attention_kernel: The kernel of attention; ``"auto"`` lets gatewise choose.
        padding: The padding token, which is masked in the source and in the loss.
        device: The device of the parameters.

    Attributes:
        output_rows: The maximum number of tokens whose logits `loss` holds at once; 0 lets `weighted_token_loss`
            choose. A memory plan (`gatewise.planning`) sets this attribute and the next.
        recompute_gates: Whether the backward pass of a decoder with input feeding recomputes its gates (gradient
            checkpointing).

    Raises:
        ArgumentError: A size is not positive, `hidden_size` is odd, a probability is outside [0, 1), `weight_dropout`
            is not 0 with input feeding, `score` or `tied` is unknown, `attention_layer_norm` is not for the score, or
            `tied` is ``"all"`` with vocabularies of different sizes.
        KernelRefused: `kernel` or `attention_kernel` is unknown.

    References:
        Bahdanau, Cho, Bengio: Neural Machine Translation by Jointly Learning to Align and Translate, 2015.
        Luong, Pham, Manning: Effective Approaches to Attention-based Neural Machine Translation, 2015 (input feeding).
        Zheng and others: EcoRNN, 2018; Hieber and others: Sockeye, 2018 (the encoder).
        Gal, Ghahramani: A Theoretically Grounded Application of Dropout in Recurrent Neural Networks, 2016 (tokens).
        Merity, Keskar, Socher: Regularizing and Optimizing LSTM Language Models, 2018 (recurrent matrices).
        Szegedy and others: Rethinking the Inception Architecture, 2016, section 7 (label smoothing).
    """

    def __init__(
        self,
        source_size: int,
        target_size: int,
        embedding_size: int,
        hidden_size: int,
        encoder_layers: int = 2,
        decoder_layers: int = 2,
        *,
        score: str = "additive",
        attention_size: int = 0,
        attention_layer_norm: bool = False,
        input_feeding: bool = True,
        dropout: float = 0.0,
        layer_dropout: float = 0.0,
        word_dropout: float = 0.0,
        weight_dropout: float = 0.0,
        tied: str = "none",
        label_smoothing: float = 0.0,
        kernel: str = "auto",
        attention_kernel: str = "auto",
        padding: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        sizes = {
            "source_size": source_size,
            "target_size": target_size,
            "embedding_size": embedding_size,
            "hidden_size": hidden_size,
            "encoder_layers": encoder_layers,
            "decoder_layers": decoder_layers,
        }
        check_sizes(sizes if attention_size == 0 else sizes | {"attention_size": attention_size})
        if hidden_size % 2:
            advice = "Each direction of the first encoder layer has half of the units."
            raise ArgumentError(sentence("hidden_size", "even", hidden_size, advice))
        rates = {
            "dropout": dropout,
            "layer_dropout": layer_dropout,
            "word_dropout": word_dropout,
            "weight_dropout": weight_dropout,
            "label_smoothing": label_smoothing,
        }
        for name, rate in rates.items():
            PROBABILITY.check(name, rate)
        check_flag("input_feeding", input_feeding)
        check_flag("attention_layer_norm", attention_layer_norm)
        if isinstance(padding, bool) or not isinstance(padding, numbers.Integral):
            raise ArgumentError(sentence("padding", "an integer, the number of a token", repr(padding)))
        if input_feeding and weight_dropout:
            advice = "Disable input feeding: the cells of its decoder have no dropout of weights."
            raise ArgumentError(sentence("weight_dropout", "0 with input feeding", weight_dropout, advice))
        if tied not in TIES:
            raise ArgumentError(sentence("tied", f"one of {', '.join(TIES)}", repr(tied)))
        if tied == "all" and source_size != target_size:
            advice = f"Use a joint vocabulary: the sizes are {source_size:,} and {target_size:,} tokens."
            raise ArgumentError(sentence("tied", "none or target for separate vocabularies", repr(tied), advice))
        # `Attention` checks these too, but under names of its own.
        if attention_kernel != AUTO:
            kernel_named(attention_kernel, "attention_kernel")
        if attention_layer_norm and score in {each.value for each in Score if each is not Score.ADDITIVE}:
            raise ArgumentError(sentence("attention_layer_norm", f"False for the {score} score", "True"))
        self.decoder_layers, self.hidden_size = decoder_layers, hidden_size
        self.input_feeding, self.label_smoothing, self.padding = input_feeding, label_smoothing, padding
        self.word_dropout, self.output_rows, self.recompute_gates = word_dropout, 0, False
        placed: dict[str, Any] = {"device": device}
        layers: dict[str, Any] = {"weight_dropout": weight_dropout, "kernel": kernel} | placed

        self.target_embedding = new_table(target_size, embedding_size, device)
        self.source_embedding = new_table(source_size, embedding_size, device)
        half = hidden_size // 2
        self.encoder = nn.ModuleList([LSTM(embedding_size, half, bidirectional=True, **layers)])
        if encoder_layers > 1:
            between = layer_dropout if encoder_layers > 2 else 0.0
            more = LSTM(hidden_size, hidden_size, encoder_layers - 1, dropout=between, **layers)
            self.encoder.append(more)
        self.start = nn.Linear(hidden_size, 2 * decoder_layers * hidden_size, **placed)
        if input_feeding:
            inputs = [embedding_size + hidden_size, *[hidden_size] * (decoder_layers - 1)]
            self.decoder: nn.Module = nn.ModuleList([LSTMCell(size, hidden_size, **placed) for size in inputs])
        else:
            between = layer_dropout if decoder_layers > 1 else 0.0
            self.decoder = LSTM(embedding_size, hidden_size, decoder_layers, dropout=between, **layers)
        self.attention = Attention(
            hidden_size,
            hidden_size,
            (attention_size or None) if score == "additive" else None,
            score=score,
            layer_norm=attention_layer_norm,
            kernel=attention_kernel,
            **placed,
        )
        self.attended = nn.Linear(2 * hidden_size, hidden_size, bias=False, **placed)
        narrowed = tied != "none" and embedding_size != hidden_size
        self.narrowed = nn.Linear(hidden_size, embedding_size, bias=False, **placed) if narrowed else None
        self.output = nn.Linear(embedding_size if narrowed else hidden_size, target_size, **placed)
        self.dropout = nn.Dropout(dropout)
        self.layer_dropout = nn.Dropout(layer_dropout)
        self.reset_parameters()
        if tied != "none":
            self.output.weight = self.target_embedding.weight
        if tied == "all":
            self.source_embedding.weight = self.target_embedding.weight

    def reset_parameters(self) -> None:
        """Draw embeddings and output weights from U(-0.1, 0.1), and zero the output's bias."""
        for weight in (self.target_embedding.weight, self.source_embedding.weight, self.output.weight):
            nn.init.uniform_(weight, -0.1, 0.1)
        nn.init.zeros_(self.output.bias)

    def forward(self, source: Tensor, source_lengths: Tensor, inputs: Tensor) -> Tensor:
        """Compute the logits of the next token after each token of the translation.

        Args:
            source: The source tokens, int64 [S, B].
            source_lengths: The number of tokens of each sentence, int64 [B].
            inputs: The decoder inputs, the begin token followed by the translation; int64 [T, B].

        Returns:
            The logits [T, B, target_size].
        """
        return self._scores(self._attended(*self.encode(source, source_lengths), inputs))

    def loss(self, batch: Any, state: None = None) -> tuple[Tensor, None]:
        """Return the mean loss of the target tokens, and no state.

        Args:
            batch: An object with `source` [S, B], `source_lengths` [B], `inputs` and `targets` [T, B] (int64), and
                `token_weight` [], the weight of each target token in the loss: 1 / their number.
            state: Always None; batches of sentence pairs are independent.

        Returns:
            The cross-entropy in nats: with label smoothing in training mode; otherwise the negative log-likelihood.

        Numerics:
            On a GPU, float32 products with the output weights that may be rounded to TensorFloat-32 are computed in
            float16, which has as many mantissa bits, and accumulated in float32.
        """
        PROBABILITY.check("label_smoothing", self.label_smoothing)  # an attribute, which programs may set
        attended = self._attended(*self.encode(batch.source, batch.source_lengths), batch.inputs)
        check_pairs(batch.inputs, batch.targets)
        rows, targets = self._narrowed(attended).flatten(0, 1), batch.targets.flatten()
        shares = (targets != self.padding) * batch.token_weight
        try:
            loss = weighted_token_loss(
                rows,
                self.output.weight,
                self.output.bias,
                targets,
                shares,
                chunk_rows=self.output_rows,
                label_smoothing=self.label_smoothing if self.training else 0.0,
            )
        except TOKEN_ERRORS as error:
            check_targets(batch.targets, batch.inputs.shape, self.output.out_features, error)
            raise
        return loss, None

    def encode(self, source: Tensor, lengths: Tensor) -> tuple[Memory, DecoderState]:
        """Encode sentences.

        Args:
            source: The source tokens, int64 [S, B].
            lengths: The number of tokens of each sentence, int64 [B].

        Returns:
            The memory that attention reads, and the decoder's initial state.
        """
        check_lengths_of("lengths", lengths)
        first, *more = self.encoder
        read = self._embedded(self.source_embedding, "source", source)
        if read.dim() != 3:
            raise ShapeError(sentence("source", "a tensor of tokens [S, B]", list(source.shape)))
        values, (final, _) = first(read, lengths=lengths)
        final = torch.cat(tuple(final), -1)
        for layer in more:
            values, (states, _) = layer(self.layer_dropout(values), lengths=lengths)
            final = states[-1]
        batch = source.shape[1]
        hidden, cell = self.start(final).view(batch, 2, self.decoder_layers, self.hidden_size).permute(1, 2, 0, 3)
        state = DecoderState(hidden.tanh(), cell.contiguous(), final.new_zeros(batch, self.hidden_size))
        return Memory(values, self.attention.keys(values), lengths), state

    def step(self, tokens: Tensor, memory: Memory, state: DecoderState) -> tuple[Tensor, DecoderState, Tensor]:
        """Run one decoder step.

        Args:
            tokens: The last token of each translation, int64 [B].
            memory: The memory that `encode` returned, for the same rows.
            state: The state that `encode` or the previous step returned.

        Returns:
            The logits of the next token [B, target_size], the next state, and the attention weights [B, S].
        """
        inputs = self._embedded(self.target_embedding, "tokens", tokens)
        if inputs.shape[:-1] != state.hidden.shape[1:2]:
            expectation = f"one token for each sentence, {list(state.hidden.shape[1:2])}"
            raise ShapeError(sentence("tokens", expectation, list(tokens.shape)))
        if self.input_feeding:
            hidden, cell = self._cells(inputs, state)
        else:
            _, (hidden, cell) = self.decoder(inputs[None], (state.hidden, state.cell))
        context, weights = self.attention(
            hidden[-1], memory.values, memory.lengths, keys=memory.keys, need_weights=True
        )
        attended = self.dropout(self._combined(hidden[-1], context))
        return self._scores(attended), DecoderState(hidden, cell, attended), weights

    def _embedded(self, table: nn.Embedding, name: str, tokens: Tensor) -> Tensor:
        """Return the embeddings [..., E] of tokens [...], in training mode with dropped tokens and features."""
        found = embedded(table, name, tokens)
        if self.training and self.word_dropout:
            found = with_dropped_words(found, tokens, table.num_embeddings, self.word_dropout)
        return self.dropout(found)

    def _attended(self, memory: Memory, state: DecoderState, inputs: Tensor) -> Tensor:
        """Run the decoder over given tokens, int64 [T, B], and return its attentional outputs [T, B, H]."""
        source = memory.values.shape[:2]
        if not source.numel():
            raise ShapeError(sentence("source", "at least one token and one sentence, [S, B]", list(source)))
        read = self._embedded(self.target_embedding, "inputs", inputs)
        if read.dim() != 3 or not len(read) or read.shape[1] != source[1]:
            expectation = f"one or more tokens for each sentence, [T, B] with B = {source[1]}"
            raise ShapeError(sentence("inputs", expectation, list(inputs.shape)))
        if not self.input_feeding:
            hidden, _ = self.decoder(read, (state.hidden, state.cell))
            context = self.attention(hidden, memory.values, memory.lengths, keys=memory.keys)
            return self.dropout(self._combined(hidden, context))
        attention = self.attention
        keys = memory.keys if attention.weight is None else nn.functional.linear(memory.keys, attention.weight)
        weights = feeding.Weights(
            tuple(map(_layer_weights, self._cell_layers)),
            attention.weight_query,
            self.attended.weight,
            attention.v,
            attention.norm_weight,
            attention.norm_bias,
        )
        return feeding.attended_outputs(
            read,
            feeding.State(*state),
            keys,
            memory.values,
            memory.lengths,
            weights,
            dropout=self.dropout.p if self.training else 0.0,
            layer_dropout=self.layer_dropout.p if self.training else 0.0,
            attention_kernel=attention.kernel,
            recompute=self.recompute_gates,
        )

    def _cells(self, embedded: Tensor, state: DecoderState) -> tuple[Tensor, Tensor]:
        """Run one step of the decoder's layers with input feeding; return hidden and cell states [L, B, H]."""
        inputs, hidden, cell = torch.cat([embedded, state.attended.to(embedded.dtype)], -1), [], []
        for layer, before in zip(self._cell_layers, zip(state.hidden, state.cell, strict=True), strict=True):
            if hidden:
                inputs = self.layer_dropout(hidden[-1])
            h, c = layer(inputs, before)
            hidden.append(h)
            cell.append(c)
        return torch.stack(hidden), torch.stack(cell)

    @property
    def _cell_layers(self) -> Sequence[LSTMCell]:
        """The layers of a decoder with input feeding, bottom to top."""
        return cast("Sequence[LSTMCell]", self.decoder)  # a ModuleList does not say of what

    def _combined(self, hidden: Tensor, context: Tensor) -> Tensor:
        return self.attended(torch.cat([hidden, context], -1)).tanh()

    def _narrowed(self, attended: Tensor) -> Tensor:
        return attended if self.narrowed is None else self.narrowed(attended)

    def _scores(self, attended: Tensor) -> Tensor:
        return self.output(self._narrowed(attended))


def _layer_weights(cell: LSTMCell) -> feeding.LayerWeights:
    assert cell.bias_ih is not None
    assert cell.bias_hh is not None
    return feeding.LayerWeights(cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh)
