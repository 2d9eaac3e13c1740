"""The values of a stream: those of the layer's call over the whole sequence, within the budgets of the library."""

import itertools
from types import MappingProxyType

import pytest
import torch

import gatewise
from gatewise import testing
from gatewise.cells import GRU, LSTM, RNN, SHIPPED, Cell, LayerNormLSTM
from gatewise.contract.problem import Problem
from tests.pairwise import each_value, pairwise

T, B = 7, 3


class Momentum(Cell):
    """A cell of a user's own: several states with initial values, parameters, and separate sums of one gate of two."""

    gates = ("a", "g")
    states = ("mean", "scale")
    apart = ("g",)
    parameters = MappingProxyType({"shift": 0.0, "gain": torch.nn.init.normal_})
    initial_states = MappingProxyType({"h": 0.5, "scale": 1.0})

    def step(self, gate, state, parameter):
        a = torch.sigmoid(gate.a + parameter.shift)
        mean = a * state.mean + (1 - a) * torch.tanh(gate.g.input + a * gate.g.recurrent)
        scale = 0.9 * state.scale + 0.1 * mean * mean
        return parameter.gain * mean / torch.sqrt(scale), {"scale": scale, "mean": mean}


class Erf(Cell):
    """A cell that cannot be traced."""

    gates = ("z",)

    def step(self, gate, state):
        return torch.erf(gate.z + 0.1 * state.h), {}


