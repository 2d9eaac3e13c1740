"""gatewise.LSTM as a module: what programs do with torch.nn.LSTM other than calling it."""

from __future__ import annotations

import copy
import inspect
import io
import itertools
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, weight_norm

import gatewise
from gatewise.nn import LSTM

VARIANTS = [
    {},
    {"bias": False},
    {"num_layers": 2, "bidirectional": True},
    {"num_layers": 2, "proj_size": 2, "bidirectional": True},
    {"proj_size": 3, "bias": False, "batch_first": True, "num_layers": 3, "dropout": 0.25},
]


def twins(seed: int = 0, **options) -> tuple[nn.LSTM, LSTM]:
    torch.manual_seed(seed)
    theirs = nn.LSTM(5, 4, **options)
    torch.manual_seed(seed)
    return theirs, LSTM(5, 4, **options)


def same(found, expected) -> None:
    torch.testing.assert_close(found, expected)


def test_constructor_takes_the_arguments_of_torch():
    ours = list(inspect.signature(LSTM.__init__).parameters)
    theirs = list(inspect.signature(nn.RNNBase.__init__).parameters)
    theirs.remove("mode")
    assert ours == [*theirs, "kernel", "memory", "weight_dropout", "reverse"]


@pytest.mark.parametrize("options", VARIANTS)
def test_parameters_have_the_names_order_shapes_and_numbers_of_torch(options):
    theirs, ours = twins(**options)
    expected = list(theirs.named_parameters())
    found = list(ours.named_parameters())
    assert [name for name, _ in found] == [name for name, _ in expected]
    for (name, parameter), (_, other) in zip(found, expected, strict=True):
        assert torch.equal(parameter, other), name


@pytest.mark.parametrize("options", VARIANTS)
def test_state_dict_goes_both_ways(options):
    theirs, ours = twins(**options)
    ours.reset_parameters()
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(3, 3, 5)
    same(ours.eval()(x), theirs.eval()(x))
    theirs.reset_parameters()
    ours.load_state_dict(theirs.state_dict(), assign=True)
    same(ours(x), theirs(x))


@pytest.mark.parametrize("options", VARIANTS)
def test_repr_and_all_weights_are_those_of_torch(options):
    theirs, ours = twins(**options)
    assert repr(ours) == repr(theirs)
    assert [[w.shape for w in direction] for direction in ours.all_weights] == [
        [w.shape for w in direction] for direction in theirs.all_weights
    ]
    assert all(a is b for a, b in zip(itertools.chain(*ours.all_weights), ours.parameters(), strict=True))


def test_repr_shows_a_named_kernel():
    assert repr(LSTM(3, 4, kernel="eager")) == "LSTM(3, 4, kernel=eager)"


def test_states_are_plain_tuples():
    _, state = LSTM(5, 4)(torch.randn(3, 2, 5))
    assert type(state) is tuple


def test_deepcopy_is_independent():
    _, ours = twins(num_layers=2)
    other = copy.deepcopy(ours)
    x = torch.randn(3, 2, 5)
    before = ours(x)
    same(other(x), before)
    with torch.no_grad():
        other.weight_hh_l0.zero_()
    same(ours(x), before)
    assert not torch.equal(other(x)[0], before[0])


def test_pickle_and_torch_save_keep_everything():
    _, ours = twins(num_layers=2, bidirectional=True, batch_first=True)
    x = torch.randn(3, 2, 5)
    buffer = io.BytesIO()
    torch.save(ours, buffer)
    buffer.seek(0)
    for other in (pickle.loads(pickle.dumps(ours)), torch.load(buffer, weights_only=False)):
        assert repr(other) == repr(ours)
        same(other(x), ours(x))


def test_pickle_from_before_an_attribute_existed():
    _, ours = twins()
    state = ours.__getstate__() if hasattr(ours, "__getstate__") else dict(vars(ours))
    state = {name: value for name, value in state.items() if name not in ("kernel", "proj_size", "_weight_names")}
    old = LSTM.__new__(LSTM)
    old.__setstate__(state)
    x = torch.randn(3, 2, 5)
    same(old(x), ours(x))
    assert old.kernel == "auto"
    assert repr(old) == repr(ours)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_conversion_of_dtype(dtype):
    theirs, ours = twins(num_layers=2)
    x = torch.randn(3, 2, 5, dtype=dtype)
    y, (h_n, c_n) = ours.to(dtype)(x)
    assert {y.dtype, h_n.dtype, c_n.dtype, ours.weight_ih_l0.dtype} == {dtype}
    tolerance = {} if dtype == torch.float64 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(y, theirs.to(dtype)(x)[0], **tolerance)
    assert ours.float()(x.float())[0].dtype == torch.float32


