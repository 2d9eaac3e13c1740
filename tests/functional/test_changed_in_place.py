"""What a caller changes in place between forward and backward: the right gradient from every kernel, or an error."""

import copy
import pickle

import pytest
import torch

import gatewise
from gatewise import functional
from gatewise.contract.errors import GatewiseError, ModifiedInPlace
from gatewise.functional.serialization import rebuild, take_apart

KERNELS = [
    pytest.param("eager", "cpu", torch.float64, id="eager"),
    pytest.param("aten", "cpu", torch.float64, id="aten's loop"),
    pytest.param("aten", "cpu", torch.float32, id="oneDNN"),
    pytest.param("persistent", "cuda", torch.float32, id="persistent", marks=pytest.mark.gpu),
    pytest.param("stepwise", "cuda", torch.float32, id="stepwise", marks=pytest.mark.gpu),
    pytest.param("cudnn", "cuda", torch.float32, id="cudnn", marks=pytest.mark.gpu),
]
LAYERS = [{}, {"num_layers": 2, "bidirectional": True}]
LENGTHS = [4, 2, 3]
TIME, BATCH, FEATURES, UNITS = 4, 3, 8, 16


@pytest.fixture(autouse=True)
def exact_products(monkeypatch):
    if torch.cuda.is_available():
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


class Call:
    """The inputs of a call on one kernel."""

    def __init__(self, kernel, device, dtype, **layers):
        torch.manual_seed(0)
        made = {"device": device, "dtype": dtype}
        self.module = gatewise.LSTM(FEATURES, UNITS, kernel=kernel, **layers, **made)
        self.theirs = torch.nn.LSTM(FEATURES, UNITS, **layers, **made)
        self.theirs.load_state_dict(self.module.state_dict())
        rows = layers.get("num_layers", 1) * (1 + layers.get("bidirectional", False))
        self.x = torch.randn(TIME, BATCH, FEATURES, **made)
        self.state = tuple(torch.randn(rows, BATCH, UNITS, **made) for _ in range(2))
        self.options = {"bidirectional": layers.get("bidirectional", False), "kernel": kernel}

    def leaves(self, module):
        return [tensor.clone().requires_grad_() for tensor in (self.x, *self.state)], list(module.parameters())

    def gradients(self, loss_of, module=None, **options):
        """Return the gradients of a loss of the call's outputs, which `loss_of` may change first."""
        module = module or self.module
        (x, *state), weights = self.leaves(module)
        y, (h, c) = module(x, tuple(state), **options)
        return torch.autograd.grad(loss_of(y, h, c), [x, *state, *weights])

    def explicit(self, change=lambda *_: None, **options):
        """Return the gradients of an explicit call whose tensors are changed between its passes."""
        x, state = self.x.clone(), tuple(tensor.clone() for tensor in self.state)
        weights = [[weight.detach().clone() for weight in direction] for direction in self.module.all_weights]
        (y, final), saved = functional.forward(x, state, weights, **self.options, **options)
        above = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(y)
        change({"x": x, "h0": state[0], "c0": state[1], "y": y, "h": final.h, "c": final.c, "weights": weights})
        found = functional.backward(saved, above, (final.h.new_ones(final.h.shape), None))
        return [found.x, *found.state, *(tensor for direction in found.weights for tensor in direction)]


def assert_same(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        # What was computed from another value is wrong in the first digit; kernels differ in the last ones.
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=3e-4)


def beside(kernel, device):
    """Return where lengths lie: cuDNN reads none on the GPU."""
    return "cpu" if kernel == "cudnn" else device


def attempted(call):
    """Return the gradients, or the error in their place."""
    try:
        return call()
    except RuntimeError as error:
        return error


def loss(y, h, c):
    return y.square().sum() + (2 * h).square().sum() + (3 * c).square().sum()


def masked(y, h, c):
    return loss(y, h * 0.5, c - 1)


def masked_in_place(y, h, c):
    h.mul_(0.5)
    c.sub_(1)
    return loss(y, h, c)


@pytest.mark.parametrize("layers", LAYERS, ids=str)
@pytest.mark.parametrize("options", [{}, {"lengths": LENGTHS}], ids=["dense", "lengths"])
@pytest.mark.parametrize(("kernel", "device", "dtype"), KERNELS)
def test_final_states_may_be_changed(kernel, device, dtype, layers, options):
    call = Call(kernel, device, dtype, **layers)
    assert_same(call.gradients(masked_in_place, **options), call.gradients(masked, **options))
    if not options:
        assert_same(call.gradients(masked_in_place), call.gradients(masked_in_place, call.theirs))


