"""Both sides compute the same results from the same values."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from gatewise.benchmarks.cases import GRU, LSTM, LSTM_TINY, LSTMCase
from gatewise.benchmarks.lstm import side as side_module
from gatewise.benchmarks.lstm.call import draw
from gatewise.benchmarks.lstm.side import gatewise_side, rival_side
from tests.pairwise import each_value

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("training", "case", "cell"),
    each_value([*itertools.product([True, False], LSTM_TINY, [LSTM, GRU])]),
    ids=lambda own: getattr(own, "name", str(own)),
)
def test_both_sides_agree_in_float64(case: LSTMCase, training: bool, cell: str) -> None:
    call = draw(case, CPU, cell=cell)
    ours = gatewise_side(call, torch.float64, "eager").evidence(training)
    theirs = rival_side(call, torch.float64).evidence(training)
    assert list(ours) == list(theirs)
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-10, atol=1e-10, msg=name)


def test_evidence_names_every_output_and_gradient() -> None:
    side = rival_side(draw(LSTM_TINY[1], CPU), torch.float32)
    assert list(side.evidence(training=False)) == ["y", "h_n", "c_n"]
    found = side.evidence(training=True)
    names = {f"d{name}" for name, _ in side.module.named_parameters()}
    assert set(found) == {"y", "h_n", "c_n", "dx", "dh0", "dc0"} | names
    assert len(names) == 16


def test_a_gru_has_no_cell_state() -> None:
    call = draw(LSTM_TINY[1], CPU, cell=GRU)
    assert (call.gates, call.c0, call.dc) == (3, None, None)
    for side in (rival_side(call, torch.float32), gatewise_side(call, torch.float32, "auto")):
        assert list(side.evidence(training=False)) == ["y", "h_n"]
        found = side.evidence(training=True)
        assert set(found) == {"y", "h_n", "dx", "dh0"} | {f"d{name}" for name, _ in side.module.named_parameters()}
        assert type(side.module).__name__ == "GRU"
    assert draw(LSTM_TINY[1], CPU).gates == 4


def test_a_step_makes_every_gradient_anew() -> None:
    side = gatewise_side(draw(LSTM_TINY[0], CPU), torch.float32, "eager")
    side.prepare(training=True)
    side.train()
    first = [leaf.grad.clone() for leaf in side.leaves]
    side.train()
    assert all(torch.equal(leaf.grad, before) for leaf, before in zip(side.leaves, first, strict=True))
    side.forget()
    assert all(leaf.grad is None for leaf in side.leaves)


def test_a_forgotten_gradient_is_not_a_number() -> None:
    side = rival_side(draw(LSTM_TINY[0], CPU), torch.float32)
    side.module.bias_hh_l0.requires_grad_(False)
    assert side.evidence(training=True)["dbias_hh_l0"].isnan().all()


def test_on_a_cpu_the_rival_packs_a_ragged_batch_in_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    call, packed = draw(LSTM_TINY[2], CPU), []
    pack = nn.utils.rnn.pack_padded_sequence
    monkeypatch.setattr(side_module, "pack_padded_sequence", lambda *args, **kw: packed.append(1) or pack(*args, **kw))
    ours, theirs = gatewise_side(call, torch.float32, "auto"), rival_side(call, torch.float32)
    for side in (ours, theirs):
        assert side.x.shape == (5, 4, 8)
        side.prepare(True)
        side.train()
        side.train()
    assert len(packed) == 2
    found, expected = ours.evidence(True), theirs.evidence(True)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_on_a_gpu_a_ragged_batch_is_packed_for_the_rival_only() -> None:
    call = draw(LSTM_TINY[2], torch.device("cuda"))
    assert gatewise_side(call, torch.float32, "auto").x.shape == (5, 4, 8)
    assert rival_side(call, torch.float32).x.shape == (call.tokens, 8)


def test_owned_bytes() -> None:
    call = draw(LSTM_TINY[0], CPU)  # T 6, B 3, I and H 8
    side = rival_side(call, torch.float32)
    states, tokens, weights = 3 * 8, 6 * 3 * 8, 4 * 8 * (8 + 8 + 2)
    assert side.owned_bytes(training=False) == 4 * (tokens + 2 * states)
    assert side.owned_bytes(training=True) == 4 * (2 * tokens + 4 * states + weights)


def test_the_sides_share_no_memory() -> None:
    call = draw(LSTM_TINY[0], CPU)
    ours, theirs = gatewise_side(call, torch.float16, "auto"), rival_side(call, torch.float16)
    pointers = [tensor.data_ptr() for side in (ours, theirs) for tensor in (*side.leaves, *side.given)]
    assert len(set(pointers)) == len(pointers)
