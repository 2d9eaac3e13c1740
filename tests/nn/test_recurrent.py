"""Layers of any cell: held to PyTorch's where it has the cell, otherwise to the published equations as plain loops."""

import copy
import pickle
import re

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import gatewise
from gatewise.cells import GRU, LSTM, MGU, RNN, SHIPPED, SLSTM, CappedLSTM, CoupledLSTM, PeepholeLSTM
from gatewise.contract.errors import ArgumentError, ShapeError

T, B, I, H = 5, 3, 3, 4  # noqa: E741  as in the legend


class Leaky(gatewise.Cell):
    """A cell of a user's own."""

    gates = ("a", "g")

    def step(self, gate, state):
        a = torch.sigmoid(gate.a)
        return a * state.h + (1 - a) * torch.tanh(gate.g), {}


class Opposite(CoupledLSTM):
    def step(self, gate, state):
        h, others = super().step(gate, state)
        return -h, others


def layer_of(cell, **options):
    torch.manual_seed(0)
    return gatewise.Recurrent(cell, I, H, dtype=torch.float64, **options)


def x_of(*shape):
    return torch.randn(*(shape or (T, B, I)), dtype=torch.float64, generator=torch.Generator().manual_seed(1))


PYTORCH = {
    LSTM(): torch.nn.LSTM,
    GRU(): torch.nn.GRU,
    RNN("tanh"): torch.nn.RNN,
    RNN("relu"): lambda *sizes, **options: torch.nn.RNN(*sizes, nonlinearity="relu", **options),
}


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False}], ids=str)
@pytest.mark.parametrize("cell", PYTORCH, ids=repr)
def test_pytorchs_layers_are_the_same(cell, options):
    ours, x = layer_of(cell, **options), x_of().requires_grad_()
    theirs = PYTORCH[cell](I, H, dtype=torch.float64, **options)
    theirs.load_state_dict(ours.state_dict())
    results = [module(x) for module in (ours, theirs)]
    torch.testing.assert_close(results[0], results[1])
    gradients = [
        torch.autograd.grad(y.square().sum(), [x, *m.parameters()])
        for m, (y, _) in zip((ours, theirs), results, strict=True)
    ]
    torch.testing.assert_close(*gradients)


def coupled(sums, h, c):
    f, g, o = sums
    f, g, o = f.sigmoid(), g.tanh(), o.sigmoid()
    c = f * c + (1 - f) * g
    return o * c.tanh(), (c,)


def capped(sums, h, c):
    i, f, g, o = sums
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    c = f * c + torch.min(i, 1 - f) * g
    return o * c.tanh(), (c,)


def leaky(sums, h):
    a, g = sums
    a = a.sigmoid()
    return a * h + (1 - a) * g.tanh(), ()


EQUATIONS = {CoupledLSTM(): coupled, CappedLSTM(): capped, Leaky(): leaky}


def looped(layer, x, equations):
    weights = dict(layer.named_parameters())
    states = [x.new_zeros(x.shape[1], H) for _ in range(1 + len(layer.cell.states))]
    outputs = []
    for row in x:
        sums = torch.nn.functional.linear(row, weights["weight_ih_l0"], weights["bias_ih_l0"])
        sums = sums + torch.nn.functional.linear(states[0], weights["weight_hh_l0"], weights["bias_hh_l0"])
        h, others = equations(sums.chunk(len(layer.cell.gates), -1), *states)
        states = [h, *others]
        outputs.append(h)
    return torch.stack(outputs)


@pytest.mark.parametrize("cell", EQUATIONS, ids=repr)
def test_the_equations_are_the_published_ones(cell):
    layer, x = layer_of(cell), x_of().requires_grad_()
    y, _ = layer(x)
    expected = looped(layer, x, EQUATIONS[cell])
    torch.testing.assert_close(y, expected)
    leaves = [x, *layer.parameters()]
    found = torch.autograd.grad(y.square().sum(), leaves)
    torch.testing.assert_close(found, torch.autograd.grad(expected.square().sum(), leaves))


CELLS = [*SHIPPED, Leaky()]


@pytest.mark.parametrize("cell", CELLS, ids=repr)
def test_pieces_with_their_states_are_the_whole(cell):
    layer, x = layer_of(cell, num_layers=2), x_of()
    y, states = layer(x)
    first, carried = layer(x[:2])
    second, last = layer(x[2:], carried)
    torch.testing.assert_close(torch.cat([first, second]), y)
    torch.testing.assert_close(last, states)
    assert isinstance(states, tuple) == bool(cell.states)


