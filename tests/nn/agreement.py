"""The comparison of two LSTM layers: outputs, final states and all gradients."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

_NUDGES = 8
_FLOAT64_TOLERANCE = 1e-12


def results(module: nn.Module, x, hx, *, seed: int = 0, **options) -> dict[str, Tensor]:
    """Return the outputs, and the gradients of a fixed random linear combination of them, by name."""
    module.zero_grad()
    data = x.data if isinstance(x, PackedSequence) else x
    leaf = data.detach().clone().requires_grad_()
    given = PackedSequence(leaf, *x[1:]) if isinstance(x, PackedSequence) else leaf
    states = None if hx is None else tuple(state.detach().clone().requires_grad_() for state in hx)
    y, (h_n, c_n) = module(given, states, **options)
    found = {"y": y.data if isinstance(y, PackedSequence) else y, "h_n": h_n, "c_n": c_n}
    generator = torch.Generator().manual_seed(seed)
    loss = sum(
        (value * torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.dtype)).sum()
        for value in found.values()
    )
    loss.backward()
    found = {name: value.detach() for name, value in found.items()}
    found["dx"] = leaf.grad
    if states is not None:
        found["dh0"], found["dc0"] = states[0].grad, states[1].grad
    found.update({f"d{name}": parameter.grad for name, parameter in module.named_parameters()})
    return found


def assert_same_results(found: dict[str, Tensor], theirs: nn.Module, x, hx) -> None:
    """Check that every tensor agrees with `torch.nn.LSTM` within a budget that is derived, not tuned.

    In float64 the relative difference is at most 1e-12. In float32 each error with respect to float64 is at most twice
    the sum of PyTorch's own error and the change of the float64 result when inputs and weights change by one rounding
    unit. On a tiny problem a single result can be accurate by chance, so PyTorch's error is the largest one for the
    problem itself and for a few nudges of it.

    Args:
        found: The `results` of the layer that is tested.
        theirs: A `torch.nn.LSTM` with the same weights, or a module around it.
        x: The input of the tested layer.
        hx: The initial states of the tested layer.
    """
    peer = results(theirs, x, hx)
    assert found.keys() == peer.keys()
    for name, value in found.items():
        assert value.shape == peer[name].shape, name
        assert value.dtype == peer[name].dtype, name
    if next(theirs.parameters()).dtype == torch.float64:
        exact, budget = peer, dict.fromkeys(found, _FLOAT64_TOLERANCE)
    else:
        exact, budget = _float32_budgets(peer, theirs, x, hx)
    for name, value in found.items():
        error = _relative(value, exact[name])
        assert error <= budget[name], f"{name}: error {error:.3g}, budget {budget[name]:.3g}"


def _float32_budgets(peer: dict[str, Tensor], theirs: nn.Module, x, hx) -> tuple[dict[str, Tensor], dict[str, float]]:
    def in_double(module: nn.Module, x, hx) -> dict[str, Tensor]:
        return results(copy.deepcopy(module).double(), _mapped(x, Tensor.double), _mapped(hx, Tensor.double))

    exact = in_double(theirs, x, hx)
    errors = {name: _relative(peer[name], exact[name]) for name in peer}
    bands = dict.fromkeys(peer, torch.finfo(torch.float32).eps)
    for _ in range(_NUDGES):
        module = copy.deepcopy(theirs)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(_nudged(parameter))
        call = (module, _mapped(x, _nudged), _mapped(hx, _nudged))
        rounded, moved = results(*call), in_double(*call)
        for name in peer:
            errors[name] = max(errors[name], _relative(rounded[name], moved[name]))
            bands[name] = max(bands[name], _relative(moved[name], exact[name]))
    return exact, {name: 2.0 * (errors[name] + bands[name]) for name in peer}


def _nudged(tensor: Tensor) -> Tensor:
    return tensor * (1 + torch.finfo(tensor.dtype).eps * (2.0 * torch.randint_like(tensor, 2) - 1))


def _mapped(value, function):
    if isinstance(value, PackedSequence):
        return PackedSequence(function(value.data), *value[1:])
    return tuple(map(function, value)) if isinstance(value, tuple) else value if value is None else function(value)


def _relative(value: Tensor, exact: Tensor) -> float:
    error, size = (value.double() - exact.double()).norm().item(), exact.double().norm().item()
    return error / size if size else error
