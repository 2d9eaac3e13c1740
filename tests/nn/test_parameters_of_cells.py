"""Learned parameters of cells, with one value for each unit: their names, gradients, and every way to run them."""

import copy
import functools
import math

import pytest
import torch

import gatewise
from gatewise.cells import SLSTM, LayerNormLSTM, PeepholeLSTM
from gatewise.cells.step import next_states

T, B, I, H = 5, 3, 3, 4  # noqa: E741  as in the legend


class Rates(gatewise.Cell):
    """A cell of two states with parameters in every place: alone in a coefficient, as an operand of functions."""

    gates = ("a", "g")
    states = ("slow", "fast")
    apart = ("g",)
    parameters = {"rate": functools.partial(torch.nn.init.uniform_, a=-2, b=2), "gain": 1.5, "shift": 0}  # noqa: RUF012
    initial_states = {"h": 0.5, "slow": -1}  # noqa: RUF012

    def step(self, gate, state, parameter):
        keep = torch.sigmoid(parameter.rate)
        slow = keep * keep * state.slow + (1 - keep) * gate.a
        fast = parameter.gain * state.fast + torch.maximum(gate.g.input, parameter.shift)
        h = torch.tanh(slow + gate.g.recurrent) * parameter.gain + parameter.rate * parameter.rate * state.h
        return h - 0.1 * torch.tanh(fast), {"fast": fast, "slow": slow}


CELLS = [PeepholeLSTM(), Rates()]
OPTIONS = [{}, {"bias": False}, {"num_layers": 2, "bidirectional": True}, {"num_layers": 2, "bias": False}]

each_cell = pytest.mark.parametrize("cell", CELLS, ids=repr)


def layer_of(cell, **options):
    torch.manual_seed(0)
    layer = gatewise.Recurrent(cell, I, H, **{"dtype": torch.float64, **options})
    with torch.no_grad():
        for name in cell.parameters:
            for parameter in parameters_of(layer, name):
                parameter.copy_(torch.randn_like(parameter) / 2)
    return layer


def parameters_of(layer, name):
    return [value for key, value in layer.named_parameters() if key.rpartition("_l")[0] == name]


