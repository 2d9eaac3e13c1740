"""Dropout and zoneout in the recurrence: a call is a plain loop with the same masks, in values and all gradients."""

import copy
import pickle
import re
import types
from types import MappingProxyType

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence

import gatewise
from gatewise.cells import GRU, LSTM, RNN, SHIPPED, SLSTM, Averaged, Cell, Regularised, candidate, cell_named
from gatewise.contract.errors import ArgumentError, KernelRefused
from tests.pairwise import each_value, exhaustive_unless, pairwise

T, B, F, H = 6, 4, 3, 5
LENGTHS = torch.tensor([6, 2, 0, 5])
RESETS = torch.zeros(T, B, dtype=torch.bool)
for step, row in ((2, 0), (5, 0), (0, 1), (1, 1), (4, 2), (3, 3)):
    RESETS[step, row] = True


class Branching(Cell):
    """A cell that cannot be traced, with a parameter."""

    gates = ("a", "g")
    states = ("c",)
    parameters = MappingProxyType({"p": 0.3})

    def step(self, gate, state, parameter):
        c = torch.where(gate.a > 0, state.c, 0.5 * state.c) + parameter.p * torch.tanh(gate.g)
        return torch.tanh(c) + 0.1 * state.h, {"c": c}


CELLS = {cell.name: cell for cell in (*SHIPPED, Branching())}
FORMS = {
    "recurrent dropout": {"recurrent_dropout": 0.4},
    "zoneout": {"zoneout": 0.3},
    "zoneout of another state": {"zoneout": {"c": 0.3}},
    "candidate dropout": {"candidate_dropout": 0.3},
    "all": {"recurrent_dropout": 0.4, "zoneout": {"h": 0.2, "c": 0.5}, "candidate_dropout": 0.25},
}


def lstm(gate, state, drop):
    i, f, g, o = gate.i.sigmoid(), gate.f.sigmoid(), gate.g.tanh(), gate.o.sigmoid()
    c = f * state.c + i * drop(g)
    return o * c.tanh(), {"c": c}


def peephole(gate, state, drop, parameter):
    i, f = (gate.i + parameter.p_i * state.c).sigmoid(), (gate.f + parameter.p_f * state.c).sigmoid()
    c = f * state.c + i * drop(gate.g.tanh())
    return (gate.o + parameter.p_o * c).sigmoid() * c.tanh(), {"c": c}


def gru(gate, state, drop):
    r, z = gate.r.sigmoid(), gate.z.sigmoid()
    n = (gate.n.input + r * gate.n.recurrent).tanh()
    return (1 - z) * drop(n) + z * state.h, {}


def slstm(gate, state, drop):
    earlier = torch.nn.functional.logsigmoid(gate.f) + state.m
    m = torch.maximum(earlier, gate.i)
    i, f = (gate.i - m).exp(), (earlier - m).exp()
    c, n = f * state.c + i * drop(gate.z.tanh()), f * state.n + i
    return gate.o.sigmoid() * c / n, {"c": c, "n": n, "m": m}


def coupled(gate, state, drop):
    f = gate.f.sigmoid()
    c = f * state.c + (1 - f) * drop(gate.g.tanh())
    return gate.o.sigmoid() * c.tanh(), {"c": c}


def capped(gate, state, drop):
    f = gate.f.sigmoid()
    c = f * state.c + torch.minimum(gate.i.sigmoid(), 1 - f) * drop(gate.g.tanh())
    return gate.o.sigmoid() * c.tanh(), {"c": c}


def mgu(gate, state, drop):
    f = gate.f.sigmoid()
    return (1 - f) * state.h + f * drop((gate.n.input + f * gate.n.recurrent).tanh()), {}


def normalized(*values, eps):
    joined = torch.cat(values, -1)
    centered = joined - joined.mean(-1, keepdim=True)
    return (centered / (centered.square().mean(-1, keepdim=True) + eps).sqrt()).chunk(len(values), -1)


def layer_norm_lstm(gate, state, drop, parameter):
    p, names = vars(parameter), "ifgo"
    of_input = normalized(*[getattr(gate, name).input for name in names], eps=1e-5)
    of_hidden = normalized(*[getattr(gate, name).recurrent for name in names], eps=1e-5)
    i, f, g, o = (
        p[f"gain_ih_{name}"] * one + p[f"gain_hh_{name}"] * other + p[f"shift_{name}"]
        for name, one, other in zip(names, of_input, of_hidden, strict=True)
    )
    c = f.sigmoid() * state.c + i.sigmoid() * drop(g.tanh())
    (output,) = normalized(c, eps=1e-5)
    return o.sigmoid() * (parameter.gain_c * output + parameter.shift_c).tanh(), {"c": c}


