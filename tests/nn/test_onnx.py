"""Models exported by torch.onnx.export, with dynamo and without: ONNX Runtime gives the numbers of the layers."""

from __future__ import annotations

import functools
import io
import tempfile
import warnings
from collections import Counter
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim

from gatewise import GRU, LSTM, RNN, GRUCell, LSTMCell, Recurrent, RNNCell, functional
from gatewise.cells import GRU as GRU_CELL
from gatewise.cells import Cell, CoupledLSTM, LayerNormGRU, PeepholeLSTM
from gatewise.contract.errors import ArgumentError
from gatewise.functional import export
from tests.pairwise import exhaustive

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def one_registry():
    """Make PyTorch's table of operators and their translations once: it takes as long as a small export."""
    kind = import_module("torch.onnx._internal.exporter._registration").ONNXRegistry
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "from_torchlib", staticmethod(functools.cache(kind.from_torchlib)))
        yield


class Layers(nn.Module):
    """An LSTM, a GRU and both RNNs, one above the other."""

    def __init__(self):
        super().__init__()
        self.lstm = LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True)
        self.gru = GRU(8, 5, num_layers=2, bias=False)
        self.tanh = RNN(5, 3, bidirectional=True)
        self.relu = RNN(6, 4, nonlinearity="relu")

    def forward(self, x):
        y, (h, c) = self.lstm(x)
        y, of_gru = self.gru(y.transpose(0, 1))
        y, of_tanh = self.tanh(y)
        return (*self.relu(y), h, c, of_gru, of_tanh)


class OneLayer(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, *given, **more):
        y, finals = self.layer(x, *given, **more)
        return y, *(finals if isinstance(finals, tuple) else (finals,))


operators_in_graphs = pytest.mark.skipif(
    not hasattr(torch.onnx, "ops"),
    reason="PyTorch 2.6 and 2.7 cannot put operators of ONNX into a graph that dynamo=True traces",
)


def exported(model, inputs, *, dynamo, dynamic=None):
    """Return the model of ONNX; `dynamic` has the names of the variable dimensions of each input."""
    options = {}
    if dynamo:
        if dynamic:
            options["dynamic_shapes"] = tuple(
                None if axes is None else {axis: Dim(name) for axis, name in axes.items()} for axes in dynamic
            )
    else:
        options["input_names"] = [f"input_{index}" for index in range(len(inputs))]
        options["dynamic_axes"] = dict(zip(options["input_names"], dynamic or (), strict=False))
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        path = Path(folder) / "model.onnx"  # PyTorch 2.6 writes no file that is open when dynamo=True
        torch.onnx.export(model.eval(), inputs, path, dynamo=dynamo, verbose=False, **options)
        return onnx.load(path)


def operators(model):
    return Counter(node.op_type for node in model.graph.node)


def run(model, inputs):
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]
    return session.run(None, {name: value.numpy() for name, value in zip(names, inputs, strict=True)})


def assert_same(model, layers, inputs):
    with torch.no_grad():
        expected = layers(*inputs)
    for found, one in zip(run(model, inputs), expected, strict=True):
        np.testing.assert_allclose(found, one.numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("dynamo", "dynamic"),
    [
        pytest.param(False, False, id="torchscript-static", marks=pytest.mark.exhaustive),
        pytest.param(False, True, id="torchscript-dynamic"),
        pytest.param(True, False, id="dynamo-static", marks=[pytest.mark.exhaustive, operators_in_graphs]),
        pytest.param(True, True, id="dynamo-dynamic", marks=operators_in_graphs),
    ],
)
def test_layers_are_the_operators_of_onnx(dynamo, dynamic):
    layers, x = Layers().eval(), torch.randn(2, 5, 3)
    axes = [{0: "batch", 1: "time"}] if dynamic else None
    model = exported(layers, (x,), dynamo=dynamo, dynamic=axes)
    counts = operators(model)
    assert (counts["LSTM"], counts["GRU"], counts["RNN"]) == (2, 2, 2)
    assert not counts["Loop"]
    assert not counts["Sigmoid"]
    shapes = [(2, 5, 3), (3, 9, 3), (1, 1, 3)] if dynamic else [(2, 5, 3)]
    for shape in shapes:
        assert_same(model, layers, (torch.randn(shape),))


