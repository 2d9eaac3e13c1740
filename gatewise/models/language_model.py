"""A recurrent language model: embedding, stacked LSTM, and softmax over the vocabulary."""

from __future__ import annotations

import numbers
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from gatewise.contract.errors import ArgumentError, ShapeError, sentence
from gatewise.contract.ranges import AMOUNT, PROBABILITY
from gatewise.models.arguments import TOKEN_ERRORS, check_pairs, check_sizes, check_targets, embedded
from gatewise.models.chunked_softmax import mean_token_loss
from gatewise.models.locked_dropout import LockedDropout, with_dropped_words
from gatewise.models.lstm_stack import LSTMStack, StackState
from gatewise.nn import LSTM
from gatewise.nn.arguments import check_flag

LanguageState = tuple[torch.Tensor, torch.Tensor] | StackState
"""The hidden and the cell state, each [L, B, H]; for an `LSTMStack` a pair of them for each layer."""


class LanguageModel(nn.Module):
    r"""Predicts each token from all tokens before it.

        x_t = dropout(E[token_t])
        h_t, state = LSTM(x_t, state)              with dropout between the layers
        p(token_{t+1}) = softmax(W W_p dropout(h_t) + b)

    W_p projects h_t to the size of an embedding if weights are tied and the sizes differ; otherwise it is omitted.

    Args:
        vocabulary_size: The number of tokens in the vocabulary, V.
        embedding_size: The size of a token's embedding.
        hidden_size: The number of units of each LSTM layer, H.
        num_layers: The number of LSTM layers, L.
        dropout: The dropout probability of the last layer's output.
        embedding_dropout: The dropout probability of the embeddings.
        layer_dropout: The dropout probability between two LSTM layers.
        last_hidden_size: The number of units of the last LSTM layer; 0 for `hidden_size`.
        locked: Whether these dropouts draw one mask for all steps of a call instead of one for each step.
        word_dropout: The probability of dropping all embeddings of a word in a call.
        weight_dropout: The probability of dropping an element of a recurrent matrix in a call.
        activation_penalty: The factor of the mean square of the last layer's output after dropout.
        change_penalty: The factor of the mean square of the difference between the last layer's outputs at one step and
            the next, before dropout.
        tied: Whether W is the embedding matrix E itself.
        kernel: The kernel of the LSTM; ``"auto"`` lets gatewise choose.
        device: The device of the parameters.

    Dropout and penalties act in training mode only. The attribute `lstm` is an `LSTMStack` if the sizes of the layers
    differ or locked dropout is between them, otherwise one `LSTM`.

    Raises:
        ArgumentError: A size is not positive, a penalty is negative, a probability is outside [0, 1), or one layer has
            a `last_hidden_size`.

    References:
        Zaremba, Sutskever, Vinyals: Recurrent Neural Network Regularization, 2014 (the positions of dropout).
        Press, Wolf: Using the Output Embedding to Improve Language Models, 2017 (the tied softmax).
        Merity, Keskar, Socher: Regularizing and Optimizing LSTM Language Models, 2018 (all other options).
    """

    def __init__(
        self,
        vocabulary_size: int,
        embedding_size: int,
        hidden_size: int,
        num_layers: int = 2,
        *,
        dropout: float = 0.0,
        embedding_dropout: float = 0.0,
        layer_dropout: float = 0.0,
        last_hidden_size: int = 0,
        locked: bool = False,
        word_dropout: float = 0.0,
        weight_dropout: float = 0.0,
        activation_penalty: float = 0.0,
        change_penalty: float = 0.0,
        tied: bool = False,
        kernel: str = "auto",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        sizes = {
            "vocabulary_size": vocabulary_size,
            "embedding_size": embedding_size,
            "hidden_size": hidden_size,
            "num_layers": num_layers,
        }
        check_sizes(sizes)
        if last_hidden_size and num_layers == 1:
            advice = "Set `hidden_size`."
            raise ArgumentError(sentence("last_hidden_size", "0 for one layer", last_hidden_size, advice))
        rates = {
            "dropout": dropout,
            "embedding_dropout": embedding_dropout,
            "layer_dropout": layer_dropout,
            "word_dropout": word_dropout,
            "weight_dropout": weight_dropout,
        }
        for name, rate in rates.items():
            PROBABILITY.check(name, rate)
        check_flag("locked", locked)
        check_flag("tied", tied)
        if isinstance(last_hidden_size, bool) or not isinstance(last_hidden_size, numbers.Integral):
            raise ArgumentError(sentence("last_hidden_size", "an integer", repr(last_hidden_size)))
        amounts = {"last_hidden_size": last_hidden_size, "activation_penalty": activation_penalty}
        for name, amount in (amounts | {"change_penalty": change_penalty}).items():
            AMOUNT.check(name, amount)
        self.word_dropout = word_dropout
        self.activation_penalty, self.change_penalty = activation_penalty, change_penalty
        dropped = LockedDropout if locked else nn.Dropout
        last = last_hidden_size or hidden_size
        self.embedding = nn.Embedding(vocabulary_size, embedding_size, device=device)
        self.embedding_dropout = dropped(embedding_dropout)
        between = layer_dropout if num_layers > 1 else 0.0
        if last != hidden_size or (locked and between):
            sizes_of_layers = [embedding_size, *[hidden_size] * (num_layers - 1), last]
            options = {"weight_dropout": weight_dropout, "kernel": kernel, "device": device}
            self.lstm = LSTMStack(sizes_of_layers, dropped(between), **options)
        else:
            self.lstm = LSTM(
                embedding_size,
                hidden_size,
                num_layers,
                dropout=between,
                weight_dropout=weight_dropout,
                kernel=kernel,
                device=device,
            )
        self.output_dropout = dropped(dropout)
        narrowed = tied and embedding_size != last
        self.narrowed = nn.Linear(last, embedding_size, bias=False, device=device) if narrowed else None
        self.output = nn.Linear(embedding_size if narrowed else last, vocabulary_size, device=device)
        if tied:
            self.output.weight = self.embedding.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw embedding and softmax weights from U(-0.1, 0.1), zero the softmax bias, and reset the other layers."""
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.uniform_(self.output.weight, -0.1, 0.1)
        nn.init.zeros_(self.output.bias)
        self.lstm.reset_parameters()
        if self.narrowed is not None:
            self.narrowed.reset_parameters()

    def forward(self, tokens: torch.Tensor, state: LanguageState | None = None) -> tuple[torch.Tensor, LanguageState]:
        """Compute the logits of the next token at each position.

        Args:
            tokens: The input tokens, int64 [T, B].
            state: The state that an earlier call returned; None means zeros.

        Returns:
            The logits [T, B, V], and the state after the last step.
        """
        _, hidden, state = self._outputs(tokens, state)
        return self.output(self._narrow(hidden)), state

    def loss(self, batch: Any, state: LanguageState | None = None) -> tuple[torch.Tensor, LanguageState]:
        """Return the mean negative log-likelihood of `batch.targets` after `batch.inputs`, and the state.

        In training mode its gradient is that of the loss with the penalties; its value is that without them.

        Args:
            batch: An object with `inputs` and `targets`, both int64 [T, B].
            state: The state that the call for the previous batch returned; None means zeros.

        Returns:
            The loss in nats per token, a scalar; and the state after the last step, still attached to the graph.

        Raises:
            ArgumentError: Inputs or targets are not a tensor, or, on a CPU, one of them is not in the vocabulary.
            DtypeError: They are no integers.
            ShapeError: There are no tokens, or the targets are of another shape than the inputs.
        """
        plain, dropped, state = self._outputs(batch.inputs, state, "inputs")
        check_pairs(batch.inputs, batch.targets)
        if not batch.inputs.numel():
            advice = "The mean loss of no tokens is not a number."
            raise ShapeError(sentence("inputs", "of at least one token, [T, B]", list(batch.inputs.shape), advice))
        rows, targets = self._narrow(dropped).flatten(0, 1), batch.targets.flatten()
        try:
            loss = mean_token_loss(rows, self.output.weight, self.output.bias, targets)
        except TOKEN_ERRORS as error:
            check_targets(batch.targets, batch.inputs.shape, self.output.out_features, error)
            raise
        if self.training:
            for penalty in self._penalties(plain, dropped):
                loss = loss + (penalty - penalty.detach())
        return loss, state

    @property
    def layers(self) -> list[LSTM]:
        """The LSTM modules in the order in which a step calls them."""
        return [self.lstm] if isinstance(self.lstm, LSTM) else [*self.lstm.layers]  # type: ignore[list-item]

    def _outputs(
        self, tokens: torch.Tensor, state: LanguageState | None, name: str = "tokens"
    ) -> tuple[torch.Tensor, torch.Tensor, LanguageState]:
        """Return the output of the last LSTM layer without and with dropout, and the state."""
        inputs = embedded(self.embedding, name, tokens)
        if inputs.dim() not in (2, 3):
            raise ShapeError(sentence(name, "tokens [T, B], or [T] of one sequence", list(tokens.shape)))
        if self.training and self.word_dropout:
            inputs = with_dropped_words(inputs, tokens, self.embedding.num_embeddings, self.word_dropout)
        plain, after = self.lstm(self.embedding_dropout(inputs), state)
        return plain, self.output_dropout(plain), after

    def _narrow(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden if self.narrowed is None else self.narrowed(hidden)

    def _penalties(self, plain: torch.Tensor, dropped: torch.Tensor) -> Iterator[torch.Tensor]:
        if self.activation_penalty:
            yield self.activation_penalty * dropped.float().square().mean()
        if self.change_penalty and len(plain) > 1:
            yield self.change_penalty * plain.float().diff(dim=0).square().mean()
