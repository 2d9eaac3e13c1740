"""gatewise.LSTM under torch.compile and torch.export: one graph, the same results and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gatewise.nn import LSTM


class Network(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.lstm = LSTM(5, 4, **options)
        self.head = nn.LazyLinear(2)

    def forward(self, x, hx=None, lengths=None):
        y, (h_n, c_n) = self.lstm(x, hx, lengths)
        return self.head(y).tanh(), h_n, c_n


def outputs_and_gradients(call, model, x, *rest):
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    outputs = call(leaf, *rest)
    sum(output.square().sum() for output in outputs).backward()
    return [*outputs, leaf.grad, *(parameter.grad.clone() for parameter in model.parameters())]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.manual_seed(0)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_layers": 2, "bidirectional": True, "batch_first": True},
        {"proj_size": 2, "bias": False},
        {"kernel": "eager"},
    ],
)
@pytest.mark.parametrize("extra", ["nothing", "state", "lengths"])
def test_compiled_in_one_graph_equals_eager(options, extra):
    model = Network(**options)
    x = torch.randn(3, 3, 5)
    rows = (1 + options.get("bidirectional", False)) * options.get("num_layers", 1)
    state = (torch.randn(rows, 3, options.get("proj_size", 4)), torch.randn(rows, 3, 4))
    rest = {"nothing": (), "state": (state,), "lengths": (None, torch.tensor([1, 3, 2]))}[extra]
    expected = outputs_and_gradients(model, model, x, *rest)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(outputs_and_gradients(compiled, model, x, *rest), expected)


def test_compiled_inference_equals_eager():
    model = Network(num_layers=2).eval()
    x = torch.randn(3, 2, 5)
    with torch.no_grad():
        expected = model(x)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), expected)


def test_compiled_dropout_trains():
    model = Network(num_layers=2, dropout=0.5)
    model(torch.randn(3, 2, 5))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(3, 2, 5)
    torch.manual_seed(4)
    expected = outputs_and_gradients(model, model, x)
    torch.manual_seed(4)
    torch.testing.assert_close(outputs_and_gradients(compiled, model, x), expected)


def test_one_sequence_compiles():
    model = Network()
    x = torch.randn(3, 5)
    expected = model(x)
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(x), expected)


def test_packed_sequence_compiles():
    layer = LSTM(5, 4, num_layers=2)
    packed = nn.utils.rnn.pack_sequence([torch.randn(length, 5) for length in (2, 4, 1)], enforce_sorted=False)
    expected, state = layer(packed)
    found, found_state = torch.compile(layer, backend="aot_eager")(packed)
    torch.testing.assert_close(found.data, expected.data)
    torch.testing.assert_close(found_state, state)


def test_other_sizes_run_after_compiling():
    model = Network()
    model(torch.randn(3, 2, 5))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for time, batch in ((3, 2), (7, 2), (4, 5)):
        x = torch.randn(time, batch, 5)
        torch.testing.assert_close(outputs_and_gradients(compiled, model, x), outputs_and_gradients(model, model, x))


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True, "batch_first": True}])
def test_export_equals_eager(options):
    model = Network(**options).eval()
    x = torch.randn(3, 2, 5)
    expected = model(x)
    program = torch.export.export(model, (x,))
    assert any("gatewise" in str(node.target) for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(x), expected)


def test_export_with_lengths_and_state():
    model = Network().eval()
    call = (torch.randn(3, 2, 5), (torch.randn(1, 2, 4), torch.randn(1, 2, 4)), torch.tensor([1, 3]))
    expected = model(*call)
    torch.testing.assert_close(torch.export.export(model, call).module()(*call), expected)
