"""`gatewise.compare` times a model with the layers of PyTorch and with gatewise's, and compares their results."""

import copy
import dataclasses
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import gatewise
from gatewise.cells import CoupledLSTM
from gatewise.nn import comparison
from gatewise.nn.comparison import Comparison, Measured


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(5, 4, num_layers=2, dropout=0.5, batch_first=True)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.cell = nn.GRUCell(4, 3)

    def forward(self, x, scale=1.0):
        y = self.drop(self.norm(self.lstm(x)[0].transpose(1, 2)))
        return {"tags": self.cell(y[..., -1]) * scale, "count": torch.tensor(3)}


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(comparison, "_SECONDS", 1e-4)
    monkeypatch.setattr(comparison, "_ROUNDS", 3)
    monkeypatch.setattr(comparison, "_WARM_UPS", 1)


def state_of(model):
    gradients = [each.grad for each in model.parameters()]
    return copy.deepcopy((model.state_dict(), gradients, model.training, model.lstm.dropout, model.drop.p))


def test_a_model_is_compared_and_stays_as_it_is():
    model, x = Tagger(), torch.randn(6, 7, 5, requires_grad=True)
    model.lstm.weight_hh_l0.grad = torch.ones_like(model.lstm.weight_hh_l0)
    before, random = state_of(model), torch.get_rng_state()
    found = gatewise.compare(model, x, scale=2.0)
    assert found.replaced == ("lstm", "cell")
    assert found.training
    assert found.outputs < 1e-5
    assert found.gradients < 1e-5
    for each in (found.before, found.after):
        assert 0 < each.called < 1
        assert (each.replayed, each.peak_bytes, each.obstacle) == (None, None, "")
    torch.testing.assert_close(state_of(model), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random)
    assert x.grad is None
    assert type(model.lstm) is nn.LSTM


def test_a_model_that_was_accelerated_is_compared_with_the_layers_that_it_had():
    model = gatewise.accelerate(Tagger(), verbose=False).eval()
    with torch.no_grad():
        found = gatewise.compare(model, torch.randn(6, 7, 5))
    assert (found.training, found.gradients) == (False, None)
    assert found.outputs < 1e-5
    assert type(model.lstm) is gatewise.LSTM


def test_packed_sequences_are_compared():
    packed = pack_sequence([torch.randn(n, 5) for n in (4, 6, 1)], enforce_sorted=False)
    found = gatewise.compare(nn.LSTM(5, 4, bidirectional=True), packed)
    assert found.replaced == ("the model itself",)
    assert found.outputs < 1e-5
    assert found.gradients < 1e-5


@dataclasses.dataclass
class Output:
    """An output as programs have them, with a number that is no tensor."""

    logits: torch.Tensor
    count: int = 3


class Returns(nn.Module):
    """A layer whose output is what a function makes of it."""

    def __init__(self, function):
        super().__init__()
        self.lstm, self.function = nn.LSTM(5, 4), function

    def forward(self, x):
        return self.function(self.lstm(x)[0])


def test_outputs_in_dataclasses_are_compared():
    found = gatewise.compare(Returns(Output), torch.randn(7, 2, 5))
    assert found.training
    assert found.gradients < 1e-5


@pytest.mark.parametrize("kind", [torch.complex64, torch.int64, torch.bool])
def test_outputs_of_every_dtype_are_compared(monkeypatch, kind):
    forward = gatewise.LSTM.forward
    model = Returns(lambda y: (y * 100).to(kind))
    x = torch.randn(7, 2, 5)
    assert gatewise.compare(model, x).outputs < 1e-4
    monkeypatch.setattr(gatewise.LSTM, "forward", lambda self, x: [forward(self, x)[0] * 0])
    assert gatewise.compare(model, x).outputs == pytest.approx(1.0)


def test_an_output_without_tensors_is_refused():
    with pytest.raises(gatewise.ArgumentError, match="`model` must be a module that returns tensors"):
        gatewise.compare(Returns(lambda y: "text"), torch.randn(7, 2, 5))


def test_inputs_that_a_model_changes_stay_as_they_are():
    class Changes(nn.LSTM):
        def forward(self, x):
            return super().forward(x.mul_(2))

    x = torch.ones(7, 2, 5)
    assert gatewise.compare(Changes(5, 4), x).outputs < 1e-5
    assert torch.equal(x, torch.ones(7, 2, 5))


def test_no_generator_of_another_device_is_seeded(monkeypatch):
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("seeded"))
    gatewise.compare(nn.LSTM(5, 4), torch.randn(7, 2, 5))


@pytest.mark.parametrize(("factor", "wrong"), [(2.0, 1.0), (float("nan"), float("inf"))])
def test_a_layer_with_other_results_is_seen(monkeypatch, factor, wrong):
    forward = gatewise.LSTM.forward

    def other(self, *given, **options):
        y, states = forward(self, *given, **options)
        return y * factor, states

    monkeypatch.setattr(gatewise.LSTM, "forward", other)
    found = gatewise.compare(nn.LSTM(5, 4), torch.randn(7, 2, 5))
    assert found.outputs == pytest.approx(wrong)
    assert found.gradients > 0.1


