"""The names of cells, by which compiled graphs, saved calls and measurements know them."""

import pytest
import torch

import gatewise
from gatewise.cells import RNN, SHIPPED, LayerNormGRU, LayerNormLSTM, cell_named
from gatewise.cells.layer_norm_lstm import FORMS

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
    assert cell_named(rnn.name) == rnn == RNN("relu") != RNN()


def test_default_cells_have_plain_names():
    assert LayerNormLSTM.of("haste").name == "layer_norm_lstm"
    assert LayerNormGRU().name == "layer_norm_gru"
    assert LayerNormLSTM.of("icefall").name == "layer_norm_lstm(gates='each', cell='both', bias=True)"
    assert repr(LayerNormLSTM.of("lingvo", clip=None)) == "LayerNormLSTM(gates='each', cell='none', eps=1e-08)"
    assert repr(LayerNormGRU()) == "LayerNormGRU(gates='joint', eps=0.001, update_bias=-1.0, centered=True)"


@pytest.mark.parametrize("cell", [LayerNormLSTM.of("icefall"), LayerNormGRU(gates="apart")], ids=repr)
def test_a_layer_without_values_has_the_shapes_of_its_cell(cell):
    layer = gatewise.Recurrent(cell, 3, 4, device="meta")
    assert layer(torch.empty(5, 2, 3, device="meta"))[0].shape == (5, 2, 4)
