"""Steps on a CPU that repeat a checked step: what makes them check again, and that they read the weights."""

import copy
import pickle

import pytest
import torch
from torch import nn

import gatewise
from gatewise.contract.errors import ArgumentError, ShapeError
from gatewise.nn.stream_on_cpu import RepeatedStep
from tests.nn.test_stream_use import CHANGES, B, F, H, outputs, steps, x_of

LAYERS = {
    "LSTM": lambda **options: gatewise.LSTM(F, H, 2, **options),
    "LSTM without biases": lambda **options: gatewise.LSTM(F, H, bias=False, **options),
    "GRU": lambda **options: gatewise.GRU(F, H, 2, **options),
    "GRU without biases": lambda **options: gatewise.GRU(F, H, bias=False, **options),
    "RNN": lambda **options: gatewise.RNN(F, H, 2, nonlinearity="relu", **options),
}
each_layer = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)


@pytest.fixture
def repeated(monkeypatch):
    """Return a list to which each call of a stream adds whether it repeated a checked step."""
    found, after = [], RepeatedStep.after

    def counted(self, *given):
        result = after(self, *given)
        if not torch.is_grad_enabled():
            found.append(result is not None)
        return result

    monkeypatch.setattr(RepeatedStep, "after", counted)
    return found


@each_layer
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_all_but_the_first_step_are_repeated_and_are_a_call(make, dtype, mode, repeated):
    layer, x = make(dtype=dtype), x_of(dtype=dtype)
    stream = layer.stream(B)
    with mode():
        torch.testing.assert_close(steps(stream, x), outputs(layer, x))
    assert repeated == [True] * (len(x) - 1)


def test_steps_with_gradients_enabled_are_repeated_without_them(repeated):
    layer, x = gatewise.LSTM(F, H, 2), x_of().requires_grad_()
    stream = layer.stream(B)
    y = steps(stream, x)
    assert not y.requires_grad
    assert torch.is_grad_enabled()
    torch.testing.assert_close(y, outputs(layer, x))
    assert repeated == [True] * (len(x) - 1)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_changed_weights_are_read_by_the_next_step(kind, change, repeated):
    layer, x = LAYERS[kind](), x_of()
    stream = layer.stream(B)
    steps(stream, x[:3])
    states = stream.states
    repeated.clear()
    change(layer)
    torch.testing.assert_close(steps(stream, x[3:]), outputs(layer, x[3:], states))
    if change.__name__ != "changed_by_parametrization":
        with torch.no_grad():
            stream(x[0])
        assert repeated[-1]


def by_autocast(stream, x):
    with torch.autocast("cpu", torch.bfloat16):
        return stream(x).float()


def by_a_named_kernel(stream, x):
    with gatewise.use_kernel("eager"):
        return stream(x)


def by_another_dtype(stream, x):
    stream.layer.double()
    return stream(x.double()).float()


def by_another_nonlinearity(stream, x):
    stream.layer.mode = "RNN_TANH"
    return stream(x)


def by_weights_of_a_program(stream, x):
    stream.layer._flat_weights = [weight.detach() * 2 for weight in stream.layer._flat_weights]
    return stream(x)


def by_another_parameter(stream, x):
    stream.layer._parameters["weight_hh_l0"] = torch.nn.Parameter(2 * stream.layer.weight_hh_l0.detach())
    return stream(x)


@pytest.mark.parametrize(
    "call",
    [
        by_autocast,
        by_a_named_kernel,
        by_another_dtype,
        by_another_nonlinearity,
        by_weights_of_a_program,
        by_another_parameter,
    ],
)
def test_steps_of_another_form_are_checked(call, repeated):
    torch.manual_seed(0)
    layer, x = gatewise.RNN(F, H, nonlinearity="relu"), x_of()
    stream = layer.stream(B)
    with torch.no_grad():
        steps(stream, x[:2])
        states = stream.states
        assert repeated == [True]
        found = call(stream, x[2])
        assert repeated == [True, False]
        fresh = layer.stream(B)
        fresh.states = states
        dtype = layer.weight_ih_l0.dtype
        near = {"rtol": 0.02, "atol": 0.02} if call is by_autocast else {}
        torch.testing.assert_close(found, fresh(x[2].to(dtype)).float(), **near)
        torch.testing.assert_close(found, layer(x[2:3].to(dtype), states.to(dtype))[0][0].float(), **near)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("reverse", True, ArgumentError),
        ("bidirectional", True, ShapeError),
        ("num_layers", 2, ShapeError),
        ("bias", False, ShapeError),
        ("proj_size", 3, ShapeError),
    ],
)
def test_attributes_that_do_not_fit_the_weights_are_refused_after_repeated_steps(name, value, error, repeated):
    layer, x = gatewise.LSTM(F, H), x_of()
    stream = layer.stream(B)
    with torch.no_grad():
        steps(stream, x[:2])
        before = stream.states
        own = getattr(layer, name)
        setattr(layer, name, value)
        with pytest.raises(error):
            stream(x[2])
        setattr(layer, name, own)
        torch.testing.assert_close(stream.states, before, rtol=0, atol=0)
        stream(x[2])
    assert repeated == [True, False, True]


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_copies_have_memory_and_checks_of_their_own(kind, repeated):
    layer, x = LAYERS[kind](), x_of()
    stream = layer.stream(B)
    with torch.no_grad():
        steps(stream, x[:2])
        older = pickle.loads(pickle.dumps(stream))
        vars(older).pop("_repeated")  # as in one that was pickled before there was one
        others = copy.deepcopy(stream), older
        repeated.clear()
        expected = outputs(layer, x)[2:]
        for y, step in zip(expected, x[2:], strict=True):
            for one in (stream, *others):
                torch.testing.assert_close(one(step), y)
    assert repeated.count(True) == 3 * len(expected) - len(others)


class _Linear(nn.Parameter):
    """A weight whose class computes the product itself, as those of quantization libraries do."""

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        if function is nn.functional.linear:
            x, weight, bias = arguments  # it has no `out`
            return x @ weight.as_subclass(torch.Tensor).T + bias
        with torch._C.DisableTorchFunctionSubclass():
            return function(*arguments, **(options or {}))


def test_weights_of_another_class_and_dual_numbers_take_the_usual_steps():
    layer = gatewise.GRU(4, 3)
    stream, x = layer.stream(2), torch.randn(4, 2, 4)
    with torch.no_grad():
        expected = layer(x)[0]
        for step in x[:2]:
            stream(step)
        for name in ("weight_ih_l0", "weight_hh_l0"):
            setattr(layer, name, _Linear(getattr(layer, name).detach()))
        torch.testing.assert_close(torch.Tensor(stream(x[2])), expected[2])
        torch.testing.assert_close(torch.Tensor(stream(x[3])), expected[3])
    layer = gatewise.LSTM(4, 3)
    stream = layer.stream(2)
    for step in x[:2]:
        stream(step)
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x[2], torch.ones_like(x[2]))
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(stream(dual)).primal, layer(x)[0][2])
