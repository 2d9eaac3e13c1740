"""Models that hold the layers under torch.fx.symbolic_trace."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

import gatewise
from gatewise.cells import CoupledLSTM

X = torch.linspace(-1, 1, 60).view(5, 3, 4)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({"lstm": gatewise.LSTM(4, 6, 2, bidirectional=True), "gru": gatewise.GRU(12, 3)})
        self.rnn, self.recurrent = gatewise.RNN(3, 3), gatewise.Recurrent(CoupledLSTM(), 3, 3)
        self.cells = nn.ModuleList([gatewise.LSTMCell(3, 3), gatewise.GRUCell(3, 3), gatewise.RNNCell(3, 3)])
        self.step = gatewise.RecurrentCell(CoupledLSTM(), 3, 3)

    def forward(self, x, lengths, state):
        y, _ = self.layers["lstm"](x, (state, state), lengths=lengths)
        y, h = self.layers["gru"](y)
        y, _ = self.recurrent(self.rnn(y, h)[0])
        h, c = self.cells[0](y[-1])
        return self.step(self.cells[2](self.cells[1](h, c)))


def test_each_call_of_a_layer_is_one_node_and_the_numbers_are_the_same():
    torch.manual_seed(0)
    model, given = Model(), (X, torch.tensor([5, 1, 3]), torch.randn(4, 3, 6))
    traced = fx.symbolic_trace(model)
    calls = [node.target for node in traced.graph.nodes if node.op == "call_module"]
    cells = ["cells.0", "cells.1", "cells.2", "step"]
    assert calls == ["layers.lstm", "layers.gru", "rnn", "recurrent", *cells]
    assert traced.get_submodule("layers.lstm") is model.layers["lstm"]
    torch.testing.assert_close(traced(*given), model(*given))
    torch.testing.assert_close(
        traced(X[:2], given[1].clamp(max=2), given[2]), model(X[:2], given[1].clamp(max=2), given[2])
    )


def test_the_layer_itself_is_not_traced():
    with pytest.raises(gatewise.ArgumentError, match=r"got a torch\.fx\.Proxy\. torch\.fx traces a model"):
        fx.symbolic_trace(gatewise.LSTM(4, 6))


def test_hooks_run_once_when_the_graph_does():
    model, seen = nn.Sequential(gatewise.GRU(4, 6)), []
    model[0].register_forward_pre_hook(lambda layer, given: seen.append("before") or (2 * given[0],))
    model[0].register_forward_hook(lambda layer, given, result: seen.append("after"))
    traced = fx.symbolic_trace(model)
    assert not seen
    torch.testing.assert_close(traced(X), model(X))
    assert seen == ["before", "after"] * 2


class Everything(fx.Tracer):
    def is_leaf_module(self, m, module_qualified_name):
        return False


class Doubled(gatewise.GRU):
    def forward(self, x):  # type: ignore[override]
        return 2 * super().forward(x)[0]


def test_a_tracer_that_would_run_hooks_or_a_forward_twice_is_refused():
    model = nn.Sequential(gatewise.GRU(4, 6))
    assert [node.op for node in Everything().trace(model).nodes] == ["placeholder", "call_module", "output"]
    model[0].register_forward_hook(lambda layer, given, result: None)
    with pytest.raises(gatewise.ArgumentError, match=r"`layer` must be a layer without .*, got forward hooks\. This"):
        Everything().trace(model)
    with pytest.raises(gatewise.ArgumentError, match=r"got the forward of Doubled\. This tracer"):
        Everything().trace(nn.Sequential(Doubled(4, 6)))


def test_a_subclass_with_its_own_forward_is_one_node():
    model = nn.Sequential(Doubled(4, 6))
    traced = fx.symbolic_trace(model)
    assert [node.op for node in traced.graph.nodes] == ["placeholder", "call_module", "output"]
    torch.testing.assert_close(traced(X), model(X))
