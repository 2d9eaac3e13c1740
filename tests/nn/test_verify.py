"""verify: a real call, its profile, and the comparison with the decision."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import gatewise
from gatewise import testing
from gatewise.cells import SHIPPED
from gatewise.contract.problem import Problem
from gatewise.functional import plan
from gatewise.kernels import ALL
from gatewise.nn import Verification, verify
from tests.pairwise import each_value


class Tagger(nn.Module):
    """Four LSTMs of both classes; one is called twice, one never."""

    def __init__(self):
        super().__init__()
        self.encoder = gatewise.LSTM(4, 8, 2, dropout=0.2, bidirectional=True, batch_first=True)
        self.middle = nn.LSTM(16, 5)
        self.twice = gatewise.LSTM(5, 5, kernel="eager")
        self.never = gatewise.LSTM(3, 3)

    def forward(self, x, lengths=None):
        y, _ = self.encoder(x, lengths=lengths)
        y, _ = self.middle(y.transpose(0, 1))
        y, _ = self.twice(y)
        return {"out": self.twice(y)[0]}


@pytest.fixture
def x():
    return torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(0))


def test_is_the_public_function():
    assert gatewise.verify is verify


def test_every_layer_of_a_model_is_reported(x):
    report = verify(Tagger(), x, lengths=torch.tensor([3, 6, 1]))
    assert isinstance(report, Verification)
    assert report.agrees
    assert [(layer.name, layer.calls) for layer in report.layers] == [("encoder", 1), ("middle", 1), ("twice", 2)]
    assert report.idle == ("never",)
    for layer in report.layers:
        assert set(layer.forward.kernels) == set(layer.backward.kernels) == {layer.decision.chosen}
    encoder, middle, _ = (layer.decision for layer in report.layers)
    assert (encoder.problem.time, encoder.problem.batch, encoder.problem.dropout) == (6, 3, 0.2)
    assert middle.reason == "torch.nn.LSTM without cuDNN"


def test_the_report_fits_80_columns(x):
    text = str(verify(Tagger(), x))
    assert max(map(len, text.splitlines())) <= 80
    for words in (
        "every layer ran as decided",
        "encoder",
        "twice (2 calls)",
        "not called: never",
        "gatewise::eager_forward",
    ):
        assert words in text


@pytest.mark.parametrize(
    ("kernel", "dtype", "form", "cell"),
    each_value(
        [
            *itertools.product(
                ["aten", "eager"],
                [torch.float32, torch.float64],
                ["dense", "packed", "single", "first"],
                ["lstm", "gru", "rnn_tanh", "rnn_relu"],
            )
        ]
    ),
    ids=str,
)
def test_every_way_of_calling_a_layer(kernel, dtype, form, cell):
    name, *nonlinearity = cell.split("_")
    layer = getattr(gatewise, name.upper())(
        4, 8, 1, *nonlinearity, kernel=kernel, dtype=dtype, batch_first=form == "first"
    )
    sequences = [torch.randn(steps, 4, dtype=dtype) for steps in (5, 3)]
    inputs = {
        "dense": torch.stack([sequences[0]] * 2, 1),
        "packed": pack_sequence(sequences),
        "single": sequences[0],
        "first": torch.stack([sequences[0]] * 2),
    }
    report = verify(layer, inputs[form])
    assert report.layers[0].decision.problem.time == 5
    assert report.layers[0].decision.problem.cell.name == cell
    assert set(report.layers[0].forward.kernels) == set(report.layers[0].backward.kernels) == {kernel}


def test_grus_beside_lstms(x):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.ours, self.lstm = gatewise.GRU(4, 8, kernel="eager"), gatewise.LSTM(8, 8)
            self.theirs = nn.GRU(8, 4, 2)

        def forward(self, x):
            y, h = self.ours(x, torch.zeros(1, x.shape[1], 8))
            y, _ = self.lstm(y)
            return self.theirs(y)[0] + self.theirs(h.expand_as(y))[0]

    report = verify(Both(), x)
    assert [(layer.name, layer.calls) for layer in report.layers] == [("ours", 1), ("lstm", 1), ("theirs", 2)]
    assert report.layers[0].decision.chosen == "eager"
    assert report.layers[2].decision.reason == "torch.nn.GRU without cuDNN"
    assert verify(nn.GRU(4, 8), x[0], torch.zeros(1, 8)).agrees


@pytest.mark.parametrize("nonlinearity", ["tanh", "relu"])
def test_pytorchs_rnn(x, nonlinearity):
    report = verify(nn.RNN(4, 8, 2, nonlinearity), x)
    assert report.layers[0].decision.problem.cell.name == f"rnn_{nonlinearity}"
    assert report.layers[0].decision.reason == "torch.nn.RNN without cuDNN"
    assert set(report.layers[0].forward.kernels) == set(report.layers[0].backward.kernels) == {"aten"}


def test_every_output_of_the_model_starts_the_backward_pass(x):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = gatewise.LSTM(4, 8), gatewise.LSTM(4, 8, kernel="eager").double()

        def forward(self, x):
            return [self.one(x), {"other": self.other(x.double())[0]}, "a word", 3]

    given = x.clone().requires_grad_() * 1.0  # has its own autograd graph, which must stay intact
    for layer in verify(Two(), given).layers:
        assert set(layer.backward.kernels) == {layer.decision.chosen}


def test_without_gradients_there_is_no_backward_pass(x):
    with torch.no_grad():
        report = verify(gatewise.LSTM(4, 8), x)
    assert report.layers[0].backward is None
    assert not report.layers[0].decision.problem.needs_grad


def test_preferences_around_the_call_count(x):
    with gatewise.use_kernel("eager"):
        assert verify(gatewise.LSTM(4, 8), x).layers[0].decision.reason == "named by `use_kernel`"


def test_autocast_counts(x):
    with torch.autocast("cpu", torch.bfloat16):
        report = verify(gatewise.LSTM(4, 8), x)
    assert report.layers[0].decision.problem.dtype == torch.bfloat16


def test_a_falsified_decision_is_found_out(x, monkeypatch):
    real = plan.decide

    def falsified(problem, device, kernel):
        return real(problem, device, "eager" if real(problem, device, kernel).chosen == "aten" else "aten")

    monkeypatch.setattr(plan, "decide", falsified)
    with pytest.raises(gatewise.UnexpectedKernel) as raised:
        verify(Tagger(), x)
    message = str(raised.value)
    assert "`twice` should have run aten: forward ran eager (gatewise::eager_forward)" in message
    assert "backward ran eager (gatewise::eager_backward)" in message
    assert "`middle`" not in message
    assert "twice (2 calls): NOT AS DECIDED" in message


def test_a_silent_fall_back_is_found_out(x, monkeypatch):
    # The layer's decision names one kernel, and it runs another.
    layer = gatewise.LSTM(4, 8, kernel="aten")
    monkeypatch.setattr(layer, "forward", lambda x: torch.nn.LSTM(4, 8)(x[:, :, :4] * 1.0))
    assert verify(layer, x).agrees  # PyTorch's own layer on a CPU runs that kernel
    monkeypatch.setattr(layer, "forward", lambda x: (x @ torch.randn(4, 8), (x, x)))
    with pytest.raises(gatewise.UnexpectedKernel, match="forward ran no known kernel; the most frequent names are"):
        verify(layer, x)


def test_only_the_backward_pass_may_be_wrong(x, monkeypatch):
    traces = plan.kernels_among
    monkeypatch.setattr(
        "gatewise.nn.verification.kernels_among",
        lambda names, backward: {"eager": ("a trace",)} if backward else traces(names, backward=False),
    )
    with pytest.raises(gatewise.UnexpectedKernel, match="should have run aten: backward ran eager"):
        verify(gatewise.LSTM(4, 8, kernel="aten"), x)


def test_nothing_of_the_model_changes(x):
    model = Tagger()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    verify(model, x)
    assert torch.equal(torch.rand(2), expected)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert hooks == [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]


def test_an_error_of_the_call_comes_through_and_the_next_call_works(x):
    model = Tagger()
    with pytest.raises(gatewise.ShapeError):
        verify(model, x[:, :, :3])
    assert verify(model, x).agrees


# It compiles a model only to ignore that.
@pytest.mark.exhaustive
def test_a_compiled_model_is_run_uncompiled(x):
    model = torch.compile(gatewise.LSTM(4, 8), backend="aot_eager")
    model(x)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    report = verify(model, x)
    assert [layer.name for layer in report.layers] == ["_orig_mod"]
    assert set(report.layers[0].backward.kernels) == {report.layers[0].decision.chosen}
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


def test_an_empty_sequence_needs_no_kernel():
    assert verify(gatewise.LSTM(4, 8), torch.zeros(0, 3, 4)).agrees


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(4, 4), r"`model` must be a module with recurrent layers of gatewise or PyTorch, got none"),
        ([], r"`model` must be a torch.nn.Module, got list"),
        (nn.ModuleDict({"unused": nn.LSTM(4, 4)}), "NotImplementedError"),
    ],
)
def test_bad_models(model, message, x):
    expected = NotImplementedError if message == "NotImplementedError" else gatewise.ArgumentError
    with pytest.raises(expected, match=None if expected is NotImplementedError else message):
        verify(model, x)


def test_a_model_that_calls_none_of_its_layers(x):
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].unused = nn.LSTM(4, 4)
    with pytest.raises(gatewise.ArgumentError, match=r"got no call of 0\.unused"):
        verify(model, x)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", ALL, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("form", [{}, {"num_layers": 2, "bidirectional": True}, {"lengths": True}], ids=str)
@pytest.mark.parametrize("cell", SHIPPED, ids=repr)
def test_every_kernel_on_a_gpu(kernel, dtype, form, cell):
    options = {name: value for name, value in form.items() if name != "lengths"}
    problem = Problem(6, 8, 64, 256, dtype=dtype, needs_grad=True, allow_tf32=True, cell=cell, **options)
    if testing.why_not(kernel, problem, "cuda"):
        pytest.skip(f"{kernel.name} refuses: {'; '.join(testing.why_not(kernel, problem, 'cuda'))}")
    layer = gatewise.Recurrent(cell, 64, 256, kernel=kernel.name, device="cuda", dtype=dtype, **options)
    lengths = torch.tensor([6, 1, 3, 6, 2, 6, 5, 4]) if form.get("lengths") else None
    for _ in range(2):
        report = verify(layer, torch.randn(6, 8, 64, device="cuda", dtype=dtype), lengths=lengths)
        (found,) = report.layers
        assert found.decision.chosen == kernel.name
        assert set(found.forward.kernels) == set(found.backward.kernels) == {kernel.name}
    with torch.no_grad():
        assert verify(layer, torch.randn(6, 8, 64, device="cuda", dtype=dtype)).layers[0].backward is None


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_pytorchs_own_layer_on_a_gpu(kind):
    layer = kind(64, 256, device="cuda")
    x = torch.randn(6, 8, 64, device="cuda")
    assert verify(layer, x).layers[0].decision.chosen == "cudnn"
    with torch.backends.cudnn.flags(enabled=False):
        assert verify(layer, x).layers[0].decision.chosen == "aten"
    with torch.autocast("cuda", torch.bfloat16):
        assert verify(layer, x).layers[0].decision.problem.dtype == torch.float16


@pytest.mark.gpu
def test_a_falsified_decision_is_found_out_on_a_gpu(monkeypatch):
    real = plan.decide
    layer = gatewise.LSTM(64, 256, device="cuda", dtype=torch.bfloat16, kernel="eager")
    monkeypatch.setattr(plan, "decide", lambda problem, device, kernel: real(problem, device, "cudnn"))
    with pytest.raises(gatewise.UnexpectedKernel, match=r"should have run cudnn: forward ran eager"):
        verify(layer, torch.randn(6, 8, 64, device="cuda", dtype=torch.bfloat16))


class Padded(nn.RNNBase):
    """A `forward` with arguments of its own, for the layers of a program."""

    def forward(self, x, hx=None, lengths=None, enforce_sorted=True):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=enforce_sorted)
        packed, state = super().forward(packed, hx=hx)
        return nn.utils.rnn.pad_packed_sequence(packed)[0], state


class PaddedLSTM(Padded, nn.LSTM):
    pass


class PaddedLSTMOfGatewise(Padded, gatewise.LSTM):
    pass


def test_subclasses_are_verified_by_what_they_give_to_super(x):
    class Model(nn.ModuleDict):
        def forward(self, x, lengths):
            for layer in self.values():
                x, _ = layer(x, lengths=lengths, enforce_sorted=False)
            return x

    model = Model({"one": PaddedLSTM(4, 5), "two": gatewise.accelerate(PaddedLSTM(5, 3), verbose=False)})
    model["three"] = PaddedLSTMOfGatewise(3, 3)
    before = nn.LSTM.forward, gatewise.LSTM.forward
    report = verify(model, x.transpose(0, 1), lengths=torch.tensor([3, 6, 1]))
    assert (nn.LSTM.forward, gatewise.LSTM.forward) == before
    assert [(layer.name, layer.calls) for layer in report.layers] == [("one", 1), ("two", 1), ("three", 1)]
    assert all("packed" in str(layer.decision.problem) for layer in report.layers)
    assert [layer.decision.reason == "torch.nn.LSTM without cuDNN" for layer in report.layers] == [True, False, False]
    assert all(layer.backward.kernels for layer in report.layers)


def test_a_call_without_input_is_refused_by_the_layer():
    with pytest.raises(TypeError, match=r"forward\(\) missing 1 required positional argument: 'input'"):
        verify(nn.LSTM(3, 4))