@pytest.mark.parametrize("cell", CELLS, ids=repr)
def test_lengths_are_a_packed_batch_and_rows_of_their_own(cell):
    layer, x, lengths = layer_of(cell, num_layers=2, bidirectional=True), x_of(), [5, 2, 4]
    y, states = layer(x, lengths=lengths)
    packed, packed_states = layer(pack_padded_sequence(x, lengths, enforce_sorted=False))
    torch.testing.assert_close(pad_packed_sequence(packed)[0], y)
    torch.testing.assert_close(packed_states, states)
    for row, length in enumerate(lengths):
        alone, _ = layer(x[:length, row])
        torch.testing.assert_close(alone, y[:length, row])


@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell != RNN("relu")], ids=repr)
def test_second_derivatives_are_right(cell):
    layer, x = layer_of(cell), x_of(3, 2, I).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda own: layer(own)[0], (x,), fast_mode=True)


def test_second_derivatives_where_a_state_depends_on_no_input():
    class Slowing(gatewise.Cell):
        gates = ("a",)
        states = ("steps",)

        def step(self, gate, state):
            steps = state.steps + 1
            return torch.tanh(gate.a) / steps, {"steps": steps}

    layer, x = layer_of(Slowing()), x_of().requires_grad_()

    def outputs(own):
        y, (h_n, steps_n) = layer(own)
        return y, h_n * steps_n

    assert torch.autograd.gradgradcheck(outputs, (x,), fast_mode=True)


@pytest.mark.parametrize("cell", CELLS, ids=repr)
def test_little_memory_gives_the_same(cell):
    plain, x = layer_of(cell), x_of()
    lean = layer_of(cell, memory="lean")
    lean.load_state_dict(plain.state_dict())
    found = []
    for layer in (plain, lean):
        layer(x)[0].square().sum().backward()
        found.append([weight.grad for weight in layer.parameters()])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("cell", CELLS, ids=repr)
def test_layers_can_be_copied_pickled_and_converted(cell):
    layer = layer_of(cell, num_layers=2)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)) if cell in SHIPPED else layer):
        torch.testing.assert_close(other(x_of()), layer(x_of()))
    assert repr(layer).startswith(f"Recurrent({cell}, 3, 4, num_layers=2")
    y, _ = layer.to(torch.bfloat16)(x_of().bfloat16())
    assert y.dtype == torch.bfloat16


@pytest.mark.parametrize("zoneout", [0.0, 0.5])
def test_a_cell_that_is_set_counts_in_the_next_call(zoneout):
    layer, other = (layer_of(cell, zoneout=zoneout).eval() for cell in (CoupledLSTM(), Opposite()))
    layer(x_of())
    layer.cell = Opposite()
    torch.testing.assert_close(layer(x_of()), other(x_of()))
    for cell in (GRU, None):
        layer.cell = cell
        with pytest.raises(ArgumentError, match=r"`cell` must be a gatewise\.Cell, got"):
            layer(x_of())


def test_a_shipped_cell_can_be_compiled_and_another_is_refused():
    x = x_of().float()
    layer = gatewise.Recurrent(CoupledLSTM(), I, H)
    torch.testing.assert_close(torch.compile(layer, backend="eager", fullgraph=True)(x), layer(x))
    with pytest.raises(Exception, match=r"one of gatewise\.cells under torch\.compile"):
        torch.compile(gatewise.Recurrent(Leaky(), I, H), backend="eager", fullgraph=True)(x)


def test_explain_and_verify_know_the_cell():
    layer = gatewise.Recurrent(Leaky(), I, H)
    decision = gatewise.explain(layer, (T, B, I))
    assert decision.problem.cell == Leaky()
    assert "cell is Leaky" in str(decision)
    assert gatewise.verify(layer, x_of().float())


@pytest.mark.parametrize("cell", [PeepholeLSTM(), SLSTM(), MGU()], ids=repr)
def test_verify_holds_shipped_cells_to_their_statements(cell):
    layer = gatewise.Recurrent(cell, I, H, num_layers=2, bidirectional=True)
    assert gatewise.verify(layer, x_of().float(), lengths=torch.tensor([5, 0, 3]))


def test_dropout_that_drops_nothing_is_warned_of():
    with pytest.warns(UserWarning, match="non-zero dropout expects num_layers greater than 1") as caught:
        gatewise.Recurrent(GRU(), I, H, dropout=0.5)
    assert caught[0].filename == __file__