def test_half_precision_parameters_and_input():
    theirs, ours = twins()
    x = torch.randn(3, 2, 5)
    y = ours.half()(x.half())[0]
    assert y.dtype == torch.float16
    torch.testing.assert_close(y.float(), theirs(x)[0], rtol=5e-3, atol=5e-3)


def test_factory_arguments():
    layer = LSTM(5, 4, device="meta", dtype=torch.float64)
    assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.float64)}
    assert layer.to_empty(device="cpu").weight_ih_l0.device.type == "cpu"


def test_parametrizations_are_read_in_every_call():
    theirs, ours = twins()
    for layer in (theirs, ours):
        parametrizations.weight_norm(layer, "weight_hh_l0")
    x = torch.randn(3, 2, 5)
    same(ours(x), theirs(x))
    ours(x)[0].square().sum().backward()
    assert ours.parametrizations.weight_hh_l0.original0.grad.abs().sum() > 0
    with torch.no_grad():
        ours.parametrizations.weight_hh_l0.original0.mul_(3)
        theirs.parametrizations.weight_hh_l0.original0.mul_(3)
    same(ours(x), theirs(x))
    parametrize.remove_parametrizations(ours, "weight_hh_l0")
    same(ours(x), theirs(x))


def test_own_parametrization_with_gradient():
    class Symmetric(nn.Module):
        def forward(self, weight):
            return weight.clone().sub_(weight.mean())

    _, ours = twins()
    parametrize.register_parametrization(ours, "weight_ih_l0", Symmetric())
    ours(torch.randn(3, 2, 5))[0].sum().backward()
    assert ours.parametrizations.weight_ih_l0.original.grad.sum().abs() < 1e-5


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize("change", [weight_norm, lambda m, name: prune.l1_unstructured(m, name, 0.5)])
def test_hooks_that_compute_weights(change):
    theirs, ours = twins()
    change(theirs, "weight_hh_l0")
    change(ours, "weight_hh_l0")
    x = torch.randn(3, 2, 5)
    same(ours(x), theirs(x))


def test_functional_call_uses_the_given_weights():
    theirs, ours = twins(num_layers=2)
    x = torch.randn(3, 2, 5)
    other = {name: (parameter * 2).detach().requires_grad_() for name, parameter in ours.named_parameters()}
    y, _ = torch.func.functional_call(ours, other, (x,))
    same(y, torch.func.functional_call(theirs, other, (x,))[0])
    y.sum().backward()
    assert all(weight.grad is not None for weight in other.values())
    assert all(parameter.grad is None for parameter in ours.parameters())


def test_func_grad_of_functional_call():
    theirs, ours = twins()
    x = torch.randn(3, 2, 5)
    weights = {name: parameter.detach() for name, parameter in ours.named_parameters()}

    def loss(weights):
        return torch.func.functional_call(ours, weights, (x,))[0].square().sum()

    theirs(x)[0].square().sum().backward()
    gradients = torch.func.grad(loss)(weights)
    same(gradients, {name: parameter.grad for name, parameter in theirs.named_parameters()})


def test_vmap_gives_gradients_per_sample():
    _, ours = twins(num_layers=2)
    weights = {name: parameter.detach() for name, parameter in ours.named_parameters()}

    def loss(weights, x):
        return torch.func.functional_call(ours, weights, (x,))[0].square().sum()

    samples = torch.randn(3, 4, 5)
    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, samples)
    for row, sample in enumerate(samples):
        ours.zero_grad()
        ours(sample)[0].square().sum().backward()
        for name, parameter in ours.named_parameters():
            same(found[name][row], parameter.grad)


