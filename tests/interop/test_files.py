"""Files of every kind: read as Keras and others write them, written as they read them, whole or not at all."""

from __future__ import annotations

import io
import itertools
import os
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from gatewise.contract.errors import ArgumentError, CheckpointError, MissingExtra, ShapeError
from gatewise.interop.convert import convert
from gatewise.interop.files import arrays, formats, hdf5
from gatewise.interop.files.formats import convert_file, read_file

pytest.importorskip("gatewise.interop.keras", exc_type=ImportError)

import h5py
import safetensors.torch as safetensors

from gatewise.interop.keras.backend import keras_on_torch
from tests.pairwise import each_value

keras = keras_on_torch()

SUFFIXES = (".safetensors", ".npz", ".keras", ".weights.h5", ".h5")


LAYOUTS = {
    "LSTM": ("keras", "torch"),
    "GRU": ("keras-gru", "torch-gru"),
    "SimpleRNN": ("keras-rnn", "torch-rnn"),
}
MODULES = {"LSTM": torch.nn.LSTM, "GRU": torch.nn.GRU, "SimpleRNN": torch.nn.RNN}


def keras_model(layers=2, bidirectional=True, features=3, units=4, cell="LSTM"):
    """Return a Keras model of stacked recurrent layers with random weights, biases too."""
    model = keras.Sequential([keras.Input((None, features))])
    for _ in range(layers):
        layer = getattr(keras.layers, cell)(units, return_sequences=True)
        model.add(keras.layers.Bidirectional(layer) if bidirectional else layer)
    generator = np.random.default_rng(0)
    model.set_weights([generator.standard_normal(weight.shape).astype("f4") / 2 for weight in model.get_weights()])
    return model


def outputs_of(path, x, layers=2, bidirectional=True, cell="LSTM"):
    """Return what a module of PyTorch computes with the weights of a file."""
    module = MODULES[cell](x.shape[-1], 4, layers, bidirectional=bidirectional, batch_first=True)
    module.load_state_dict(read_file(path))
    return module(torch.from_numpy(x))[0].detach().numpy()


@pytest.fixture
def x():
    return np.random.default_rng(1).standard_normal((2, 7, 3)).astype("f4")