def layer_norm_gru(gate, state, drop, parameter):
    sums = normalized(gate.r, gate.z, gate.n, eps=1e-3)
    r, z, n = (
        getattr(parameter, f"gain_{name}") * own + getattr(parameter, f"shift_{name}")
        for name, own in zip("rzn", sums, strict=True)
    )
    z = (z - 1).sigmoid()
    return (1 - z) * state.h + z * drop((r.sigmoid() * n).tanh()), {}


# The papers' equations with the candidate dropped; other cells have none.
WITH_CANDIDATE = {
    "lstm": lstm,
    "peephole_lstm": peephole,
    "gru": gru,
    "slstm": slstm,
    "coupled_lstm": coupled,
    "capped_lstm": capped,
    "mgu": mgu,
    "layer_norm_lstm": layer_norm_lstm,
    "layer_norm_gru": layer_norm_gru,
}


def layer_of(name, form="all", dtype=torch.float64, **options):
    """Return a layer of a cell with random weights; rates of states that the cell does not have are left out."""
    cell, rates = CELLS[name], dict(FORMS[form])
    if isinstance(rates.get("zoneout"), dict):
        rates["zoneout"] = {state: rate for state, rate in rates["zoneout"].items() if state in ("h", *cell.states)}
    if name not in WITH_CANDIDATE:
        rates.pop("candidate_dropout", None)
    torch.manual_seed(0)
    return gatewise.Recurrent(cell, F, H, dtype=dtype, **({"bias": True} | rates | options))


def drawn(layer, dtype=torch.float64):
    torch.manual_seed(1)
    rows, states = layer.num_layers * (1 + layer.bidirectional), layer.cell.states
    x = torch.randn(T, B, F, dtype=dtype, requires_grad=True)
    return x, [torch.rand(rows, B, H, dtype=dtype, requires_grad=True) for _ in ("h", *states)]


def rates_of(layer):
    given = layer.zoneout if isinstance(layer.zoneout, dict) else {"h": layer.zoneout}
    return {name: given.get(name, 0.0) for name in ("h", *layer.cell.states)}


class Masks:
    """The masks of a call, drawn from PyTorch's generator as the call does, or their means in evaluation mode."""

    def __init__(self, layer):
        rows, size = layer.num_layers * (1 + layer.bidirectional), H * (1 + layer.bidirectional)
        rates = {name: rate for name, rate in rates_of(layer).items() if rate}

        def mask(shape, probability):
            return torch.empty(shape, dtype=torch.bool).bernoulli_(probability)

        def scaled(shape, rate):
            return mask(shape, 1 - rate).double() / (1 - rate)

        if not layer.training:
            self.gaps, self.hidden, self.zoneout = None, None, [rates] * layer.num_layers
            self.candidate = None
            return
        shape, gaps = (T, B, size), range(layer.num_layers - 1)
        self.gaps = [scaled(shape, layer.dropout) for _ in gaps] if layer.dropout else None
        self.hidden = None
        if layer.recurrent_dropout:
            self.hidden = scaled((rows, B, H), layer.recurrent_dropout)
        self.zoneout, self.candidate = [], [] if layer.candidate_dropout else None
        for _ in range(layer.num_layers):
            self.zoneout.append({name: mask(shape, rate) for name, rate in rates.items()})
            if self.candidate is not None:
                self.candidate.append(scaled(shape, layer.candidate_dropout))