@pytest.mark.parametrize(("kernel", "device", "dtype"), KERNELS)
def test_a_state_is_reset_between_steps_as_in_reinforcement_learning(kernel, device, dtype):
    call = Call(kernel, device, dtype)
    done = torch.tensor([0.0, 1.0, 0.0], device=device, dtype=dtype).unsqueeze(1)

    def gradients(module):
        (x, *state), weights = call.leaves(module)
        state, total = tuple(state), 0.0
        for step in x:
            y, (h, c) = module(step.unsqueeze(0), state)
            total = total + y.square().sum()
            h.mul_(1 - done)
            c.mul_(1 - done)
            state = (h, c)
        return torch.autograd.grad(total + state[0].sum(), [x, *weights])

    assert_same(gradients(call.module), gradients(call.theirs))


@pytest.mark.parametrize("layers", LAYERS, ids=str)
@pytest.mark.parametrize("options", [{}, {"lengths": LENGTHS}], ids=["dense", "lengths"])
@pytest.mark.parametrize(("kernel", "device", "dtype"), KERNELS)
def test_a_changed_output_is_an_error_only_where_it_is_one_in_torch(kernel, device, dtype, layers, options):
    call = Call(kernel, device, dtype, **layers)

    def in_place(y, h, c):
        y.mul_(0.5)  # never an error yet
        return loss(y, h, c)

    expected = call.gradients(lambda y, h, c: loss(y * 0.5, h, c), **options)
    found = attempted(lambda: call.gradients(in_place, **options))
    if isinstance(found, RuntimeError):
        theirs = attempted(lambda: call.gradients(in_place, call.theirs))
        assert "modified by an inplace operation" in str(found)
        assert "modified by an inplace operation" in str(theirs)
    else:
        assert_same(found, expected)


@pytest.mark.parametrize("layers", LAYERS, ids=str)
@pytest.mark.parametrize("name", ["x", "h0", "c0", "weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"])
@pytest.mark.parametrize(("kernel", "device", "dtype"), KERNELS)
def test_a_changed_input_of_a_differentiable_call_is_never_read(kernel, device, dtype, name, layers):
    call = Call(kernel, device, dtype, **layers)

    def gradients(change):
        (x, *state), weights = call.leaves(call.module)
        y, (h, c) = call.module(x, tuple(state))
        if change:
            with torch.no_grad():
                tensors = {"x": x, "h0": state[0], "c0": state[1]}
                (tensors[name] if name in tensors else getattr(call.module, name)).add_(1)
        return torch.autograd.grad(loss(y, h, c), [x, *state, *weights])

    expected = gradients(False)
    found = attempted(lambda: gradients(True))
    if isinstance(found, RuntimeError):
        assert "inplace" in str(found)
    else:  # the native loop does not keep biases
        assert_same(found, expected)


@pytest.mark.parametrize("form", ["tensor", "int32", "array", "list"])
@pytest.mark.parametrize(("kernel", "device", "dtype"), KERNELS)
def test_lengths_may_be_used_again(kernel, device, dtype, form):
    call = Call(kernel, device, dtype)
    expected = call.gradients(loss, lengths=LENGTHS)
    lengths = {
        "tensor": torch.tensor(LENGTHS, device=beside(kernel, device)),
        "int32": torch.tensor(LENGTHS, dtype=torch.int32),
        "array": torch.tensor(LENGTHS).numpy(),
        "list": list(LENGTHS),
    }[form]

    def change(*outputs):
        lengths[:] = [1, 1, 1] if form in ("array", "list") else torch.ones_like(lengths)
        return loss(*outputs)

    assert_same(call.gradients(change, lengths=lengths), expected)


@pytest.mark.parametrize(("kernel", "device", "dtype"), KERNELS)
def test_batch_sizes_may_be_used_again(kernel, device, dtype):
    call = Call(kernel, device, dtype)
    x = torch.randn(6, FEATURES, device=device, dtype=dtype)

    def gradients(change):
        sizes, leaf = torch.tensor([3, 2, 1]), x.clone().requires_grad_()
        y, (h, c) = functional.lstm(leaf, None, call.module.all_weights, batch_sizes=sizes, kernel=kernel)
        if change:
            sizes.fill_(2)
        return torch.autograd.grad(loss(y, h, c), [leaf, *call.module.parameters()])

    assert_same(gradients(True), gradients(False))


CHANGES = {
    "x": lambda given: given["x"].add_(1),
    "h0": lambda given: given["h0"].zero_(),
    "c0": lambda given: given["c0"].zero_(),
    "y": lambda given: given["y"].mul_(0.5),
    "weights[0][0]": lambda given: given["weights"][0][0].mul_(2),
    "weights[0][3]": lambda given: given["weights"][0][3].mul_(2),
    "weights[1][1]": lambda given: given["weights"][1][1].mul_(2),
}


