"""The layouts of layer-normalized cells compared with the layers of their systems."""

import pytest
import torch

import gatewise
from gatewise.cells import LayerNormLSTM
from gatewise.contract.errors import ArgumentError, CheckpointError, ShapeError
from gatewise.interop.convert import convert
from gatewise.interop.layer_norm_layouts import LAYER_NORM_LAYOUTS
from gatewise.interop.layouts import LAYOUTS, default_target, layout_named
from gatewise.interop.search import find_stacks
from tests.published_layer_norm import PUBLISHED, H, I

SOURCES = {
    "haste-layer-norm": "haste",
    "fastrnns-layer-norm": "torchscript",
    "tfa-layer-norm": "tensorflow_addons",
    "tf1-layer-norm": "tensorflow1",
    "icefall-layer-norm": "icefall",
    "lingvo-layer-norm": "lingvo",
    "lingvo-lean": "lingvo_lean",
    "haste-layer-norm-gru": "haste_gru",
    "dreamerv3-gru": "dreamer",
}
PLACES = {
    "tf1-layer-norm": "rnn/layer_norm_basic_lstm_cell/",
    "tfa-layer-norm": "model/rnn/cell/",
}
SUFFIXES = {"lingvo-layer-norm": "/var", "lingvo-lean": "/var"}


def of_system(layout, seed=0):
    """Return random tensors of a system, by the names that they have in its files."""
    tensors = PUBLISHED[SOURCES[layout]].tensors(seed)
    place, suffix = PLACES.get(layout, ""), SUFFIXES.get(layout, "")
    return {f"{place}{name}{suffix}": tensor.detach() for name, tensor in tensors.items()}


def run(layout, tensors, x):
    published = PUBLISHED[SOURCES[layout]]
    place, suffix = PLACES.get(layout, ""), SUFFIXES.get(layout, "")
    own = {name.removeprefix(place).removesuffix(suffix): tensor for name, tensor in tensors.items()}
    return published.run(own, x, [x.new_zeros(2, H)] * (1 + len(published.cell.states)))[0]


def loaded(layout, tensors, **options):
    layer = gatewise.Recurrent(LAYOUTS[layout].cell, I, H, dtype=torch.float64, **options)
    layer.load_state_dict(tensors)
    return layer


def test_every_layout_is_tested():
    assert [layout.name for layout in LAYER_NORM_LAYOUTS] == list(SOURCES)


@pytest.mark.parametrize("layout", SOURCES)
def test_the_converted_weights_compute_what_their_system_computes(layout):
    tensors, x = of_system(layout), torch.randn(4, 2, I, dtype=torch.float64)
    converted = convert(tensors, layout, "gatewise")
    expected = PUBLISHED[SOURCES[layout]].parameters(PUBLISHED[SOURCES[layout]].tensors())
    assert converted.keys() == {f"{name}_l0" for name in expected}
    for name, value in expected.items():
        torch.testing.assert_close(converted[f"{name}_l0"], value, rtol=0, atol=1e-15)
    torch.testing.assert_close(loaded(layout, converted)(x)[0], run(layout, tensors, x))


def test_cells_of_tensorflow_with_another_forget_bias_become_the_cell_of_the_default():
    tensors, x = of_system("tf1-layer-norm"), torch.randn(4, 2, I, dtype=torch.float64)
    other = gatewise.Recurrent(LayerNormLSTM.of("tensorflow1", forget_bias=0.25), I, H, dtype=torch.float64)
    other.load_state_dict(convert(tensors, "tf1-layer-norm", "gatewise"))
    converted = convert(tensors, "tf1-layer-norm", "gatewise", forget_bias=0.25)
    torch.testing.assert_close(loaded("tf1-layer-norm", converted)(x)[0], other(x)[0])
    back = convert(converted, "gatewise", "tf1-layer-norm", forget_bias=0.25)
    for name, tensor in back.items():
        torch.testing.assert_close(tensor, tensors[name], rtol=0, atol=1e-15)


