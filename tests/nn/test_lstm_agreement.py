"""gatewise.LSTM against torch.nn.LSTM on drawn configurations: outputs, final states, every gradient."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from agreement import assert_same_results, results
from hypothesis import given, settings
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence

from gatewise.nn import LSTM

SIZES = st.sampled_from([1, 2, 3, 5, 8, 31])
DTYPES = st.sampled_from([torch.float64, torch.float32])


@st.composite
def options(draw, **fixed):
    hidden = draw(st.sampled_from([1, 2, 3, 8, 31]))
    drawn = {
        "input_size": draw(SIZES),
        "hidden_size": hidden,
        "num_layers": draw(st.integers(1, 3)),
        "bias": draw(st.booleans()),
        "batch_first": draw(st.booleans()),
        "bidirectional": draw(st.booleans()),
        "proj_size": draw(st.sampled_from([0, 0, 1, hidden // 2])) if hidden > 1 else 0,
        "dtype": draw(DTYPES),
    }
    return drawn | fixed


def pair(choices: dict, seed: int) -> tuple[torch.nn.LSTM, LSTM]:
    torch.manual_seed(seed)
    theirs = torch.nn.LSTM(**choices)
    ours = LSTM(**choices)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def states(choices: dict, batch: int | None, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    rows = choices["num_layers"] * (1 + choices["bidirectional"])
    middle = () if batch is None else (batch,)
    hidden = choices["proj_size"] or choices["hidden_size"]
    return (
        torch.randn(rows, *middle, hidden, dtype=dtype),
        torch.randn(rows, *middle, choices["hidden_size"], dtype=dtype),
    )


def compare(theirs: torch.nn.LSTM, ours: LSTM, x, hx) -> None:
    assert_same_results(results(ours, x, hx), theirs, x, hx)


class Packing(torch.nn.Module):
    """Run torch.nn.LSTM on sequences of different length, as users do."""

    def __init__(self, layer: torch.nn.LSTM, lengths: list[int], time: int):
        super().__init__()
        self.layer, self.lengths, self.time = layer, torch.tensor(lengths), time

    def named_parameters(self, *args, **kwargs):
        return self.layer.named_parameters()

    def forward(self, x, hx):
        first = self.layer.batch_first
        packed = pack_padded_sequence(x, self.lengths, batch_first=first, enforce_sorted=False)
        y, state = self.layer(packed, hx)
        return pad_packed_sequence(y, batch_first=first, total_length=self.time)[0], state


def with_more_examples(test, calls, examples: int):
    """Return a test with more of the calls that another test draws, for `make exhaustive-test`."""
    drawn = settings(max_examples=examples, deadline=None, derandomize=True)(calls(test.hypothesis.inner_test))
    return pytest.mark.exhaustive(drawn)


dense_calls = given(choices=options(), time=SIZES, batch=SIZES, with_state=st.booleans(), seed=st.integers(0, 2**31))


@settings(max_examples=15, deadline=None, derandomize=True)
@dense_calls
def test_equals_torch(choices, time, batch, with_state, seed):
    theirs, ours = pair(choices, seed)
    shape = (batch, time) if choices["batch_first"] else (time, batch)
    x = torch.randn(*shape, choices["input_size"], dtype=choices["dtype"])
    compare(theirs, ours, x, states(choices, batch, choices["dtype"]) if with_state else None)


test_equals_torch_often = with_more_examples(test_equals_torch, dense_calls, 120)


single_calls = given(choices=options(), time=SIZES, with_state=st.booleans(), seed=st.integers(0, 2**31))


@settings(max_examples=10, deadline=None, derandomize=True)
@single_calls
def test_one_sequence_equals_torch(choices, time, with_state, seed):
    theirs, ours = pair(choices, seed)
    x = torch.randn(time, choices["input_size"], dtype=choices["dtype"])
    compare(theirs, ours, x, states(choices, None, choices["dtype"]) if with_state else None)


test_one_sequence_equals_torch_often = with_more_examples(test_one_sequence_equals_torch, single_calls, 40)


packed_calls = given(
    choices=options(),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    with_state=st.booleans(),
    presorted=st.booleans(),
    seed=st.integers(0, 2**31),
)


@settings(max_examples=8, deadline=None, derandomize=True)
@packed_calls
def test_packed_sequence_equals_torch(choices, lengths, with_state, presorted, seed):
    theirs, ours = pair(choices, seed)
    sequences = [torch.randn(length, choices["input_size"], dtype=choices["dtype"]) for length in lengths]
    if presorted:
        sequences.sort(key=len, reverse=True)
    packed = pack_sequence(sequences, enforce_sorted=presorted)
    compare(theirs, ours, packed, states(choices, len(lengths), choices["dtype"]) if with_state else None)


test_packed_sequence_equals_torch_often = with_more_examples(test_packed_sequence_equals_torch, packed_calls, 60)


calls_with_lengths = given(
    choices=options(),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    with_state=st.booleans(),
    as_tensor=st.booleans(),
    padding=st.integers(0, 2),
    seed=st.integers(0, 2**31),
)


@settings(max_examples=10, deadline=None, derandomize=True)
@calls_with_lengths
def test_lengths_equal_packed_sequence(choices, lengths, with_state, as_tensor, padding, seed):
    theirs, ours = pair(choices, seed)
    time, batch, dtype = max(lengths) + padding, len(lengths), choices["dtype"]
    x = torch.randn(time, batch, choices["input_size"], dtype=dtype)
    if choices["batch_first"]:
        x = x.transpose(0, 1).contiguous()
    hx = states(choices, batch, dtype) if with_state else None

    given_lengths = torch.tensor(lengths, dtype=torch.int32) if as_tensor else lengths
    assert_same_results(results(ours, x, hx, lengths=given_lengths), Packing(theirs, lengths, time), x, hx)


test_lengths_equal_packed_sequence_often = with_more_examples(
    test_lengths_equal_packed_sequence, calls_with_lengths, 80
)


def test_length_zero_hands_the_state_through():
    torch.manual_seed(0)
    layer = LSTM(3, 4, num_layers=2, bidirectional=True, dtype=torch.float64)
    h0, c0 = torch.randn(4, 2, 4, dtype=torch.float64), torch.randn(4, 2, 4, dtype=torch.float64)
    y, (h_n, c_n) = layer(torch.randn(5, 2, 3, dtype=torch.float64), (h0, c0), lengths=[0, 5])
    assert y[:, 0].eq(0).all()
    assert torch.equal(h_n[:, 0], h0[:, 0])
    assert torch.equal(c_n[:, 0], c0[:, 0])
    assert not torch.equal(h_n[:, 1], h0[:, 1])


def test_what_follows_the_end_is_not_read():
    torch.manual_seed(0)
    layer = LSTM(3, 4, num_layers=2, bidirectional=True)
    x = torch.randn(6, 3, 3)
    lengths = torch.tensor([2, 6, 4])
    expected = layer(x, lengths=lengths)
    for row, length in enumerate(lengths):
        x[length:, row] = 1e6
    torch.testing.assert_close(layer(x, lengths=lengths), expected, rtol=0, atol=0)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_dropout_draws_the_numbers_of_torch(layout):
    theirs, ours = pair({"input_size": 5, "hidden_size": 7, "num_layers": 3, "dropout": 0.4, "bidirectional": True}, 3)
    x = torch.randn(6, 4, 5)
    if layout == "packed":
        x = pack_padded_sequence(x, torch.tensor([6, 4, 4, 1]))
    torch.manual_seed(11)
    expected = results(theirs, x, None)
    torch.manual_seed(11)
    found = results(ours, x, None)
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], msg=name)


def test_dropout_changes_results_in_training_only():
    torch.manual_seed(0)
    layer = LSTM(5, 7, num_layers=2, dropout=0.5)
    x = torch.randn(6, 4, 5)
    plain = LSTM(5, 7, num_layers=2)
    plain.load_state_dict(layer.state_dict())
    assert not torch.equal(layer(x)[0], plain(x)[0])
    torch.testing.assert_close(layer.eval()(x), plain(x), rtol=0, atol=0)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("with_state", [True, False])
def test_empty_batch_gives_what_torch_gives(training, with_state):
    choices = {"input_size": 3, "hidden_size": 4, "num_layers": 2, "bidirectional": True, "proj_size": 0}
    theirs, ours = pair(choices, 0)
    x = torch.randn(3, 0, 3)
    hx = states(choices, 0, torch.float32) if with_state else None
    with torch.set_grad_enabled(training):
        torch.testing.assert_close(ours(x, hx), theirs(x, hx))


def test_no_time_step_gives_an_empty_output_and_the_state():
    # torch.nn.LSTM refuses this on the CPU; a loop over zero steps is well defined.
    choices = {"input_size": 3, "hidden_size": 4, "num_layers": 2, "bidirectional": True, "proj_size": 0}
    _, ours = pair(choices, 0)
    hx = states(choices, 2, torch.float32)
    y, state = ours(torch.randn(0, 2, 3), hx)
    assert y.shape == (0, 2, 8)
    torch.testing.assert_close(state, hx)


def test_batch_first_copies_nothing_and_matches_strides():
    theirs, ours = pair({"input_size": 3, "hidden_size": 4, "batch_first": True}, 0)
    x = torch.randn(2, 5, 3)
    assert ours(x)[0].stride() == theirs(x)[0].stride()


def test_noncontiguous_input_equals_contiguous():
    torch.manual_seed(0)
    layer = LSTM(3, 4, num_layers=2)
    wide = torch.randn(5, 2, 6)
    torch.testing.assert_close(layer(wide[..., ::2]), layer(wide[..., ::2].contiguous()))