@pytest.mark.parametrize("name", list(CHANGES))
@pytest.mark.parametrize("options", [{}, {"lengths": LENGTHS}, {"keep": False}], ids=["dense", "lengths", "repeated"])
@pytest.mark.parametrize(("kernel", "device", "dtype"), KERNELS)
def test_the_explicit_passes_name_what_was_changed(kernel, device, dtype, options, name):
    call = Call(kernel, device, dtype, num_layers=2)
    with pytest.raises(ModifiedInPlace) as raised:
        call.explicit(CHANGES[name], **options)
    assert str(raised.value).startswith(f"`{name}` must be as it was in the forward pass")
    assert "modified by an inplace operation" in str(raised.value)
    assert isinstance(raised.value, GatewiseError)
    assert isinstance(raised.value, RuntimeError)
    call.explicit(**options)


@pytest.mark.parametrize("layers", LAYERS, ids=str)
@pytest.mark.parametrize(("kernel", "device", "dtype"), KERNELS)
def test_the_explicit_passes_do_not_need_the_final_states(kernel, device, dtype, layers):
    call = Call(kernel, device, dtype, **layers)
    found = call.explicit(lambda given: (given["h"].fill_(torch.nan), given["c"].fill_(torch.nan)))
    assert_same(found, call.explicit())


@pytest.mark.parametrize(("kernel", "device", "dtype"), KERNELS)
def test_lengths_of_the_explicit_passes_may_be_used_again(kernel, device, dtype):
    call, lengths = Call(kernel, device, dtype), torch.tensor(LENGTHS, device=beside(kernel, device))
    assert_same(call.explicit(lambda _: lengths.fill_(1), lengths=lengths), call.explicit(lengths=LENGTHS))


def test_an_optimizer_step_between_the_passes_is_named():
    module = torch.nn.LSTM(3, 4)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    (y, _), saved = functional.forward(torch.randn(5, 2, 3), None, list(module.parameters()))
    torch.optim.SGD(module.parameters(), 0.1).step()
    with pytest.raises(ModifiedInPlace, match=r"`weights\[0\]` must be as it was in the forward pass \(version \d"):
        functional.backward(saved, torch.ones_like(y))


@pytest.mark.parametrize(("kernel", "device", "dtype"), KERNELS)
def test_tensors_of_the_inference_mode_are_copied(kernel, device, dtype):
    module = torch.nn.LSTM(FEATURES, UNITS, device=device, dtype=dtype)
    with torch.inference_mode():
        x = torch.randn(5, 2, FEATURES, device=device, dtype=dtype)
        weights = [parameter.clone() for parameter in module.parameters()]

        def gradients(change):
            given, own = x.clone(), [weight.clone() for weight in weights]
            (y, (h, c)), saved = functional.forward(given, None, own, kernel=kernel)
            dy = torch.ones_like(y)
            if change:
                for tensor in (given, y, h, c, *own):
                    if tensor.is_inference():  # the outputs of PyTorch's loop are not
                        tensor.fill_(torch.nan)
            found = functional.backward(saved, dy)
            return [found.x, *found.weights]

        assert_same(gradients(True), gradients(False))


@pytest.mark.parametrize("travel", [copy.deepcopy, copy.copy, lambda saved: pickle.loads(pickle.dumps(saved))])
def test_a_saved_pass_is_copied_with_versions_of_its_own(travel):
    module = torch.nn.LSTM(3, 4)
    weights = [parameter.detach().add_(1) for parameter in module.parameters()]
    x = torch.randn(5, 2, 3)
    (y, _), saved = functional.forward(x, None, weights, kernel="eager")
    again = travel(saved)
    dy = torch.ones_like(y)
    expected = functional.backward(saved, dy)
    assert_same([functional.backward(again, dy).x], [expected.x])
    again.inputs.x.add_(1)
    with pytest.raises(ModifiedInPlace, match="`x` must be"):
        functional.backward(again, dy)
    y.add_(1)
    with pytest.raises(ModifiedInPlace, match=r"`[xy]` must be"):
        travel(saved)


def test_the_pieces_of_a_saved_pass_are_watched_too():
    module = torch.nn.LSTM(3, 4)
    (y, _), saved = functional.forward(torch.randn(5, 2, 3), None, module.all_weights, kernel="eager")
    tensors, facts = take_apart(saved)
    again = rebuild(tensors, facts)
    functional.backward(again, torch.ones_like(y))
    tensors["weight.1"].add_(1)
    with pytest.raises(ModifiedInPlace, match=r"`weights\[1\]` must be"):
        functional.backward(again, torch.ones_like(y))
    saved.inputs.x.add_(1)
    with pytest.raises(ModifiedInPlace, match="`x` must be"):
        take_apart(saved)
