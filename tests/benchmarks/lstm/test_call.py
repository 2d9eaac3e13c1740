"""The values of a call."""

from __future__ import annotations

import pytest
import torch

from gatewise.benchmarks.cases import LSTM_TINY, LSTMCase
from gatewise.benchmarks.lstm.call import draw

CPU = torch.device("cpu")
RAGGED = LSTMCase("ragged", 40, 64, 3, ragged=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_numbers_are_the_same_in_every_precision(dtype: torch.dtype) -> None:
    call = draw(LSTMCase("wide", 50, 31, 200), CPU)
    for tensor in (call.x, call.h0, call.c0, call.dy, call.dh, call.dc, *call.weights.values()):
        assert torch.equal(tensor.to(dtype).double(), tensor.double())


def test_numbers_have_mean_zero_and_the_usual_spread() -> None:
    call = draw(LSTMCase("wide", 50, 31, 200), CPU)
    assert abs(call.x.double().mean()) < 0.01
    assert call.x.double().std() == pytest.approx(1, rel=0.01)
    bound = 200**-0.5
    weight = call.weights["weight_hh_l0"].double()
    assert 0.99 * bound < weight.abs().max() <= 1.01 * bound
    assert weight.std() == pytest.approx(bound / 3**0.5, rel=0.02)


def test_a_seed_gives_the_same_numbers_and_another_does_not() -> None:
    case = LSTM_TINY[2]
    first, again, other = draw(case, CPU), draw(case, CPU), draw(case, CPU, seed=2)
    assert torch.equal(first.x, again.x)
    assert torch.equal(first.lengths, again.lengths)
    assert not torch.equal(first.x, other.x)


def test_lengths_are_mixed_and_the_longest_is_the_whole_time() -> None:
    lengths = draw(RAGGED, CPU).lengths
    assert lengths.max() == RAGGED.time
    assert RAGGED.time // 4 <= lengths.min() < RAGGED.time / 2
    assert not torch.equal(lengths, lengths.sort(descending=True).values)


def test_tokens() -> None:
    assert draw(LSTMCase("full", 40, 64, 3), CPU).tokens == 40 * 64
    call = draw(RAGGED, CPU)
    assert call.tokens == call.lengths.sum()
    assert 0.5 < call.tokens / (40 * 64) < 0.75
