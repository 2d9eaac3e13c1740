"""Cells that PyTorch does not have, held in float64 to their published equations, written here a sequence at a time."""

import math

import pytest
import torch
from torch.nn.functional import linear, logsigmoid

import gatewise
from gatewise.cells import MGU, SLSTM, PeepholeLSTM

T, B, I, H = 5, 4, 3, 4  # noqa: E741  as in the legend
LENGTHS = [5, 2, 0, 4]


def peephole(sums, states, own):
    """Return the step of Gers, Schraudolph & Schmidhuber (2002)."""
    (i, f, g, o), (_, c) = sums.chunk(4), states
    i, f = torch.sigmoid(i + own["p_i"] * c), torch.sigmoid(f + own["p_f"] * c)
    c = f * c + i * torch.tanh(g)
    return torch.sigmoid(o + own["p_o"] * c) * torch.tanh(c), c


def stabilised(sums, states, own):
    """Return the step of xLSTM's code, whose states are zero initially."""
    (i, f, z, o), (_, c, n, m) = sums.chunk(4), states
    earlier = logsigmoid(f) + m
    m = i if torch.all(n == 0) else torch.max(i, earlier)
    i, f = torch.exp(i - m), torch.exp(earlier - m)
    c, n = f * c + i * torch.tanh(z), f * n + i
    return torch.sigmoid(o) * c / n, c, n, m


def unstabilised(sums, states, own):
    """Return the step of Beck et al. (2024), equations 8 to 14, with the forget gate sigmoid(f) and no stabiliser."""
    (i, f, z, o), (_, c, n) = sums.chunk(4), states
    i, f = torch.exp(i), torch.sigmoid(f)
    c, n = f * c + i * torch.tanh(z), f * n + i
    return torch.sigmoid(o) * c / n, c, n


PUBLISHED = {
    "peephole": (PeepholeLSTM(), peephole, 2),
    "slstm": (SLSTM(), stabilised, 4),
    "slstm without its stabiliser": (SLSTM(), unstabilised, 3),
}