@pytest.mark.parametrize(
    ("cell", "suffix", "bidirectional"),
    each_value([*itertools.product(LAYOUTS, [".keras", ".weights.h5", ".h5"], [False, True])]),
    ids=str,
)
@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5")
def test_a_model_of_keras_computes_the_same_in_pytorch(tmp_path, x, suffix, bidirectional, cell):
    model = keras_model(bidirectional=bidirectional, cell=cell)
    source, target = tmp_path / f"model{suffix}", tmp_path / "lstm.safetensors"
    (model.save_weights if suffix == ".weights.h5" else model.save)(source)
    done = convert_file(source, target, *LAYOUTS[cell], stack=True)
    assert str(done.stacks[0]) == f"2 layers, {1 + bidirectional} direction{'s' * bidirectional}, I 3, H 4"
    assert done.left == ()
    np.testing.assert_allclose(
        outputs_of(target, x, bidirectional=bidirectional, cell=cell), model.predict(x, verbose=0), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("suffix", [".keras", ".weights.h5"])
def test_a_keras_gru_that_resets_before_its_product_is_refused(tmp_path, suffix):
    model = keras.Sequential([keras.Input((None, 3)), keras.layers.GRU(4, reset_after=False)])
    (model.save_weights if suffix == ".weights.h5" else model.save)(tmp_path / f"model{suffix}")
    with pytest.raises(ShapeError, match="A bias of 3H is that of reset_after=False, which multiplies the state by"):
        convert_file(tmp_path / f"model{suffix}", tmp_path / "gru.npz", "keras-gru", "torch-gru")
    assert not (tmp_path / "gru.npz").exists()


@pytest.mark.parametrize(
    ("cell", "suffix", "bidirectional"),
    each_value([*itertools.product(LAYOUTS, [".keras", ".weights.h5", ".h5"], [False, True])]),
    ids=str,
)
def test_keras_reads_what_is_written_and_computes_the_same(tmp_path, x, suffix, bidirectional, cell):
    torch.manual_seed(0)
    module = MODULES[cell](3, 4, 2, bidirectional=bidirectional, batch_first=True)
    source, target = tmp_path / "torch.safetensors", tmp_path / f"model{suffix}"
    safetensors.save_file(module.state_dict(), source)
    convert_file(source, target, *reversed(LAYOUTS[cell]))
    if suffix == ".keras":
        model = keras.saving.load_model(target)
    else:
        model = keras_model(bidirectional=bidirectional, cell=cell)
        model.load_weights(target)
    expected = module(torch.from_numpy(x))[0].detach()
    np.testing.assert_allclose(model.predict(x, verbose=0), expected, rtol=0, atol=1e-6)


def test_a_file_of_cudnn_weights_computes_what_the_keras_layer_does(tmp_path, x):
    """The file is the one that Keras 2 writes for CuDNNLSTM: named weights, packed as Keras documents it."""
    model = keras_model()
    with h5py.File(tmp_path / "old.h5", "w") as file:
        file.attrs["layer_names"] = [b"bidirectional", b"bidirectional_1", b"dropout"]
        file.attrs["keras_version"] = b"2.2.4"
        file.create_group("dropout").attrs["weight_names"] = np.zeros(0, "S1")
        weights = iter(model.get_weights())
        for layer in ("bidirectional", "bidirectional_1"):
            group = file.create_group(layer)
            written = []
            for name in (f"{layer}/forward_cu_dnnlstm", f"{layer}/backward_cu_dnnlstm"):
                kernel, recurrent, bias = (next(weights) for _ in range(3))
                packed = {
                    "kernel": np.hstack([gate.T.reshape(gate.shape) for gate in np.hsplit(kernel, 4)]),
                    "recurrent_kernel": np.hstack([gate.T for gate in np.hsplit(recurrent, 4)]),
                    "bias": np.tile(bias / 2, 2),
                }
                for variable, array in packed.items():
                    written.append(f"{name}/{variable}:0".encode())
                    group[written[-1]] = array
            group.attrs["weight_names"] = written
    convert_file(tmp_path / "old.h5", tmp_path / "lstm.npz", "keras-cudnn", "torch", stack=True)
    np.testing.assert_allclose(outputs_of(tmp_path / "lstm.npz", x), model.predict(x, verbose=0), rtol=0, atol=1e-6)
    convert_file(tmp_path / "lstm.npz", tmp_path / "again.h5", "torch", "keras-cudnn")
    with h5py.File(tmp_path / "old.h5") as old, h5py.File(tmp_path / "again.h5") as new:
        for layer in ("bidirectional", "bidirectional_1"):
            for before, after in zip(old[layer].attrs["weight_names"], new[layer].attrs["weight_names"], strict=True):
                np.testing.assert_array_equal(old[layer][before], new[layer][after])


def test_the_names_that_a_user_gave_are_kept(tmp_path):
    inputs = keras.Input((5, 3))
    first = keras.layers.LSTM(4, return_sequences=True, name="words")(inputs)
    second = keras.layers.Bidirectional(keras.layers.LSTM(2), name="sentences")(first)
    model = keras.Model(inputs, keras.layers.Dense(1, name="out")(second))
    model.compile("adam", "mse")
    model.fit(np.zeros((2, 5, 3)), np.zeros((2, 1)), verbose=0)  # the file then has the optimizer's variables too
    model.save(tmp_path / "model.keras")
    done = convert_file(tmp_path / "model.keras", tmp_path / "all.npz", "keras", "torch")
    assert [stack.name for stack in done.stacks] == ["words", "sentences"]
    assert done.left == ("out/0", "out/1")
    one = convert_file(tmp_path / "model.keras", tmp_path / "one.npz", "keras", "torch", layers=["words"])
    assert [stack.name for stack in one.stacks] == ["words"]
    np.testing.assert_array_equal(
        read_file(tmp_path / "one.npz")["weight_ih_l0"], model.get_layer("words").get_weights()[0].T
    )


@pytest.mark.parametrize(
    ("dtype", "suffix"),
    each_value([*itertools.product([torch.float32, torch.float64, torch.float16, torch.bfloat16], SUFFIXES)]),
    ids=str,
)
def test_round_trips_through_files_are_exact(tmp_path, suffix, dtype):
    source, middle, target = tmp_path / "a.safetensors", tmp_path / f"b{suffix}", tmp_path / "c.safetensors"
    single_bias = convert(torch.nn.LSTM(3, 2, 12).to(dtype).state_dict(), "torch", "keras")
    safetensors.save_file(single_bias, source)
    if dtype == torch.bfloat16 and suffix in (".npz", ".h5"):
        with pytest.raises(ArgumentError, match=r"of a dtype that NumPy has, got torch\.bfloat16"):
            convert_file(source, middle, "keras", "keras")
        return
    convert_file(source, middle, "keras", "keras")
    convert_file(middle, target, "keras", "keras")
    result = safetensors.load_file(target)
    assert result.keys() == single_bias.keys()
    for name, tensor in single_bias.items():
        assert result[name].dtype == dtype
        assert torch.equal(result[name], tensor)


@pytest.fixture
def sources(tmp_path):
    """A good file of every kind, in the layout keras."""
    paths = {}
    weights = convert(torch.nn.LSTM(30, 20).state_dict(), "torch", "keras")
    safetensors.save_file(
        {name: tensor.contiguous() for name, tensor in weights.items()}, tmp_path / "first.safetensors"
    )
    for suffix in SUFFIXES:
        paths[suffix] = tmp_path / f"good{suffix}"
        convert_file(tmp_path / "first.safetensors", paths[suffix], "keras", "keras")
    return paths


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_truncated_and_foreign_files_are_errors_and_nothing_is_written(tmp_path, sources, suffix):
    good = sources[suffix].read_bytes()
    target = tmp_path / "target.npz"
    target.write_bytes(b"before")
    bad = {f"cut at {share}": good[: int(len(good) * share)] for share in (0, 0.001, 0.2, 0.5, 0.9, 0.999)}
    bad |= {"text": b"not a checkpoint at all" * 99, "a zip": _zip(b"x"), "other bytes": os.urandom(1000)}
    for what, content in bad.items():
        path = tmp_path / f"bad{suffix}"
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"bad\..*(truncated|not a)|the LSTM has no") as raised:
            convert_file(path, target, "keras", "torch")
        assert "Take another copy." in str(raised.value), what
        assert target.read_bytes() == b"before", what
    assert sorted(path.name for path in tmp_path.iterdir() if "unfinished" in path.name) == []