@pytest.mark.parametrize("make", [gatewise.LSTM, gatewise.GRU, gatewise.RNN, gatewise.GRUCell])
def test_a_layer_of_gatewise_is_compared_with_that_of_pytorch(make, monkeypatch):
    model, kind = make(5, 4), make.__name__
    theirs, calls = getattr(nn, kind).forward, []
    monkeypatch.setattr(getattr(nn, kind), "forward", lambda *given: calls.append(1) or theirs(*given))
    found = gatewise.compare(model, torch.randn(7, 5))
    assert found.replaced == ("the model itself",)
    assert found.outputs < 1e-5
    assert found.gradients < 1e-5
    assert calls
    assert type(model) is make


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Linear(2, 2), "none"),
        (gatewise.LSTM(5, 4, reverse=True), "the model itself: stays: it has the option reverse, which torch.nn"),
        (
            gatewise.Recurrent(CoupledLSTM(), 5, 4),
            "the model itself: stays: it is a gatewise.Recurrent, which torch.nn",
        ),
    ],
    ids=["none", "reverse", "another cell"],
)
def test_without_a_layer_to_replace_there_is_nothing_to_compare(model, reason):
    with pytest.raises(
        gatewise.ArgumentError, match="`model` must be a module with recurrent layers that both"
    ) as error:
        gatewise.compare(model, torch.randn(7, 2, 5))
    assert reason in str(error.value)
    assert "Give a model with LSTM, GRU, RNN or their cells, of torch.nn or of gatewise." in str(error.value)


@pytest.mark.parametrize("way", ["by name", "by place"])
def test_arguments_that_only_layers_of_gatewise_have_are_named(way):
    model, x, lengths = gatewise.LSTM(5, 4), torch.randn(7, 2, 5), torch.tensor([7, 3])
    given, options = ((x, None, lengths), {}) if way == "by place" else ((x,), {"lengths": lengths})
    with pytest.raises(
        gatewise.ArgumentError, match=r"as those of torch\.nn, got another call \(LSTM\.forward\(\) .*\)"
    ) as error:
        gatewise.compare(model, *given, **options)
    assert "Compare it without `lengths` and `resets`, or with a PackedSequence." in str(error.value)


class Unsuited(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(5, 4)

    def forward(self, x):
        return self.lstm(x + None)


def test_other_errors_of_a_model_are_its_own():
    with pytest.raises(TypeError, match="unsupported operand"):
        gatewise.compare(Unsuited(), torch.randn(7, 2, 5))


class Calls(nn.Module):
    """A model that may call the forward method of its layer, or not call its layer."""

    def __init__(self, how):
        super().__init__()
        self.lstm, self.linear, self.how = nn.LSTM(5, 4), nn.Linear(5, 4), how

    def forward(self, x):
        return self.lstm.forward(x)[0] if self.how == "forward" else self.linear(x)


def test_a_model_that_calls_no_layer_is_refused():
    with pytest.raises(
        gatewise.ArgumentError, match="`model` must be a module that calls the layers to replace, got no"
    ):
        gatewise.compare(Calls("never"), torch.randn(7, 2, 5))
    model, forward = Calls("forward"), nn.LSTM.forward
    assert gatewise.compare(model, torch.randn(7, 2, 5)).replaced == ("lstm",)
    assert nn.LSTM.forward is forward


def test_replicas_of_a_layer_run_with_their_own_weights():
    """`DataParallel` copies the attributes of a layer to its replicas on other devices."""
    from gatewise.nn.comparison import _called

    layer = nn.LSTM(3, 4)
    x = torch.randn(2, 2, 3)
    with _called([layer]) as called:
        replica = layer._replicate_for_data_parallel()
        replica._flat_weights = [torch.zeros_like(weight) for weight in layer._flat_weights]
        assert not replica(x)[0].any()
    assert called == [replica]


def test_a_function_is_refused():
    with pytest.raises(gatewise.ArgumentError, match=r"`model` must be a torch\.nn\.Module, got function"):
        gatewise.compare(lambda x: x, torch.randn(7, 2, 5))


def test_the_report_fits_80_columns():
    before = Measured(12.6e-3, 1.94e-3, 3 << 30, "")
    after = Measured(3.4e-3, None, 1 << 30, "operation not permitted when stream is capturing " * 3)
    text = str(Comparison(before, after, tuple(f"encoder.layers.{n}" for n in range(9)), True, 3.4e-7, 0.0))
    assert max(map(len, text.splitlines())) <= 80
    assert text.startswith(
        "forward and backward pass     torch.nn    gatewise\n"
        "called from Python             12.6 ms      3.4 ms  3.71 times as fast\n"
        "replayed as a CUDA graph       1.94 ms           ?\n"
        "peak memory                      3 GiB       1 GiB  0.33 of the memory\n"
        "largest difference  outputs 3e-07, gradients 0 of the largest value\n"
        "replaced  encoder.layers.0, "
    )
    assert "no CUDA graph, gatewise  operation not permitted" in text


@pytest.mark.gpu
def test_on_a_gpu_steps_are_replayed_too(monkeypatch):
    monkeypatch.undo()
    model = nn.Sequential(nn.LSTM(64, 256, num_layers=2, device="cuda"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of cuDNN, if the weights of a layer are not in one piece of memory
        found = gatewise.compare(model, torch.randn(50, 16, 64, device="cuda"))
    for each in (found.before, found.after):
        assert 0 < each.replayed < each.called
        assert each.peak_bytes > 0
        assert not each.obstacle
    assert found.after.called < found.before.called
    assert found.outputs < 1e-2
    assert found.gradients < 1e-2


@pytest.mark.gpu
def test_a_step_that_cannot_be_captured_is_timed_as_it_is():
    class Reads(nn.LSTM):
        def forward(self, x):
            return super().forward(x)[0] * x.sum().item()

    found = gatewise.compare(Reads(8, 8, device="cuda"), torch.randn(5, 2, 8, device="cuda"))
    assert found.before.replayed is found.after.replayed is None
    assert "captur" in found.after.obstacle
    assert found.after.called > 0
    assert torch.ones(2, device="cuda").sum().item() == 2
