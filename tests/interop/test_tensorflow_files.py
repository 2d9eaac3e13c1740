"""Checkpoints of TensorFlow; most tests need it (pip install tensorflow-cpu) and are skipped in CI."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from gatewise.contract.errors import ArgumentError, CheckpointError, MissingExtra
from gatewise.interop.convert import convert
from gatewise.interop.files.formats import convert_file, read_file


@pytest.fixture
def tensorflow():
    return pytest.importorskip("tensorflow")


@pytest.fixture
def source(tmp_path):
    """Weights of a bidirectional stack, and the same in a file."""
    weights = torch.nn.LSTM(3, 2, 2, bidirectional=True).state_dict()
    np.savez(tmp_path / "lstm.npz", **{name: tensor.numpy() for name, tensor in weights.items()})
    return tmp_path / "lstm.npz"


def test_without_tensorflow_there_is_one_sentence_and_nothing_is_written(tmp_path, source, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    for suffix in ("index", "data-00000-of-00001"):
        (tmp_path / f"model.ckpt-100.{suffix}").write_bytes(b"")
    before = sorted(tmp_path.iterdir())
    expected = "needs `tensorflow`, which is not installed. Run: pip install tensorflow-cpu"
    with pytest.raises(MissingExtra, match=expected):
        convert_file(tmp_path / "model.ckpt-100", tmp_path / "out.npz", "tf1-cudnn", "torch")
    with pytest.raises(MissingExtra, match=expected):
        convert_file(source, tmp_path / "new.ckpt", "torch", "tf1-cudnn")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("layout", ["keras", "keras-cudnn"])
def test_a_checkpoint_that_keras_would_not_load_is_not_written(tmp_path, source, layout):
    message = (
        f"`the layout` must be one of TensorFlow 1 in a .ckpt file, got {layout}. Keras finds variables by the obj"
    )
    with pytest.raises(ArgumentError, match=message):
        convert_file(source, tmp_path / "model.ckpt", "torch", layout)


def test_a_checkpoint_that_is_not_there(tmp_path):
    with pytest.raises(CheckpointError, match=r"model\.ckpt"):
        read_file(tmp_path / "model.ckpt")


@pytest.mark.parametrize("layout", ["tf1-cudnn", "tf1-basic"])
def test_a_round_trip_is_exact(tensorflow, tmp_path, source, layout):
    convert_file(source, tmp_path / "model.ckpt", "torch", layout)
    names = {name for name, _ in tensorflow.train.list_variables(str(tmp_path / "model.ckpt"))}
    assert names == convert(read_file(source), "torch", layout).keys()
    convert_file(tmp_path / "model.ckpt", tmp_path / "again.ckpt", layout, layout)
    first, second = read_file(tmp_path / "model.ckpt"), read_file(tmp_path / "again.ckpt.index")
    assert first.keys() == second.keys()
    assert all(torch.equal(second[name], tensor) for name, tensor in first.items())
    assert not [path for path in tmp_path.iterdir() if "unfinished" in path.name]


def test_a_checkpoint_of_the_saver_of_tensorflow_1_is_read(tensorflow, tmp_path):
    v1 = tensorflow.compat.v1
    kernel, bias = np.random.default_rng(0).standard_normal((5, 8)).astype("f4"), np.arange(8, dtype="f4")
    with v1.Graph().as_default(), v1.Session() as session:
        with v1.variable_scope("rnn/basic_lstm_cell"):
            v1.get_variable("kernel", initializer=kernel, use_resource=False)
            v1.get_variable("bias", initializer=bias, use_resource=False)
        v1.train.get_or_create_global_step()
        session.run(v1.global_variables_initializer())
        v1.train.Saver().save(session, str(tmp_path / "model.ckpt"), global_step=1000)
    convert_file(tmp_path / "model.ckpt-1000", tmp_path / "lstm.npz", "tf1-basic", "keras")
    result = read_file(tmp_path / "lstm.npz")
    np.testing.assert_array_equal(result["kernel"][:, 2:4], kernel[:3, 4:6])
    np.testing.assert_array_equal(result["bias"], [0, 1, 5, 6, 2, 3, 6, 7])


def test_a_checkpoint_of_tensorflow_2_is_read(tensorflow, tmp_path):
    class Cell(tensorflow.Module):
        def __init__(self):
            super().__init__()
            self.kernel = tensorflow.Variable(tensorflow.ones((3, 8)))
            self.recurrent_kernel = tensorflow.Variable(tensorflow.ones((2, 8)))
            self.bias = tensorflow.Variable(tensorflow.range(8, dtype=tensorflow.float32))

    tensorflow.train.Checkpoint(lstm=Cell()).write(str(tmp_path / "new"))
    convert_file(tmp_path / "new", tmp_path / "lstm.npz", "keras", "torch")
    np.testing.assert_array_equal(read_file(tmp_path / "lstm.npz")["bias_ih_l0"], np.arange(8))


def test_layers_of_a_checkpoint_are_stacked_in_the_order_of_their_numbers(tensorflow, tmp_path):
    kernels = [np.random.default_rng(number).standard_normal((4, 8)).astype("f4") for number in range(12)]
    content = {f"lstm_{number}/basic_lstm_cell/kernel": kernel for number, kernel in enumerate(kernels)}
    content |= {f"lstm_{number}/basic_lstm_cell/bias": np.zeros(8, "f4") for number in range(12)}
    tensorflow.raw_ops.SaveV2(
        prefix=str(tmp_path / "model.ckpt"),
        tensor_names=list(content),
        shape_and_slices=[""] * len(content),
        tensors=list(content.values()),
    )
    convert_file(tmp_path / "model.ckpt", tmp_path / "lstm.npz", "tf1-cudnn", "torch", stack=True)
    result = read_file(tmp_path / "lstm.npz")
    for number, kernel in enumerate(kernels):
        np.testing.assert_array_equal(result[f"weight_ih_l{number}"][:2], kernel[:2, :2].T)


@pytest.mark.parametrize("kind", ["checkpoint", "exported", "saved"])
def test_a_trained_model_of_tensorflow_is_read(tensorflow, tmp_path, kind):
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "tensorflow":
        pytest.skip("Keras has another backend: run this file alone, with KERAS_BACKEND=tensorflow")
    layers = [keras.layers.LSTM(3, return_sequences=True) for _ in range(11)]
    model = keras.Sequential([keras.Input((None, 3)), *layers])
    model.compile("adam", "mse")
    model.fit(np.ones((2, 4, 3)), np.ones((2, 4, 3)), verbose=0)
    if kind == "checkpoint":
        tensorflow.train.Checkpoint(model=model, optimizer=model.optimizer).write(str(tmp_path / "model"))
    elif kind == "exported":
        model.export(tmp_path / "model", verbose=False)
    else:
        tensorflow.saved_model.save(model, str(tmp_path / "model"))
    convert_file(tmp_path / "model", tmp_path / "lstm.npz", "keras", "torch", stack=True)
    module = torch.nn.LSTM(3, 3, 11, batch_first=True)
    module.load_state_dict(read_file(tmp_path / "lstm.npz"))
    for number, layer in enumerate(layers):
        np.testing.assert_array_equal(module.state_dict()[f"weight_hh_l{number}"], np.array(layer.get_weights()[1]).T)


def test_truncated_and_foreign_checkpoints(tensorflow, tmp_path, source):
    convert_file(source, tmp_path / "model.ckpt", "torch", "tf1-cudnn")
    target = tmp_path / "target.npz"
    for part in ("index", "data-00000-of-00001"):
        path = tmp_path / f"model.ckpt.{part}"
        good = path.read_bytes()
        for bad in (good[: len(good) // 2], b"not a checkpoint" * 99, b""):
            path.write_bytes(bad)
            with pytest.raises(CheckpointError, match="is truncated or not a TensorFlow checkpoint"):
                convert_file(tmp_path / "model.ckpt", target, "tf1-cudnn", "torch")
            assert not target.exists()
        path.write_bytes(good)
    convert_file(tmp_path / "model.ckpt", target, "tf1-cudnn", "torch")
    assert target.exists()
