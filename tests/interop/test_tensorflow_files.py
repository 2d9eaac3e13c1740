"""Checkpoints of TensorFlow; most tests need it (pip install tensorflow-cpu) and are skipped in CI."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

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


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["checkpoint", "exported", "saved"])
def test_a_trained_model_of_tensorflow_is_read(tensorflow, tmp_path, kind):
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "tensorflow":
        pytest.skip("Keras has another backend: run this file alone, with KERAS_BACKEND=tensorflow")
    layers = [keras.layers.LSTM(3, return_sequences=True) for _ in range(3)]
    model = keras.Sequential([keras.Input((None, 3)), *layers])
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    if kind == "checkpoint":
        tensorflow.train.Checkpoint(model=model, optimizer=model.optimizer).write(str(tmp_path / "model"))
    elif kind == "exported":
        model.export(tmp_path / "model", verbose=False)
    else:
        tensorflow.saved_model.save(model, str(tmp_path / "model"))
    convert_file(tmp_path / "model", tmp_path / "lstm.npz", "keras", "torch", stack=True)
    found = read_file(tmp_path / "lstm.npz")
    for number, layer in enumerate(layers):
        np.testing.assert_array_equal(found[f"weight_hh_l{number}"], np.array(layer.get_weights()[1]).T)


class Objects:
    """A checkpoint of objects as TensorFlow's reader presents it: a trained model of Keras 2 or 3 in a SavedModel.

    The variables of the model are in the list `variables`, under their numbers; those of the optimizer in its own list,
    with names that differ from those of the model by what is before them.
    """

    def __init__(self, layers, prefix="variables"):
        variables = {
            f"{layer}/lstm_cell/{name}": value for layer, group in layers.items() for name, value in group.items()
        }
        slots = {f"Adam/m/{name}": np.zeros_like(value) for name, value in variables.items()}
        self.keys = {f"{prefix}/{number}{VALUE}": name for number, name in enumerate(variables)}
        own = {f"optimizer/_variables/{number}{VALUE}": name for number, name in enumerate(slots)}
        contents = variables | slots
        self.arrays = {key: contents[name] for key, name in (self.keys | own).items()}
        self.arrays |= {f"optimizer/_iterations{VALUE}": np.array(3), GRAPH: b"graph"}

        def node(children=(), key="", name=""):
            named = [SimpleNamespace(checkpoint_key=key, full_name=name)] if key else []
            children = [SimpleNamespace(local_name=name, node_id=number) for name, number in children]
            return SimpleNamespace(attributes=named, children=children)

        first, count = 3, len(self.keys)
        self.nodes = [
            node([("variables", 1), ("optimizer", 2)]),
            node([(str(number), first + number) for number in range(count)]),
            node([("_iterations", first), ("_variables", first + 2 * count)]),
            *(node(key=key, name=name) for key, name in (self.keys | own).items()),
            node([(str(number), first + count + number) for number in range(count)]),
        ]

    def get_variable_to_shape_map(self):
        return {name: list(np.shape(value)) for name, value in reversed(self.arrays.items())}

    def get_tensor(self, name):
        return self.arrays[name]

    def stand_in(self, monkeypatch):
        """Put modules in the place of TensorFlow that read this checkpoint."""
        graph = SimpleNamespace(FromString=lambda _: SimpleNamespace(nodes=self.nodes))
        protocol = SimpleNamespace(trackable_object_graph_pb2=SimpleNamespace(TrackableObjectGraph=graph))
        train, errors = SimpleNamespace(load_checkpoint=lambda _: self), SimpleNamespace(OpError=OSError)
        monkeypatch.setitem(sys.modules, "tensorflow", SimpleNamespace(train=train, errors=errors))
        monkeypatch.setitem(sys.modules, "tensorflow.core", SimpleNamespace())
        monkeypatch.setitem(sys.modules, "tensorflow.core.protobuf", protocol)


VALUE, GRAPH = "/.ATTRIBUTES/VARIABLE_VALUE", "_CHECKPOINTABLE_OBJECT_GRAPH"


def of_keras(number):
    generator = np.random.default_rng(number)
    shapes = {"kernel": (2, 8), "recurrent_kernel": (2, 8), "bias": (8,)}
    return {name: generator.standard_normal(shape).astype("f4") for name, shape in shapes.items()}


@pytest.fixture
def saved_model(tmp_path):
    folder = tmp_path / "saved"
    (folder / "variables").mkdir(parents=True)
    (folder / "variables" / "variables.index").touch()
    return folder


def test_variables_under_numbers_have_the_names_of_their_model(tmp_path, saved_model, monkeypatch):
    layers = {f"model/lstm_{number}" if number else "model/lstm": of_keras(number) for number in range(12)}
    Objects(layers).stand_in(monkeypatch)
    done = convert_file(saved_model, tmp_path / "lstm.npz", "keras", "torch", stack=True)
    assert str(done.stacks[0]) == "12 layers, 1 direction, I 2, H 2"
    assert done.left == ()
    found = read_file(tmp_path / "lstm.npz")
    for number, layer in enumerate(layers.values()):
        np.testing.assert_array_equal(found[f"weight_hh_l{number}"], layer["recurrent_kernel"].T)


def test_names_that_contradict_the_order_of_the_variables_tell_none(tmp_path, saved_model, monkeypatch):
    Objects({"model/lstm_7": of_keras(0), "model/lstm_3": of_keras(1)}).stand_in(monkeypatch)
    with pytest.raises(ArgumentError, match="must be numbered in the order of the model"):
        convert_file(saved_model, tmp_path / "lstm.npz", "keras", "torch", stack=True)


@pytest.mark.parametrize("options", [{}, {"activation": "relu"}, {"return_sequences": False}])
def test_the_config_in_a_saved_model_of_keras_2_is_read(tmp_path, saved_model, monkeypatch, options):
    Objects({"second": of_keras(0), "first": of_keras(1)}).stand_in(monkeypatch)
    entries = [
        {"class_name": "LSTM", "config": {"name": name, "return_sequences": True} | options}
        for name in ("second", "first")
    ]
    root = {"class_name": "Sequential", "config": {"name": "model", "layers": entries}}
    # Of each object its path, what it is, and its metadata as JSON, with their lengths before them
    content = b'\n\xee\x1e\x1a\x04root"\x14_tf_keras_sequential*\xe0\x1e' + json.dumps(root).encode() + b"2\x02"
    (saved_model / "keras_metadata.pb").write_bytes(content)
    files = (saved_model, tmp_path / "lstm.npz", "keras", "torch")
    if options:
        message = (
            "got activation='relu'" if "activation" in options else "each one reads the outputs of the one before it"
        )
        with pytest.raises(ArgumentError, match=message):
            convert_file(*files, stack=True)
        return
    convert_file(*files, stack=True)
    np.testing.assert_array_equal(read_file(files[1])["weight_ih_l0"], of_keras(0)["kernel"].T)


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