def looped(layer, x, states, masks, lengths=None, resets=None):
    """Return the output and the final states by a loop over steps, in the equations of the papers."""
    cell, directions = layer.cell, 1 + layer.bidirectional
    lengths = torch.full((B,), T) if lengths is None else lengths
    resets = torch.zeros(T, B, dtype=torch.bool) if resets is None else resets
    names, finals = ("h", *cell.states), []
    for index in range(layer.num_layers):
        if index and masks.gaps is not None:
            x = x * masks.gaps[index - 1]
        outputs = [[None] * T for _ in range(directions)]
        for direction in range(directions):
            place = index * directions + direction
            weights = layer.all_weights[place]
            w_ih, w_hh, b_ih, b_hh, *parameters = weights
            now = {name: state[place] for name, state in zip(names, states, strict=True)}
            for t in reversed(range(T)) if direction else range(T):
                alive = (t < lengths).unsqueeze(1)
                begins = resets[t] if direction == 0 else (resets[t + 1] & (t + 1 < lengths) if t + 1 < T else False)
                begins = torch.as_tensor(begins).unsqueeze(-1) & alive
                before = {name: torch.where(begins, cell.initial_value(name), value) for name, value in now.items()}
                hidden = before["h"] if masks.hidden is None else before["h"] * masks.hidden[place]
                of_input = (x[t] @ w_ih.t() + b_ih).chunk(len(cell.gates), -1)
                of_hidden = (hidden @ w_hh.t() + b_hh).chunk(len(cell.gates), -1)
                gate = types.SimpleNamespace()
                for name, one, other in zip(cell.gates, of_input, of_hidden, strict=True):
                    apart = types.SimpleNamespace(input=one, recurrent=other)
                    setattr(gate, name, apart if name in cell.apart else one + other)
                learned = (
                    [types.SimpleNamespace(**dict(zip(cell.parameters, parameters, strict=True)))] if parameters else []
                )
                state, mine = types.SimpleNamespace(**before), slice(direction * H, (direction + 1) * H)
                if masks.candidate is None:
                    h, others = cell.step(gate, state, *learned)
                else:
                    kept = masks.candidate[index][t, :, mine]
                    h, others = WITH_CANDIDATE[cell.name](gate, state, kept.mul, *learned)
                after = {"h": h, **others}
                for name, mask in masks.zoneout[index].items():
                    if isinstance(mask, float):
                        after[name] = mask * before[name] + (1 - mask) * after[name]
                    else:
                        after[name] = torch.where(mask[t, :, mine], before[name], after[name])
                now = {name: torch.where(alive, after[name], now[name]) for name in names}
                outputs[direction][t] = torch.where(alive, after["h"], 0)
            finals.append([now[name] for name in names])
        x = torch.cat([torch.stack(each) for each in outputs], -1)
    return [x, *(torch.stack(each) for each in zip(*finals, strict=True))]


def called(layer, x, states, **options):
    y, finals = layer(x, tuple(states) if len(states) > 1 else states[0], **options)
    return [y, *(finals if isinstance(finals, tuple) else (finals,))]


def seeded(function, *arguments, **options):
    torch.manual_seed(2)
    return function(*arguments, **options)


def gradients(outputs, leaves, **options):
    torch.manual_seed(3)
    return torch.autograd.grad(outputs, leaves, [torch.randn_like(output) for output in outputs], **options)


def assert_is_the_loop(layer, lengths=None, resets=None):
    x, states = drawn(layer)
    found = seeded(called, layer, x, states, lengths=lengths, resets=resets)
    expected = looped(layer, x, states, seeded(Masks, layer), lengths, resets)
    torch.testing.assert_close(found, expected)
    leaves = [x, *states, *layer.parameters()]
    torch.testing.assert_close(gradients(found, leaves), gradients(expected, leaves))


@pytest.mark.filterwarnings("ignore:.*Branching")
@pytest.mark.parametrize(
    ("name", "form", "shape", "lengths", "resets", "memory", "training"),
    each_value(
        pairwise(
            [*CELLS],
            [*FORMS],
            [(1, False, 0.0), (2, True, 0.0), (2, False, 0.3)],
            [None, LENGTHS],
            [None, RESETS],
            ["normal", "lean"],
            [True, True, False],
        ),
        (0, 1),
        most=24,
    ),
    ids=lambda value: "given" if isinstance(value, torch.Tensor) else str(value),
)
def test_a_call_is_the_loop(name, form, shape, lengths, resets, memory, training):
    num_layers, bidirectional, dropout = shape
    options = {"num_layers": num_layers, "bidirectional": bidirectional, "dropout": dropout, "memory": memory}
    assert_is_the_loop(layer_of(name, form, **options).train(training), lengths, resets)


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_every_option_changes_the_result(name):
    x, _ = drawn(layer_of(name, num_layers=2))
    outputs = {form: seeded(layer_of(name, form, num_layers=2), x)[0] for form in FORMS}
    outputs["none"] = gatewise.Recurrent(CELLS[name], F, H, 2, dtype=torch.float64)(x)[0]
    if name == "gru":
        del outputs["zoneout of another state"]
    for one, other in pairwise([*outputs], [*outputs]):
        assert one == other or not torch.allclose(outputs[one], outputs[other])


