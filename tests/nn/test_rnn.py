"""What an RNN has that a GRU has not: its nonlinearity, as an argument and in the state of copies."""

import inspect
import pickle

import pytest
import torch

import gatewise


@pytest.mark.parametrize("name", ["RNN", "RNNCell"])
def test_the_positions_of_arguments_are_pytorchs(name):
    sizes = (4, 5, 2, "relu", False, True, 0.5, True) if name == "RNN" else (4, 5, False, "relu")
    ours, theirs = getattr(gatewise, name)(*sizes), getattr(torch.nn, name)(*sizes)
    assert {key: value.shape for key, value in ours.state_dict().items()} == {
        key: value.shape for key, value in theirs.state_dict().items()
    }
    options = ["nonlinearity", "bias", *(["batch_first", "dropout", "bidirectional", "mode"] if name == "RNN" else [])]
    for option in options:
        assert getattr(ours, option) == getattr(theirs, option)


@pytest.mark.parametrize("make", [gatewise.RNN, gatewise.RNNCell])
@pytest.mark.parametrize("nonlinearity", ["sigmoid", None, ["tanh"]], ids=repr)
def test_another_nonlinearity_is_refused(make, nonlinearity):
    with pytest.raises(gatewise.ArgumentError, match=r"`nonlinearity` must be 'tanh' or 'relu', got "):
        make(4, 5, nonlinearity=nonlinearity)
    with pytest.raises(ValueError, match="nonlinearity"):  # the class of PyTorch's error
        make(4, 5, nonlinearity=nonlinearity)


def test_the_nonlinearity_acts_and_survives_a_copy():
    torch.manual_seed(0)
    relu = gatewise.RNN(4, 5, nonlinearity="relu")
    tanh, x = gatewise.RNN(4, 5), torch.randn(3, 2, 4)
    tanh.load_state_dict(relu.state_dict())
    assert relu(x)[0].detach().min() == 0
    assert tanh(x)[0].detach().min() < 0
    other = pickle.loads(pickle.dumps(relu))
    torch.testing.assert_close(other(x), relu(x))
    assert repr(other) == "RNN(4, 5, nonlinearity=relu)"


def test_the_parameters_of_the_constructors_are_pytorchs():
    ours = inspect.signature(gatewise.RNNCell.__init__).parameters
    assert list(ours) == list(inspect.signature(torch.nn.RNNCell.__init__).parameters)


@pytest.mark.parametrize("nonlinearity", ["tanh", "relu"])
def test_lean_memory_gives_the_same_gradients(nonlinearity):
    torch.manual_seed(0)
    plain = gatewise.RNN(4, 5, 2, nonlinearity, dtype=torch.float64)
    lean = gatewise.RNN(4, 5, 2, nonlinearity, dtype=torch.float64, memory="lean")
    lean.load_state_dict(plain.state_dict())
    x = torch.randn(6, 3, 4, dtype=torch.float64)
    for layer in (plain, lean):
        layer(x)[0].square().sum().backward()
    for one, other in zip(plain.parameters(), lean.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("nonlinearity", ["tanh", "relu"])
def test_vmap_over_weights(nonlinearity):
    layers = [gatewise.RNN(4, 5, nonlinearity=nonlinearity) for _ in range(3)]
    weights, _ = torch.func.stack_module_state(layers)
    x = torch.randn(6, 2, 4)
    y, _ = torch.func.vmap(lambda own: torch.func.functional_call(layers[0], own, (x,)))(weights)
    torch.testing.assert_close(y, torch.stack([layer(x)[0] for layer in layers]))
