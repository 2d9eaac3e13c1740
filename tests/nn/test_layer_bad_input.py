"""The layers' errors for arguments that do not fit; PyTorch refuses the same calls."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import gatewise
from gatewise.cells import MGU
from gatewise.contract.errors import ArgumentError, DeviceError, DtypeError, KernelRefused, ShapeError
from gatewise.nn import LSTM, Attention, GRUCell, LSTMCell, RNNCell
from tests.pairwise import each_value


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_size": 0}, "`hidden_size` must be a positive integer, got 0."),
        ({"hidden_size": 4.0}, "`hidden_size` must be a positive integer, got 4.0."),
        ({"input_size": 0}, "`input_size` must be a positive integer, got 0."),
        ({"input_size": "10"}, "`input_size` must be a positive integer, got '10'."),
        ({"num_layers": 0}, "`num_layers` must be a positive integer, got 0."),
        ({"bias": 1}, "`bias` must be True or False, got 1."),
        ({"batch_first": "False"}, "`batch_first` must be True or False, got 'False'."),
        ({"dropout": 1.5}, "`dropout` must be a number from 0 to 1, got 1.5."),
        ({"dropout": -0.1}, "`dropout` must be a number from 0 to 1, got -0.1."),
        ({"dropout": True}, "`dropout` must be a number from 0 to 1, got True."),
        ({"dropout": "0.5"}, "`dropout` must be a number from 0 to 1, got '0.5'."),
        ({"proj_size": 4}, "`proj_size` must be an integer from 0 to hidden_size - 1 = 3, got 4."),
        ({"proj_size": -1}, "`proj_size` must be an integer from 0 to hidden_size - 1 = 3, got -1."),
    ],
)
def test_constructor_refuses_what_torch_refuses(options, message):
    options = {"input_size": 3, "hidden_size": 4} | options
    with pytest.raises(ArgumentError) as raised:
        LSTM(**options)
    assert str(raised.value).startswith(message)
    if torch.__version__ < "2.11" and message.split("`")[1] in ("bias", "batch_first", "input_size"):
        return  # older versions of PyTorch take these
    with pytest.raises((ValueError, TypeError)) as theirs:
        nn.LSTM(**options)
    assert isinstance(raised.value, theirs.type)


def test_constructor_refuses_a_kernel_that_is_no_name():
    with pytest.raises(ArgumentError, match="`kernel` must be 'auto' or the name of a kernel, got None"):
        LSTM(3, 4, kernel=None)


@pytest.mark.parametrize("kernel", ["foo", "EAGER", " eager", ""])
def test_constructor_refuses_a_kernel_that_is_unknown(kernel):
    with pytest.raises(KernelRefused, match=f"`kernel` must be one of 'auto', .*'aten', 'eager', got {kernel!r}"):
        LSTM(3, 4, kernel=kernel)
    with pytest.raises(KernelRefused, match=f"`kernel` must be one of 'auto', 'fused', .*, got {kernel!r}"):
        Attention(3, 4, kernel=kernel)


def test_constructor_takes_what_torch_takes_for_numbers_and_flags():
    layer = LSTM(3, 4, 2, bidirectional=1, dropout=np.float32(0.5))
    assert layer.bidirectional is True
    assert layer.dropout == 0.5
    with pytest.raises(ArgumentError, match="`bidirectional` must be True or False, got 'False'"):
        LSTM(3, 4, bidirectional="False")


MAKERS = [
    LSTM,
    LSTMCell,
    GRUCell,
    RNNCell,
    lambda *sizes, **options: gatewise.Recurrent(MGU(), *sizes, **options),
    lambda *sizes, **options: gatewise.RecurrentCell(MGU(), *sizes, **options),
]


@pytest.mark.parametrize(
    ("value", "make"), each_value([*itertools.product([True, False], [*MAKERS, gatewise.GRU, gatewise.RNN])])
)
def test_a_flag_is_no_size(make, value):
    # PyTorch's layers take True for 1, also where a program gives a flag by its place: LSTM(3, 4, True).
    for sizes, name in (((value, 4), "input_size"), ((3, value), "hidden_size")):
        with pytest.raises(ArgumentError, match=f"`{name}` must be .*, got {value}. Give flags, such as"):
            make(*sizes)
    if make not in MAKERS or make is LSTM:
        with pytest.raises(ArgumentError, match=f"`num_layers` must be a positive integer, got {value}. Give flags"):
            make(3, 4, value)


def test_a_projection_has_a_size():
    with pytest.raises(ArgumentError, match="`proj_size` must be an integer from 0 to hidden_size - 1 = 3, got True"):
        LSTM(3, 4, proj_size=True)
    assert LSTM(3, 4, proj_size=False).proj_size == 0


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dropout", [1.5, -0.1, float("nan"), True, "0.5", None])
def test_dropout_that_is_assigned_is_checked_by_the_next_call_that_drops(dropout, training):
    layer, x = LSTM(3, 4, 2, dropout=1.0).train(training), torch.randn(5, 2, 3)
    layer(x)
    layer.dropout = dropout
    if not training:
        layer(x)
        return
    with pytest.raises(ArgumentError, match=f"`dropout` must be a number from 0 to 1, got {dropout!r}"):
        layer(x)
    layer.dropout = 0.5
    layer(x)


def test_dropout_without_a_gap_warns_as_torch_does():
    with pytest.warns(UserWarning, match="dropout") as theirs:
        nn.LSTM(3, 4, dropout=0.5)
    with pytest.warns(UserWarning, match="dropout") as ours:  # programs ignore the warning by its words
        LSTM(3, 4, dropout=0.5)
    assert str(ours[0].message).startswith(str(theirs[0].message))


@pytest.mark.parametrize(
    ("shape", "states", "message"),
    [
        ((3,), None, "`input` must be [T, B, I], or [T, I] for one sequence, got rank 1 with shape [3]."),
        ((2, 5, 2, 3), None, "`input` must be [T, B, I], or [T, I] for one sequence, got rank 4"),
        ((5, 2, 7), None, "of 3 features, got 7"),
        ((5, 7), None, "of 3 features, got 7"),
        ((5, 2, 3), ((2, 3, 4), (2, 2, 4)), "must be [2, 2, 4], which is [L*D, B, R], got [2, 3, 4]"),
        ((5, 2, 3), ((2, 2, 4), (2, 2, 5)), "must be [2, 2, 4], which is [L*D, B, H], got [2, 2, 5]"),
        ((5, 2, 3), ((2, 4), (2, 4)), "[2, 2, 4]"),
        ((5, 3), ((2, 1, 4), (2, 1, 4)), "`hx[0]` must be a state of [L*D, R] and [L*D, H]"),
        ((5, 3), ((2, 4), (2, 1, 4)), "`hx[1]` must be a state of [L*D, R] and [L*D, H]"),
    ],
)
def test_call_refuses_shapes_that_torch_refuses(shape, states, message):
    x = torch.randn(shape)
    hx = None if states is None else tuple(torch.randn(state) for state in states)
    with pytest.raises(ShapeError) as raised:
        LSTM(3, 4, num_layers=2)(x, hx)
    assert message in str(raised.value)
    with pytest.raises((ValueError, RuntimeError)) as theirs:
        nn.LSTM(3, 4, num_layers=2)(x, hx)
    assert isinstance(raised.value, theirs.type)


def test_batch_first_is_named_in_the_message():
    with pytest.raises(ShapeError, match=r"`input` must be \[B, T, I\], or"):
        LSTM(3, 4, batch_first=True)(torch.randn(3))


def test_dtypes_must_agree_outside_of_autocast():
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    with pytest.raises(DtypeError, match=r"torch\.float32 like the weights, got torch\.float64") as raised:
        LSTM(3, 4)(x)
    with pytest.raises((ValueError, RuntimeError)) as theirs:
        nn.LSTM(3, 4)(x)
    assert isinstance(raised.value, theirs.type)
    states = torch.zeros(2, 1, 2, 4, dtype=torch.float64)
    with pytest.raises(DtypeError, match=r"`hx\[0\]` must be torch.float32 like input") as raised:
        LSTM(3, 4)(x.float(), tuple(states))
    with pytest.raises(RuntimeError) as theirs:
        nn.LSTM(3, 4)(x.float(), tuple(states))
    assert isinstance(raised.value, theirs.type)
    with pytest.raises(DtypeError):
        LSTM(3, 4)(torch.ones(5, 2, 3, dtype=torch.int64))


def test_devices_must_agree():
    with pytest.raises(DeviceError, match="on meta like the weights, got one on cpu"):
        LSTM(3, 4, device="meta")(torch.randn(5, 2, 3))


@pytest.mark.parametrize(
    ("lengths", "error", "message"),
    [
        ([5, -1], ShapeError, "`lengths` must be between 0 and T = 5, got -1."),
        ([6, 5], ShapeError, "`lengths` must be between 0 and T = 5, got 6."),
        ([5], ShapeError, "`lengths` must be one integer per sequence, [2], got [1]."),
        (torch.tensor([[5, 5]]), ShapeError, "`lengths` must be one integer per sequence, [2], got [1, 2]."),
        (torch.tensor([5.0, 5.0]), DtypeError, "`lengths` must be integers, got torch.float32."),
    ],
)
@pytest.mark.parametrize("batch_first", [False, True])
def test_lengths_are_checked(lengths, error, message, batch_first):
    x = torch.randn(2, 5, 3) if batch_first else torch.randn(5, 2, 3)
    with pytest.raises(error) as raised:
        LSTM(3, 4, batch_first=batch_first)(x, lengths=lengths)
    assert message in str(raised.value)


def test_lengths_go_with_padded_batches_only():
    with pytest.raises(ArgumentError, match=r"None for one sequence \[T, I\], got \[5\]. Cut the sequence"):
        LSTM(3, 4)(torch.randn(5, 3), lengths=[5])
    with pytest.raises(ArgumentError, match="None for a PackedSequence"):
        LSTM(3, 4)(pack_sequence([torch.randn(5, 3)]), lengths=[5])


def test_packed_sequence_needs_a_state_of_its_batch():
    packed = pack_sequence([torch.randn(2, 3), torch.randn(5, 3)], enforce_sorted=False)
    for batch in (1, 3):
        state = torch.zeros(1, batch, 4)
        with pytest.raises(ShapeError, match=r"`hx\[0\]` must be a state of .* with B = 2"):
            LSTM(3, 4)(packed, (state, state))


def test_every_message_reads_as_one_sentence_form():
    with pytest.raises(gatewise.GatewiseError) as raised:
        LSTM(3, 4, proj_size=9)
    assert str(raised.value) == (
        "`proj_size` must be an integer from 0 to hidden_size - 1 = 3, got 9. 0 means no projection."
    )


@pytest.mark.parametrize(
    ("shape", "state", "message"),
    [
        ((3, 11), (3, 20), "`input` must be of 10 features, got 11 in [3, 11]."),
        ((3, 10), (3, 21), "`hx[0]` must be of shape [3, 20], got [3, 21]."),
        ((3, 10), (5, 20), "`hx[0]` must be of shape [3, 20], got [5, 20]."),
        ((3, 10), (3, 1, 1, 20), "`hx[0]` must be of shape [3, 20], got [3, 1, 1, 20]."),
        ((2, 3, 10), (3, 20), "`input` must be [B, I], or [I] without a batch, got rank 3 with shape [2, 3, 10]."),
    ],
)
def test_cell_refuses_shapes_that_torch_refuses(shape, state, message):
    x, hx = torch.randn(shape), (torch.randn(state), torch.randn(state))
    with pytest.raises(ShapeError) as raised:
        LSTMCell(10, 20)(x, hx)
    assert str(raised.value) == message
    with pytest.raises((ValueError, RuntimeError)) as theirs:
        nn.LSTMCell(10, 20)(x, hx)
    assert isinstance(raised.value, theirs.type)


def test_cell_refuses_another_dtype():
    with pytest.raises(
        DtypeError, match=r"`input` must be torch\.float32 like the parameters, got torch\.float64"
    ) as ours:
        LSTMCell(3, 4)(torch.randn(2, 3, dtype=torch.float64))
    with pytest.raises(RuntimeError) as theirs:
        nn.LSTMCell(3, 4)(torch.randn(2, 3, dtype=torch.float64))
    assert isinstance(ours.value, theirs.type)


LAYERS = [LSTM, LSTMCell]
X = torch.zeros(3, 10)
PAIR = "`hx` must be None or a pair of tensors (h_0, c_0), got "


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(
    ("input", "hx", "message"),
    [
        (X.numpy(), None, "`input` must be a tensor, got ndarray. torch.as_tensor makes one of an array or a list."),
        ([[0.0] * 10], None, "`input` must be a tensor, got list. torch.as_tensor makes one of an array or a list."),
        (X, torch.zeros(2, 20), f"{PAIR}Tensor. Give zeros for a state that is not known."),
        (X, (X, None), f"{PAIR}(Tensor, None). Give zeros for a state that is not known."),
        (X, (X, X, X), f"{PAIR}(Tensor, Tensor, Tensor). Give zeros for a state that is not known."),
        (X, (), f"{PAIR}(). Give zeros for a state that is not known."),
    ],
)
def test_what_is_no_tensor_and_no_pair_is_said_to_be_none(layer, input, hx, message):
    with pytest.raises(ArgumentError) as raised:
        layer(10, 20)(input, hx)
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("name", "value", "expectation"),
    [
        *[("hidden_size", value, "a positive integer") for value in (0, -1, 2.0)],
        *[("input_size", value, "an integer from 0 on") for value in (-1, 2.0)],
    ],
)
def test_cell_needs_sizes(name, value, expectation):
    with pytest.raises(ArgumentError, match=f"`{name}` must be {expectation}, got {value}"):
        LSTMCell(**({"input_size": 3, "hidden_size": 4} | {name: value}))


@pytest.mark.parametrize("kind", [LSTMCell, GRUCell, RNNCell], ids=lambda kind: kind.__name__)
def test_a_cell_may_have_no_input_features(kind):
    theirs, ours = getattr(nn, kind.__name__)(0, 4), kind(0, 4)
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(ours(torch.ones(2, 0)), theirs(torch.ones(2, 0)))


@pytest.mark.parametrize("make", [*MAKERS, Attention])
def test_parameters_need_a_dtype_with_gradients(make):
    with pytest.raises(DtypeError, match=r"`dtype` must be one of floating-point numbers, got torch\.int64"):
        make(3, 4, dtype=torch.int64)
    with pytest.raises(ArgumentError, match=r"`dtype` must be None or a torch\.dtype, got 'float32'"):
        make(3, 4, dtype="float32")


@pytest.mark.parametrize("kind", [LSTMCell, GRUCell, RNNCell], ids=lambda kind: kind.__name__)
def test_the_bias_of_a_cell_is_what_pytorchs_cells_take(kind):
    assert kind(3, 4, 0).bias_ih is None
    assert kind(3, 4, "relu").bias is True  # as in PyTorch's own samples, where a nonlinearity stands in its place


@pytest.mark.parametrize(
    ("value", "name"),
    each_value([*itertools.product([0, -1, True, False, 4.0, "4"], ["query_size", "source_size", "hidden_size"])]),
    ids=str,
)
def test_attention_needs_sizes(name, value):
    with pytest.raises(ArgumentError, match=f"`{name}` must be a positive integer, got {value!r}"):
        Attention(**{"query_size": 4, "source_size": 4, name: value})
    attention = Attention(np.int64(4), np.int32(5), np.int64(6))
    assert attention(torch.zeros(2, 4), torch.zeros(3, 2, 5)).shape == (2, 5)


def test_attention_takes_a_flag_for_layer_norm():
    with pytest.raises(ArgumentError, match="`layer_norm` must be True or False, got 'no'"):
        Attention(4, 4, layer_norm="no")


@pytest.mark.parametrize("score", ["additive", "general", "dot"])
def test_attention_names_the_tensor_of_another_kind(score):
    attention, x = Attention(4, 4, score=score), torch.zeros(5, 2, 4)
    if score == "additive":  # the others name the keys
        with pytest.raises(DtypeError, match=r"`query` must be torch\.float32 like the parameters, got torch\.float64"):
            attention(x.double(), x)
        with pytest.raises(
            DtypeError, match=r"`source` must be torch\.float32 like the parameters, got torch\.float64"
        ):
            attention(x, x.double())
    with pytest.raises(ArgumentError, match=r"`query` must be a dense tensor, got one of torch\.sparse_coo"):
        attention(x.to_sparse(), x)


def test_verify_raises_the_error_of_the_call():
    with pytest.raises(ArgumentError, match="`input` must be a tensor, got int"):
        gatewise.verify(LSTM(4, 5), 3)
    with pytest.raises(ShapeError, match=r"`input` must be of 4 features, got 3 in \[2, 7, 3\]"):
        gatewise.verify(LSTM(4, 5, batch_first=True), torch.zeros(2, 7, 3))