def test_the_gru_is_found_in_a_model_of_dreamerv3():
    model = {f"agent/wm/rssm/{name}": tensor for name, tensor in of_system("dreamerv3-gru").items()}
    model |= {"agent/wm/rssm/img_in/kernel": torch.zeros(3, 4), "agent/wm/rssm/img_in/norm/scale": torch.zeros(4)}
    found = find_stacks(model, layout_named("dreamerv3-gru"))
    assert [str(stack) for stack in found.stacks] == [f"1 layer, 1 direction, I {I}, H {H}"]
    assert len(found.left) == 2
    block_gru = {"dyn/dyngru/kernel": torch.zeros(2, 5, 9), "dyn/dynhid0/kernel": torch.zeros(2, 5, 3)}
    with pytest.raises(
        ArgumentError, match=r"The block GRU of 2024 \(dyngru or dyncore\) reads its state through layers"
    ):
        convert(block_gru, "dreamerv3-gru", "gatewise")


@pytest.mark.parametrize("layout", SOURCES)
def test_the_weights_of_a_layer_compute_the_same_in_the_other_system(layout):
    torch.manual_seed(0)
    layer = gatewise.Recurrent(LAYOUTS[layout].cell, I, H, dtype=torch.float64)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter))
    there, x = convert(layer.state_dict(), "gatewise", layout), torch.randn(4, 2, I, dtype=torch.float64)
    given = of_system(layout)
    short = {name.removeprefix("model/rnn/cell/") for name in given}
    assert there.keys() == short
    torch.testing.assert_close(run(layout, there, x), layer(x)[0])
    back = convert(there, layout, "gatewise")
    assert all(torch.equal(back[name], value) for name, value in layer.state_dict().items())


@pytest.mark.parametrize("layout", ["fastrnns-layer-norm", "tf1-layer-norm", "icefall-layer-norm"])
def test_numbered_layers_become_a_stack(layout):
    layer = gatewise.Recurrent(LAYOUTS[layout].cell, I, H, num_layers=3)
    there = convert(layer.state_dict(), "gatewise", layout)
    outer = {f"decoders.1.rnn.{name}" if "." in name else f"model/{name}": value for name, value in there.items()}
    back = convert(outer, layout, "gatewise")
    assert back.keys() == layer.state_dict().keys()
    assert all(torch.equal(back[name], value) for name, value in layer.state_dict().items())


def test_modules_in_numbered_modules_are_separate():
    layout = layout_named("icefall-layer-norm")
    one, two = of_system(layout.name, 1), of_system(layout.name, 2)
    tensors = {f"decoders.{k}.{name}": value for k, each in enumerate((one, two)) for name, value in each.items()}
    assert [stack.name for stack in find_stacks(tensors, layout).stacks] == ["decoders/0", "decoders/1"]


def test_two_directions_of_tensorflow():
    layer = gatewise.Recurrent(LayerNormLSTM.of("tensorflow_addons"), I, H, bidirectional=True)
    there = convert(layer.state_dict(), "gatewise", "tfa-layer-norm")
    assert "backward_layer/kernel_norm/gamma" in there
    back = convert(there, "tfa-layer-norm", "gatewise")
    assert all(torch.equal(back[name], value) for name, value in layer.state_dict().items())


def test_an_addons_cell_without_its_bias():
    tensors = of_system("tfa-layer-norm")
    tensors["model/rnn/cell/bias"] = torch.zeros(4 * H, dtype=torch.float64)
    expected = convert(tensors, "tfa-layer-norm", "gatewise")
    del tensors["model/rnn/cell/bias"]
    found = convert(tensors, "tfa-layer-norm", "gatewise")
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_the_names_of_tensorflow_2_are_understood():
    tensors = of_system("tfa-layer-norm")
    model = {f"{name}/.ATTRIBUTES/VARIABLE_VALUE": tensor for name, tensor in tensors.items()}
    model["model/rnn/cell/kernel/.OPTIMIZER_SLOT/optimizer/m/.ATTRIBUTES/VARIABLE_VALUE"] = torch.zeros(3)
    found = convert(model, "tfa-layer-norm", "gatewise")
    assert all(
        torch.equal(found[name], value) for name, value in convert(tensors, "tfa-layer-norm", "gatewise").items()
    )


