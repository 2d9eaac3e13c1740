"""Models that hold the layers under torch.jit.script and torch.jit.trace, which give PyTorch's own operators."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import gatewise
from gatewise.cells import SHIPPED, PeepholeLSTM

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script compiles:UserWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = gatewise.LSTM(4, 6, 2, bidirectional=True, proj_size=3, dropout=0.5)
        self.gru, self.rnn = gatewise.GRU(6, 3), gatewise.RNN(3, 3, nonlinearity="relu")
        self.lstm_cell, self.gru_cell = gatewise.LSTMCell(3, 3), gatewise.GRUCell(3, 3)
        self.rnn_cell = gatewise.RNNCell(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y, (h_n, _) = self.lstm(x)
        y, _ = self.rnn(self.gru(y)[0])
        return self.lstm_cell(self.rnn_cell(self.gru_cell(y[-1] + h_n[0])))[0]


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model().eval()


X = torch.linspace(-1, 1, 60).view(5, 3, 4)


def script(model):
    return torch.jit.script(copy.deepcopy(model))


def trace(model):
    return torch.jit.trace(model, X)


@pytest.mark.parametrize("way", [script, trace])
def test_the_numbers_are_the_same_for_other_sizes_and_from_a_file(model, way):
    found = way(model)
    file = io.BytesIO()
    torch.jit.save(found, file)
    file.seek(0)
    for program in (found, torch.jit.load(file)):
        for x in (X, X[:2, :1]):
            torch.testing.assert_close(program(x), model(x))
        assert {"aten::lstm", "aten::gru", "aten::rnn_relu"} <= {node.kind() for node in program.inlined_graph.nodes()}
    assert isinstance(model.lstm, gatewise.LSTM)


@pytest.mark.parametrize("way", [script, trace])
def test_it_trains(model, way):
    found = way(model)
    found(X).square().sum().backward()
    model(X).square().sum().backward()
    expected = dict(model.named_parameters())
    for name, weight in found.named_parameters():
        torch.testing.assert_close(weight.grad, expected[name].grad)


def test_a_packed_batch_is_scripted():
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = gatewise.LSTM(4, 6)

        def forward(self, x: PackedSequence) -> Tensor:
            y, _ = self.lstm(x)
            return y.data

    model = Packed()
    packed = pack_padded_sequence(X, torch.tensor([5, 3, 1]))
    expected = model(packed)
    torch.testing.assert_close(script(model)(packed), expected)


def test_scripting_says_what_it_does_to_the_model(model):
    weight = model.gru.weight_hh_l0
    with pytest.warns(UserWarning, match=r"torch\.jit\.script compiles torch\.nn\.GRU in place of gatewise\.GRU, and"):
        torch.jit.script(model)
    assert type(model.gru) is nn.GRU
    assert model.gru.weight_hh_l0 is weight
    gatewise.accelerate(model, verbose=False)
    assert type(model.gru) is gatewise.GRU
    with warnings.catch_warnings():
        # PyTorch may warn of a projection without oneDNN, once in a process.
        warnings.filterwarnings("error", message="torch.jit.script compiles")
        model(X)


@pytest.mark.parametrize("way", [script, trace])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": "eager"}, r"`kernel` must be 'auto' for gatewise\.LSTM in torch\.jit\.\w+, got 'eager'\. Set"),
        ({"weight_dropout": 0.5}, r"`weight_dropout` must be 0 for gatewise\.LSTM in torch\.jit\.\w+, got 0\.5\. Call"),
    ],
)
def test_what_pytorchs_layer_would_not_compute_is_refused(way, options, message):
    model = nn.Sequential(gatewise.LSTM(4, 6, **options))
    with pytest.raises(gatewise.ArgumentError, match=message):
        way(model)
    assert isinstance(model[0], gatewise.LSTM)


@pytest.mark.parametrize("way", [script, trace])
def test_a_kernel_named_by_use_kernel_is_refused_except_for_cells(way):
    with gatewise.use_kernel("eager"):
        with pytest.raises(
            gatewise.ArgumentError, match=r"torch\.jit\.\w+, got 'eager'\. It is named by `use_kernel`;"
        ):
            way(nn.Sequential(gatewise.GRU(4, 6)))
        way(nn.Sequential(nn.Flatten(0, 1), gatewise.GRUCell(4, 6)))


def test_a_scripted_layer_keeps_its_options_and_is_not_one_to_restore():
    model = gatewise.accelerate(nn.Sequential(nn.LSTM(4, 6)), verbose=False)
    model[0].memory = "lean"
    torch.jit.script(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gatewise.restore(model, verbose=False)
        assert type(model[0]) is nn.LSTM
        gatewise.accelerate(model, verbose=False)
    assert type(model[0]) is gatewise.LSTM
    assert model[0].memory == "lean"


@pytest.mark.parametrize("given", [{"lengths": torch.tensor([1, 2, 3])}, {"resets": torch.zeros(5, 3)}])
def test_inputs_that_pytorchs_layer_has_not_are_refused_in_a_trace(given):
    layer = gatewise.LSTM(4, 6)
    (name,) = given
    for call in (
        lambda x: layer(x, **given)[0],
        lambda x: layer(x, None, given.get("lengths"), given.get("resets"))[0],
    ):
        with pytest.raises(gatewise.ArgumentError, match=rf"`{name}` must be None in torch\.jit\.trace, got a value"):
            torch.jit.trace(call, X)


def test_parametrizations():
    model = nn.Sequential(gatewise.GRU(4, 6))
    parametrizations.weight_norm(model[0], "weight_hh_l0")
    torch.testing.assert_close(trace(model)(X[:2]), model(X[:2]))
    with pytest.raises(gatewise.ArgumentError, match=r"must be without parametrizations for torch\.jit\.script"):
        torch.jit.script(model)


class Doubled(gatewise.LSTM):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * x


def test_a_subclass_with_its_own_forward_is_compiled_as_it_is():
    model = nn.Sequential(Doubled(4, 6))
    for way in (torch.jit.script, trace):
        torch.testing.assert_close(way(model)(X), 2 * X)
    assert type(model[0]) is Doubled


def cell_states(cell, *shape):
    states = tuple(torch.rand(shape, dtype=torch.float64) for _ in range(1 + len(cell.states)))
    return states if len(states) > 1 else states[0]


def leaves(values):
    return [values] if isinstance(values, Tensor) else [leaf for value in values for leaf in leaves(value)]


# A cell of PyTorch's, and those with several states, with parameters, and with a normalization.
RECORDED = ("lstm", "peephole_lstm", "layer_norm_gru")


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, marks=() if cell.name in RECORDED else pytest.mark.exhaustive, id=cell.name)
        for cell in SHIPPED
    ],
)
def test_the_steps_of_any_cell_are_recorded_with_their_gradients(cell):
    torch.manual_seed(0)
    layer = gatewise.Recurrent(cell, 4, 6, bidirectional=True, dtype=torch.float64)
    one, x_all = gatewise.RecurrentCell(cell, 4, 6, dtype=torch.float64), torch.rand(2, 3, 4, dtype=torch.float64)
    for module, x, more in (
        (layer, x_all, torch.rand(2, 2, 4).double()),
        (one, x_all[0], torch.rand(2, 4).double()),
        (layer, (x_all, cell_states(cell, 2, 3, 6)), (torch.rand(2, 2, 4).double(), cell_states(cell, 2, 2, 6))),
        (one, (x_all[0], cell_states(cell, 3, 6)), (torch.rand(2, 4).double(), cell_states(cell, 2, 6))),
    ):
        file = io.BytesIO()
        torch.jit.save(torch.jit.trace(module, x, check_trace=False), file)  # as is done below, with gradients
        file.seek(0)
        program = torch.jit.load(file)
        for given in (x, more):
            given = given if isinstance(given, tuple) else (given,)
            found, expected = leaves(program(*given)), leaves(module(*given))
            torch.testing.assert_close(found, expected)
            weights = dict(module.named_parameters())
            grads = torch.autograd.grad(sum(each.square().sum() for each in found), list(program.parameters()))
            by_name = dict(zip((name for name, _ in program.named_parameters()), grads, strict=True))
            wanted = torch.autograd.grad(sum(each.square().sum() for each in expected), list(weights.values()))
            torch.testing.assert_close(by_name, dict(zip(weights, wanted, strict=True)))


@pytest.mark.parametrize("name", ["lengths", "resets"])
def test_lengths_and_resets_are_inputs_of_a_recorded_program(name):
    layer = gatewise.Recurrent(PeepholeLSTM(), 4, 6).requires_grad_(False)  # parameters of a lambda are constants
    given = torch.tensor([[5, 2, 3], [1, 4, 5]]) if name == "lengths" else torch.rand(2, 5, 3) < 0.5
    program = torch.jit.trace(lambda x, value: layer(x, **{name: value})[0], (X, given[0]))
    for value in given:
        torch.testing.assert_close(program(X, value), layer(X, **{name: value})[0])


def test_a_plan_of_a_recorded_call_serves_no_other_call():
    layer = gatewise.Recurrent(PeepholeLSTM(), 4, 6)
    for _ in range(2):
        program = torch.jit.trace(layer, X)
        torch.testing.assert_close(program(X), layer(X))


def test_a_kernel_that_no_tracer_can_record_is_refused():
    layer = gatewise.Recurrent(PeepholeLSTM(), 4, 6, kernel="stepwise")
    message = r"`kernel` must be 'auto' or 'eager' in torch\.jit\.trace .*, got 'stepwise'\. Name no kernel, or use"
    with pytest.raises(gatewise.KernelRefused, match=message):
        torch.jit.trace(layer, X)
    with gatewise.use_kernel("stepwise"), pytest.raises(gatewise.KernelRefused, match=message):
        torch.jit.trace(gatewise.Recurrent(PeepholeLSTM(), 4, 6), X)