@pytest.mark.parametrize("suffix", [".npz", ".keras"])
def test_an_archive_that_is_encrypted_or_compressed_unusually_is_refused(tmp_path, sources, suffix):
    path = tmp_path / f"bad{suffix}"
    for local, central, value in ((6, 8, 1), (8, 10, 99)):  # the flag of encryption; the number of the compression
        content = bytearray(sources[suffix].read_bytes())
        for signature, place in ((b"PK\x03\x04", local), (b"PK\x01\x02", central)):
            for found in re.finditer(re.escape(signature), bytes(content)):
                content[found.start() + place] |= value
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"bad\..* is truncated or not a .*Take another copy\."):
            read_file(path)


@pytest.mark.parametrize("suffix", [".npz", ".keras"])
def test_compressed_zeros_are_refused_without_reading_them(tmp_path, sources, suffix, monkeypatch):
    monkeypatch.setattr(arrays, "_ALWAYS_READ", 1000)
    with zipfile.ZipFile(sources[suffix]) as good, zipfile.ZipFile(tmp_path / f"bad{suffix}", "w") as bad:
        for name in good.namelist():
            bad.writestr(name, good.read(name) + bytes(10**6), zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match=r"bytes in the file and 1,[\d,]* when it is read, more than 100 times"):
        read_file(tmp_path / f"bad{suffix}")


