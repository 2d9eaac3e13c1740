"""The layouts of xLSTM's sLSTM: recorded results of xlstm 2.0.6, the blocks of heads, and errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import gatewise
from gatewise.cells import SLSTM
from gatewise.contract.errors import ArgumentError, ShapeError
from gatewise.interop.convert import convert
from gatewise.interop.layouts import LAYOUTS, default_target, layouts_of_conversion
from gatewise.interop.search import find_stacks

LAYOUT = pytest.mark.parametrize("layout", ["xlstm-slstm", "xlstm-slstm-vanilla"])
H = 6


def recorded(name, layout):
    """Return the input, the output and the weights of a recorded layer."""
    suffix = "_vanilla" if "vanilla" in layout else ""
    with np.load(Path(__file__).parent / "references" / f"{name}{suffix}.npz") as file:
        content = {key: torch.from_numpy(file[key]) for key in file.files}
    weights = {key.removeprefix("weights/"): value for key, value in content.items() if key.startswith("weights/")}
    return content["x"], content["y"], weights


def layer_with(tensors):
    layer = gatewise.Recurrent(SLSTM(), tensors["weight_ih_l0"].shape[1], H)
    layer.load_state_dict(tensors)
    return layer


def layer_in_blocks(heads):
    torch.manual_seed(0)
    layer = gatewise.Recurrent(SLSTM(), H, H)
    inside = torch.block_diag(*torch.ones(heads, H // heads, H // heads)).repeat(4, 1)
    with torch.no_grad():
        layer.weight_ih_l0.mul_(inside)
        layer.weight_hh_l0.mul_(inside)
        layer.bias_hh_l0.zero_()
    return layer


@LAYOUT
@pytest.mark.parametrize("name", ["xlstm", "xlstm_one_head", "xlstm_convolved"])
def test_the_converted_weights_compute_what_xlstm_computed(name, layout):
    x, y, weights = recorded(name, layout)
    assert default_target(layout) == "gatewise"
    layer = layer_with(convert(weights, layout, "gatewise"))
    torch.testing.assert_close(layer(x)[0], y, rtol=0, atol=2e-6)


@LAYOUT
@pytest.mark.parametrize(("name", "heads"), [("xlstm", 2), ("xlstm_one_head", 1), ("xlstm_convolved", 3)])
def test_the_weights_that_are_written_are_those_of_xlstm(name, heads, layout):
    _, _, weights = recorded(name, layout)
    there = convert(convert(weights, layout, "gatewise"), "gatewise", layout, heads=heads)
    assert there.keys() == {key for key in weights if not key.startswith(("group_norm", "conv1d"))}
    assert all(torch.equal(tensor, weights[key]) for key, tensor in there.items())


@LAYOUT
def test_the_normalization_and_the_convolution_are_left_out(layout):
    _, _, weights = recorded("xlstm_convolved", layout)
    model = {f"blocks.{number}.xlstm.{key}": value for number in (0, 1) for key, value in weights.items()}
    found = find_stacks(model, LAYOUTS[layout])
    assert [stack.name for stack in found.stacks] == ["blocks/0/xlstm", "blocks/1/xlstm"]
    assert {name.rpartition("xlstm.")[2] for name in found.left} == {
        "conv1d.conv.weight",
        "conv1d.conv.bias",
        "group_norm.weight",
    }
    with pytest.raises(ArgumentError, match=r"`stack` must be False for sLSTMLayer of xlstm, .* computes more between"):
        convert(model, layout, "gatewise", stack=True)


@LAYOUT
@pytest.mark.parametrize("heads", [1, 2, 3, 6])
def test_a_layer_in_blocks_is_written_in_as_many_heads_or_fewer(layout, heads):
    layer = layer_in_blocks(heads)
    for fewer in (1, heads):
        there = convert(layer.state_dict(), "gatewise", layout, heads=fewer)
        assert there["igate.weight"].shape == (fewer, H // fewer, H // fewer)
        back = convert(there, layout, "gatewise")
        assert all(torch.equal(back[name], value) for name, value in layer.state_dict().items())


@LAYOUT
def test_a_layer_that_is_not_in_blocks_is_refused(layout):
    state = layer_in_blocks(2).state_dict()
    message = "must be zero outside of the blocks of 3 heads, got weights that connect heads. Write fewer heads"
    with pytest.raises(ArgumentError, match=message):
        convert(state, "gatewise", layout, heads=3)
    state["weight_hh_l0"][0, -1] = 1
    with pytest.raises(ArgumentError, match="the recurrent weights` must be zero outside of the blocks of 2 heads"):
        convert(state, "gatewise", layout, heads=2)
    assert len(convert(state, "gatewise", layout)) == 6
    with pytest.raises(ArgumentError, match="square for each gate, with a number of units that 4 heads divide"):
        convert(state, "gatewise", layout, heads=4)
    wide = gatewise.Recurrent(SLSTM(), 4, H).state_dict()
    with pytest.raises(ArgumentError, match=r"the input weights` must be square for each gate.* got \[6, 4\]"):
        convert(wide, "gatewise", layout)
    both = gatewise.Recurrent(SLSTM(), 2 * H, H).state_dict()
    with pytest.raises(ArgumentError, match="the weights of gate i on the second half of the input` must be zero"):
        convert(both, "gatewise", layout)


def test_the_weights_of_the_other_backend_are_named():
    _, _, weights = recorded("xlstm", "xlstm-slstm")
    with pytest.raises(
        ShapeError, match="The recurrent weights of the backend cuda are those of the layout xlstm-slstm"
    ):
        convert(weights, "xlstm-slstm-vanilla", "gatewise")
    _, _, weights = recorded("xlstm_one_head", "xlstm-slstm-vanilla")
    with pytest.raises(ShapeError, match="of the backend vanilla are those of the layout xlstm-slstm-vanilla"):
        convert(weights, "xlstm-slstm", "gatewise")


@LAYOUT
@pytest.mark.parametrize(("name", "heads"), [("xlstm", 2), ("xlstm_one_head", 1), ("xlstm_convolved", 3)])
def test_a_layer_with_heads_has_the_blocks(name, heads, layout):
    x, y, weights = recorded(name, layout)
    tensors = convert(weights, layout, "gatewise", heads=heads)
    layer = gatewise.Recurrent(SLSTM(), x.shape[2], H, heads=heads)
    layer.load_state_dict(tensors)
    assert layer.weight_hh_l0.shape == (4 * H, H // heads)
    torch.testing.assert_close(layer(x)[0], y, rtol=0, atol=2e-6)
    torch.testing.assert_close(layer.all_weights[0][1], convert(weights, layout, "gatewise")["weight_hh_l0"])
    there = convert(layer.state_dict(), "gatewise", layout, heads=heads)
    assert all(torch.equal(tensor, weights[key]) for key, tensor in there.items())
    fewer = convert(layer.state_dict(), "gatewise", layout)
    back = convert(fewer, layout, "gatewise", heads=heads)
    assert torch.equal(back["weight_hh_l0"], tensors["weight_hh_l0"])


def test_heads_that_a_layer_cannot_have_are_refused():
    _, _, weights = recorded("xlstm", "xlstm-slstm")
    with pytest.raises(ArgumentError, match="the recurrent weights` must be zero outside of the blocks of 3 heads"):
        convert(weights, "xlstm-slstm", "gatewise", heads=3)
    with pytest.raises(ArgumentError, match=r"with a number of units that 4 heads divide, got \[6, 6\]\.$"):
        convert(weights, "xlstm-slstm", "gatewise", heads=4)
    with pytest.raises(ArgumentError, match="`heads` must be left out for the target gatewise, got 2"):
        convert(torch.nn.GRU(3, 2).state_dict(), "torch-gru", "gatewise", heads=2)


def test_layers_of_another_cell_are_left_out():
    model = {
        f"{name}.{key}": value
        for name, layer in (
            ("slstm", gatewise.Recurrent(SLSTM(), H, H, heads=2)),
            ("gru", torch.nn.GRU(H, H)),
            ("rnn", torch.nn.RNN(H, H)),
        )
        for key, value in layer.state_dict().items()
    }
    source, _ = layouts_of_conversion("gatewise", "xlstm-slstm")
    found = find_stacks(model, source)
    assert [stack.name for stack in found.stacks] == ["slstm"]
    assert len(found.left) == 8


def test_heads_are_of_these_layouts_only():
    message = r"`heads` must be left out for the target keras, got 2\. Only the targets .*xlstm-slstm"
    with pytest.raises(ArgumentError, match=message):
        convert(torch.nn.LSTM(3, 2).state_dict(), "torch", "keras", heads=2)
    with pytest.raises(ArgumentError, match="`heads` must be a positive number, got 0"):
        convert(layer_in_blocks(2).state_dict(), "gatewise", "xlstm-slstm", heads=0)