def layer_of(cell, **options):
    torch.manual_seed(0)
    layer = gatewise.Recurrent(cell, I, H, dtype=torch.float64, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return layer


def x_of(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()


def sequence(layer, step, states, x, suffix):
    """Return the hidden states of one sequence [T, I] in one direction of the first layer, and the final states."""
    weights = dict(layer.named_parameters())
    own = {name: weights[f"{name}_l0{suffix}"] for name in layer.cell.parameters}
    outputs = []
    for token in x:
        sums = linear(token, weights[f"weight_ih_l0{suffix}"], weights[f"bias_ih_l0{suffix}"])
        sums = sums + linear(states[0], weights[f"weight_hh_l0{suffix}"], weights[f"bias_hh_l0{suffix}"])
        states = step(sums, states, own)
        outputs.append(states[0])
    return outputs, states


def both_directions(layer, step, count, x):
    """Return the output and the final states [2, B, H] of a bidirectional layer for sequences of `LENGTHS`."""
    y, finals = x.new_zeros(T, B, 2 * H), []
    for direction, suffix in enumerate(("", "_reverse")):
        for row, length in enumerate(LENGTHS):
            own = x[:length, row] if direction == 0 else x[:length, row].flip(0)
            outputs, states = sequence(layer, step, [x.new_zeros(H)] * count, own, suffix)
            for place, output in enumerate(outputs):
                at = place if direction == 0 else length - 1 - place
                y = y.index_put((torch.tensor(at), torch.tensor(row), torch.arange(H) + direction * H), output)
            finals.append(states)
    return y, [torch.stack(each).view(2, B, H) for each in zip(*finals, strict=True)]


@pytest.mark.parametrize("memory", ["normal", "lean"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_values_and_all_gradients(name, memory):
    cell, step, count = PUBLISHED[name]
    layer, x = layer_of(cell, bidirectional=True, memory=memory), x_of(T, B, I)
    y, states = layer(x, lengths=LENGTHS)
    expected, finals = both_directions(layer, step, count, x)
    torch.testing.assert_close(y, expected)
    with_steps = [row for row, length in enumerate(LENGTHS) if length]
    compared = 1 if step is unstabilised else count  # without the stabiliser, c and n have another scale
    for mine, other in zip(states[:compared], finals[:compared], strict=True):
        torch.testing.assert_close(mine[:, with_steps], other[:, with_steps])
    leaves = [x, *layer.parameters()]
    weight = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(2))
    found = torch.autograd.grad((y * weight).sum() + states[0].square().sum(), leaves)
    above = (expected * weight).sum() + finals[0].square().sum()
    torch.testing.assert_close(found, torch.autograd.grad(above, leaves))
    assert all(gradient.abs().max() > 0 for gradient in found)


@pytest.mark.parametrize("name", ["peephole", "slstm"])
def test_gradients_of_states_and_second_derivatives(name):
    cell, step, count = PUBLISHED[name]
    layer, x = layer_of(cell), x_of(3, I)
    states = [x_of(H) + (index == 2) * 3 for index in range(count)]  # the normaliser is positive
    leaves = [x, *states, *layer.parameters()]
    y, finals = layer(x, tuple(state.unsqueeze(0) for state in states))
    outputs, others = sequence(layer, step, states, x, "")
    found, expected = [
        torch.autograd.grad(sum(output.square().sum() for output in each), leaves, create_graph=True)
        for each in ([y, *finals[1:]], [torch.stack(outputs), *others[1:]])
    ]
    torch.testing.assert_close(found, expected)
    found, expected = [
        torch.autograd.grad(sum(gradient.square().sum() for gradient in each), leaves) for each in (found, expected)
    ]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["peephole", "slstm"])
def test_numerical_derivatives_of_parameters(name):
    layer, x = layer_of(PUBLISHED[name][0]), x_of(3, 2, I)
    names, values = zip(*layer.named_parameters(), strict=True)

    def run(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))[0]

    assert torch.autograd.gradcheck(run, (x, *values))
    assert torch.autograd.gradgradcheck(run, (x, *values), fast_mode=True)


def test_the_peephole_cell_starts_as_an_lstm():
    torch.manual_seed(0)
    layer = gatewise.Recurrent(PeepholeLSTM(), I, H)
    plain = torch.nn.LSTM(I, H)
    plain.load_state_dict({name: value for name, value in layer.state_dict().items() if not name.startswith("p_")})
    x = torch.randn(T, B, I)
    torch.testing.assert_close(layer(x), plain(x))


def published_mgu(x, h, weights, *, product_first):
    """Return the step of Zhou et al. (2016); with `product_first`, f multiplies the recurrent product instead of h."""
    w_f, w_n, r_f, r_n, b_f, b_n, d_f, d_n = weights
    f = torch.sigmoid(linear(x, w_f, b_f) + linear(h, r_f, d_f))
    recurrent = f * linear(h, r_n, d_n) if product_first else linear(f * h, r_n, d_n)
    n = torch.tanh(linear(x, w_n, b_n) + recurrent)
    return (1 - f) * h + f * n


@pytest.mark.parametrize("product_first", [True, False])
def test_the_mgu_applies_its_gate_after_the_product(product_first):
    layer, x = layer_of(MGU()), x_of(T, I)
    weights = [half for weight in layer.all_weights[0] for half in weight.chunk(2)]
    h, outputs = x.new_zeros(H), []
    for token in x:
        h = published_mgu(token, h, weights, product_first=product_first)
        outputs.append(h)
    leaves = [x, *layer.parameters()]
    found, expected = layer(x)[0], torch.stack(outputs)
    assert torch.allclose(found, expected) == product_first
    if product_first:
        gradients = [torch.autograd.grad(each.square().sum(), leaves) for each in (found, expected)]
        torch.testing.assert_close(*gradients)


def test_the_mgu_is_a_gru_with_one_gate():
    """f is the reset gate r, and 1 - f the update gate z, whose sum is that of f with the opposite sign."""
    layer, x = layer_of(MGU(), bidirectional=True), x_of(T, B, I)
    gru = gatewise.GRU(I, H, bidirectional=True, dtype=torch.float64)
    halves = {name: weight.chunk(2) for name, weight in layer.state_dict().items()}
    gru.load_state_dict({name: torch.cat([f, -f, n]) for name, (f, n) in halves.items()})
    pytorchs = torch.nn.GRU(I, H, bidirectional=True, dtype=torch.float64)
    pytorchs.load_state_dict(gru.state_dict())
    torch.testing.assert_close(layer(x), pytorchs(x))
    torch.testing.assert_close(layer(x, lengths=LENGTHS), gru(x, lengths=LENGTHS))


def test_the_stabiliser_starts_below_all_gates():
    layer = gatewise.Recurrent(SLSTM(), I, H)
    with torch.no_grad():
        layer.bias_ih_l0[:H] = -500  # exp(-500) is zero in float32
    x = torch.randn(T, B, I, requires_grad=True)
    y, (_, _, n, m) = layer(x)
    assert y.isfinite().all()
    assert (n >= 1).all()
    assert (m < -10).all()
    y.sum().backward()
    assert x.grad.isfinite().all()
    _, (h, _, _, m) = layer(x, lengths=[0] * B)
    assert (h == 0).all()
    assert (m == -math.inf).all()


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["dense", "lengths"])
def test_an_slstm_that_is_given_the_zeros_of_the_published_code_agrees(lengths):
    layer, x = layer_of(SLSTM()), x_of(T, B, I)
    zeros = tuple(torch.zeros(1, B, H, dtype=torch.float64) for _ in range(4))
    torch.testing.assert_close(layer(x, zeros, lengths=lengths)[0], layer(x, lengths=lengths)[0])
