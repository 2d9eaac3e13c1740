"""The explicit passes: what is saved, who runs backward, and that forward is not repeated without a word."""

import pytest
import torch

from gatewise import functional, use_kernel
from gatewise.contract.errors import DtypeError, KernelRefused, ShapeError
from gatewise.contract.saved import Needs
from gatewise.functional import RepeatedForwardWarning
from gatewise.kernels.aten import aten
from gatewise.kernels.eager import eager


@pytest.fixture
def module():
    torch.manual_seed(0)
    return torch.nn.LSTM(4, 6, num_layers=2, bidirectional=True, dtype=torch.float64)


@pytest.fixture
def call(module):
    """One call, the gradients of its outputs, and the gradients of its inputs by autograd through torch.nn.LSTM."""
    x = torch.randn(5, 3, 4, dtype=torch.float64, requires_grad=True)
    state = tuple(torch.randn(4, 3, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    y, final = module(x, state)
    above = [torch.randn_like(tensor) for tensor in (y, *final)]
    expected = torch.autograd.grad([y, *final], [x, *state, *module.parameters()], above)
    return x, state, above, expected


def flat(gradients):
    weights = [tensor for direction in gradients.weights for tensor in direction]
    return [gradients.x, *gradients.state, *weights]


@pytest.mark.parametrize("kernel", ["eager", "aten"])
def test_backward_from_what_forward_saved(module, call, kernel):
    x, state, above, expected = call
    (y, final), saved = functional.forward(x, state, module.all_weights, bidirectional=True, kernel=kernel)
    assert saved.kernel == kernel
    assert not y.requires_grad
    torch.testing.assert_close((y, *final), (lambda out: (out[0], *out[1]))(module(x, state)), rtol=1e-12, atol=1e-13)
    gradients = functional.backward(saved, above[0], above[1:])
    torch.testing.assert_close(flat(gradients), list(expected), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kernel", [eager, aten], ids=lambda kernel: kernel.name)
def test_backward_runs_no_forward(module, call, kernel, monkeypatch):
    x, state, above, expected = call
    _, saved = functional.forward(x, state, module.all_weights, bidirectional=True, kernel=kernel.name)
    monkeypatch.setattr(type(kernel), "forward", lambda *_: pytest.fail("the forward pass ran again"))
    for _ in range(2):
        gradients = functional.backward(saved, above[0], above[1:])
        torch.testing.assert_close(flat(gradients), list(expected), rtol=1e-10, atol=1e-12)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch was built without oneDNN")
@pytest.mark.parametrize("forward", [False, True])
def test_onednn_may_be_switched_on_or_off_between_the_passes(module, call, forward):
    module = module.float()
    x, state, above, expected = [each.float() if torch.is_tensor(each) else [t.float() for t in each] for each in call]
    with torch.backends.mkldnn.flags(enabled=forward):
        _, saved = functional.forward(x, state, module.all_weights, bidirectional=True, kernel="aten")
    with torch.backends.mkldnn.flags(enabled=not forward):
        gradients = functional.backward(saved, above[0], above[1:])
    torch.testing.assert_close(flat(gradients), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("first", "second"), [("eager", "aten"), ("aten", "eager")])
@pytest.mark.parametrize("by", ["argument", "block"])
def test_another_kernel_repeats_the_forward_with_one_warning(module, call, first, second, by):
    x, state, above, expected = call
    _, saved = functional.forward(x, state, module.all_weights, bidirectional=True, kernel=first)
    message = f"forward pass ran on '{first}'; backward on '{second}' repeats it"
    with use_kernel(second if by == "block" else "auto"), pytest.warns(RepeatedForwardWarning, match=message) as caught:
        gradients = functional.backward(saved, above[0], above[1:], kernel=second if by == "argument" else None)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    torch.testing.assert_close(flat(gradients), list(expected), rtol=1e-10, atol=1e-12)


def test_dropout_is_the_same_for_both_kernels():
    torch.manual_seed(0)
    module = torch.nn.LSTM(4, 6, num_layers=3, dtype=torch.float64)
    x = torch.randn(5, 3, 4, dtype=torch.float64)
    (y, _), saved = functional.forward(x, None, module.all_weights, dropout=0.5, kernel="eager")
    own = functional.backward(saved, torch.ones_like(y))
    with pytest.warns(RepeatedForwardWarning):
        other = functional.backward(saved, torch.ones_like(y), kernel="aten")
    torch.testing.assert_close(flat(own), flat(other), rtol=1e-10, atol=1e-12)
    without = functional.forward(x, None, module.all_weights, kernel="eager")[0].y
    assert not torch.allclose(y, without)


def test_a_kernel_whose_state_is_used_up_repeats_the_forward(module, call, monkeypatch):
    x, state, above, expected = call
    forwards = []
    run = type(eager).forward
    monkeypatch.setattr(type(eager), "single_use", lambda self, problem: True)
    monkeypatch.setattr(type(eager), "forward", lambda *arguments: forwards.append(1) or run(*arguments))
    _, saved = functional.forward(x, state, module.all_weights, bidirectional=True, kernel="eager")
    for count in (1, 2, 3):
        gradients = functional.backward(saved, above[0], above[1:])
        torch.testing.assert_close(flat(gradients), list(expected), rtol=1e-10, atol=1e-12)
        assert len(forwards) == count


def test_nothing_kept_means_the_forward_is_repeated(module, call):
    x, state, above, expected = call
    _, saved = functional.forward(x, state, module.all_weights, bidirectional=True, keep=False)
    assert saved.result.kept == ()
    gradients = functional.backward(saved, above[0], above[1:])
    torch.testing.assert_close(flat(gradients), list(expected), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kernel", ["eager", "aten"])
def test_missing_gradients_are_zero(module, call, kernel):
    x, state, above, _ = call
    (y, final), saved = functional.forward(x, state, module.all_weights, bidirectional=True, kernel=kernel)
    zeros = [torch.zeros_like(tensor) for tensor in (y, *final)]
    for missing in range(3):
        given = [None if index == missing else tensor for index, tensor in enumerate(above)]
        filled = [zeros[index] if index == missing else tensor for index, tensor in enumerate(above)]
        ours = functional.backward(saved, given[0], given[1:])
        full = functional.backward(saved, filled[0], filled[1:])
        torch.testing.assert_close(flat(ours), flat(full), rtol=1e-12, atol=1e-13)


def test_needs_leave_out_what_is_not_wanted(module, call):
    x, state, above, _ = call
    _, saved = functional.forward(x, state, module.all_weights, bidirectional=True)
    gradients = functional.backward(saved, above[0], needs=Needs(x=False, state=False, weights=True))
    assert gradients.x is None
    assert gradients.state is None
    assert gradients.weights[0][0] is not None


def test_weights_come_back_in_the_nesting_they_were_given_in(module, call):
    x, state, above, _ = call
    for weights in (module.all_weights, list(module.parameters())):
        _, saved = functional.forward(x, state, weights, bidirectional=True)
        found = functional.backward(saved, above[0]).weights
        shapes = torch.utils._pytree.tree_map(lambda tensor: tensor.shape, found)
        assert shapes == torch.utils._pytree.tree_map(lambda tensor: tensor.shape, weights)


def test_bad_gradients_are_named(module, call):
    x, state, above, _ = call
    (y, _), saved = functional.forward(x, state, module.all_weights, bidirectional=True)
    with pytest.raises(ShapeError, match=r"`dy` must be shaped \[5, 3, 12\] as its output, got \[5, 3, 11\]"):
        functional.backward(saved, y[..., :11])
    with pytest.raises(DtypeError, match=r"`dh` must be torch\.float64"):
        functional.backward(saved, y, (above[1].float(), None))
    with pytest.raises(KernelRefused, match="device is CPU"):
        functional.backward(saved, y, kernel="cudnn")
    functional.backward(saved, y)