def x_of(*shape):
    return torch.randn(*(shape or (T, B, I)), dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def looped(layer, x):
    """Return the output of a forward layer, by a loop over the cell's own step."""
    cell = layer.cell
    for index in range(layer.num_layers):
        names = list(layer.state_dict())[: len(layer.all_weights[0])]
        weights = dict(zip([name.rpartition("_l")[0] for name in names], layer.all_weights[index], strict=True))
        states = [x.new_full((x.shape[1], H), cell.initial_states.get(name, 0)) for name in ("h", *cell.states)]
        outputs = []
        for token in x:
            of_input = torch.nn.functional.linear(token, weights["weight_ih"], weights.get("bias_ih"))
            of_state = torch.nn.functional.linear(states[0], weights["weight_hh"], weights.get("bias_hh"))
            sums = {}
            for gate, one, other in zip(cell.gates, of_input.split(H, -1), of_state.split(H, -1), strict=True):
                apart = {f"{gate}_input": one, f"{gate}_recurrent": other}
                sums |= apart if gate in cell.apart else {gate: one + other}
            own = {name: weights[name] for name in cell.parameters}
            h, after = next_states(cell, sums, dict(zip(("h", *cell.states), states, strict=True)), own)
            states = [h, *after]
            outputs.append(h)
        x = torch.stack(outputs)
    return x


def test_names_and_order():
    layer = gatewise.Recurrent(PeepholeLSTM(), I, H, num_layers=2, bidirectional=True)
    kinds = "weight_ih", "weight_hh", "bias_ih", "bias_hh", "p_i", "p_f", "p_o"
    names = [f"{kind}_l{index}{suffix}" for index in range(2) for suffix in ("", "_reverse") for kind in kinds]
    assert [name for name, _ in layer.named_parameters()] == names == list(layer.state_dict())
    assert [id(weight) for direction in layer.all_weights for weight in direction] == list(map(id, layer.parameters()))
    assert layer.p_i_l0_reverse.shape == (H,)


def test_initial_values():
    layer = gatewise.Recurrent(Rates(), 2, 1000)
    bound = 1 / math.sqrt(1000)
    for _ in range(2):
        assert (layer.gain_l0 == 1.5).all()
        assert (layer.shift_l0 == 0).all()
        assert -2 <= layer.rate_l0.min() < -1.9
        assert 1.9 < layer.rate_l0.max() <= 2
        assert bound / 2 < layer.weight_hh_l0.abs().max() <= bound
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.fill_(7)
        torch.nn.utils.parametrize.register_parametrization(layer, "gain_l0", torch.nn.Identity(), unsafe=True)
        layer.reset_parameters()
        torch.nn.utils.parametrize.remove_parametrizations(layer, "gain_l0")


@pytest.mark.parametrize("kind", [gatewise.Recurrent, gatewise.RecurrentCell])
def test_parameters_of_a_cell_that_is_a_module_keep_their_values(kind):
    class Scaled(gatewise.Cell, torch.nn.Module):
        gates = ("a",)

        def __init__(self):
            torch.nn.Module.__init__(self)
            self.scale = torch.nn.Parameter(torch.full((H,), 7.0))

        def step(self, gate, state):
            return torch.tanh(gate.a * self.scale), {}

    torch.manual_seed(0)  # of other weights the sums may be so large that a gradient is zero
    layer = kind(Scaled(), I, H)
    assert "cell.scale" in layer.state_dict()
    assert (layer.cell.scale == 7).all()
    with pytest.warns(UserWarning, match="got a tensor from outside of the step"):
        layer(torch.randn(B, I))[0].sum().backward()
    assert layer.cell.scale.grad.abs().min() > 0


@each_cell
@pytest.mark.parametrize("options", OPTIONS[:2] + OPTIONS[3:], ids=str)
def test_values_and_all_gradients(cell, options):
    layer, x = layer_of(cell, **options), x_of().requires_grad_()
    leaves = [x, *layer.parameters()]
    y, expected = layer(x)[0], looped(layer, x)
    torch.testing.assert_close(y, expected)
    found = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
    others = torch.autograd.grad(expected.square().sum(), leaves, create_graph=True)
    torch.testing.assert_close(found, others)
    assert all(gradient.any() for gradient in found)
    twice = [torch.autograd.grad(sum(one.square().sum() for one in each), leaves) for each in (found, others)]
    torch.testing.assert_close(*twice)


@each_cell
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_little_memory_gives_the_same(cell, options):
    gradients = []
    for memory in ("normal", "lean"):
        layer = layer_of(cell, memory=memory, **options)
        layer(x_of(), lengths=[5, 0, 3])[0].square().sum().backward()
        gradients.append([weight.grad for weight in layer.parameters()])
    torch.testing.assert_close(*gradients)


@each_cell
def test_lengths_are_rows_of_their_own_in_both_directions(cell):
    layer, x, lengths = layer_of(cell, num_layers=2, bidirectional=True), x_of(), [5, 2, 4]
    y, states = layer(x, lengths=lengths)
    rows = [layer(x[:length, row]) for row, length in enumerate(lengths)]
    for row, (own, finals) in enumerate(rows):
        torch.testing.assert_close(own, y[: lengths[row], row])
        torch.testing.assert_close(finals, tuple(state[:, row] for state in states))
    found, expected = [
        torch.autograd.grad(sum(one.square().sum() for one in each), [*layer.parameters()])
        for each in ([y], [own for own, _ in rows])
    ]
    torch.testing.assert_close(found, expected)


@each_cell
def test_pieces_with_their_states_are_the_whole(cell):
    layer, x = layer_of(cell, num_layers=2), x_of()
    y, states = layer(x)
    first, carried = layer(x[:2])
    second, last = layer(x[2:], carried)
    torch.testing.assert_close(torch.cat([first, second]), y)
    torch.testing.assert_close(last, states)
    assert len(states) == 1 + len(cell.states)


def test_states_stand_in_the_cells_order():
    """`Rates` returns its states in another order than it names them."""
    layer, x = layer_of(Rates()), x_of(1, B, I)
    given = {name: x_of(1, B, H) * scale for name, scale in (("h", 1), ("slow", 10), ("fast", 100))}
    _, (h, slow, fast) = layer(x, tuple(given.values()))
    keep = torch.sigmoid(layer.rate_l0)
    moved = fast - layer.gain_l0 * given["fast"]
    assert (moved.abs() < 20).all()
    a = torch.nn.functional.linear(x[0], layer.weight_ih_l0[:H], layer.bias_ih_l0[:H])
    a = a + torch.nn.functional.linear(given["h"][0], layer.weight_hh_l0[:H], layer.bias_hh_l0[:H])
    torch.testing.assert_close(slow[0], keep**2 * given["slow"][0] + (1 - keep) * a)
    assert h.shape == slow.shape


def test_initial_states_are_those_of_the_cell():
    layer, x = layer_of(Rates(), num_layers=2), x_of()
    values = tuple(torch.full((2, B, H), value, dtype=torch.float64) for value in (0.5, -1.0, 0.0))
    torch.testing.assert_close(layer(x), layer(x, values))
    assert not torch.allclose(layer(x)[0], layer(x, tuple(map(torch.zeros_like, values)))[0])
    _, empty = layer(x, lengths=[0] * B)
    torch.testing.assert_close(empty, values)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_in_16_bits_are_summed_in_float32(dtype):
    """With 16-bit sums, 4,096 equal terms would stop growing at 256 (bfloat16) or 2,048 (float16) of them."""

    class Adding(gatewise.Cell):
        gates = ("a",)
        parameters = {"shift": 0.0}  # noqa: RUF012

        def step(self, gate, state, parameter):
            return 0 * gate.a + parameter.shift, {}

    layer = gatewise.Recurrent(Adding(), 1, 1, dtype=dtype)
    layer(torch.zeros(64, 64, 1, dtype=dtype))[0].sum().backward()
    assert layer.shift_l0.grad.dtype == dtype
    assert layer.shift_l0.grad.item() == 4096


@each_cell
def test_transforms_of_torch_func_agree_with_autograd(cell):
    layer, x = layer_of(cell), x_of()
    weights = dict(layer.named_parameters())

    def loss(weights, x):
        return torch.func.functional_call(layer, weights, (x,))[0].square().sum()

    found = torch.func.grad(loss)(weights, x)
    expected = torch.autograd.grad(loss(weights, x), list(weights.values()))
    torch.testing.assert_close(list(found.values()), list(expected))
    rows = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 1))(weights, x)
    for name, value in found.items():
        torch.testing.assert_close(rows[name].sum(0), value)


