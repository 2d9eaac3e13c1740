"""Models of Keras whose config says more than their weights: the order of layers, their connections, their options."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gatewise.contract.errors import ArgumentError
from gatewise.interop.files.formats import convert_file, read_file

pytest.importorskip("gatewise.interop.keras", exc_type=ImportError)

import h5py

from gatewise.interop.keras.backend import keras_on_torch
from tests.pairwise import exhaustive

keras = keras_on_torch()
layers = keras.layers

pytestmark = pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5")

WHOLE = pytest.mark.parametrize("suffix", [".keras", ".h5"])
# The structure of a model is the same in both.
STRUCTURES = pytest.mark.parametrize("suffix", [".keras", *exhaustive(".h5")])


def lstm(units=3, **options):
    return layers.LSTM(units, return_sequences=True, **options)


def sequential(*content, shape=(None, 3)):
    model = keras.Sequential([keras.Input(shape), *content])
    generator = np.random.default_rng(0)
    model.set_weights([generator.standard_normal(weight.shape).astype("f4") for weight in model.get_weights()])
    return model


def functional(build):
    inputs = keras.Input((None, 3))
    return keras.Model(inputs, build(inputs))


def named_against_their_order(inputs):
    return lstm(name="first")(layers.Dropout(0.5)(lstm(name="second")(inputs)))


def in_a_function_of_its_own(inputs):
    return lstm(name="a")(functional(lambda inner: lstm(name="c")(lstm(name="b")(inner)))(inputs))


STACKS = {
    "a model in a model": lambda: sequential(keras.Sequential([lstm()]), lstm()),
    "models three deep": lambda: sequential(lstm(), keras.Sequential([lstm(), keras.Sequential([lstm()])]), lstm()),
    "an RNN of a cell": lambda: sequential(layers.RNN(layers.LSTMCell(3), return_sequences=True), lstm()),
    "an RNN of cells": lambda: sequential(
        layers.RNN([layers.LSTMCell(3), layers.LSTMCell(3)], return_sequences=True), lstm()
    ),
    "names against the order": lambda: functional(named_against_their_order),
    "a function in a function": lambda: functional(in_a_function_of_its_own),
    "twelve layers": lambda: sequential(*(lstm() for _ in range(12))),
    "a masked input": lambda: functional(lambda inputs: lstm()(lstm()(layers.Masking()(inputs)))),
    "names of directions": lambda: sequential(lstm(name="forward"), lstm(name="backward")),
}


@STRUCTURES
@pytest.mark.parametrize("model", STACKS)
def test_layers_are_stacked_in_the_order_of_the_model(tmp_path, suffix, model):
    model = STACKS[model]()
    model.save(tmp_path / f"model{suffix}")
    done = convert_file(tmp_path / f"model{suffix}", tmp_path / "lstm.npz", "keras", "torch", stack=True)
    module = torch.nn.LSTM(3, 3, len(done.stacks[0].layers), batch_first=True)
    module.load_state_dict(read_file(tmp_path / "lstm.npz"))
    x = np.random.default_rng(1).standard_normal((2, 5, 3)).astype("f4")
    np.testing.assert_allclose(module(torch.from_numpy(x))[0].detach(), model.predict(x, verbose=0), rtol=0, atol=1e-6)


NO_STACKS = {
    "beside each other": lambda: functional(lambda inputs: layers.Add()([lstm()(inputs), lstm()(inputs)])),
    "a layer between": lambda: sequential(lstm(), layers.Dense(3), lstm()),
    "another recurrent layer between": lambda: sequential(lstm(), layers.GRU(3, return_sequences=True), lstm()),
    "the last output only": lambda: sequential(layers.LSTM(3), layers.RepeatVector(4), lstm()),
    "a layer called twice": lambda: functional(lambda inputs: _twice(lstm(), lstm(), inputs)),
    "states of the layer below": lambda: functional(_with_states),
    "a layer of other sequences": lambda: sequential(layers.TimeDistributed(layers.LSTM(3)), lstm(), shape=(4, 5, 3)),
}


def _twice(one, other, inputs):
    return other(one(one(inputs)))


def _with_states(inputs):
    outputs, *states = lstm(return_state=True)(inputs)
    return lstm()(outputs, initial_state=states)


@STRUCTURES
@pytest.mark.parametrize("model", NO_STACKS)
def test_layers_that_are_no_stack_are_not_stacked(tmp_path, suffix, model):
    NO_STACKS[model]().save(tmp_path / f"model{suffix}")
    files = (tmp_path / f"model{suffix}", tmp_path / "lstm.npz", "keras")
    with pytest.raises(ArgumentError, match="must be layers of which each one reads the outputs of the one before it"):
        convert_file(*files, "torch", stack=True)
    assert not (tmp_path / "lstm.npz").exists()
    done = convert_file(*files, "torch")
    assert len(done.stacks) == 2
    named = [stack.name for stack in done.stacks]
    assert len(convert_file(*files, "torch", stack=True, layers=named).stacks[0].layers) == 2


@pytest.mark.parametrize("target", [".keras", ".weights.h5", ".h5"])
def test_a_keras_file_is_not_written_in_an_unknown_order(tmp_path, target):
    sequential(lstm(), lstm()).save_weights(tmp_path / "good.weights.h5")
    sequential(keras.Sequential([lstm()]), lstm()).save_weights(tmp_path / "model.weights.h5")
    convert_file(tmp_path / "good.weights.h5", tmp_path / f"target{target}", "keras", "keras")
    with pytest.raises(ArgumentError, match="must be numbered in the order of the model"):
        convert_file(tmp_path / "model.weights.h5", tmp_path / f"target{target}", "keras", "keras")


def test_weights_are_stacked_by_the_numbers_in_the_file_and_not_by_names(tmp_path):
    model = sequential(lstm(name="lstm_8"), lstm(name="lstm_7"))
    model.save_weights(tmp_path / "model.weights.h5")
    model.save(tmp_path / "model.h5")
    with h5py.File(tmp_path / "model.h5", "a") as file:
        del file.attrs["model_config"]
    files = (tmp_path / "model.weights.h5", tmp_path / "lstm.npz")
    convert_file(*files, "keras", "torch", stack=True)
    np.testing.assert_array_equal(read_file(files[1])["weight_ih_l0"], model.get_weights()[0].T)
    # The older file has the same order, but nothing that tells whether it, or the numbers, are the order of the model.
    with pytest.raises(ArgumentError, match=r"numbered in the order of the model.*got lstm_8.*lstm_7"):
        convert_file(tmp_path / "model.h5", files[1], "keras", "torch", stack=True)


def test_layers_of_a_weights_file_are_not_taken_for_directions_by_their_names(tmp_path):
    sequential(lstm(name="forward"), lstm(name="backward")).save_weights(tmp_path / "model.weights.h5")
    done = convert_file(tmp_path / "model.weights.h5", tmp_path / "lstm.npz", "keras", "torch")
    assert [f"{stack.name}: {stack.directions}" for stack in done.stacks] == ["forward: 1", "backward: 1"]
    sequential(layers.Bidirectional(lstm(), name="backward")).save_weights(tmp_path / "model.weights.h5")
    done = convert_file(tmp_path / "model.weights.h5", tmp_path / "lstm.npz", "keras", "torch")
    assert [stack.directions for stack in done.stacks] == [2]


OPTIONS = {
    "activation='relu'": lambda: lstm(activation="relu"),
    "recurrent_activation='hard_sigmoid'": lambda: lstm(recurrent_activation="hard_sigmoid"),
    "recurrent_activation='tanh'": lambda: layers.RNN(layers.LSTMCell(3, recurrent_activation="tanh")),
    "go_backwards=True": lambda: lstm(go_backwards=True),
    "merge_mode='sum'": lambda: layers.Bidirectional(lstm(), merge_mode="sum"),
    "activation='softsign'": lambda: layers.Bidirectional(
        lstm(), backward_layer=lstm(activation="softsign", go_backwards=True)
    ),
}


@STRUCTURES
@pytest.mark.parametrize("option", OPTIONS)
def test_options_that_weights_do_not_express_are_refused(tmp_path, suffix, option):
    sequential(OPTIONS[option]()).save(tmp_path / f"model{suffix}")
    with pytest.raises(ArgumentError, match=rf"the options of .*got {option}"):
        convert_file(tmp_path / f"model{suffix}", tmp_path / "lstm.npz", "keras", "torch")
    assert not (tmp_path / "lstm.npz").exists()


@WHOLE
def test_a_layer_with_such_options_is_left_out_when_the_others_are_named(tmp_path, suffix):
    sequential(lstm(name="plain"), lstm(name="other", activation="relu")).save(tmp_path / f"model{suffix}")
    done = convert_file(tmp_path / f"model{suffix}", tmp_path / "lstm.npz", "keras", "torch", layers=["plain"])
    assert [stack.name for stack in done.stacks] == ["plain"]


@pytest.mark.parametrize("option", ["activation", "recurrent_activation", "reset_after"])
def test_options_of_a_gru_are_refused(tmp_path, option):
    value = {"activation": "relu", "recurrent_activation": "tanh", "reset_after": False}[option]
    sequential(layers.GRU(3, use_bias=False, **{option: value})).save(tmp_path / "model.keras")
    with pytest.raises(ArgumentError, match=f"got {option}={value!r}"):
        convert_file(tmp_path / "model.keras", tmp_path / "gru.npz", "keras-gru", "torch-gru")


@pytest.mark.parametrize("unit_forget_bias", [True, False])
def test_initial_values_are_in_the_weights(tmp_path, unit_forget_bias):
    model = keras.Sequential([keras.Input((None, 3)), lstm(unit_forget_bias=unit_forget_bias)])
    model.save(tmp_path / "model.keras")
    convert_file(tmp_path / "model.keras", tmp_path / "lstm.npz", "keras", "torch")
    assert read_file(tmp_path / "lstm.npz")["bias_ih_l0"].tolist() == [0] * 3 + [float(unit_forget_bias)] * 3 + [0] * 6


def test_a_layer_that_reads_backwards_is_the_second_one_of_a_pair(tmp_path):
    def build(inputs):
        forward, backward = lstm(name="one")(inputs), lstm(name="two", go_backwards=True)(inputs)
        return layers.Concatenate()([forward, layers.Lambda(lambda y: keras.ops.flip(y, 1))(backward)])

    model = functional(build)
    model.save(tmp_path / "model.keras")
    files = (tmp_path / "model.keras", tmp_path / "lstm.npz", "keras", "torch")
    convert_file(*files, pair=True)
    module = torch.nn.LSTM(3, 3, bidirectional=True, batch_first=True)
    module.load_state_dict(read_file(tmp_path / "lstm.npz"))
    x = np.random.default_rng(1).standard_normal((2, 5, 3)).astype("f4")
    np.testing.assert_allclose(module(torch.from_numpy(x))[0].detach(), model.predict(x, verbose=0), rtol=0, atol=1e-6)
    with pytest.raises(ArgumentError, match="can only be the second one of a pair"):
        convert_file(*files, layers=["two", "one"], pair=True)
    sequential(lstm(), lstm()).save(tmp_path / "model.keras")
    with pytest.raises(ArgumentError, match="must be two layers, of which one reads backwards"):
        convert_file(*files, pair=True)


def test_an_rnn_that_computes_relu_says_so(tmp_path):
    model = sequential(layers.SimpleRNN(4, activation="relu", return_sequences=True))
    model.save(tmp_path / "model.keras")
    done = convert_file(tmp_path / "model.keras", tmp_path / "rnn.npz", "keras-rnn", "torch-rnn")
    assert str(done.stacks[0]) == "1 layer, 1 direction, I 3, H 4, ReLU"
    convert_file(tmp_path / "model.keras", tmp_path / "again.keras", "keras-rnn", "keras-rnn")
    x = np.random.default_rng(1).standard_normal((2, 5, 3)).astype("f4")
    again = keras.saving.load_model(tmp_path / "again.keras")
    np.testing.assert_array_equal(again.predict(x, verbose=0), model.predict(x, verbose=0))
    sequential(
        layers.SimpleRNN(3, activation="relu", return_sequences=True), layers.SimpleRNN(3, return_sequences=True)
    ).save(tmp_path / "mixed.keras")
    with pytest.raises(ArgumentError, match="`the RNNs to combine` must be of one nonlinearity"):
        convert_file(tmp_path / "mixed.keras", tmp_path / "rnn.npz", "keras-rnn", "torch-rnn", stack=True)


@WHOLE
def test_a_convolutional_lstm_beside_an_lstm_is_left_out(tmp_path, suffix):
    model = sequential(layers.ConvLSTM2D(3, 2), layers.Reshape((-1, 3)), lstm(4), shape=(4, 5, 5, 2))
    model.save(tmp_path / f"model{suffix}")
    done = convert_file(tmp_path / f"model{suffix}", tmp_path / "lstm.npz", "keras", "torch")
    assert str(done.stacks[0]) == "1 layer, 1 direction, I 3, H 4"
    assert len(done.left) == 3


@WHOLE
def test_the_keras_layer_of_gatewise_is_known(tmp_path, suffix):
    from gatewise.interop.keras import LSTM

    sequential(keras.Sequential([LSTM(3, return_sequences=True)]), LSTM(3)).save(tmp_path / f"model{suffix}")
    files = (tmp_path / f"model{suffix}", tmp_path / "lstm.npz", "keras", "torch")
    assert len(convert_file(*files, stack=True).stacks[0].layers) == 2
    sequential(LSTM(3, go_backwards=True)).save(tmp_path / f"model{suffix}")
    with pytest.raises(ArgumentError, match="got go_backwards=True"):
        convert_file(*files)


def test_a_config_of_the_oldest_form_is_read(tmp_path):
    """A Sequential model of Keras 2.1 is a list, and a tensor of a function is [name, node, tensor, options]."""
    from gatewise.interop.files.keras_config import described

    entry = {"class_name": "LSTM", "config": {"name": "lstm_1", "recurrent_activation": "hard_sigmoid"}}
    assert (
        described({"class_name": "Sequential", "config": [entry]})[0].refused == "recurrent_activation='hard_sigmoid'"
    )
    entries = [
        {"class_name": "InputLayer", "name": "in", "config": {"name": "in"}, "inbound_nodes": []},
        *(
            {
                "class_name": "LSTM",
                "name": name,
                "config": {"name": name, "return_sequences": True},
                "inbound_nodes": [[[source, 0, 0, {}]]],
            }
            for name, source in (("x", "in"), ("w", "x"))
        ),
    ]
    config = {"name": "model", "layers": entries, "input_layers": [["in", 0, 0]], "output_layers": [["w", 0, 0]]}
    found = described({"class_name": "Model", "config": config})
    assert [(layer.places[0], layer.below) for layer in found] == [(("x",), None), (("w",), 0)]
