"""The errors of layers and cells speak of `input` and `hx` as the user gave them."""

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

import gatewise
from gatewise import GRU, LSTM, RNN, GRUCell, LSTMCell, Recurrent, RecurrentCell, RNNCell, cells
from gatewise.contract.errors import ArgumentError, DeviceError, DtypeError, ShapeError


def peephole(*sizes, **options):
    return Recurrent(cells.PeepholeLSTM(), *sizes, **options)


def mgu(*sizes, **options):
    return Recurrent(cells.MGU(), *sizes, **options)


def states_of(make, *shape, **options):
    one = torch.zeros(shape, **options)
    return (one, one) if make in (LSTM, peephole) else one


@pytest.fixture(params=[LSTM, GRU, RNN, peephole, mgu], ids=lambda make: make.__name__)
def make(request):
    return request.param


def message_of(error, call):
    with pytest.raises(error) as raised:
        call()
    return str(raised.value)


@pytest.mark.parametrize(
    ("batch_first", "shape"),
    [(False, [7, 2, 3]), (True, [2, 7, 3]), (True, [2, 2, 3]), (False, [7, 3]), (True, [7, 3])],
)
@pytest.mark.parametrize("for_data_parallel", [False, True])
def test_the_input_is_shown_as_it_was_given(make, batch_first, shape, for_data_parallel):
    layer = make(4, 5, 2, batch_first=batch_first)
    expected = f"`input` must be of 4 features, got 3 in {shape}. The last dimension is the input size of the weights."
    if for_data_parallel:
        with gatewise.for_data_parallel():
            assert message_of(ShapeError, lambda: layer(torch.zeros(shape))) == expected
    else:
        assert message_of(ShapeError, lambda: layer(torch.zeros(shape))) == expected


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize(
    ("convert", "error", "message"),
    [
        (torch.Tensor.double, DtypeError, "`input` must be torch.float32 like the weights, got torch.float64"),
        (lambda x: x.to("meta"), DeviceError, "`input` must be on cpu like the weights, got one on meta"),
        (torch.Tensor.to_sparse, ArgumentError, "`input` must be a dense tensor, got one of torch.sparse_coo"),
    ],
)
def test_the_input_has_its_name(make, batch_first, convert, error, message):
    layer = make(4, 5, batch_first=batch_first)
    for x in (torch.zeros(2, 7, 4), torch.zeros(7, 4)):
        assert message_of(error, lambda x=x: layer(convert(x))).startswith(message)


@pytest.mark.parametrize("batch_first", [False, True])
def test_the_states_have_their_names(make, batch_first):
    layer, x = make(4, 5, batch_first=batch_first), torch.zeros(3, 3, 4)
    name = "hx[0]" if make in (LSTM, peephole) else "hx"
    found = message_of(ShapeError, lambda: layer(x, states_of(make, 1, 2, 5)))
    assert found == f"`{name}` must be [1, 3, 5], which is [L*D, B, R], got [1, 2, 5]."
    found = message_of(ShapeError, lambda: layer(x[0], states_of(make, 1, 6)))
    assert found == f"`{name}` must be [1, 5], which is [L*D, R], got [1, 6]."
    found = message_of(DtypeError, lambda: layer(x, states_of(make, 1, 3, 5, dtype=torch.float64)))
    assert found == f"`{name}` must be torch.float32 like input, got torch.float64. Convert it with .to(input.dtype)."
    found = message_of(DeviceError, lambda: layer(x, states_of(make, 1, 3, 5, device="meta")))
    assert found == f"`{name}` must be on cpu like input, got one on meta."


def test_the_cell_state_is_the_second_of_the_pair():
    layer, h = LSTM(4, 5, proj_size=2), torch.zeros(1, 3, 2)
    found = message_of(ShapeError, lambda: layer(torch.zeros(7, 3, 4), (h, h)))
    assert found == "`hx[1]` must be [1, 3, 5], which is [L*D, B, H], got [1, 3, 2]."
    found = message_of(ShapeError, lambda: layer(torch.zeros(7, 4), (h[:, 0], h[:, 0])))
    assert found == "`hx[1]` must be [1, 5], which is [L*D, H], got [1, 2]."


def test_a_packed_batch_has_data(make):
    found = message_of(ShapeError, lambda: make(4, 5)(pack_sequence([torch.zeros(3, 3), torch.zeros(2, 3)])))
    assert found.startswith("`input.data` must be of 4 features, got 3 in [5, 3].")
    packed = pack_sequence([torch.zeros(3, 4)])._replace(batch_sizes=torch.tensor([1, 1]))
    assert message_of(ShapeError, lambda: make(4, 5)(packed)).startswith(
        "`input.batch_sizes` must be numbers whose sum"
    )


def test_lengths_and_resets_are_compared_with_the_input(make):
    layer, x = make(4, 5, batch_first=True), torch.zeros(2, 7, 4)
    found = message_of(DeviceError, lambda: layer(x, lengths=torch.zeros(2, device="meta", dtype=torch.int64)))
    assert found == "`lengths` must be on the CPU like input, got on meta."
    found = message_of(DeviceError, lambda: layer(x, resets=torch.zeros(2, 7, device="meta", dtype=torch.bool)))
    assert found.startswith("`resets` must be on cpu like input, got one on meta. Move it with .to(input.device).")
    assert (
        message_of(DtypeError, lambda: layer(x, lengths=["x", 3])) == "`lengths` must be integers, got 'x' at place 0."
    )


def test_a_state_of_several_on_another_device():
    layer, state = Recurrent(cells.SLSTM(), 4, 5), torch.zeros(1, 2, 5, device="meta")
    found = message_of(DeviceError, lambda: layer(torch.zeros(7, 2, 4), (state,) * 4))
    assert found.startswith("`hx[0]` must be on cpu like the input, got one on meta.")


@pytest.mark.parametrize("shape", [(2, 4), (4,)])
@pytest.mark.parametrize(
    "make_cell",
    [LSTMCell, GRUCell, RNNCell, *(lambda *s, c=c: RecurrentCell(c, *s) for c in (cells.PeepholeLSTM(), cells.MGU()))],
)
def test_the_arguments_of_cells_have_their_names(make_cell, shape):
    cell, x = make_cell(4, 5), torch.zeros(shape)
    state = torch.zeros(*shape[:-1], 5)
    several = isinstance(cell(x), tuple)
    name = "hx[0]" if several else "hx"

    def given(change):
        return (change(state), change(state)) if several else change(state)

    found = message_of(DtypeError, lambda: cell(x, given(torch.Tensor.double)))
    assert found.startswith(f"`{name}` must be torch.float32 like ")
    assert found.endswith("input, got torch.float64. Convert it with .to(input.dtype).")
    found = message_of(DeviceError, lambda: cell(x, given(lambda state: state.to("meta"))))
    assert found.startswith(f"`{name}` must be on cpu like ")
    assert message_of(DeviceError, lambda: cell(x.to("meta"))).startswith("`input` must be on cpu like the weights")


def test_functions_keep_their_own_names():
    weights = torch.nn.LSTM(4, 5).all_weights
    found = message_of(ShapeError, lambda: gatewise.functional.lstm(torch.zeros(7, 2, 3), None, weights))
    assert found.startswith("`x` must be of 4 features, got 3 in [7, 2, 3].")
    state = torch.zeros(1, 2, 6), torch.zeros(1, 2, 5)
    found = message_of(ShapeError, lambda: gatewise.functional.lstm(torch.zeros(7, 2, 4), state, weights))
    assert found.startswith("`h0` must be [1, 2, 5], which is")
