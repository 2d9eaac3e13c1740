"""`gatewise convert`: conversion of files, and its messages."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("h5py")

import safetensors.torch as safetensors

from gatewise.interop.layouts import LAYOUTS
from tests.published_layer_norm import PUBLISHED


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "lstm.safetensors"
    safetensors.save_file(torch.nn.LSTM(3, 2, 2).state_dict(), path)
    return path


def test_there_and_back_is_exact(gatewise, model):
    answer = gatewise("convert", model, "lstm.weights.h5", "--from", "torch", "--to", "keras")
    assert (answer.status, answer.err) == (0, "")
    assert answer.out.splitlines() == [
        "  2 layers, 1 direction, I 3, H 2",
        "Wrote lstm.weights.h5 in the layout keras.",
    ]
    gatewise("convert", "lstm.weights.h5", "back.safetensors", "--from", "keras", "--stack")
    gatewise("convert", "back.safetensors", "again.weights.h5", "--from", "torch", "--to", "keras")
    assert gatewise("convert", "again.weights.h5", "last.npz", "--from", "keras", "--to", "keras").status == 0
    back = safetensors.load_file("back.safetensors")
    for name, tensor in safetensors.load_file(model).items():
        if name.startswith("weight"):
            assert torch.equal(back[name], tensor)


def test_layers_are_listed_and_chosen(gatewise, model):
    gatewise("convert", model, "lstm.weights.h5", "--from", "torch", "--to", "keras")
    answer = gatewise("convert", "lstm.weights.h5", "two.safetensors", "--from", "keras")
    assert answer.out.splitlines()[:3] == [
        "  lstm: 1 layer, 1 direction, I 3, H 2",
        "  lstm_1: 1 layer, 1 direction, I 2, H 2",
        "These are separate LSTMs. --stack combines them into one.",
    ]
    answer = gatewise("convert", "lstm.weights.h5", "one.safetensors", "--from", "keras", "--layer", "lstm_1")
    assert answer.out.splitlines()[0] == "  lstm_1: 1 layer, 1 direction, I 2, H 2"
    assert safetensors.load_file("one.safetensors")["weight_ih_l0"].shape == (8, 2)


def test_two_layers_become_two_directions(gatewise, tmp_path):
    layer = torch.nn.LSTM(3, 2).state_dict()
    both = {f"{name}.{key}": tensor.clone() for name in "ab" for key, tensor in layer.items()}
    safetensors.save_file(both, "two.safetensors")
    files = ("two.safetensors", "one.safetensors")
    answer = gatewise("convert", *files, "--from", "torch", "--pair")
    assert (answer.status, "Name the layers in their order" in answer.err) == (1, True)
    gatewise("convert", *files, "--from", "torch", "--pair", "--layer", "a", "--layer", "b")
    expected = torch.nn.LSTM(3, 2, bidirectional=True).state_dict()
    assert safetensors.load_file("one.safetensors").keys() == expected.keys()


@pytest.mark.parametrize("cell", ["gru", "rnn"])
def test_other_cells_go_to_pytorchs_layout_unless_another_is_named(gatewise, tmp_path, cell):
    layer = {"gru": torch.nn.GRU, "rnn": torch.nn.RNN}[cell](3, 2)
    if cell == "rnn":
        torch.nn.init.zeros_(layer.bias_hh_l0)  # the layout has one bias
    safetensors.save_file(layer.state_dict(), "there.safetensors")
    of_keras = f"keras-{cell}"
    there = gatewise("convert", "there.safetensors", "keras.weights.h5", "--from", f"torch-{cell}", "--to", of_keras)
    assert (there.status, there.err) == (0, "")
    back = gatewise("convert", "keras.weights.h5", "back.safetensors", "--from", of_keras)
    assert back.out.splitlines()[-1] == f"Wrote back.safetensors in the layout torch-{cell}."
    found = safetensors.load_file("back.safetensors")
    assert found.keys() == layer.state_dict().keys()
    assert all(torch.equal(tensor, layer.state_dict()[name]) for name, tensor in found.items())


def test_rnns_are_named_in_the_report(gatewise, tmp_path):
    one, other = torch.nn.RNN(3, 2).state_dict(), torch.nn.RNN(2, 2).state_dict()
    model = {f"one.{name}": tensor for name, tensor in one.items()}
    model |= {f"other.{name}": tensor for name, tensor in other.items()} | {"head.weight": torch.zeros(3)}
    safetensors.save_file(model, "model.safetensors")
    lines = gatewise("convert", "model.safetensors", "rnn.npz", "--from", "torch-rnn").out.splitlines()
    assert lines[2:4] == [
        "Left out, in no RNN of the layout torch-rnn: 1 tensor (head.weight)",
        "These are separate RNNs. --stack combines them into one.",
    ]


def test_cells_of_tensorflow_1_of_any_name_and_forget_bias(gatewise, tmp_path):
    model = {"encoder/cell/kernel": torch.randn(5, 8), "encoder/cell/bias": torch.zeros(8)}
    safetensors.save_file(model, "model.safetensors")
    words = ("convert", "model.safetensors", "lstm.safetensors", "--from", "tf1-basic")
    assert "If one is the cell, name it: --layer encoder/cell." in gatewise(*words).err
    assert gatewise(*words, "--layer", "encoder/cell", "--forget-bias", "0.5").status == 0
    assert safetensors.load_file("lstm.safetensors")["bias_hh_l0"].tolist() == [0, 0, 0.5, 0.5, 0, 0, 0, 0]
    answer = gatewise(
        "convert", "lstm.safetensors", "x.npz", "--from", "torch", "--to", "keras", "--forget-bias", "0.5"
    )
    assert "`--forget-bias` must be left out for the target keras and the source torch, got 0.5." in answer.err


def test_what_is_left_out_is_named(gatewise, tmp_path):
    tensors = torch.nn.LSTM(3, 2).state_dict() | {"head.weight": torch.zeros(3), "head.bias": torch.zeros(1)}
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    answer = gatewise("convert", "model.safetensors", "lstm.npz", "--from", "torch", "--to", "haste")
    assert "Left out, in no LSTM of the layout torch: 2 tensors (head.bias, head.weight)" in answer.out


def test_the_layouts_are_listed(gatewise):
    answer = gatewise("convert", "--layouts")
    assert answer.status == 0
    for layout in LAYOUTS.values():
        assert layout.name in answer.out
        assert layout.system in answer.out
    assert max(map(len, answer.out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lstm.safetensors", "x.npz", "--from", "caffe"], "dreamerv3-gru, gatewise, got 'caffe'"),
        (["lstm.safetensors", "x.npz", "--from", "torch", "--to", "caffe"], "`--to` must be one of torch, keras,"),
        (
            ["lstm.safetensors", "x.npz", "--from", "torch", "--pair"],
            "`--layer` must be an even number of one direction",
        ),
        (["none.npz", "x.npz", "--from", "keras"], "none.npz cannot be read: No such file"),
        (
            ["lstm.safetensors", "x.onnx", "--from", "torch"],
            "`TARGET` must be a name that ends in one of",
        ),
        (["lstm.safetensors", "x.npz", "--from", "keras"], "The names are those of the layout torch"),
        (["lstm.safetensors", "x.npz", "--from", "torch", "--layer", "a"], "`--layer` must be left out for a file"),
        (["lstm.safetensors", "x.npz", "--from", "torch", "--to", "flax-gru"], "must be that of an LSTM as the source"),
        (["lstm.safetensors", "x.npz", "--from", "torch-gru"], "The names are those of the layout torch"),
    ],
)
def test_errors_are_one_sentence_and_write_nothing(gatewise, model, words, message):
    answer = gatewise("convert", *words)
    assert answer.refused
    assert answer.err.startswith("error: ")
    assert message in answer.err
    assert [path.name for path in model.parent.iterdir()] == [model.name]


def test_the_source_is_not_overwritten(gatewise, model):
    before = model.read_bytes()
    answer = gatewise("convert", model, "lstm.safetensors", "--from", "torch", "--to", "keras")
    assert answer.refused
    assert "`TARGET` must be a file of its own, got lstm.safetensors. That is the file of `SOURCE`," in answer.err
    assert model.read_bytes() == before


@pytest.mark.parametrize("name", ["there.npz", "there.ckpt.index", "there.ckpt.data-00000-of-00001"])
def test_a_file_that_exists_is_replaced_on_request_only(gatewise, model, name):
    there = model.with_name(name)
    there.write_bytes(b"mine")
    target = "there.npz" if name == "there.npz" else "there.ckpt"
    words = ("convert", model, target, "--from", "torch", "--to", "keras")
    answer = gatewise(*words)
    assert answer.refused
    assert "`TARGET` must be a file that does not exist yet, got there." in answer.err
    assert "Replace it by `--overwrite`" in " ".join(answer.err.split())
    assert there.read_bytes() == b"mine"
    if name == target:  # a checkpoint needs TensorFlow
        assert gatewise(*words, "--overwrite").status == 0
        assert there.read_bytes() != b"mine"


def test_a_stream_is_no_file_that_exists(gatewise, model):
    model.with_name("nowhere.npz").symlink_to("/dev/null")
    assert gatewise("convert", model, "nowhere.npz", "--from", "torch", "--to", "keras").status == 0


def test_heads_are_refused_by_a_target_without_them(gatewise, model):
    answer = gatewise("convert", model, "x.npz", "--from", "torch", "--to", "keras", "--heads", 2)
    assert "`--heads` must be left out for the target keras, got 2." in answer.err


def test_the_layout_of_the_source_must_be_given(gatewise, model):
    answer = gatewise("convert", model, "x.npz")
    assert answer.status == 2
    assert "--from" in answer.err


def test_a_cell_that_pytorch_does_not_have_goes_to_the_layout_of_gatewise(gatewise, tmp_path):
    one, other = (PUBLISHED["icefall"].tensors(seed) for seed in (1, 2))
    model = {f"one.{name}": tensor.detach() for name, tensor in one.items()}
    model |= {f"other.{name}": tensor.detach() for name, tensor in other.items()}
    safetensors.save_file(model, "icefall.safetensors")
    answer = gatewise("convert", "icefall.safetensors", "there.safetensors", "--from", "icefall-layer-norm")
    assert (answer.status, answer.err) == (0, "")
    assert answer.out.splitlines()[-2:] == [
        "These are separate LayerNormLSTMs. --stack combines them into one.",
        "Wrote there.safetensors in the layout gatewise.",
    ]
    there = safetensors.load_file("there.safetensors")
    assert torch.equal(there["one.gain_g_l0"], one["layers.0.cell.layernorm_cx.weight"])
    back = gatewise(
        "convert", "there.safetensors", "back.safetensors", "--from", "gatewise", "--to", "icefall-layer-norm"
    )
    assert back.status == 0
    found = safetensors.load_file("back.safetensors")
    assert found.keys() == model.keys()
    assert all(torch.equal(tensor, model[name]) for name, tensor in found.items())