@pytest.mark.parametrize(("name", "training"), each_value(pairwise(["lstm", "gru", "slstm"], [True, False])))
def test_gradcheck_of_second_order(name, training):
    torch.manual_seed(0)
    rates = {"h": 0.4, **dict.fromkeys(CELLS[name].states[:1], 0.4)}
    options = {"recurrent_dropout": 0.4, "zoneout": rates, "candidate_dropout": 0.4}
    layer = gatewise.Recurrent(CELLS[name], 2, 2, dtype=torch.float64, **options).train(training)
    x = torch.randn(3, 2, 2, dtype=torch.float64, requires_grad=True)
    state = torch.rand(1, 2, 2, dtype=torch.float64, requires_grad=True)
    w_hh = layer.weight_hh_l0.detach().clone().requires_grad_()

    def call(x, state, w_hh):
        torch.manual_seed(2)
        hx = (state,) * (1 + len(layer.cell.states)) if layer.cell.states else state
        return torch.func.functional_call(layer, {"weight_hh_l0": w_hh}, (x, hx, [3, 2]))[0]

    assert torch.autograd.gradcheck(call, (x, state, w_hh))
    assert torch.autograd.gradgradcheck(call, (x, state, w_hh), fast_mode=True)


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.filterwarnings("ignore:.*Branching")
def test_rate_zero_is_no_option(name):
    torch.manual_seed(0)
    plain = gatewise.Recurrent(CELLS[name], F, H, 2, dtype=torch.float64)
    zeros = {
        "recurrent_dropout": 0.0,
        "candidate_dropout": 0.0,
        "zoneout": {"h": 0, **dict.fromkeys(CELLS[name].states, 0.0)},
    }
    layer = gatewise.Recurrent(CELLS[name], F, H, 2, dtype=torch.float64, weight_dropout=0, **zeros)
    layer.load_state_dict(plain.state_dict())
    x, states = drawn(plain)
    before = torch.random.get_rng_state()
    torch.testing.assert_close(called(layer, x, states), called(plain, x, states), rtol=0, atol=0)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert layer.cell_in(True) is layer.cell_in(False) is layer.cell


def test_evaluation_draws_nothing_and_drops_nothing():
    plain, layer = gatewise.Recurrent(LSTM(), F, H, dtype=torch.float64), layer_of("lstm", "recurrent dropout").eval()
    plain.load_state_dict(layer.state_dict())
    x, states = drawn(layer)
    before = torch.random.get_rng_state()
    torch.testing.assert_close(called(layer, x, states), called(plain, x, states), rtol=0, atol=0)
    layer_of("lstm", "zoneout").eval()(x)
    torch.manual_seed(1)
    drawn(layer)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("form", FORMS)
def test_each_call_draws_new_masks_and_a_seed_repeats_them(form):
    layer = layer_of("lstm", form)
    x, _ = drawn(layer)
    first, second, again = seeded(layer, x)[0], layer(x)[0], seeded(layer, x)[0]
    torch.testing.assert_close(again, first, rtol=0, atol=0)
    assert not torch.equal(first, second)
    with torch.no_grad():
        torch.testing.assert_close(seeded(layer, x)[0], first)


def test_zoneout_keeps_units_exactly():
    layer = layer_of("lstm", "zoneout")
    x, (h0, c0) = drawn(layer)
    y, _ = layer(x, (h0, c0))
    kept = torch.cat([h0, y[:-1]]) == y
    assert 0.1 < kept.double().mean() < 0.5


def test_recurrent_dropout_lets_nothing_of_a_dropped_unit_through():
    layer = gatewise.Recurrent(RNN("tanh"), F, 60, recurrent_dropout=0.4, dtype=torch.float64)
    x, h0 = torch.randn(1, 50, F, dtype=torch.float64), torch.randn(1, 50, 60, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(x, h0)[0].square().sum(), h0)
    dropped = (gradient == 0).double().mean().item()
    assert abs(dropped - 0.4) < 4 * (0.4 * 0.6 / 3000) ** 0.5