@pytest.mark.parametrize("lengths", [[[4, 1], [0, 3], [2, 2]], [[0, 0], [0, 0], [0, 0]]], ids=["mixed", "empty"])
def test_vmap_maps_over_lengths(lengths):
    _, ours = twins(num_layers=2, bidirectional=True)
    x, lengths = torch.randn(3, 4, 2, 5), torch.tensor(lengths)
    rows = [ours(each, lengths=row) for each, row in zip(x, lengths, strict=True)]
    y, (h_n, c_n) = torch.func.vmap(lambda x, lengths: ours(x, lengths=lengths))(x, lengths)
    same(y, torch.stack([row[0] for row in rows]))
    same(h_n, torch.stack([row[1][0] for row in rows]))
    same(c_n, torch.stack([row[1][1] for row in rows]))

    def loss(x, lengths):
        return ours(x, lengths=lengths)[0].square().sum()

    found = torch.func.vmap(torch.func.grad(loss))(x, lengths)
    same(found, torch.stack([torch.func.grad(loss)(each, row) for each, row in zip(x, lengths, strict=True)]))
    with pytest.raises(gatewise.ShapeError, match="`lengths` must be between 0 and T = 4, got 9"):
        torch.func.vmap(loss)(x, lengths + torch.tensor([[0, 0], [0, 0], [0, 9 - int(lengths[2, 1])]]))


def test_function_transforms_refuse_a_named_kernel_that_they_cannot_see_into():
    layer = LSTM(5, 4, kernel="aten")
    weights = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    call = torch.func.grad(lambda weights, x: torch.func.functional_call(layer, weights, (x,))[0].sum())
    with pytest.raises(gatewise.KernelRefused, match=r"`kernel` must be 'auto' or 'eager' inside torch\.func\.grad"):
        call(weights, torch.randn(3, 2, 5))


def test_weights_tied_between_layers_share_one_gradient():
    theirs, ours = nn.LSTM(4, 4, 2), LSTM(4, 4, 2)
    ours.load_state_dict(theirs.state_dict())
    for layer in (theirs, ours):
        for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            setattr(layer, f"{kind}_l1", getattr(layer, f"{kind}_l0"))
    x = torch.randn(3, 2, 4)
    same(ours(x), theirs(x))
    for layer in (theirs, ours):
        layer(x)[0].square().sum().backward()
    same(ours.weight_hh_l0.grad, theirs.weight_hh_l0.grad)
    ours.double()
    assert ours.weight_hh_l1 is ours.weight_hh_l0


def test_weights_tied_between_modules_follow_each_other():
    first, second = LSTM(4, 4), LSTM(4, 4)
    second.weight_hh_l0 = first.weight_hh_l0
    x = torch.randn(3, 2, 4)
    before = second(x)[0].detach()
    with torch.no_grad():
        first.weight_hh_l0.mul_(2)
    assert not torch.equal(second(x)[0], before)
    (first(x)[0].sum() + second(x)[0].sum()).backward()
    assert first.weight_hh_l0.grad is second.weight_hh_l0.grad


def test_frozen_weights_get_no_gradient():
    theirs, ours = twins(num_layers=2)
    for layer in (theirs, ours):
        layer.weight_ih_l0.requires_grad_(False)
        layer.bias_hh_l1.requires_grad_(False)
        layer(torch.linspace(-1, 1, 30).view(3, 2, 5))[0].square().sum().backward()
    for (name, found), (_, expected) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        if expected.grad is None:
            assert found.grad is None, name
        else:
            same(found.grad, expected.grad)


def test_all_weights_frozen_still_gives_the_input_gradient():
    theirs, ours = twins()
    x = torch.randn(3, 2, 5)
    gradients = []
    for layer in (theirs, ours):
        layer.requires_grad_(False)
        leaf = x.clone().requires_grad_()
        layer(leaf)[0].square().sum().backward()
        gradients.append(leaf.grad)
    same(*gradients)


def test_no_gradient_is_recorded_when_none_is_wanted():
    _, ours = twins()
    with torch.no_grad():
        assert not ours(torch.randn(3, 2, 5))[0].requires_grad
    with torch.inference_mode():
        assert ours(torch.randn(3, 2, 5))[0].is_inference()


def test_backward_in_eval_mode():
    theirs, ours = twins(num_layers=2, dropout=0.5)
    x = torch.randn(3, 2, 5)
    for layer in (theirs, ours):
        layer.eval()(x)[0].square().sum().backward()
    for (name, found), (_, expected) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, msg=name)