# One step of the second one is compiled in test_recurrent_cell.py, too.
# `make test` compiles normalized layers, which have parameters, and a cell with several states:
# test_compile.py and test_recurrent_cell.py.
@pytest.mark.exhaustive
@pytest.mark.parametrize("cell", [PeepholeLSTM(), pytest.param(SLSTM(), marks=pytest.mark.exhaustive)], ids=repr)
def test_shipped_cells_with_parameters_or_several_states_can_be_compiled(cell):
    layer, x = layer_of(cell, num_layers=2, bidirectional=True, bias=False), x_of()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    results = [each(x) for each in (compiled, layer)]
    torch.testing.assert_close(*results)
    gradients = [torch.autograd.grad(y.square().sum(), [*layer.parameters()]) for y, _ in results]
    torch.testing.assert_close(*gradients)


@each_cell
def test_dtypes_copies_and_state_dicts(cell):
    layer, x = layer_of(cell, num_layers=2), x_of()
    other = gatewise.Recurrent(cell, I, H, num_layers=2, dtype=torch.float64)
    other.load_state_dict(layer.state_dict())
    for same in (other, copy.deepcopy(layer)):
        torch.testing.assert_close(same(x), layer(x))
    expected = layer(x)[0]
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = copy.deepcopy(layer).float()(x.float())
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), expected, atol=0.05, rtol=0.05)


@each_cell
def test_persistent_computes_the_cell_unless_memory_is_little(cell):
    assert gatewise.explain(layer_of(cell, dtype=torch.float32), (T, B, I), device="h200").chosen == "persistent"
    decision = gatewise.explain(layer_of(cell, memory="lean", dtype=torch.float32), (T, B, I), device="h200")
    assert "a cell with several states, parameters" in " ".join(map(str, decision.verdict("persistent").refusals))
    with gatewise.use_kernel("eager"):
        assert gatewise.explain(layer_of(cell), (T, B, I)).chosen == "eager"


def test_the_number_of_weights_is_checked():
    layer = layer_of(PeepholeLSTM())
    layer.p_i_l0 = torch.nn.Parameter(torch.zeros(H + 1, dtype=torch.float64))
    with pytest.raises(gatewise.ShapeError, match=r"`weights` must be shaped \[4\] in layer 0, got \[5\]"):
        layer(x_of())


@pytest.mark.parametrize("cell", [LayerNormLSTM(), SLSTM()], ids=lambda cell: cell.name)
def test_autocast_converts_given_states_to_its_dtype(cell):
    torch.manual_seed(0)
    layer, x = gatewise.Recurrent(cell, I, H, dtype=torch.bfloat16), torch.randn(T, B, I, dtype=torch.bfloat16)
    states = tuple(torch.rand(1, B, H, dtype=torch.bfloat16) for _ in ("h", *cell.states))
    with torch.autocast("cpu", torch.float16):
        found = layer(x, states)
    expected = layer.half()(x.half(), tuple(state.half() for state in states))
    assert found[0].dtype == torch.float16
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("cell", [LayerNormLSTM(), SLSTM()], ids=lambda cell: cell.name)
def test_autocast_converts_no_operand_inside_of_a_step(cell):
    # On a GPU, autocast would compute exponentials and normalizations in float32, and return the states in it.
    layer, x = gatewise.Recurrent(cell, I, H, device="cuda", kernel="eager"), torch.randn(T, B, I, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        found = layer(x)
    torch.testing.assert_close(found, layer.bfloat16()(x.bfloat16()), rtol=0, atol=0)