def test_a_cell_of_ones_own_marks_its_candidate():
    class Leaky(Cell):
        gates = ("a", "g")

        def step(self, gate, state):
            a = torch.sigmoid(gate.a)
            return a * state.h + (1 - a) * candidate(torch.tanh(gate.g)), {}

    layer = gatewise.Recurrent(Leaky(), F, H, candidate_dropout=0.4, dtype=torch.float64)
    x = torch.randn(1, 400, F, dtype=torch.float64, requires_grad=True)
    y, _ = layer(x)
    dropped = (y == 0).double().mean().item()
    assert abs(dropped - 0.4) < 4 * (0.4 * 0.6 / (400 * H)) ** 0.5
    whole, _ = layer.eval()(x)
    torch.testing.assert_close(y, torch.where(y == 0, 0, whole / 0.6))


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_a_packed_batch_and_one_sequence(name):
    layer = layer_of(name, num_layers=2, bidirectional=True)
    x, _ = drawn(layer)
    lengths = torch.tensor([6, 5, 3, 3])
    packed = pack_padded_sequence(x, lengths)
    y, _ = seeded(layer, packed)
    torch.testing.assert_close(seeded(layer, packed)[0].data, y.data)
    gradient = gradients([y.data], [x])[0]
    assert gradient[:3].ne(0).all()
    assert gradient[5, 1:].eq(0).all()
    one = seeded(layer, x[:, :1])
    torch.testing.assert_close(seeded(layer, x[:, 0])[0], one[0].squeeze(1))


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_a_packed_batch_is_the_loop(training):
    layer = layer_of("lstm", "all", bidirectional=True).train(training)
    x, states = drawn(layer)
    lengths = torch.tensor([6, 5, 3, 3])
    y, finals = seeded(layer, pack_padded_sequence(x, lengths), tuple(states))
    masks = seeded(PackedMasks, layer, lengths) if training else Masks(layer)
    expected = looped(layer, x, states, masks, lengths)
    packed = pack_padded_sequence(expected[0], lengths).data
    torch.testing.assert_close([y.data, *finals], [packed, *expected[1:]])
    leaves = [x, *states, *layer.parameters()]
    torch.testing.assert_close(gradients([y.data, *finals], leaves), gradients([packed, *expected[1:]], leaves))


class PackedMasks(Masks):
    """The masks of a packed batch, whose masks of steps are drawn for its tokens only."""

    def __init__(self, layer, lengths):
        super().__init__(layer)
        torch.manual_seed(2)
        kept = torch.empty(2, B, H, dtype=torch.bool).bernoulli_(1 - layer.recurrent_dropout)
        self.hidden = kept.double() / (1 - layer.recurrent_dropout)
        alive = torch.arange(T)[:, None] < lengths
        for name, rate in rates_of(layer).items():
            mask = torch.zeros(T, B, 2 * H, dtype=torch.bool)
            mask[alive] = torch.empty(int(lengths.sum()), 2 * H, dtype=torch.bool).bernoulli_(rate)
            self.zoneout[0][name] = mask
        self.candidate[0].zero_()[alive] = (
            torch.empty(int(lengths.sum()), 2 * H, dtype=torch.bool).bernoulli_(1 - layer.candidate_dropout)
            / (1 - layer.candidate_dropout)
        ).to(self.candidate[0].dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_16_bits_are_near_float64(name, dtype):
    layer = layer_of(name, num_layers=2)
    half = copy.deepcopy(layer).to(dtype)
    layer.load_state_dict(half.state_dict())
    x, _ = drawn(layer)
    x = x.detach().to(dtype)
    found, expected = seeded(half, x)[0], seeded(layer, x.double())[0]
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=8 * torch.finfo(dtype).eps)


def test_transforms_of_torch_func():
    layer = layer_of("lstm", num_layers=2, dropout=0.2)
    x, _ = drawn(layer)
    parameters = dict(layer.named_parameters())

    def loss(parameters, x):
        return torch.func.functional_call(layer, parameters, (x,))[0].square().sum()

    found = seeded(torch.func.grad(loss), parameters, x)
    expected = torch.autograd.grad(seeded(loss, parameters, x), [*parameters.values()])
    torch.testing.assert_close([*found.values()], [*expected])
    same = x[:, :1].expand(-1, B, -1).unsqueeze(2)
    losses = torch.func.vmap(loss, (None, 1), randomness="different")(parameters, same)
    assert losses.unique().numel() == B