def test_plain_layers_beside_normalized_ones_are_left_out():
    plain = {
        f"plain.{name}": value
        for name, value in convert(torch.nn.GRU(I, H).state_dict(), "torch-gru", "haste-gru").items()
    }
    tensors = {f"normalized.{name}": value for name, value in of_system("haste-layer-norm-gru").items()}
    found = find_stacks(plain | tensors, layout_named("haste-layer-norm-gru"))
    assert [stack.name for stack in found.stacks] == ["normalized"]
    assert found.left == tuple(plain)


@pytest.mark.parametrize(
    ("layout", "plain"),
    [
        ("haste-layer-norm", "haste"),
        ("haste-layer-norm-gru", "haste-gru"),
        ("tfa-layer-norm", "keras"),
        ("tf1-layer-norm", "tf1-basic"),
    ],
)
def test_the_plain_layout_names_the_one_with_normalization(layout, plain):
    with pytest.raises(ArgumentError, match=rf"without layer normalisation.* Its layout is {layout}\."):
        convert(of_system(layout) | {"rnn/layer_norm_basic_lstm_cell/bias": torch.zeros(4 * H)}, plain, plain)


def test_biases_before_the_normalization_have_no_place_in_haste():
    layer = gatewise.Recurrent(LayerNormLSTM(), I, H, bias=True)
    with pytest.raises(ArgumentError, match=r"`weights` must be without biases, got b_ih \[20\]\. haste_pytorch"):
        convert(layer.state_dict(), "gatewise", "haste-layer-norm")


@pytest.mark.parametrize(
    ("layout", "extra", "what"),
    [
        ("lingvo-layer-norm", "w_proj/var", "a projection"),
        ("lingvo-lean", "w_proj/var", "a projection"),
        ("lingvo-lean", "b/var", "enable_lstm_bias"),
    ],
)
def test_other_cells_of_lingvo_are_refused(layout, extra, what):
    with pytest.raises(ArgumentError, match=rf"`{extra}` must be absent: a LayerNormLSTM without {what}, got"):
        convert(of_system(layout) | {extra: torch.zeros(H)}, layout, "gatewise")


def test_a_projection_of_icefall_is_refused():
    tensors = of_system("icefall-layer-norm") | {"layers.0.cell.weight_hr": torch.zeros(2, H)}
    with pytest.raises(ArgumentError, match=r"weight_hr` must be absent: a LayerNormLSTM without a projection, got"):
        convert(tensors, "icefall-layer-norm", "gatewise")


def test_missing_and_ill_shaped_tensors_are_named():
    tensors = of_system("haste-layer-norm")
    with pytest.raises(CheckpointError, match="the file has no gamma_h: it is truncated"):
        convert({name: value for name, value in tensors.items() if name != "gamma_h"}, "haste-layer-norm", "gatewise")
    with pytest.raises(
        ShapeError, match=r"must be those of a LayerNormLSTM in the layout haste-layer-norm, got .*\[5\]"
    ):
        convert(tensors | {"gamma": torch.zeros(5)}, "haste-layer-norm", "gatewise")


def test_the_layout_of_gatewise_takes_the_cell_of_the_other():
    assert (default_target("icefall-layer-norm"), default_target("haste")) == ("gatewise", "torch")
    with pytest.raises(
        ArgumentError, match="`the layout of the target` must be given for the source gatewise, got none"
    ):
        default_target("gatewise")
    plain = torch.nn.LSTM(I, H).state_dict()
    assert convert(plain, "gatewise", "torch").keys() == plain.keys()
    with pytest.raises(ArgumentError, match="Choose one of icefall-layer-norm, gatewise"):
        convert(of_system("icefall-layer-norm"), "icefall-layer-norm", "torch")
    with pytest.raises(ArgumentError, match="`layout` must be that of another system on one side, got gatewise on"):
        convert(plain, "gatewise", "gatewise")