# With dynamo they are inputs of the empty sequences below, too.
@pytest.mark.parametrize(
    "dynamo", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["torchscript", "dynamo"]
)
def test_initial_states_are_inputs(dynamo):
    layers = OneLayer(LSTM(3, 4, num_layers=2)).eval()
    inputs = torch.randn(5, 2, 3), (torch.randn(2, 2, 4), torch.randn(2, 2, 4))
    flat = (inputs[0], *inputs[1])
    with torch.no_grad():
        expected = layers(*inputs)
    for found, one in zip(run(exported(layers, inputs, dynamo=dynamo), flat), expected, strict=True):
        np.testing.assert_allclose(found, one.numpy(), rtol=1e-4, atol=1e-6)


# With dynamo, the test of empty sequences below exports lengths as an input, too.
@pytest.mark.parametrize(
    "dynamo",
    [
        pytest.param(False, id="torchscript"),
        pytest.param(True, id="dynamo", marks=[pytest.mark.exhaustive, operators_in_graphs]),
    ],
)
def test_lengths_are_an_input_of_the_operator(dynamo):
    class Ragged(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = LSTM(3, 4, bidirectional=True)

        def forward(self, x, lengths):
            y, (h, c) = self.layer(x, lengths=lengths)
            return y, h, c

    layers, lengths = Ragged().eval(), torch.tensor([2, 5, 3])
    axes = [{0: "time", 1: "batch"}, {0: "batch"}]
    model = exported(layers, (torch.randn(5, 3, 3), lengths), dynamo=dynamo, dynamic=axes)
    assert operators(model)["LSTM"] == 1
    assert_same(model, layers, (torch.randn(5, 3, 3), lengths))
    # Only the exporter with dynamo admits empty sequences, whose final states are the initial ones.
    assert_same(model, layers, (torch.randn(7, 4, 3), torch.tensor([7, 1, 0 if dynamo else 2, 4])))


@operators_in_graphs
def test_the_final_states_of_an_empty_sequence_are_its_initial_states():
    class Ragged(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = GRU(3, 4)

        def forward(self, x, h, lengths):
            return self.layer(x, h, lengths)

    inputs = torch.randn(4, 3, 3), torch.randn(1, 3, 4), torch.tensor([3, 0, 4])
    layers = Ragged().eval()
    assert_same(exported(layers, inputs, dynamo=True), layers, inputs)


# Other tests of this file export the operator.
@pytest.mark.exhaustive
@operators_in_graphs
def test_other_cells_of_the_operator_lstm():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.coupled = Recurrent(CoupledLSTM(), 3, 4, bidirectional=True)
            self.peephole = Recurrent(PeepholeLSTM(), 8, 4, bidirectional=True)

        def forward(self, x):
            y, of_coupled = self.coupled(x)
            y, of_peephole = self.peephole(y)
            return y, *of_coupled, *of_peephole

    layers, x = Both().eval(), torch.randn(5, 2, 3)
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.normal_(std=0.5)  # peepholes are zero initially
    model = exported(layers, (x,), dynamo=True, dynamic=[{0: "time", 1: "batch"}])
    assert operators(model)["LSTM"] == 2
    for shape in ((5, 2, 3), (8, 3, 3)):
        assert_same(model, layers, (torch.randn(shape),))


@pytest.mark.skipif(
    not hasattr(torch.onnx, "ops"),
    reason="of an LSTM with projections PyTorch 2.6 and 2.7 write models that ONNX Runtime refuses, also of nn.LSTM",
)
@pytest.mark.parametrize("kind", ["projection and resets", *exhaustive("normalized")])
def test_what_onnx_does_not_have_becomes_steps(kind):
    class Steps(nn.Module):
        def __init__(self):
            super().__init__()
            self.projected = LSTM(3, 4, proj_size=2)
            self.episodes = GRU(2, 3)

        def forward(self, x, resets):
            y, of_projected = self.projected(x)
            return *self.episodes(y, resets=resets), *of_projected

    class Normalized(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = Recurrent(LayerNormGRU(), 3, 4)

        def forward(self, x, resets):
            return self.norm(x, resets=resets)

    layers = Normalized().eval() if kind == "normalized" else Steps().eval()
    resets = torch.tensor([[0, 1], [1, 0]]).bool()
    model = exported(layers, (torch.randn(2, 2, 3), resets), dynamo=True)
    assert not {"LSTM", "GRU", "RNN", "Loop"} & set(operators(model))
    assert_same(model, layers, (torch.randn(2, 2, 3), resets))


def test_where_no_operator_can_be_put_into_the_graph_layers_become_steps(monkeypatch):
    monkeypatch.setattr(export, "_in_onnx_export", lambda: False)  # which is what PyTorch 2.6 and 2.7 say
    layers = OneLayer(GRU(3, 4, bidirectional=True)).eval()
    assert_same(exported(layers, (torch.randn(2, 2, 3),), dynamo=True), layers, (torch.randn(2, 2, 3),))


scans = pytest.mark.skipif(not export._SCANS, reason="this version of PyTorch cannot export its operator scan")


class Own(Cell):
    """A cell of few operators, whose scan is traced in a third of the time."""

    gates = ("f",)

    def step(self, gate, state):
        return state.h + torch.sigmoid(gate.f), {}


@scans
@pytest.mark.parametrize("cell", [Own(), pytest.param(LayerNormGRU(), marks=pytest.mark.exhaustive)], ids=repr)
def test_other_cells_take_any_number_of_steps(cell):
    layers = OneLayer(Recurrent(cell, 3, 4)).eval()
    model = exported(layers, (torch.randn(5, 2, 3),), dynamo=True, dynamic=[{0: "time", 1: "batch"}])
    assert operators(model)["Scan"] == 1
    for shape in ((5, 2, 3), (8, 3, 3)):
        assert_same(model, layers, (torch.randn(shape),))


@operators_in_graphs
def test_without_scan_other_cells_need_a_fixed_number_of_steps(monkeypatch):
    monkeypatch.setattr(export, "_SCANS", False)
    layers = OneLayer(Recurrent(LayerNormGRU(), 3, 4))
    with pytest.raises(torch.onnx.errors.OnnxExporterError, match="a variable number of steps"):
        exported(layers, (torch.randn(4, 2, 3),), dynamo=True, dynamic=[{0: "time"}])


def test_other_cells_need_dynamo():
    layers = OneLayer(Recurrent(LayerNormGRU(), 3, 4))
    with pytest.raises(ArgumentError, match="Export it with dynamo=True"):
        exported(layers, (torch.randn(4, 2, 3),), dynamo=False)


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = LSTM(3, 4, bidirectional=True)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
        y, (h, c) = self.layer(packed)
        return nn.utils.rnn.pad_packed_sequence(y, total_length=x.shape[0])[0], h, c


def test_a_packed_batch_without_dynamo():
    layers, inputs = Packed().eval(), (torch.randn(5, 3, 3), torch.tensor([2, 5, 3]))
    model = exported(layers, inputs, dynamo=False)
    assert operators(model)["LSTM"] == 1
    assert_same(model, layers, inputs)


def test_the_functional_call_is_exported_too():
    class Call(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.LSTM(3, 4)

        def forward(self, x):
            y, (h, c) = functional.lstm(x, None, self.layer.all_weights)
            return y, h, c

    layers, x = Call().eval(), torch.randn(5, 2, 3)
    model = exported(layers, (x,), dynamo=False, dynamic=[{0: "time", 1: "batch"}])
    assert operators(model)["LSTM"] == 1
    assert_same(model, layers, (torch.randn(8, 3, 3),))


def test_a_recurrent_layer_is_a_model_of_its_own():
    layer, file = Recurrent(GRU_CELL(), 4, 6).eval(), io.BytesIO()
    torch.onnx.export(layer, (torch.randn(5, 2, 4),), file, dynamo=False)
    assert [node.op_type for node in onnx.load_from_string(file.getvalue()).graph.node].count("GRU") == 1


@pytest.mark.parametrize("cell", [LSTMCell, GRUCell, RNNCell])
def test_cells_without_given_states_export_any_batch_size(cell):
    layer = cell(4, 5).eval()
    model = exported(layer, (torch.randn(3, 4),), dynamo=False, dynamic=[{0: "batch"}])
    x = torch.randn(7, 4)
    with torch.no_grad():
        expected = layer(x)
    for found, one in zip(run(model, [x]), expected if isinstance(expected, tuple) else (expected,), strict=True):
        np.testing.assert_allclose(found, one.numpy(), rtol=1e-4, atol=1e-6)