def test_a_dataset_that_the_file_only_declares_is_refused(tmp_path):
    with h5py.File(tmp_path / "bad.weights.h5", "w") as file:
        shape = (2**20, 2**20)
        file.create_dataset("layers/dense/vars/0", shape=shape, dtype="f4", chunks=(1024, 1024))
    with pytest.raises(CheckpointError, match="dense/0 has 0 bytes in the file and 4,398,046,511,104 when it is read"):
        read_file(tmp_path / "bad.weights.h5")


@pytest.mark.parametrize("suffix", [".h5", ".weights.h5"])
def test_layers_of_a_keras_file_get_names_of_their_own(tmp_path, suffix):
    layers = {"lstm_1": torch.nn.LSTM(3, 4), "lstm": torch.nn.LSTM(4, 4, 2)}
    model = {f"{name}.{key}": value for name, layer in layers.items() for key, value in layer.state_dict().items()}
    safetensors.save_file(model, tmp_path / "in.safetensors")
    convert_file(tmp_path / "in.safetensors", tmp_path / f"out{suffix}", "torch", "keras", layers=list(layers))
    names = {name.split("/")[0] for name in read_file(tmp_path / f"out{suffix}")}
    assert names == {"lstm_1", "lstm_2", "lstm_3"}


def test_a_single_array_is_no_npz(tmp_path):
    np.save(tmp_path / "one.npy", np.ones(3))
    (tmp_path / "one.npy").rename(tmp_path / "one.npz")
    with pytest.raises(CheckpointError, match=r"one\.npz is truncated or not a file of numpy\.savez"):
        read_file(tmp_path / "one.npz")


def _zip(content):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("model.weights.h5", content)
    return buffer.getvalue()


def test_objects_in_an_npz_are_not_unpickled(tmp_path):
    np.savez(tmp_path / "bad.npz", kernel=np.array([print], object))
    with pytest.raises(CheckpointError, match=r"not a file of numpy\.savez"):
        read_file(tmp_path / "bad.npz")


def test_a_file_whose_layer_is_incomplete_is_named(tmp_path):
    source = tmp_path / "part.safetensors"
    weights = torch.nn.LSTM(3, 2).state_dict()
    for change, error in (
        ({"weight_hh_l0": None}, CheckpointError),
        ({"weight_hh_l0": torch.zeros(8, 3)}, ShapeError),
    ):
        tensors = {name: tensor for name, tensor in (weights | change).items() if tensor is not None}
        safetensors.save_file(tensors, source)
        with pytest.raises(error, match=f"^{re.escape(str(source))}: "):
            convert_file(source, tmp_path / "out.npz", "torch", "keras")


@pytest.mark.parametrize("name", ["model.pt", "model.pth", "model.bin"])
def test_pickles_are_refused_with_the_way_round_them(tmp_path, name):
    torch.save({}, tmp_path / name)
    with pytest.raises(CheckpointError, match="Pickles are not read: save the state_dict with safetensors"):
        read_file(tmp_path / name)


def test_files_that_are_not_there_or_of_no_known_kind(tmp_path):
    with pytest.raises(CheckpointError, match=r"none\.npz cannot be read: No such file"):
        read_file(tmp_path / "none.npz")
    (tmp_path / "folder.npz").mkdir()
    with pytest.raises(CheckpointError, match="cannot be read: Is a directory"):
        read_file(tmp_path / "folder.npz")
    with pytest.raises(CheckpointError, match=r"a name that ends in one of .safetensors, .npz, .*, got model.onnx"):
        read_file(tmp_path / "model.onnx")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_write_that_fails_leaves_what_was_there(tmp_path, sources, suffix, monkeypatch):
    target = tmp_path / f"target{suffix}"
    target.write_bytes(b"before")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"cannot be written: No space left on device\. Its old content"):
        convert_file(sources[suffix], target, "keras", "keras")
    assert target.read_bytes() == b"before"
    assert not [path for path in tmp_path.iterdir() if "unfinished" in path.name]
    with pytest.raises(CheckpointError, match="cannot be written"):
        convert_file(sources[suffix], tmp_path / "nowhere" / f"target{suffix}", "keras", "keras")