def test_autocast():
    layer = layer_of("lstm", dtype=torch.float32)
    x, _ = drawn(layer, torch.float32)
    half = copy.deepcopy(layer).to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        found = seeded(layer, x)[0]
    torch.testing.assert_close(found, seeded(half, x.bfloat16())[0], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "training"),
    exhaustive_unless([("slstm", True)], pairwise(["lstm", "gru", "slstm"], [True, False])),
)
def test_compiled_in_one_graph(name, training):
    torch.compiler.reset()
    layer = layer_of(name, num_layers=2, bidirectional=True, dropout=0.2).train(training)
    x, _ = drawn(layer)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    lengths, leaves = torch.tensor([6, 2, 4, 5]), [x, *layer.parameters()]
    found, expected = seeded(compiled, x, lengths=lengths)[0], seeded(layer, x, lengths=lengths)[0]
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients([found], leaves), gradients([expected], leaves))
    torch.compiler.reset()


def test_a_cell_that_is_compiled_before_it_is_called_has_its_masks():
    torch.compiler.reset()
    # The steps of cells are derived once in a process, so that these rates must be those of no other test.
    layer = layer_of("lstm", candidate_dropout=0.45, zoneout=0.15)
    x, states = drawn(layer)
    found = seeded(called, torch.compile(layer, backend="aot_eager"), x, states)
    torch.testing.assert_close(found, looped(layer, x, states, seeded(Masks, layer)))
    torch.compiler.reset()


@pytest.mark.parametrize("form", FORMS)
def test_names_stand_for_cells(form):
    layer = layer_of("lstm", form)
    assert cell_named(layer.cell_in(True).name) == layer.cell_in(True)
    assert cell_named(layer.cell_in(False).name) == layer.cell_in(False)
    for training in (True, False):
        again = eval(repr(layer.cell_in(training)), {"LSTM": LSTM, "Regularised": Regularised, "Averaged": Averaged})
        assert again == layer.cell_in(training)
    assert isinstance(layer.cell_in(True), Regularised)
    assert isinstance(layer.cell_in(False), Averaged) == ("zoneout" in FORMS[form])


def test_cells_are_found_by_what_they_are_made_of():
    cells = [Regularised(LSTM(), 0.3, (0.1, 0.2), 0.25) for _ in range(2)]
    assert cells[0] == cells[1]
    assert hash(cells[0]) == hash(cells[1])
    assert hash(cells[0].masked) == hash(cells[1].masked)
    assert cells[0] != Regularised(LSTM(), 0.3, (0.1, 0.2), 0.2)
    changed = Regularised(Branching(), 0.3)
    before = hash(changed)
    changed.cell.bias = False
    assert hash(changed) != before


def test_kernels_that_compute_no_masks_refuse_them():
    layer = layer_of("lstm", "all", dtype=torch.float32)
    x = torch.randn(T, B, F)
    decision = gatewise.explain(layer, x)
    assert decision.chosen == "eager"
    assert "lstm with recurrent_dropout=0.4, zoneout=(0.2, 0.5), candidate_dropout=0.25" in str(decision.problem)
    for kernel in ("aten", "cudnn", "persistent"):
        with pytest.raises(KernelRefused, match=r"lstm with recurrent_dropout=0.4"), gatewise.use_kernel(kernel):
            layer(x)
    evaluated = gatewise.explain(layer, x, training=False)
    assert "lstm with mean zoneout=(0.2, 0.5)" in str(evaluated.problem)
    dropped = layer_of("gru", "recurrent dropout", dtype=torch.float32)
    assert gatewise.explain(dropped, (T, B, F), device="h200").chosen == "persistent"
    assert gatewise.explain(layer_of("lstm", "all"), (T, B, F), device="h200").chosen == "stepwise"  # in float64
    assert gatewise.explain(dropped.eval(), (T, B, F), device="h200").chosen == "persistent"
    report = gatewise.verify(layer, x)
    assert report.agrees
    assert "recurrent_dropout=0.4" in str(report)


def test_measured_choices_have_masks(monkeypatch):
    monkeypatch.setenv("GATEWISE_POLICY", "measure")
    layer = layer_of("lstm", "all", dtype=torch.float32)
    assert layer(torch.randn(T, B, F))[0].shape == (T, B, H)


def test_copies_keep_the_rates_and_repr_shows_them():
    layer = layer_of("lstm", "all")
    x, _ = drawn(layer)
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        torch.testing.assert_close(seeded(copied, x)[0], seeded(layer, x)[0], rtol=0, atol=0)
    assert "recurrent_dropout=0.4, zoneout={'h': 0.2, 'c': 0.5}, candidate_dropout=0.25" in repr(layer)
    plain = repr(gatewise.Recurrent(LSTM(), F, H))
    assert "zoneout" not in plain
    assert "dropout" not in plain


