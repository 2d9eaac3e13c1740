"""A recurrent language model: embedding, stacked LSTM, and softmax over the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gatewise.contract.errors import ArgumentError, sentence
from gatewise.models.softmax import token_losses
from gatewise.nn import LSTM

LanguageState = tuple[torch.Tensor, torch.Tensor]
"""The hidden and the cell state, each [L, B, H]."""


class LanguageModel(nn.Module):
    r"""Predicts each token from all tokens before it.

    .. code-block:: text

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
        tied: Whether W is the embedding matrix E itself.
        kernel: The kernel of the LSTM; ``"auto"`` lets gatewise choose.
        device: The device of the parameters.

    Raises:
        ArgumentError: A size is not positive, or a probability is outside [0, 1).

    References:
        Zaremba, Sutskever, Vinyals: Recurrent Neural Network Regularization, 2014 (the positions of dropout).
        Press, Wolf: Using the Output Embedding to Improve Language Models, 2017 (the tied softmax).
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
        for name, size in sizes.items():
            if size < 1:
                raise ArgumentError(sentence(name, "a positive integer", size))
        rates = {"dropout": dropout, "embedding_dropout": embedding_dropout, "layer_dropout": layer_dropout}
        for name, rate in rates.items():
            if not 0 <= rate < 1:
                raise ArgumentError(sentence(name, "a probability in [0, 1)", rate))
        self.embedding = nn.Embedding(vocabulary_size, embedding_size, device=device)
        self.embedding_dropout = nn.Dropout(embedding_dropout)
        between = layer_dropout if num_layers > 1 else 0.0
        self.lstm = LSTM(embedding_size, hidden_size, num_layers, dropout=between, kernel=kernel, device=device)
        self.output_dropout = nn.Dropout(dropout)
        narrowed = tied and embedding_size != hidden_size
        self.narrowed = nn.Linear(hidden_size, embedding_size, bias=False, device=device) if narrowed else None
        self.output = nn.Linear(embedding_size if narrowed else hidden_size, vocabulary_size, device=device)
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
        hidden, state = self._hidden(tokens, state)
        return self.output(hidden), state

    def loss(self, batch: Any, state: LanguageState | None = None) -> tuple[torch.Tensor, LanguageState]:
        """Return the mean negative log-likelihood of `batch.targets` after `batch.inputs`, and the state.

        Args:
            batch: An object with `inputs` and `targets`, both int64 [T, B].
            state: The state that the call for the previous batch returned; None means zeros.

        Returns:
            The loss in nats per token, a scalar; and the state after the last step, still attached to the graph.
        """
        hidden, state = self._hidden(batch.inputs, state)
        rows, targets = hidden.flatten(0, 1), batch.targets.flatten()
        return token_losses(rows, self.output.weight, self.output.bias, targets).mean(), state

    def _hidden(self, tokens: torch.Tensor, state: LanguageState | None) -> tuple[torch.Tensor, LanguageState]:
        inputs = self.embedding_dropout(self.embedding(tokens))
        hidden, after = self.lstm(inputs, state)
        hidden = self.output_dropout(hidden)
        return hidden if self.narrowed is None else self.narrowed(hidden), after
