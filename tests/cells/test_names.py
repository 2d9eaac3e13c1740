"""The names of cells, by which compiled graphs, saved calls and measurements know them."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.rnn import pack_padded_sequence

import gatewise
from gatewise.cells import RNN, SHIPPED, LayerNormGRU, LayerNormLSTM, cell_named, in_evaluation, in_training
from gatewise.cells.layer_norm_lstm import FORMS
from gatewise.contract.errors import ArgumentError, DeviceError

OTHERS = [
    *(LayerNormLSTM.of(form) for form in FORMS),
    LayerNormLSTM(gates="none", shift=False, hidden=True, clip=3.5),
    LayerNormGRU(gates="apart"),
    LayerNormGRU(eps=1e-4, update_bias=0.5, centered=False),
]


@pytest.mark.parametrize("cell", [*SHIPPED, *OTHERS], ids=lambda cell: cell.name)
def test_a_name_stands_for_one_cell(cell):
    assert cell_named(cell.name) == cell
    assert all((other.name == cell.name) == (other == cell) for other in (*SHIPPED, *OTHERS))


def test_the_name_follows_options_that_change():
    cell = LayerNormLSTM()
    cell.eps = 1e-3
    assert cell_named(cell.name) == cell == LayerNormLSTM(eps=1e-3)
    gru = LayerNormGRU()
    gru.update_bias = 0.0
    assert cell_named(gru.name) == gru != LayerNormGRU()
    rnn = RNN()
    rnn.nonlinearity = "relu"
    assert rnn.name == "rnn_relu"
    cell = LayerNormLSTM()
    trained, evaluated = in_training(cell, 0.5, (0.25, 0.0), 0.125), in_evaluation(cell, (0.25, 0.0))
    cell.eps = 1e-3
    assert cell_named(trained.name) == trained == in_training(LayerNormLSTM(eps=1e-3), 0.5, (0.25, 0.0), 0.125)
    assert cell_named(evaluated.name) == evaluated == in_evaluation(LayerNormLSTM(eps=1e-3), (0.25, 0.0))
    assert hash(cell_named(trained.name)) == hash(trained)
    assert cell_named(rnn.name) == rnn == RNN("relu") != RNN()


def test_default_cells_have_plain_names():
    assert LayerNormLSTM.of("haste").name == "layer_norm_lstm"
    assert LayerNormGRU().name == "layer_norm_gru"
    assert LayerNormLSTM.of("icefall").name == "layer_norm_lstm(gates='each', cell='both', bias=True)"
    assert repr(LayerNormLSTM.of("lingvo", clip=None)) == "LayerNormLSTM(gates='each', cell='none', eps=1e-08)"
    assert repr(LayerNormGRU()) == "LayerNormGRU(gates='joint', eps=0.001, update_bias=-1.0, centered=True)"


class Leaky(gatewise.Cell):
    gates = ("a", "g")

    def step(self, gate, state):
        return torch.sigmoid(gate.a) * state.h + torch.tanh(gate.g), {}


@pytest.mark.parametrize("cell", [LayerNormLSTM.of("icefall"), LayerNormGRU(gates="apart"), Leaky()], ids=repr)
def test_a_layer_without_values_has_the_shapes_of_its_cell(cell):
    layer = gatewise.Recurrent(cell, 3, 4, device="meta")
    y, _ = layer(torch.empty(5, 2, 3, device="meta"), lengths=[5, 2])
    assert y.shape == (5, 2, 4)
    y.sum().backward()
    assert layer.weight_hh_l0.grad.is_meta


def test_a_cell_of_ones_own_is_refused_where_a_graph_would_find_it_by_name():
    layer = gatewise.Recurrent(Leaky(), 3, 4, device="meta")
    packed = pack_padded_sequence(torch.empty(5, 2, 3, device="meta"), [5, 2])
    with pytest.raises(ArgumentError, match=r"`input` must be a padded batch on the meta device for the cell Leaky"):
        layer(packed)
    layer = gatewise.Recurrent(Leaky(), 3, 4)
    graph_of = make_fx(lambda x: layer(x)[0], tracing_mode="symbolic", _allow_non_fake_inputs=True)
    with pytest.raises(ArgumentError, match=r"`cell` must be one of gatewise\.cells where .* symbols, got Leaky"):
        graph_of(torch.randn(5, 2, 3))


def test_the_steps_of_a_layer_without_values_are_refused_in_a_sentence():
    layer = gatewise.Recurrent(Leaky(), 3, 4, device="meta")
    with pytest.raises(DeviceError, match="`device` must be a CPU or CUDA device, got 'meta'"):
        layer(torch.empty(5, 2, 3, device="meta"), return_steps=True)
