"""A repeated call after a change of something that it depends on must see the change."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import gatewise
from gatewise.cells import MGU
from gatewise.kernels.eager import eager
from gatewise.nn import LSTM
from tests.pairwise import each_value


@pytest.fixture
def twins() -> tuple[nn.LSTM, LSTM]:
    """nn.LSTM and gatewise.LSTM with the same weights, both called before, with gradients and without."""
    torch.manual_seed(0)
    theirs = nn.LSTM(5, 4, 2, dropout=0.5)
    ours = LSTM(5, 4, 2, dropout=0.5)
    ours.load_state_dict(theirs.state_dict())
    for layer in (theirs.eval(), ours.eval()):
        layer(example())
        with torch.no_grad():
            layer(example())
    return theirs, ours


@pytest.fixture
def eager_calls(monkeypatch, passes_alone) -> list[int]:
    """One entry for each layer call that ran on the kernel `eager`."""
    calls: list[int] = []
    forward = type(eager).forward
    monkeypatch.setattr(type(eager), "forward", lambda *arguments: calls.append(1) or forward(*arguments))
    return calls


def example(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.linspace(-1, 1, 30, dtype=dtype).view(3, 2, 5)


def other_weights(layer: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value * -2 for name, value in layer.state_dict().items()}


def load(layer: nn.Module) -> None:
    layer.load_state_dict(other_weights(layer))


def load_by_assignment(layer: nn.Module) -> None:
    layer.load_state_dict(other_weights(layer), assign=True)


def replace_a_parameter(layer: nn.Module) -> None:
    layer.weight_hh_l1 = nn.Parameter(layer.weight_hh_l1.detach() * -2)


def exchange_data(layer: nn.Module) -> None:
    layer.weight_hh_l1.data = layer.weight_hh_l1.data * -2


def write_in_place(layer: nn.Module) -> None:
    with torch.no_grad():
        layer.weight_hh_l1.mul_(-2)


def parametrise(layer: nn.Module) -> None:
    class Negative(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return -2 * weight

    parametrize.register_parametrization(layer, "weight_hh_l1", Negative())


def hook_the_input(layer: nn.Module) -> None:
    layer.register_forward_pre_hook(lambda module, arguments: (arguments[0] * -2,))


def hook_the_output(layer: nn.Module) -> None:
    layer.register_forward_hook(lambda module, arguments, output: (output[0] * -2, output[1]))


CHANGES = [
    load,
    load_by_assignment,
    replace_a_parameter,
    exchange_data,
    write_in_place,
    parametrise,
    hook_the_input,
    hook_the_output,
]


@pytest.mark.parametrize(("gradients", "change"), each_value([*itertools.product([True, False], CHANGES)]))
def test_a_change_of_the_module_counts_at_once(twins, change, gradients):
    theirs, ours = twins
    with torch.set_grad_enabled(gradients):
        before = ours(example())[0]
        for layer in twins:
            change(layer)
        found, expected = ours(example()), theirs(example())
    torch.testing.assert_close(found, expected)
    assert found[0].requires_grad == gradients
    assert not torch.allclose(found[0], before)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_copy_does_not_follow_the_original(twins, copied):
    _, ours = twins
    before, other = ours(example()), copied(ours)
    load(ours)
    torch.testing.assert_close(other(example()), before)
    assert not torch.allclose(ours(example())[0], before[0])


def test_functional_call_and_back(twins):
    theirs, ours = twins
    before, weights = ours(example()), other_weights(ours)
    found = torch.func.functional_call(ours, weights, (example(),))
    torch.testing.assert_close(found, torch.func.functional_call(theirs, weights, (example(),)))
    torch.testing.assert_close(ours(example()), before)


def test_another_dtype_and_back(twins):
    theirs, ours = (layer.double() for layer in twins)
    x = example(torch.float64)
    torch.testing.assert_close(ours(x), theirs(x))
    with pytest.raises(gatewise.DtypeError):
        ours(example())
    torch.testing.assert_close(ours.float()(example()), theirs.float()(example()))


def test_a_weight_that_no_longer_fits_is_refused(twins):
    _, ours = twins
    ours.weight_hh_l1.data = torch.zeros(16, 3)
    with pytest.raises(gatewise.ShapeError):
        ours(example())


def test_recurrent_weights_of_another_width_are_named():
    ours = gatewise.GRU(3, 4)
    ours.weight_hh_l0 = torch.nn.Parameter(torch.zeros(12, 5))
    with pytest.raises(gatewise.ShapeError, match=r"w_hh, whose 5 columns are R .* without one there are H = 4"):
        ours(torch.zeros(5, 2, 3))


def test_a_weight_that_is_none_is_named(twins):
    _, ours = twins
    ours.bias_hh_l0 = None
    with pytest.raises(gatewise.ArgumentError, match="`bias_hh_l0` must be a tensor, got None"):
        ours(example())


@pytest.mark.parametrize("frozen", [False, True])
def test_a_matrix_that_is_none_is_named(twins, frozen):
    for ours in (twins[1], gatewise.Recurrent(MGU(), 5, 4)):
        ours.weight_ih_l0 = None
        ours.requires_grad_(not frozen)
        with pytest.raises(gatewise.ArgumentError, match="`weight_ih_l0` must be a tensor, got None"):
            ours(example())
    cell = gatewise.RecurrentCell(MGU(), 3, 4)
    cell.weight_ih = None
    with pytest.raises(gatewise.ArgumentError, match="`weight_ih` must be a tensor, got None"):
        cell(torch.zeros(2, 3))
    for kind in (gatewise.LSTMCell, gatewise.GRUCell, gatewise.RNNCell):
        for name in ("weight_ih", "weight_hh"):
            cell = kind(3, 4)
            setattr(cell, name, None)
            with pytest.raises(gatewise.ArgumentError, match=f"`{name}` must be a tensor, got None"):
                cell(torch.zeros(2, 3))


def test_training_and_evaluation(twins):
    _, ours = twins
    torch.manual_seed(0)
    dropped = ours.train()(example())[0]
    torch.testing.assert_close(ours.eval()(example()), ours(example()))
    assert not torch.allclose(ours(example())[0], dropped)


def test_freezing_and_thawing(twins):
    _, ours = twins
    assert not ours.requires_grad_(False)(example())[0].requires_grad
    assert ours(example().requires_grad_())[0].requires_grad
    assert ours.requires_grad_(True)(example())[0].requires_grad
    with torch.no_grad():
        assert not ours(example())[0].requires_grad


def test_sizes_of_the_input_and_of_the_state(twins):
    theirs, ours = twins
    for time, batch in ((1, 1), (7, 2), (3, 5)):
        x, state = torch.randn(time, batch, 5), (torch.randn(2, batch, 4), torch.randn(2, batch, 4))
        torch.testing.assert_close(ours(x, state), theirs(x, state))
        with pytest.raises(gatewise.ShapeError):
            ours(x, (state[0][:1], state[1]))


def test_autocast(twins):
    _, ours = twins
    with torch.autocast("cpu", torch.bfloat16):
        assert ours(example())[0].dtype == torch.bfloat16
    assert ours(example())[0].dtype == torch.float32


def test_the_kernel_of_the_module_of_a_block_and_of_the_environment(twins, eager_calls, monkeypatch):
    _, ours = twins
    ours(example())
    assert not eager_calls
    with gatewise.use_kernel("eager"):
        ours(example())
    assert len(eager_calls) == 1
    ours(example())
    assert len(eager_calls) == 1
    monkeypatch.setenv("GATEWISE_KERNEL", "eager")
    ours(example())
    assert len(eager_calls) == 2
    monkeypatch.delenv("GATEWISE_KERNEL")
    ours(example())
    assert len(eager_calls) == 2
    ours.kernel = "eager"
    ours(example())
    assert len(eager_calls) == 3


def test_a_refusal_is_not_remembered_as_a_choice(twins):
    _, ours = twins
    for _ in range(2):
        with gatewise.use_kernel("cudnn"), pytest.raises(gatewise.KernelRefused, match="named by `use_kernel`"):
            ours(example())
    ours(example())


def test_the_policy_of_the_environment(twins, monkeypatch):
    _, ours = twins
    monkeypatch.setenv("GATEWISE_POLICY", "guess")
    with pytest.raises(gatewise.ArgumentError, match="GATEWISE_POLICY"):
        ours(example())
    monkeypatch.delenv("GATEWISE_POLICY")
    ours(example())


def test_an_exchanged_environment(twins, eager_calls, monkeypatch):
    _, ours = twins
    monkeypatch.setattr("os.environ", {"GATEWISE_KERNEL": "eager"})
    ours(example())
    assert len(eager_calls) == 1


@pytest.mark.gpu
def test_the_device_and_its_settings():
    torch.manual_seed(0)
    layer = LSTM(64, 64)
    x = torch.randn(5, 3, 64)
    expected = layer(x)[0]
    moved = layer.cuda()(x.cuda())[0]
    torch.testing.assert_close(moved.cpu(), expected, rtol=1e-2, atol=1e-2)
    layer.kernel = "cudnn"
    layer(x.cuda())
    with torch.backends.cudnn.flags(enabled=False), pytest.raises(gatewise.KernelRefused):
        layer(x.cuda())
    layer(x.cuda())
    layer.kernel = "auto"
    torch.testing.assert_close(layer.cpu()(x)[0], expected)


@pytest.mark.gpu
def test_tf32_follows_the_setting():
    torch.manual_seed(0)
    layer = LSTM(256, 256, device="cuda", kernel="cudnn")
    x = torch.randn(4, 64, 256, device="cuda")
    before = torch.backends.cudnn.allow_tf32
    try:
        torch.backends.cudnn.allow_tf32 = True
        rounded = layer(x)[0]
        torch.backends.cudnn.allow_tf32 = False
        exact = layer(x)[0]
    finally:
        torch.backends.cudnn.allow_tf32 = before
    assert not torch.equal(rounded, exact)
