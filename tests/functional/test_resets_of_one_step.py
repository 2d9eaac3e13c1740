"""Resets of a call of one time step are those of the states before it, so that the call itself has none."""

import pytest
import torch

import gatewise
from gatewise.cells import SLSTM

LAYERS = {
    "LSTM": lambda: gatewise.LSTM(3, 4, num_layers=2),
    "GRU": lambda: gatewise.GRU(3, 4, num_layers=2),
    "projected": lambda: gatewise.LSTM(3, 4, proj_size=2),
    "states that begin elsewhere": lambda: gatewise.Recurrent(SLSTM(), 3, 4),
}


@pytest.mark.parametrize("integers", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_results_and_gradients_are_those_of_rows_that_begin(name, integers):
    torch.manual_seed(0)
    layer = LAYERS[name]()
    x, resets = torch.randn(1, 5, 3, requires_grad=True), torch.tensor([[True, False, True, False, False]])
    with torch.no_grad():
        _, before = layer(torch.randn(4, 5, 3))
    single = isinstance(before, torch.Tensor)
    before = (before,) if single else before
    states = [each.clone().requires_grad_() for each in before]
    with torch.no_grad():  # what a reset row reads counts for nothing, whatever it is
        for each in states:
            each[:, 0] = torch.nan

    def call(x, states, resets=None):
        y, found = layer(x, states[0] if single else tuple(states), **({} if resets is None else {"resets": resets}))
        return [y, *((found,) if single else found)]

    found = call(x, states, resets.long() * 3 if integers else resets)
    begun = call(x[:, resets[0]], [each[:, resets[0]].detach() for each in _new(layer, x, single)])
    kept = call(x[:, ~resets[0]], [each[:, ~resets[0]] for each in states])
    for one, first, other in zip(found, begun, kept, strict=True):
        torch.testing.assert_close(one[:, resets[0]], first)
        torch.testing.assert_close(one[:, ~resets[0]], other)
    wanted = [x, *states, *layer.parameters()]
    gradients = torch.autograd.grad(sum(each.square().sum() for each in found), wanted)
    total = sum(each.square().sum() for each in (*begun, *kept))
    for one, other in zip(gradients, torch.autograd.grad(total, wanted, allow_unused=True), strict=True):
        torch.testing.assert_close(one, torch.zeros_like(one) if other is None else other)


def _new(layer, x, single):
    """Return the states with which a call begins that gives none, as it would give them."""
    states = layer.stream(batch=x.shape[1]).states
    return [states] if single else list(states)


@pytest.mark.parametrize("kind", [gatewise.LSTM, gatewise.GRU])
@pytest.mark.parametrize("options", [{}, {"bidirectional": True}, {"reverse": True}], ids=str)
def test_results_are_those_of_a_kernel_that_reads_the_resets(kind, options):
    layer = kind(3, 4, num_layers=2, **options)
    x, resets = torch.randn(1, 5, 3), torch.tensor([[True, False, True, False, False]])
    with torch.no_grad():
        _, states = layer(torch.randn(4, 5, 3))
        found = layer(x, states, resets=resets)
        expected = layer(x, states, lengths=[1] * 5, resets=resets)
    torch.testing.assert_close(found, expected)
    assert not torch.equal(layer(x, states)[0], found[0]) or "reverse" in options


@pytest.mark.parametrize("cell", [False, True])
@pytest.mark.parametrize("kind", [torch.bool, torch.int64])
def test_resets_may_be_written_over_before_the_backward_pass(kind, cell):
    def run(change):
        torch.manual_seed(0)
        layer = gatewise.RecurrentCell(gatewise.cells.LSTM(), 3, 4) if cell else gatewise.LSTM(3, 4)
        with torch.inference_mode():
            resets = torch.tensor([True, False, True]).to(kind)
        resets = resets if not change else resets.clone()
        x, states = torch.randn(3, 3), tuple(torch.ones(2, 3, 4).requires_grad_())
        if cell:
            h, _ = layer(x, states, resets)
        else:
            h, _ = layer(x[None], tuple(each[None] for each in states), resets=resets[None])
        if change:
            resets.fill_(1)
        h.sum().backward()
        return [each.grad for each in layer.parameters()]

    torch.testing.assert_close(run(True), run(False))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_named_kernel_accepts_a_single_step(compiled):
    layer, x = gatewise.LSTM(3, 4, kernel="aten"), torch.randn(1, 5, 3)
    states, resets = tuple(torch.ones(2, 1, 5, 4)), torch.tensor([[True, False, True, False, False]])
    with torch.no_grad():
        expected = layer(x, tuple(each * ~resets.unsqueeze(-1) for each in states))
        call = torch.compile(layer, backend="eager") if compiled else layer
        torch.testing.assert_close(call(x, states, resets=resets), expected)
    torch.compiler.reset()


def test_a_call_is_chosen_as_one_without_resets():
    layer = gatewise.LSTM(8, 16, device="meta")
    one, several = (gatewise.explain(layer, (time, 5, 8), device="h200", resets=True) for time in (1, 2))
    assert (one.problem.resets, several.problem.resets) == (False, True)
    assert gatewise.explain(layer, (1, 5, 8), lengths=True, device="h200", resets=True).problem.resets
    report = gatewise.verify(gatewise.LSTM(3, 4), torch.randn(1, 5, 3), resets=torch.ones(1, 5, dtype=torch.bool))
    assert not report.layers[0].decision.problem.resets


@pytest.mark.parametrize(
    ("resets", "expected"),
    [
        (torch.ones(1, 4, dtype=torch.bool), gatewise.ShapeError),
        (torch.ones(1, 5), gatewise.DtypeError),
        ([True] * 5, gatewise.ArgumentError),
    ],
)
def test_wrong_resets_are_refused(resets, expected):
    with pytest.raises(expected, match="`resets`"):
        gatewise.LSTM(3, 4)(torch.randn(1, 5, 3), resets=resets)


def test_wrong_states_are_refused_as_without_resets():
    states = torch.zeros(1, 4, 4), torch.zeros(1, 4, 4)
    with pytest.raises(gatewise.ShapeError, match="hx"):
        gatewise.LSTM(3, 4)(torch.randn(1, 5, 3), states, resets=torch.ones(1, 5, dtype=torch.bool))
