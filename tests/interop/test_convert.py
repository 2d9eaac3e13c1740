"""The conversion of tensors to LSTMs: names, directions, layers, and errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gatewise.contract.errors import ArgumentError, CheckpointError, DtypeError, ShapeError
from gatewise.interop.convert import convert
from gatewise.interop.layouts import layout_named
from gatewise.interop.search import find_stacks


def keras(features=3, units=2, gates=4):
    """Return the weights of a Keras layer: an LSTM with 4 gates, a GRU with 3."""
    return {
        "kernel": torch.randn(features, gates * units),
        "recurrent_kernel": torch.randn(units, gates * units),
        "bias": torch.randn(gates * units),
    }


def under(place, tensors):
    return {f"{place}/{name}": tensor for name, tensor in tensors.items()}


def test_layers_of_a_keras_model_keep_their_names():
    model = under("one", keras()) | under("dense", {"kernel": torch.randn(2, 5), "bias": torch.randn(5)})
    model |= (
        under("two", keras(5, 4)) | under("gru", keras(4, 4, gates=3)) | {"embedding/embeddings": torch.randn(9, 3)}
    )
    found = find_stacks(model, layout_named("keras"))
    assert [(stack.name, str(stack)) for stack in found.stacks] == [
        ("one", "1 layer, 1 direction, I 3, H 2"),
        ("two", "1 layer, 1 direction, I 5, H 4"),
    ]
    assert len(found.left) == 6
    assert set(found.left) == {name for name in model if name.startswith(("dense", "gru", "embedding"))}
    tensors = convert(model, "keras", "torch")
    assert sorted(name for name in tensors if "ih" in name) == [
        "one.bias_ih_l0",
        "one.weight_ih_l0",
        "two.bias_ih_l0",
        "two.weight_ih_l0",
    ]
    assert torch.equal(tensors["two.weight_ih_l0"], model["two/kernel"].t())
    assert convert(tensors, "torch", "keras").keys() == {name for name in model if name.startswith(("one", "two"))}


def test_layers_are_chosen_and_put_on_each_other_in_the_order_given():
    model = under("top", keras(2)) | under("bottom", keras(3)) | under("other", keras(7))
    stacked = convert(model, "keras", "torch", layers=["bottom", "top"], stack=True)
    assert torch.equal(stacked["weight_ih_l0"], model["bottom/kernel"].t())
    assert torch.equal(stacked["weight_ih_l1"], model["top/kernel"].t())
    assert len(stacked) == 8
    with pytest.raises(ArgumentError, match="the input of layer 1 of the stack` must be of 2 features"):
        convert(model, "keras", "torch", layers=["top", "bottom"], stack=True)
    with pytest.raises(ArgumentError, match="`layers` must be one of 'top', 'bottom', 'other', got 'middle'"):
        convert(model, "keras", "torch", layers=["middle"])


def test_a_layer_may_be_named_with_the_dots_of_a_state_dict():
    model = under("encoder.lstm", torch.nn.LSTM(3, 2).state_dict())
    model = {name.replace("/", "."): tensor for name, tensor in model.items()}
    for name in ("encoder.lstm", "encoder/lstm"):
        assert set(convert(model, "torch", "keras", layers=[name])) == {"kernel", "recurrent_kernel", "bias"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: under("a1", keras()) | under("a2", keras(2, 3)), "the recurrent weights of layer 1"),
        (
            lambda model: under("a1", keras()) | {k: v for k, v in under("a2", keras(2)).items() if "bias" not in k},
            "the bias",
        ),
    ],
)
def test_layers_that_do_not_go_together_are_not_joined(change, message):
    with pytest.raises(ArgumentError, match=message):
        convert(change({}), "keras", "torch", stack=True)


@pytest.mark.parametrize(
    "names",
    [
        ["lstm", "lstm_1", "lstm_2", "lstm_10"],
        ["l2_lstm", "l3_lstm", "l10_lstm"],
        ["layer_with_weights-1/cell", "layer_with_weights-2/cell", "layer_with_weights-10/cell"],
        ["lstm_3/lstm_cell_9", "lstm_4/lstm_cell_8", "lstm_11/lstm_cell_7"],
        ["blocks_0/LSTMCell_9", "blocks_1/LSTMCell_0", "blocks_1/LSTMCell_10"],
    ],
)
def test_layers_are_stacked_in_the_order_of_their_numbers(names):
    layers = [keras(2) for _ in names]
    model = {}
    for index in sorted(range(len(names)), key=names.__getitem__):  # as text, as JAX and TensorFlow sort
        model |= under(names[index], layers[index])
    stacked = convert(model, "keras", "torch", stack=True)
    for number, layer in enumerate(layers):
        assert torch.equal(stacked[f"weight_hh_l{number}"], layer["recurrent_kernel"].t())


@pytest.mark.parametrize(
    ("first", "second"),
    [("encoder", "decoder"), ("lstm", "sequential/lstm"), ("bidirectional", "lstm"), ("a_1", "b_2"), ("l1", "l_1")],
)
@pytest.mark.parametrize("way", ["stack", "pair"])
def test_layers_whose_names_tell_no_order_are_not_combined(first, second, way):
    model = under(first, keras(2)) | under(second, keras(2))
    with pytest.raises(ArgumentError, match="`the layers to combine` must be numbered in the order of the model"):
        convert(model, "keras", "torch", **{way: True})
    combined = convert(model, "keras", "torch", layers=[second, first], **{way: True})
    assert torch.equal(combined["weight_hh_l0"], model[f"{second}/recurrent_kernel"].t())
    assert len(convert(model, "keras", "torch")) == 8


def test_convolutional_layers_are_left_out():
    convolutional = {"kernel": torch.randn(3, 3, 2, 8), "recurrent_kernel": torch.randn(3, 3, 2, 8)}
    model = under("conv_lstm2d/cell", convolutional | {"bias": torch.randn(8)}) | under("lstm/lstm_cell", keras())
    found = find_stacks(model, layout_named("keras"))
    assert [stack.name for stack in found.stacks] == ["lstm"]
    assert len(found.left) == 3
    cells = {"conv_lstm_cell": torch.randn(3, 3, 4, 8), "basic_lstm_cell": torch.randn(5, 8)}
    model = {f"rnn/{name}/kernel": kernel for name, kernel in cells.items()}
    model |= {f"rnn/{name}/bias": torch.randn(8) for name in cells}
    assert len(find_stacks(model, layout_named("tf1-basic")).left) == 2


@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        ("bidirectional/forward_lstm/lstm_cell", "bidirectional/backward_lstm/lstm_cell"),
        ("model/bidirectional_3/forward_layer/cell", "model/bidirectional_3/backward_layer/cell"),
        ("bidirectional_1/forward_lstm_2/lstm_cell_7", "bidirectional_1/backward_lstm_2/lstm_cell_8"),
        ("forward_layer", "backward_layer"),
    ],
)
def test_two_directions_are_known_by_their_names(forward, backward):
    model = under(forward, keras()) | under(backward, keras())
    tensors = convert(model, "keras", "torch")
    assert torch.equal(tensors["weight_hh_l0"], model[f"{forward}/recurrent_kernel"].t())
    assert torch.equal(tensors["weight_hh_l0_reverse"], model[f"{backward}/recurrent_kernel"].t())


def test_a_layer_may_be_called_forward_or_backward():
    tensors = convert(under("forward_lstm", keras()) | under("encoder/backward_lstm", keras()), "keras", "torch")
    assert {name.rpartition(".")[0] for name in tensors} == {"forward_lstm", "encoder.backward_lstm"}


def test_directions_without_names_are_paired_on_demand():
    cells = [convert(torch.nn.LSTM(3, 2).state_dict(), "torch", "flax") for _ in range(2)]
    model = {
        f"params/OptimizedLSTMCell_{number}/{name.removeprefix('cell/')}": tensor
        for number, cell in enumerate(cells)
        for name, tensor in cell.items()
    }
    assert len(convert(model, "flax", "torch")) == 8
    paired = convert(model, "flax", "torch", pair=True)
    assert paired.keys() == torch.nn.LSTM(3, 2, bidirectional=True).state_dict().keys()
    with pytest.raises(ArgumentError, match="an even number of one direction each"):
        convert(model, "flax", "torch", layers=["OptimizedLSTMCell_0"], pair=True)


@pytest.mark.parametrize(
    "name",
    ["rnn/multi_rnn_cell/cell_{}/basic_lstm_cell", "model/RNN/MultiRNNCell/cell_{}/LSTMBlockCell", "cell_{}/lstm_cell"],
)
def test_layers_of_tensorflow_are_known_by_their_numbers(name):
    layers = [{"kernel": torch.randn(2 + size, 8), "bias": torch.randn(8)} for size in (3, 2, 2)]
    model = {"global_step": torch.zeros(())}
    for number in (2, 0, 1):
        model |= under(name.format(number), layers[number])
        model |= under(name.format(number), {"kernel/Adam": torch.zeros(5), "kernel/Adam_1": torch.zeros(5)})
    tensors = convert(model, "tf1-basic", "torch")
    assert tensors["weight_ih_l0"].shape == (8, 3)
    assert torch.equal(tensors["weight_hh_l2"][2:4], layers[2]["kernel"][2:, 4:6].t())


def test_the_names_of_tensorflow_2_are_understood():
    model = {f"layer_with_weights-0/cell/{name}/.ATTRIBUTES/VARIABLE_VALUE": tensor for name, tensor in keras().items()}
    model["layer_with_weights-0/cell/kernel/.OPTIMIZER_SLOT/optimizer/m/.ATTRIBUTES/VARIABLE_VALUE"] = torch.zeros(3)
    assert len(convert(model, "keras", "torch")) == 4
    assert len(convert({f"lstm/lstm_cell/{name}:0": tensor for name, tensor in keras().items()}, "keras", "torch")) == 4


def test_arrays_of_any_byte_order_and_not_writable_are_read():
    model = {name: tensor.numpy().astype(">f4") for name, tensor in keras().items()}
    for array in model.values():
        array.flags.writeable = False
    tensors = convert(model, "keras", "torch")
    np.testing.assert_array_equal(tensors["weight_ih_l0"], model["kernel"].T)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (None, "`tensors` must be a mapping from names to tensors, such as a state_dict, got NoneType"),
        ({1: torch.zeros(3)}, "`tensors` must be a mapping .*, got dict with the name 1"),
        (
            {"kernel": torch.zeros(3, device="meta")},
            "`kernel` must be a tensor with numbers, got one on the device meta",
        ),
    ],
)
def test_what_has_no_names_or_no_numbers_is_refused(tensors, message):
    with pytest.raises(ArgumentError, match=message):
        convert(tensors, "keras", "torch")


@pytest.mark.parametrize("constant", [float("nan"), float("inf"), "1"])
def test_a_forget_bias_that_is_not_finite_is_refused(constant):
    with pytest.raises(ArgumentError, match="`forget_bias` must be a finite number, got "):
        convert(torch.nn.LSTM(3, 2).state_dict(), "torch", "tf1-basic", forget_bias=constant)


def test_what_is_no_array_is_named():
    with pytest.raises(ArgumentError, match="`kernel` must be a tensor or an array of numbers, got str"):
        convert({"kernel": "no"}, "keras", "torch")


@pytest.mark.parametrize("extra", ["w_f_diag", "projection/kernel"])
def test_other_cells_of_tensorflow_are_refused(extra):
    model = under("rnn/lstm_cell", {"kernel": torch.randn(5, 8), "bias": torch.randn(8), extra: torch.randn(2, 2)})
    with pytest.raises(ArgumentError, match=rf"`rnn/lstm_cell/{extra}` must be absent: an LSTM without"):
        convert(model, "tf1-basic", "torch")


def test_layer_normalisation_of_haste_is_refused():
    with pytest.raises(ArgumentError, match="an LSTM without layer normalisation"):
        convert(keras() | {"gamma": torch.ones(2, 8)}, "haste", "torch")


def test_a_gru_of_haste_with_layer_normalisation_is_refused():
    model = keras(gates=3) | {"recurrent_bias": torch.randn(6), "gamma": torch.ones(2, 6)}
    with pytest.raises(ArgumentError, match="a GRU without layer normalisation"):
        convert(model, "haste-gru", "torch-gru")


def test_a_dense_layer_of_tensorflow_is_no_lstm():
    model = {"dense/kernel": torch.randn(5, 8), "dense/bias": torch.randn(8)}
    with pytest.raises(ArgumentError, match="the tensors` must be those of an LSTM in the layout tf1-basic"):
        convert(model, "tf1-basic", "torch")


@pytest.mark.parametrize(
    ("scopes", "name"),
    [
        (["rnn/encoder"], "rnn/encoder"),
        (["encoder/rnn"], "encoder/rnn"),
        (["rnn/multi_rnn_cell/cell_0/mine", "rnn/multi_rnn_cell/cell_1/mine"], "rnn/multi_rnn_cell/mine"),
        (["bidirectional_rnn/fw/mine", "bidirectional_rnn/bw/mine"], "bidirectional_rnn/mine"),
    ],
)
def test_cells_of_tensorflow_of_any_name_are_named_by_the_user(scopes, name):
    model = {"dense/kernel": torch.randn(4, 8), "dense/bias": torch.randn(8), "out/kernel": torch.randn(2, 3)}
    model |= {"gru/gates/kernel": torch.randn(5, 8), "gru/gates/bias": torch.randn(8)}
    for scope in scopes:
        model |= under(scope, {"kernel": torch.randn(4, 8), "bias": torch.randn(8)})
    with pytest.raises(ArgumentError, match=rf"Scopes with tensors of such shapes: dense, {name}\. If one is the cell"):
        convert(model, "tf1-basic", "torch")
    found = convert(model, "tf1-basic", "torch", layers=[name])
    assert torch.equal(found["weight_ih_l0"][2:4], model[f"{scopes[0]}/kernel"][:2, 4:6].t())
    assert len(found) == 4 * len(scopes)
    with pytest.raises(ArgumentError, match="must be those of an LSTM in the layout tf1-basic, got"):
        convert(model, "tf1-basic", "torch", layers=["nothing"])


def test_a_model_whose_name_says_lstm_may_have_other_layers():
    model = under("lstm_model/rnn/basic_lstm_cell", {"kernel": torch.randn(5, 8), "bias": torch.randn(8)})
    model |= under("lstm_model/dense", {"kernel": torch.randn(2, 10), "bias": torch.randn(10)})
    found = find_stacks(model, layout_named("tf1-basic"))
    assert [stack.name for stack in found.stacks] == ["lstm_model"]
    assert found.left == ("lstm_model/dense/kernel", "lstm_model/dense/bias")


def test_directions_that_are_stacks_of_their_own_are_refused():
    # What bidirectional_dynamic_rnn makes of two MultiRNNCells: the second layer reads one direction, not both.
    model = {}
    for direction in ("fw", "bw"):
        for layer, size in enumerate((3, 2)):
            tensors = {"kernel": torch.randn(size + 2, 8), "bias": torch.randn(8)}
            model |= under(f"bidirectional_rnn/{direction}/multi_rnn_cell/cell_{layer}/lstm_cell", tensors)
    with pytest.raises(ArgumentError, match="must be of 4 features, which the layer below gives, got 2"):
        convert(model, "tf1-basic", "torch")


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("weight_hh_l0", "lstm has no weight_hh_l0: it is truncated"),
        ("bias_hh_l1_reverse", "lstm has no bias_hh_l1_reverse: it is truncated"),
        ("l0", "lstm has no layer 0"),
        ("l1_reverse", "lstm has no reverse direction in layer 1"),
    ],
)
def test_missing_tensors_are_named(missing, message):
    module = torch.nn.LSTM(3, 2, 2, bidirectional=True)
    model = {f"lstm.{name}": tensor for name, tensor in module.state_dict().items()}
    cut = {name: tensor for name, tensor in model.items() if not (name.endswith(missing) or f"{missing}_" in name)}
    assert len(cut) < len(model)
    with pytest.raises((CheckpointError, ArgumentError), match=message):
        convert(cut, "torch", "keras")


def test_another_layout_is_suggested_where_nothing_is_found():
    with pytest.raises(ArgumentError, match="got weight_ih_l0, weight_hh_l0, bias_ih_l0, bias_hh_l0"):
        convert(torch.nn.LSTM(3, 2).state_dict(), "keras", "torch")
    with pytest.raises(ArgumentError, match="are those of the layout torch"):
        convert(torch.nn.LSTM(3, 2).state_dict(), "keras", "torch")
    with pytest.raises(ArgumentError, match=r"got nothing\. Check the file"):
        convert({}, "keras", "torch")


@pytest.mark.parametrize("layout", ["torch", "torch-gru", "torch-rnn"])
def test_the_layers_of_a_layouts_cell_are_taken_out_of_a_model(layout):
    modules = {
        "lstm": torch.nn.LSTM(3, 2, 2, bidirectional=True),
        "gru": torch.nn.GRU(3, 2, 2, bidirectional=True),
        "narrow": torch.nn.LSTM(3, 5, proj_size=2),
        "plain": torch.nn.RNN(3, 2),
    }
    model = {f"{name}.{key}": tensor for name, module in modules.items() for key, tensor in module.state_dict().items()}
    found = find_stacks(model, layout_named(layout))
    of_cell = {"torch": ["lstm", "narrow"], "torch-gru": ["gru"], "torch-rnn": ["plain"]}[layout]
    assert [stack.name for stack in found.stacks] == of_cell
    assert all(stack.cell == layout_named(layout).cell for stack in found.stacks)
    assert set(found.left) == {name for name in model if name.partition(".")[0] not in of_cell}


def test_the_gru_cells_of_keras_models_are_found():
    cell = keras(gates=3) | {"bias": torch.randn(2, 6)}
    model = under("bidirectional_1/forward_gru_2/gru_cell_7", cell)
    model |= under("bidirectional_1/backward_gru_2/gru_cell_8", cell) | under("lstm/lstm_cell", keras())
    tensors = convert(model, "keras-gru", "torch-gru")
    assert tensors.keys() == torch.nn.GRU(3, 2, bidirectional=True).state_dict().keys()
    with pytest.raises(ArgumentError, match="are those of the layout keras-gru"):
        convert(under("gru", cell), "keras", "torch")


def test_the_simple_rnn_cells_of_keras_models_are_found():
    cell = {"kernel": torch.randn(3, 2), "recurrent_kernel": torch.randn(2, 2), "bias": torch.randn(2)}
    model = under("bidirectional/forward_simple_rnn/simple_rnn_cell_1", cell)
    model |= under("bidirectional/backward_simple_rnn/simple_rnn_cell_2", cell) | under("lstm/lstm_cell", keras())
    tensors = convert(model, "keras-rnn", "torch-rnn")
    assert tensors.keys() == torch.nn.RNN(3, 2, bidirectional=True).state_dict().keys()
    with pytest.raises(ArgumentError, match="are those of the layout keras-rnn"):
        convert(under("simple_rnn", cell), "keras-gru", "torch-gru")


@pytest.mark.parametrize("module", [torch.nn.GRU(3, 2), torch.nn.RNN(3, 2)])
def test_other_recurrent_layers_of_pytorch_are_left_out(module):
    with pytest.raises(ArgumentError, match="those of an LSTM in the layout torch"):
        convert(module.state_dict(), "torch", "keras")


def test_a_bias_of_cudnn_under_the_layout_keras_is_explained():
    cudnn = convert(keras(), "keras", "keras-cudnn")
    with pytest.raises(ShapeError, match=r"bias \[16\]\. A bias of 8H is that of CuDNNLSTM: the layout keras-cudnn"):
        convert(cudnn, "keras", "torch")


@pytest.mark.parametrize("target", ["keras", "flax", "haste", "systemml"])
def test_no_layer_takes_the_name_of_another(target):
    layers = {"lstm": torch.nn.LSTM(3, 4, 2), "lstm_1": torch.nn.LSTM(3, 4)}
    model = {f"{name}.{key}": value for name, layer in layers.items() for key, value in layer.state_dict().items()}
    with pytest.raises(ArgumentError, match=r"names of the layers` must be different in the .*, got lstm_1.* twice"):
        convert(model, "torch", target)
    assert len(convert(model, "torch", "torch")) == len(model)
    assert convert(model, "torch", target, layers=["lstm"])


def test_two_tensors_of_one_name_are_refused_unless_they_are_the_same():
    model = under("lstm", keras())
    twice = model | under("params/lstm", keras())
    with pytest.raises(ArgumentError, match="`params/lstm/kernel` must be of another name than lstm/kernel"):
        convert(twice, "keras", "torch")
    same = model | {f"params/{name}": value.clone() for name, value in model.items()}
    assert convert(same, "keras", "torch").keys() == torch.nn.LSTM(3, 2).state_dict().keys()


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_weights_of_other_dtypes_are_refused(dtype):
    layer = {name: value.to(dtype) for name, value in torch.nn.LSTM(3, 2).state_dict().items()}
    with pytest.raises(DtypeError, match=rf"_l0` must be of a dtype of weights, .*, got {dtype}\. Convert it"):
        convert(layer, "torch", "keras")
    assert convert(under("lstm", keras()) | {"dense/kernel": torch.ones(3, 2).to(dtype)}, "keras", "torch")