LAYERS = {
    "LSTM": (LSTM(), {}),
    "LSTM, projection": (LSTM(), {"proj_size": 3}),
    "GRU": (GRU(), {}),
    "RNN tanh": (RNN("tanh"), {}),
    "RNN relu": (RNN("relu"), {}),
    **{f"Recurrent({cell!r})": (cell, {}) for cell in (*SHIPPED, LayerNormLSTM.of("icefall"), Momentum(), Erf())},
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SIZES = ((5, 31), (1, 1), (31, 8))


def layer_of(name, problem, **options):
    """Return the layer of a problem; its weights are its own."""
    sizes = problem.input_size, problem.hidden_size
    options |= {"num_layers": problem.num_layers, "bias": problem.bias, "dtype": problem.dtype}
    if name.startswith("Recurrent"):
        return gatewise.Recurrent(problem.cell, *sizes, **options)
    if name.startswith("RNN"):
        return gatewise.RNN(*sizes, nonlinearity=problem.cell.nonlinearity, **options)
    if problem.proj_size:
        options["proj_size"] = problem.proj_size
    return getattr(gatewise, name.partition(",")[0])(*sizes, **options)


def states_of(problem, inputs):
    others = inputs.c0.chunk(len(problem.cell.states), -1) if problem.cell.states else ()
    return (inputs.h0, *others) if others else inputs.h0


def side_by_side(states):
    h, *others = states if isinstance(states, tuple) else (states,)
    return h, torch.cat(others, -1) if others else h.new_zeros(*h.shape[:2], 0)


CASES = pairwise(tuple(LAYERS), DTYPES, (1, 2, 3), (True, False), SIZES)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize(("name", "dtype", "layers", "bias", "sizes"), each_value(CASES, (0, 1), most=30))
def test_steps_are_a_call_over_the_sequence(name, dtype, layers, bias, sizes):
    cell, options = LAYERS[name]
    if options.get("proj_size", 0) >= sizes[1]:
        sizes = SIZES[0]
    options = {**options, "num_layers": layers, "bias": bias, "dtype": dtype, "cell": cell, "needs_grad": False}
    problem = Problem(T, B, *sizes, **options)
    inputs = testing.make_inputs(problem)
    layer = layer_of(name, problem)
    with torch.no_grad():
        for weight, value in zip([one for some in layer.all_weights for one in some], inputs.weights, strict=True):
            weight.copy_(value)
    stream = layer.stream(B)
    stream.states = states_of(problem, inputs)
    y = torch.stack([stream(x) for x in inputs.x])
    found = {"y": y, **dict(zip(("h_n", "c_n"), side_by_side(stream.states), strict=True))}
    exact = testing.named(problem, *testing.oracle(problem, inputs))
    allowed = testing.budgets(problem, inputs, None, exact, "cpu")
    errors = {name: testing.relative_error(value, exact[name]) for name, value in found.items()}
    assert all(errors[name] <= allowed[name] for name in errors), (errors, allowed)
    assert all(value.dtype == dtype for value in found.values())


STRUCTURES = ({"heads": 3}, {"recurrent_rank": 2})


@pytest.mark.parametrize(
    ("dtype", "structure", "cell"),
    each_value([*itertools.product(DTYPES, STRUCTURES, [LSTM(), GRU(), LayerNormLSTM()])]),
    ids=repr,
)
def test_matrices_of_blocks_and_factors_are_multiplied_without_being_made(cell, structure, dtype):
    torch.manual_seed(0)
    layer = gatewise.Recurrent(cell, 5, 9, 2, dtype=dtype, **structure)
    x = torch.randn(T, B, 5, dtype=dtype)
    with torch.no_grad():
        exact = gatewise.Recurrent(cell, 5, 9, 2, dtype=torch.float64, **structure)
        exact.load_state_dict(layer.state_dict())
        expected, theirs = exact(x.double())[0], layer(x)[0]
    stream = layer.stream(B)
    y = torch.stack([stream(step) for step in x])
    unit = torch.finfo(dtype).eps
    # In float64 the layer's call is the reference itself, so that its error is not known.
    allowed = 1e-12 if dtype == torch.float64 else 2 * (testing.relative_error(theirs, expected) + unit)
    assert testing.relative_error(y, expected) <= allowed


@pytest.mark.parametrize("kernel", ["eager", "aten"])
@pytest.mark.parametrize("make", [gatewise.LSTM, gatewise.GRU, gatewise.RNN], ids=lambda kind: kind.__name__)
def test_a_named_kernel_computes_the_steps(make, kernel, monkeypatch):
    layer = make(5, 8, num_layers=2, dtype=torch.float64)
    named = make(5, 8, num_layers=2, dtype=torch.float64, kernel=kernel)
    named.load_state_dict(layer.state_dict())
    x = torch.randn(T, B, 5, dtype=torch.float64)
    expected = layer(x)[0].detach()

    def steps(layer):
        stream = layer.stream(B)
        return torch.stack([stream(step) for step in x])

    torch.testing.assert_close(steps(named), expected)
    with gatewise.use_kernel(kernel):
        torch.testing.assert_close(steps(layer), expected)
    monkeypatch.setenv("GATEWISE_KERNEL", kernel)
    torch.testing.assert_close(steps(layer), expected)


def test_a_kernel_that_cannot_run_the_step_refuses_it():
    layer = gatewise.LSTM(5, 8, kernel="cudnn")
    with pytest.raises(gatewise.KernelRefused, match="cudnn"):
        layer.stream(1)(torch.randn(1, 5))


def test_a_named_kernel_takes_states_of_cells_that_have_several():
    layer = gatewise.Recurrent(Momentum(), 5, 8, 2, dtype=torch.float64, kernel="eager")
    x = torch.randn(T, B, 5, dtype=torch.float64)
    expected, finals = layer(x)
    stream = layer.stream(B)
    torch.testing.assert_close(torch.stack([stream(step) for step in x]), expected.detach())
    torch.testing.assert_close(stream.states, tuple(state.detach() for state in finals))


@pytest.mark.parametrize("kernel", ["auto", "eager"])
@pytest.mark.parametrize("cell", [LSTM(), GRU(), Momentum()], ids=repr)
def test_autocast_carries_the_states_as_a_call_does(cell, kernel):
    torch.manual_seed(0)
    layer = gatewise.Recurrent(cell, 5, 31, 2, kernel=kernel)
    x = torch.randn(T, B, 5)
    exact = gatewise.Recurrent(cell, 5, 31, 2, dtype=torch.float64)
    exact.load_state_dict(layer.state_dict())
    expected = exact(x.double())[0]
    stream = layer.stream(B)
    with torch.autocast("cpu", torch.bfloat16):
        theirs = layer(x)[0]
        y = torch.stack([stream(step) for step in x])
    assert y.dtype == torch.bfloat16
    unit = torch.finfo(torch.bfloat16).eps
    rounded = 2 if kernel == "eager" else 1  # the states of a call are rounded once more
    assert testing.relative_error(y, expected) <= 2 * (rounded * testing.relative_error(theirs, expected) + unit)
    assert all(state.dtype == torch.float32 for state in torch.utils._pytree.tree_leaves(stream.states))
    assert stream(x[0]).dtype == torch.float32


@pytest.mark.parametrize(
    ("kernel", "cell", "given", "dtype"),
    each_value(
        [
            *itertools.product(
                ["auto", "eager"],
                [LSTM(), Momentum()],
                [torch.float32, torch.bfloat16, torch.float16],
                [torch.bfloat16, torch.float32, torch.float64],
            )
        ]
    ),
    ids=repr,
)
def test_autocast_converts_the_input_and_the_weights_each_from_its_own_dtype(dtype, given, cell, kernel):
    torch.manual_seed(0)
    layer = gatewise.Recurrent(cell, 5, 8, 2, kernel=kernel, dtype=dtype)
    x = torch.randn(T, B, 5).to(given)
    # The same call, with everything converted beforehand.
    stream = gatewise.Recurrent(cell, 5, 8, 2, kernel=kernel, dtype=torch.bfloat16)
    stream.load_state_dict(layer.state_dict())
    stream = stream.stream(B)
    expected = torch.stack([stream(step) for step in x.bfloat16()])
    stream = layer.stream(B)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.stack([stream(step) for step in x])
        assert layer(x)[0].dtype == found.dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_autocast_converts_weights_of_several_dtypes_as_in_a_call():
    layer = gatewise.LSTM(5, 8).bfloat16()
    layer.bias_hh_l0 = torch.nn.Parameter(layer.bias_hh_l0.detach().float())
    x = torch.randn(T, B, 5)
    stream = layer.stream(B)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.stack([stream(step) for step in x])
        assert layer(x)[0].dtype == found.dtype == torch.bfloat16
    stream = layer.bfloat16().stream(B)
    torch.testing.assert_close(found, torch.stack([stream(step) for step in x.bfloat16()]), rtol=0, atol=0)


@pytest.mark.parametrize("kernel", ["auto", "eager"])
def test_inputs_that_autocast_does_not_convert_need_the_dtype_of_the_weights(kernel):
    layer = gatewise.LSTM(5, 8, kernel=kernel)
    x = torch.randn(T, B, 5)
    stream = layer.stream(B)
    message = "must be torch.float32 like the weights, got"
    with torch.autocast("cpu", torch.bfloat16):
        for name, call in (("x", lambda: stream(x[0].double())), ("input", lambda: layer(x.double()))):
            with pytest.raises(gatewise.DtypeError, match=f"`{name}` {message} torch.float64"):
                call()
        double = gatewise.LSTM(5, 8, kernel=kernel, dtype=torch.float64)
        assert double.stream(B)(x[0].double()).dtype == torch.float64
    before = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", True)
    try:
        for dtype in (torch.float64, torch.bfloat16):
            with pytest.raises(gatewise.DtypeError, match=f"{message} {dtype}"):
                stream(x[0].to(dtype))
        found = torch.stack([stream(step) for step in x])
    finally:
        torch.set_autocast_enabled("cuda", before)
    torch.testing.assert_close(found, layer(x)[0].detach())


def test_the_states_of_16_bits_are_carried_in_full():
    # The forget gate is open and 1/64 of the input is added at each step: in bfloat16 a sum stays at 4.
    layer = gatewise.LSTM(1, 1, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight_hh_l0.zero_()
        layer.bias_hh_l0.zero_()
        layer.weight_ih_l0.copy_(torch.tensor([[0.0], [0.0], [1.0], [0.0]]))
        layer.bias_ih_l0.copy_(torch.tensor([30.0, 30.0, 0.0, 30.0]))
        x = torch.full((1000, 1, 1), 1 / 64, dtype=torch.bfloat16)
        stream = layer.stream(1)
        for step in x:
            stream(step)
    _, c = stream.states
    assert abs(c.item() - 1000 / 64) < 0.1


def test_training_mode_changes_nothing():
    options = {"num_layers": 2, "dropout": 0.5, "weight_dropout": 0.5}
    layer = gatewise.Recurrent(LSTM(), 5, 8, recurrent_dropout=0.5, zoneout={"c": 0.3}, **options)
    x = torch.randn(T, B, 5)
    expected = layer.eval()(x)[0].detach()
    layer.train()
    stream = layer.stream(B)
    torch.testing.assert_close(torch.stack([stream(step) for step in x]), expected)
    layer.zoneout = 0.5
    stream.reset()
    torch.testing.assert_close(torch.stack([stream(step) for step in x]), layer.eval()(x)[0].detach())


@pytest.mark.parametrize("cell", [LSTM(), GRU(), Momentum(), LayerNormLSTM()], ids=repr)
@pytest.mark.parametrize("kernel", ["auto", "eager"])
def test_nan_stays_in_its_row_until_it_is_reset(cell, kernel):
    layer = gatewise.Recurrent(cell, 5, 8, 2, kernel=kernel)
    x = torch.randn(T, B, 5)
    stream, clean = layer.stream(B), layer.stream(B)
    for step in x[:3]:
        stream(step)
        clean(step)
    spoiled = x[3].clone()
    spoiled[1, 0] = float("nan")
    for given, step in ((spoiled, x[3]), (x[4], x[4])):
        found, expected = stream(given), clean(step)
        assert found[1].isnan().all()
        # On some processors, the last bits of PyTorch's products depend on the addresses of their factors.
        torch.testing.assert_close(found[[0, 2]], expected[[0, 2]], rtol=1e-5, atol=1e-6)
    stream.reset(torch.tensor([False, True, False]))
    fresh = layer.stream(B)
    found, expected = stream(x[5]), clean(x[5])
    torch.testing.assert_close(found[[0, 2]], expected[[0, 2]], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[1], fresh(x[5])[1], rtol=1e-5, atol=1e-6)