PROBABILITY = "a probability in [0, 1)"


@pytest.mark.parametrize(
    ("cell", "options", "message"),
    [
        (LSTM(), {"recurrent_dropout": 1.0}, f"`recurrent_dropout` must be {PROBABILITY}, got 1.0."),
        (LSTM(), {"recurrent_dropout": -0.1}, f"`recurrent_dropout` must be {PROBABILITY}, got -0.1."),
        (LSTM(), {"recurrent_dropout": "0.1"}, f"`recurrent_dropout` must be {PROBABILITY}, got '0.1'."),
        (LSTM(), {"candidate_dropout": 1.0}, f"`candidate_dropout` must be {PROBABILITY}, got 1.0."),
        (LSTM(), {"candidate_dropout": None}, f"`candidate_dropout` must be {PROBABILITY}, got None."),
        (
            RNN("tanh"),
            {"candidate_dropout": 0.5},
            "`candidate_dropout` must be 0 for rnn_tanh, which marks no candidate, got 0.5. Mark it in the step: ",
        ),
        (LSTM(), {"zoneout": 1}, f"`zoneout` must be {PROBABILITY}, got 1."),
        (LSTM(), {"zoneout": (0.1, 0.2)}, f"`zoneout` must be {PROBABILITY}, got (0.1, 0.2)."),
        (LSTM(), {"zoneout": {"c": 1.5}}, f"`zoneout['c']` must be {PROBABILITY}, got 1.5."),
        (GRU(), {"zoneout": {"c": 0.5}}, "`zoneout` must be rates by the names of states, which are h, got 'c'."),
        (
            SLSTM(),
            {"zoneout": {"m": 0.5}},
            "`zoneout['m']` must be 0 for a state that does not begin at a finite number, got 0.5, "
            "and the state begins at -inf.",
        ),
    ],
    ids=str,
)
def test_bad_rates_are_refused(cell, options, message):
    with pytest.raises(ArgumentError, match=re.escape(message)):
        gatewise.Recurrent(cell, F, H, **options)


def test_rates_that_are_set_act():
    layer, x = gatewise.Recurrent(LSTM(), 3, 5, zoneout=0.2, recurrent_dropout=0.3), torch.randn(4, 2, 3)
    layer.zoneout = layer.recurrent_dropout = 0.0
    assert torch.equal(layer(x)[0], layer(x)[0])
    layer.zoneout = {"c": 0.5}
    assert not torch.equal(layer(x)[0], layer(x)[0])
    assert layer.zoneout == {"c": 0.5}
    with pytest.raises(ArgumentError, match="recurrent_dropout"):
        layer.recurrent_dropout = 1.5
    assert layer.recurrent_dropout == 0.0
    other = copy.deepcopy(layer)
    other.zoneout = 0.0
    assert layer.zoneout == {"c": 0.5}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_on_a_gpu(name):
    layer = layer_of(name, num_layers=2, bidirectional=True).cuda()
    x, _ = drawn(layer)
    x = x.detach().cuda().requires_grad_()
    y, _ = seeded(layer, x, lengths=LENGTHS.cuda())
    dx = gradients([y], [x])[0]
    layer.memory = "lean"
    again, _ = seeded(layer, x, lengths=LENGTHS.cuda())
    torch.testing.assert_close(again, y)
    torch.testing.assert_close(gradients([again], [x])[0], dx)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["persistent", "stepwise"])
def test_mean_zoneout_of_a_gru_runs_on_fused_kernels(kernel, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    layer = gatewise.Recurrent(GRU(), 32, 64, zoneout=0.3, device="cuda", kernel=kernel).eval()
    x = torch.randn(T, B, 32, device="cuda")
    with torch.no_grad():
        found = layer(x)[0]
        layer.kernel = "eager"
        torch.testing.assert_close(found, layer(x)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_a_captured_graph_draws_new_masks_at_each_replay():
    layer = layer_of("lstm", dtype=torch.float32).cuda()
    x = torch.randn(T, B, F, device="cuda")
    with torch.no_grad():
        layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y, _ = layer(x)
    found = []
    for _ in range(2):
        graph.replay()
        found.append(y.clone())
    assert not torch.equal(*found)
