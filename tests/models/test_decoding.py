"""Sampling of tokens: the effect of each option, and the carried state."""

from __future__ import annotations

import itertools

import pytest
import torch

from gatewise.contract.errors import ArgumentError
from gatewise.models import LanguageModel, generate, restrict

LOGITS = torch.tensor([0.5, 0.1, 0.25, 0.15]).log()


def drawn(length=40, prompt=(1, 2, 3), seed=0, **options):
    torch.manual_seed(0)
    model = LanguageModel(31, 12, 12)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(12)
    generator = torch.Generator().manual_seed(seed)
    tokens = generate(model, torch.tensor(prompt, dtype=torch.int64), generator=generator, **options)
    return list(itertools.islice(tokens, length)), model


def kept(logits):
    return torch.isfinite(logits).nonzero().flatten().tolist()


@pytest.mark.parametrize(
    ("k", "expected"), [(1, [0]), (2, [0, 2]), (3, [0, 2, 3]), (4, [0, 1, 2, 3]), (9, [0, 1, 2, 3])]
)
def test_top_k_keeps_the_likeliest(k, expected):
    assert kept(restrict(LOGITS, top_k=k)) == expected


@pytest.mark.parametrize(
    ("p", "expected"), [(0.01, [0]), (0.49, [0]), (0.51, [0, 2]), (0.8, [0, 2, 3]), (1.0, [0, 1, 2, 3])]
)
def test_top_p_keeps_the_fewest_that_hold_p(p, expected):
    assert kept(restrict(LOGITS, top_p=p)) == expected


def test_top_p_applies_to_what_top_k_left():
    assert kept(restrict(LOGITS, top_k=2, top_p=0.66)) == [0]
    assert kept(restrict(LOGITS, top_k=2, top_p=0.67)) == [0, 2]


def test_what_is_kept_is_unchanged():
    assert torch.equal(restrict(LOGITS, top_k=2)[[0, 2]], LOGITS[[0, 2]])


def test_temperature_zero_is_the_likeliest_of_each_step():
    tokens, model = drawn(length=6, temperature=0)
    text = [1, 2, 3]
    for token in tokens:
        logits, _ = model(torch.tensor(text).view(-1, 1))  # the whole text again, without a carried state
        assert token == logits[-1, 0].argmax().item()
        text.append(token)


def test_the_same_seed_draws_the_same():
    assert drawn(seed=1)[0] == drawn(seed=1)[0]
    assert drawn(seed=1)[0] != drawn(seed=2)[0]


@pytest.mark.parametrize("options", [{"temperature": 0.3}, {"temperature": 3.0}, {"top_k": 2}, {"top_p": 0.3}])
def test_each_option_changes_what_is_drawn(options):
    assert drawn(**options)[0] != drawn()[0]


def test_forbidden_tokens_do_not_come():
    plain = drawn()[0]
    assert plain[0] in plain
    assert plain[0] not in drawn(forbidden=[plain[0]])[0]


def test_the_prompt_and_the_state_matter():
    plain = drawn()[0]
    assert drawn(prompt=(4, 5))[0] != plain
    state = tuple(torch.randn(2, 1, 12, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert drawn(state=state)[0] != plain


def test_the_mode_of_the_model_comes_back():
    _, model = drawn()
    model.train()
    tokens = generate(model, torch.tensor([1]))
    next(tokens)
    tokens.close()
    assert model.training


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": ()}, "`prompt` must be at least one token"),
        ({"temperature": -1.0}, "`temperature` must be 0 or more, got -1.0"),
        ({"top_k": 0}, "`top_k` must be a positive integer, got 0"),
        ({"temperature": "hot"}, "`temperature` must be 0 or more, got 'hot'"),
        ({"top_k": 2.5}, "`top_k` must be a positive integer, got 2.5"),
        ({"prompt": ((1, 2), (3, 4))}, r"`prompt` must be a tensor of tokens, int64 \[N\], got torch.int64 \[2, 2\]"),
        ({"forbidden": (31,)}, "`forbidden` must be tokens from 0 to 30, got 31"),
        ({"forbidden": (-1,)}, "`forbidden` must be tokens from 0 to 30, got -1"),
        ({"forbidden": range(31)}, "`forbidden` must be some tokens, got all 31"),
        ({"top_p": 0.0}, r"`top_p` must be in \(0, 1\], got 0.0"),
        ({"top_p": 1.5}, r"`top_p` must be in \(0, 1\], got 1.5"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ArgumentError, match=message):
        drawn(**options)


def test_a_temperature_that_is_infinite_in_float32_draws_every_token_that_is_allowed():
    tokens, _ = drawn(temperature=1e300, forbidden=[2], length=100)
    assert 2 not in tokens
    assert len(set(tokens)) > 5


@pytest.mark.parametrize("temperature", [1e-40, 1e-300])
def test_a_temperature_that_is_zero_in_float32_takes_the_likeliest_token(temperature):
    assert drawn(temperature=temperature)[0] == drawn(temperature=0)[0]
