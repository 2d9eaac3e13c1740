"""Whether two LSTM layers compute the same thing: outputs, final states and every gradient, in one call."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

ONE_ROUNDING = {torch.float64: 2.0**-53, torch.float32: 2.0**-24}


def results(module: nn.Module, x, hx, *, seed: int = 0, **options) -> dict[str, Tensor]:
    """Outputs and the gradients of a fixed random scalar of them, by name."""
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


def assert_same_results(found: dict[str, Tensor], peer: dict[str, Tensor], oracle: dict[str, Tensor]) -> None:
    """Every tensor lies within twice (the peer's error against float64 + one rounding of the largest value).

    Args:
        found: What is tested.
        peer: The same computation by `torch.nn.LSTM` in the same precision.
        oracle: The same by `torch.nn.LSTM` in float64; the peer itself when that is the precision.
    """
    assert found.keys() == peer.keys()
    for name, value in found.items():
        other, exact = peer[name], oracle[name]
        assert value.shape == other.shape, name
        assert value.dtype == other.dtype, name
        if not value.numel():
            continue
        scale = exact.abs().max().item()
        if value.dtype == torch.float64:
            # The oracle has errors of its own: sums of up to a few hundred terms, through a few tens of steps.
            budget = 1e-12 * max(scale, 1e-3)
        else:
            peer_error = (other.double() - exact).abs().max().item()
            budget = 2.0 * (peer_error + ONE_ROUNDING[value.dtype] * max(scale, 1.0))
        error = (value.double() - exact).abs().max().item()
        assert error <= budget, f"{name}: error {error:.3g}, budget {budget:.3g}"
