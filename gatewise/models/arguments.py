"""Checks of the arguments of models: their sizes, tokens and targets.

Tokens are checked only after PyTorch has refused them, as it does on a CPU. On a GPU, reading their values would wait
for all work before them.
"""

from __future__ import annotations

import numbers
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from gatewise.contract.errors import ArgumentError, DtypeError, ShapeError, sentence
from gatewise.models.lookup import looked_up
from gatewise.nn.arguments import checked_size

TOKEN_ERRORS = (IndexError, TypeError, ValueError, RuntimeError)
"""The errors by which PyTorch refuses tokens and targets."""


def check_sizes(sizes: Mapping[str, object]) -> None:
    """Check that sizes, by their names, are positive integers.

    Raises:
        ArgumentError: One of them is not.
    """
    for name, size in sizes.items():
        checked_size(name, size)


def check_forbidden(forbidden: object) -> None:
    """Check that the tokens that may not be generated are several integers.

    Raises:
        ArgumentError: They are something else.
    """
    if isinstance(forbidden, (str, bytes)) or not isinstance(forbidden, Collection):
        raise ArgumentError(sentence("forbidden", "a sequence of tokens", repr(forbidden)))
    for token in forbidden:
        if isinstance(token, bool) or not isinstance(token, numbers.Integral):
            raise ArgumentError(sentence("forbidden", "a sequence of tokens, which are integers", repr(token)))


def embedded(table: nn.Embedding, name: str, tokens: Tensor) -> Tensor:
    """Return the embeddings [..., E] of tokens [...].

    Args:
        table: The embeddings.
        name: The name of the tokens, for the error.
        tokens: The tokens, int64.

    Raises:
        ArgumentError: They are not a tensor, or a token is not in the vocabulary; on a CPU only.
        DtypeError: They are no integers.
    """
    try:
        return looked_up(table, tokens)
    except TOKEN_ERRORS as error:
        check_tokens(name, tokens, table.num_embeddings, error)
        raise


def check_tokens(name: str, tokens: object, count: int, error: Exception | None = None) -> None:
    """Check that tokens, or classes, are numbers of a vocabulary; on a GPU, that they are integers.

    Args:
        name: The name of the argument, for the error.
        tokens: The tokens.
        count: The number of tokens in the vocabulary.
        error: The error of PyTorch that is explained, if there was one.

    Raises:
        ArgumentError: They are not a tensor, or one is out of the range.
        DtypeError: They are no integers.
    """
    if not isinstance(tokens, Tensor):
        advice = "torch.as_tensor makes one of an array or a list."
        raise ArgumentError(sentence(name, "a tensor of integers", type(tokens).__name__, advice)) from error
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise DtypeError(sentence(name, "integers", tokens.dtype, "Convert them with .long().")) from error
    if not tokens.is_cpu:
        return
    wrong = (tokens < 0) | (tokens >= count)
    if wrong.any():
        place = wrong.nonzero()[0].tolist()
        expectation = f"numbers from 0 to {count - 1:,}"
        raise ArgumentError(sentence(name, expectation, f"{tokens[tuple(place)].item()} at {place}")) from error


def check_targets(targets: object, shape: Sequence[int], count: int, error: Exception) -> None:
    """Explain by what targets PyTorch was not able to compute a loss.

    Args:
        targets: The targets.
        shape: The shape that they must have.
        count: The number of tokens in the vocabulary.
        error: The error of PyTorch.

    Raises:
        ArgumentError: They are not a tensor, or one is out of the range.
        DtypeError: They are not int64.
        ShapeError: They are of another shape.
    """
    check_tokens("targets", targets, count, error)
    assert isinstance(targets, Tensor)
    if targets.dtype != torch.int64:
        raise DtypeError(sentence("targets", "int64", targets.dtype, "Convert them with .long().")) from error
    if tuple(targets.shape) != tuple(shape):
        raise ShapeError(sentence("targets", f"of shape {list(shape)}", list(targets.shape))) from error


def check_pairs(inputs: Tensor, targets: object) -> None:
    """Check that there is a target for each token of the input; the order of both is the same only if the shapes are.

    Args:
        inputs: The tokens that a model has read.
        targets: The targets.

    Raises:
        ArgumentError: The targets are not a tensor.
        ShapeError: They are of another shape, or it is not [T, B].
    """
    if inputs.dim() != 2:
        raise ShapeError(sentence("inputs", "a tensor of tokens [T, B]", list(inputs.shape)))
    if not isinstance(targets, Tensor):
        check_tokens("targets", targets, 0)
    elif targets.shape != inputs.shape:
        raise ShapeError(sentence("targets", f"of shape {list(inputs.shape)}", list(targets.shape)))


def as_int64(tokens: Tensor) -> Tensor:
    """Return integers of another width as int64, by which PyTorch indexes; anything else as it is, to be refused."""
    if (
        not isinstance(tokens, Tensor)
        or tokens.is_floating_point()
        or tokens.is_complex()
        or tokens.dtype == torch.bool
    ):
        return tokens
    return tokens.long()


def check_lengths_of(name: str, lengths: object) -> None:
    """Check that lengths which a model computes with are a tensor.

    Raises:
        ArgumentError: They are something else.
    """
    if not isinstance(lengths, Tensor):
        advice = "torch.as_tensor makes one of a list."
        raise ArgumentError(sentence(name, "a tensor of integers", type(lengths).__name__, advice))