WRONG = {
    "cell": (lambda: gatewise.Recurrent(LSTM, I, H), "`cell` must be a gatewise.Cell, got <class"),
    "sizes": (lambda: gatewise.Recurrent(LSTM(), 0, H), "`input_size` must be a positive integer, got 0"),
    "states": (
        lambda: layer_of(SLSTM())(x_of(), x_of(1, B, H)),
        r"must be a tuple \(h, c, n, m\) of tensors, got Tensor",
    ),
    "number of states": (lambda: layer_of(LSTM())(x_of(), (x_of(1, B, H),)), "of tensors, got 1 of them"),
    "kind of state": (lambda: layer_of(GRU())(x_of(), 3.0), "`hx, the state h,` must be a tensor, got float"),
    "shape of a state": (
        lambda: layer_of(LSTM())(x_of(), (x_of(1, B, H), x_of(2, B, H))),
        r"the state c,` must be of shape \[1, 3, 4\], like the hidden state, got \[2, 3, 4\]",
    ),
    "units of a state": (
        lambda: layer_of(LSTM())(x_of(), (x_of(1, B, H), x_of(1, B, H + 1))),
        "like the hidden state, got",
    ),
    "shape of all states": (lambda: layer_of(GRU())(x_of(), x_of(1, B + 1, H)), r"\[1, 4, 4\]"),
    "input": (lambda: layer_of(GRU())([1.0]), "`input` must be a tensor, got list"),
    "rank": (lambda: layer_of(GRU())(x_of(1, 2, 3, I)), "got rank 4"),
    "features": (lambda: layer_of(GRU())(x_of(T, B, I + 1)), "features"),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_is_refused_in_a_sentence(name):
    call, message = WRONG[name]
    with pytest.raises(gatewise.GatewiseError, match=message):
        call()


def test_a_step_that_cannot_be_recorded_is_refused_with_its_line():
    class Branches(gatewise.Cell):
        gates = ("z",)

        def step(self, gate, state):
            return (gate.z if gate.z > 0 else -gate.z), {}

    message = r"`Branches.step` must be .* got .*gate.z > 0"
    with pytest.warns(UserWarning, match=message), pytest.raises(TypeError, match=message):
        gatewise.Recurrent(Branches(), I, H)(torch.randn(T, B, I))


@pytest.mark.parametrize("structure", [{}, {"heads": 2}, {"recurrent_rank": 2}], ids=str)
@pytest.mark.parametrize(
    ("name", "value", "got"),
    [
        ("num_layers", 3, "no weight_ih_l2"),
        ("num_layers", 1, "weight_ih_l1 too"),
        ("bidirectional", True, "no weight_ih_l0_reverse"),
        ("bias", False, "bias_ih_l0 too"),
    ],
)
def test_sizes_that_are_assigned_and_do_not_fit_are_refused(structure, name, value, got):
    layer, x = gatewise.Recurrent(MGU(), 3, 4, 2, **structure), torch.randn(5, 2, 3)
    stream, sizes = layer.stream(2), {"num_layers": 2, "bidirectional": False, "bias": True, name: value}
    setattr(layer, name, value)
    expected = f"`weights` must be those that {', '.join(f'{each} {size}' for each, size in sizes.items())} take, got "
    with pytest.raises(ShapeError) as raised:
        layer(x)
    assert str(raised.value).startswith(expected + got)
    if name != "bidirectional":
        with pytest.raises(ShapeError, match=re.escape(expected)):
            stream(x[0])


def test_a_weight_that_was_deleted_is_missed():
    layer = gatewise.Recurrent(MGU(), 3, 4)
    del layer.bias_hh_l0
    with pytest.raises(ShapeError, match=r"`weights` must be those that .* take, got no bias_hh_l0\."):
        layer(torch.randn(5, 2, 3))


class Frozen(gatewise.Recurrent):
    """A layer whose weights are constants."""

    @property
    def all_weights(self):
        return [[weight.detach() for weight in direction] for direction in super().all_weights]


def test_weights_are_those_that_a_subclass_states():
    x = torch.randn(3, 2, 4)
    assert not Frozen(PeepholeLSTM(), 4, 5)(x)[0].requires_grad
    assert gatewise.Recurrent(PeepholeLSTM(), 4, 5)(x)[0].requires_grad