def test_backward_twice_with_retained_graph():
    _, ours = twins()
    loss = ours(torch.randn(3, 2, 5))[0].square().sum()
    loss.backward(retain_graph=True)
    once = ours.weight_hh_l0.grad.clone()
    loss.backward()
    same(ours.weight_hh_l0.grad, 2 * once)


def test_double_backward_equals_torch():
    theirs, ours = (layer.double() for layer in twins(num_layers=2))
    x = torch.randn(3, 2, 5, dtype=torch.float64)
    penalties = []
    for layer in (theirs, ours):
        leaf = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(layer(leaf)[0].square().sum(), leaf, create_graph=True)
        dx.square().sum().backward()
        penalties.append(layer.weight_hh_l0.grad)
    same(*penalties)


def test_hooks_fire():
    _, ours = twins()
    seen = []
    ours.register_forward_pre_hook(lambda module, args: seen.append("before"))
    ours.register_forward_hook(lambda module, args, output: seen.append("after"))
    ours.register_full_backward_hook(lambda module, inputs, outputs: seen.append("backward"))
    ours(torch.randn(3, 2, 5, requires_grad=True))[0].sum().backward()
    assert seen == ["before", "after", "backward"]


def test_replacing_a_parameter_takes_effect():
    theirs, ours = twins()
    weight = torch.randn(16, 4)
    ours.weight_hh_l0 = nn.Parameter(weight.clone())
    theirs.weight_hh_l0 = nn.Parameter(weight.clone())
    x = torch.randn(3, 2, 5)
    same(ours(x), theirs(x))


def test_two_pieces_with_carried_state_equal_the_whole():
    _, ours = twins(num_layers=2)
    x = torch.randn(7, 2, 5)
    whole, state = ours(x)
    first, carried = ours(x[:3])
    second, end = ours(x[3:], carried)
    same(torch.cat([first, second]), whole)
    same(end, state)


def test_named_kernel_runs_or_raises():
    x = torch.randn(3, 2, 5)
    _, ours = twins()
    by_name = LSTM(5, 4, kernel="eager")
    by_name.load_state_dict(ours.state_dict())
    same(by_name(x), ours(x))
    with pytest.raises(gatewise.KernelRefused, match="cudnn"):
        LSTM(5, 4, kernel="cudnn")(x)
    with pytest.raises(gatewise.KernelRefused, match="warp"):
        LSTM(5, 4, kernel="warp")(x)


def test_flatten_parameters_leaves_cpu_parameters_as_they_are():
    _, ours = twins(num_layers=2)
    before = [(id(parameter), parameter.data_ptr()) for parameter in ours.parameters()]
    ours.flatten_parameters()
    assert [(id(parameter), parameter.data_ptr()) for parameter in ours.parameters()] == before


def test_optimizer_and_trained_result_equal_torch():
    theirs, ours = (layer.double() for layer in twins(num_layers=2))
    x, target = torch.randn(6, 3, 5, dtype=torch.float64), torch.randn(6, 3, 4, dtype=torch.float64)
    for layer in (theirs, ours):
        optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
        for _ in range(20):
            optimizer.zero_grad()
            (layer(x)[0] - target).square().mean().backward()
            optimizer.step()
    same(dict(ours.named_parameters()), dict(theirs.named_parameters()))


class Counting(nn.Module):
    """A parametrization that counts its computations."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def forward(self, weight):
        self.count += 1
        return weight


@pytest.mark.parametrize("kind", ["ih", "hh"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: LSTM(5, 4, num_layers=2),
        lambda: gatewise.GRU(5, 4, bidirectional=True),
        lambda: gatewise.Recurrent(gatewise.cells.MGU(), 5, 4),
        lambda: gatewise.LSTMCell(5, 4),
        lambda: gatewise.RNNCell(5, 4),
        lambda: gatewise.RecurrentCell(gatewise.cells.MGU(), 5, 4),
    ],
)
def test_a_call_computes_a_parametrized_weight_once(make, kind):
    module = make()
    is_cell = isinstance(module, nn.RNNCellBase | gatewise.RecurrentCell)
    counting = Counting()
    parametrize.register_parametrization(module, f"weight_{kind}" + ("" if is_cell else "_l0"), counting)
    counting.count = 0
    for calls in (1, 2):
        module(torch.randn(2, 5) if is_cell else torch.randn(3, 2, 5))
        assert counting.count == calls
