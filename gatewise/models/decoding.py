"""Sampling text from a model, one token at a time."""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from gatewise.contract.errors import ArgumentError, NotFinite, sentence
from gatewise.contract.ranges import AMOUNT, SHARE
from gatewise.models.arguments import check_forbidden


def generate(
    model: nn.Module,
    prompt: torch.Tensor,
    *,
    state: Any = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    forbidden: Sequence[int] = (),
    generator: torch.Generator | None = None,
) -> Iterator[int]:
    """Sample tokens from a model without end; each token is the next input.

    The state carries over, so that the cost of a token does not grow with the length of the text. Nothing is computed
    before the first token is requested; use `itertools.islice` to limit the number of tokens.

    Args:
        model: A model that is called as ``logits, state = model(tokens, state)`` with tokens [T, 1] and logits
            [T, 1, V]; it is run in evaluation mode.
        prompt: The tokens that the text begins with, int64 [N] with N >= 1, on any device.
        state: The model's state before the prompt; None means zeros.
        temperature: The number by which logits are divided: values below 1 make likely tokens likelier, values above 1
            less likely, and 0 always takes the likeliest token.
        top_k: The number of likeliest tokens to sample from; None samples from all.
        top_p: The minimum total probability of the likeliest tokens to sample from, of which the fewest are taken; None
            samples from all.
        forbidden: Tokens that are never sampled.
        generator: The random number generator on the CPU; None uses PyTorch's default.

    Yields:
        The sampled token numbers.

    Raises:
        ArgumentError: The prompt is empty or no tensor of tokens, an option is out of its range, or all tokens are
            forbidden.
        NotFinite: The model's logits are not finite, as those of a model whose training diverged.
    """
    if not isinstance(prompt, torch.Tensor) or prompt.dim() > 1 or prompt.dtype != torch.int64:
        got = f"{prompt.dtype} {list(prompt.shape)}" if isinstance(prompt, torch.Tensor) else type(prompt).__name__
        raise ArgumentError(sentence("prompt", "a tensor of tokens, int64 [N]", got))
    if prompt.numel() == 0:
        raise ArgumentError(sentence("prompt", "at least one token", "none", "Give a text to begin with."))
    check_sampling(temperature, top_k, top_p)
    check_forbidden(forbidden)
    device = next(model.parameters()).device
    tokens = prompt.to(device).view(-1, 1)
    was_training = model.training
    model.eval()
    try:
        while True:
            with torch.inference_mode():
                logits, state = model(tokens, state)
                logits = logits[-1, 0].float().cpu()
                _forbid(logits, forbidden)
                token = _draw(logits, temperature, top_k, top_p, generator)
                tokens = torch.tensor([[token]], device=device)
            yield token
    finally:
        model.train(was_training)


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Raise if a sampling option is out of its range."""
    AMOUNT.check("temperature", temperature)
    if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, numbers.Integral) or top_k < 1):
        raise ArgumentError(
            sentence("top_k", "a positive integer", repr(top_k), "Leave it out to sample from all tokens.")
        )
    if top_p is not None:
        SHARE.check("top_p", top_p)


def restrict(logits: torch.Tensor, top_k: int | None = None, top_p: float | None = None) -> torch.Tensor:
    """Set the logits of all but the likeliest tokens to minus infinity.

    With both options, `top_k` applies first and `top_p` to the remaining tokens. At least one token always remains.

    Args:
        logits: The logits [V].
        top_k: The number of tokens that remain.
        top_p: The minimum total probability of the remaining tokens.

    Returns:
        New logits [V].

    References:
        Holtzman and others: The Curious Case of Neural Text Degeneration, 2020 (top-p).
    """
    order = logits.argsort(descending=True, stable=True)
    kept = torch.ones_like(order, dtype=torch.bool)
    if top_k is not None:
        kept[top_k:] = False
    if top_p is not None:
        probability = logits[order].masked_fill(~kept, -torch.inf).softmax(-1)
        kept &= probability.cumsum(-1) - probability < top_p
    return logits.index_fill(0, order[~kept], -torch.inf)


def _forbid(logits: torch.Tensor, forbidden: Sequence[int]) -> None:
    """Set the logits of forbidden tokens to minus infinity."""
    unknown = [token for token in forbidden if not 0 <= token < len(logits)]
    if unknown:
        raise ArgumentError(sentence("forbidden", f"tokens from 0 to {len(logits) - 1}", unknown[0]))
    if len({*forbidden}) == len(logits):
        raise ArgumentError(sentence("forbidden", "some tokens", f"all {len(logits)}", "Allow one of them."))
    logits[list(forbidden)] = -torch.inf


def _draw(
    logits: torch.Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator | None,
) -> int:
    largest = logits.max()
    if not largest.isfinite():  # NaN too, which max passes on
        raise NotFinite(
            f"the model's logits of the next token must be finite, got {largest.item()}. Its weights have diverged in "
            "training, or its kernel is at fault: try another `kernel`, or train it again with a lower `learning_rate`."
        )
    if temperature == 0:
        return int(logits.argmax())
    # The largest logit is subtracted before the division, which might overflow. Its own quotient would be NaN for a
    # temperature that is zero in float32, and that of a forbidden token for a temperature that is infinite there.
    scaled = ((logits - largest) / temperature).masked_fill(logits == largest, 0.0)
    scaled = scaled.masked_fill(logits == -torch.inf, -torch.inf)
    probability = restrict(scaled, top_k, top_p).softmax(-1)
    return int(torch.multinomial(probability, 1, generator=generator))