@pytest.mark.parametrize("way", ["the same path", "a relative path", "a symbolic link", "a hard link"])
def test_a_file_is_not_converted_into_itself(tmp_path, sources, way, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = sources[".npz"]
    before, target = source.read_bytes(), tmp_path / "other.npz"
    if way == "a symbolic link":
        target.symlink_to(source)
    elif way == "a hard link":
        target.hardlink_to(source)
    else:
        target = Path(source.name) if way == "a relative path" else source
    with pytest.raises(ArgumentError, match=r"`the target` must be a file of its own.*the file of `the source`, which"):
        convert_file(source, target, "keras", "keras")
    assert source.read_bytes() == before


@pytest.mark.parametrize(("suffix", "layout"), [(".keras", "torch"), (".weights.h5", "keras-cudnn"), (".h5", "flax")])
def test_a_file_that_cannot_hold_the_layout_says_which_it_can(sources, tmp_path, suffix, layout):
    with pytest.raises(ArgumentError, match=f"`the layout` must be .*keras.* in a {suffix} file, got {layout}"):
        convert_file(sources[".npz"], tmp_path / f"target{suffix}", "keras", layout)


def test_a_keras_model_is_made_of_layers_that_fit_only(tmp_path):
    names = ("a_1", "a_2")
    weights = {f"{name}/{key}": value for name in names for key, value in _keras_weights().items()}
    np.savez(tmp_path / "two.npz", **weights)
    with pytest.raises(ArgumentError, match="the input of layer 1"):
        convert_file(tmp_path / "two.npz", tmp_path / "model.keras", "keras", "keras")
    assert not (tmp_path / "model.keras").exists()
    convert_file(tmp_path / "two.npz", tmp_path / "model.weights.h5", "keras", "keras")
    assert read_file(tmp_path / "model.weights.h5").keys() == {
        f"{name}/cell/{key}" for name in names for key in _keras_weights()
    }


def _keras_weights():
    return convert(torch.nn.LSTM(5, 2).state_dict(), "torch", "keras")


@pytest.mark.parametrize(
    ("suffix", "package", "extra"), [(".h5", "h5py", "keras"), (".safetensors", "safetensors", "train")]
)
def test_a_missing_package_is_named_with_the_command(tmp_path, sources, monkeypatch, suffix, package, extra):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(MissingExtra, match=rf"needs `{package}`.*pip install 'gatewise\[{extra}\]'"):
        read_file(sources[suffix])


def test_long_lists_of_layers_are_read_from_their_pieces(tmp_path):
    with h5py.File(tmp_path / "old.h5", "w") as file:
        file.attrs["layer_names0"], file.attrs["layer_names1"] = [b"a"], [b"b"]
        for name in "ab":
            group = file.create_group(name)
            group.attrs["weight_names"] = [f"{name}/{key}:0".encode() for key in _keras_weights()]
            for key, value in _keras_weights().items():
                group[f"{name}/{key}:0"] = value.numpy()
    assert {name.partition("/")[0] for name in hdf5.read_hdf5(tmp_path / "old.h5").tensors} == {"a", "b"}


def test_a_file_of_the_keras_in_tensorflow_2_12_is_read(tmp_path):
    with h5py.File(tmp_path / "model.weights.h5", "w") as file:
        for name, layer in (("lstm", _keras_weights()), ("lstm_1", _keras_weights())):
            for index, tensor in enumerate(layer.values()):
                file[f"_layer_checkpoint_dependencies/{name}/cell/vars/{index}"] = tensor.numpy()
        file["optimizer/vars/0"] = np.zeros(3)
    done = convert_file(tmp_path / "model.weights.h5", tmp_path / "lstm.npz", "keras", "torch")
    assert [stack.name for stack in done.stacks] == ["lstm", "lstm_1"]
    assert done.left == ()


def test_every_kind_of_file_is_in_the_documentation_of_the_call():
    assert all(f"`{kind.suffix}`" in (convert_file.__doc__ or "") for kind in formats.KINDS)
