"""Statements of cells with errors, which are refused in a sentence, and cells that only autograd can differentiate."""

import copy
import math
import warnings

import pytest
import torch

import gatewise
from gatewise.cells import LSTM, StatementError
from gatewise.cells.step import next_states

T, B, I, H = 5, 3, 3, 4  # noqa: E741  as in the legend

TABLE = torch.linspace(-1, 1, H, dtype=torch.float64)


def stated(step=lambda self, gate, state: (gate.a, {}), **attributes):
    return type("Stated", (gatewise.Cell,), {"gates": ("a", "b"), "step": step, **attributes})()


def layer_of(cell, **options):
    torch.manual_seed(0)
    return gatewise.Recurrent(cell, I, H, dtype=torch.float64, **options)


def x_of(*shape):
    return torch.randn(*(shape or (T, B, I)), dtype=torch.float64, generator=torch.Generator().manual_seed(1))


WRONG_ATTRIBUTES = {
    "one gate as a string": ({"gates": "ifgo"}, r"`Stated\.gates` must be a tuple of names, got 'ifgo'\. One name is"),
    "one state as a string": ({"states": "c"}, r"`Stated\.states` must be a tuple of names, got 'c'"),
    "no gates": ({"gates": ()}, r"`Stated\.gates` must be at least one name, got none"),
    "a gate twice": ({"gates": ("a", "a")}, r"`Stated\.gates` must be names that differ, got 'a' twice"),
    "a state twice": ({"states": ("c", "c")}, r"`Stated\.states` must be names that differ, got 'c' twice"),
    "the hidden state": ({"states": ("h",)}, r"`Stated\.states` must be named by .* other than `h`.*, got 'h'"),
    "a parameter h": ({"parameters": {"h": 0.0}}, r"`Stated\.parameters` must be named by .* got 'h'"),
    "no name": ({"gates": (1,)}, r"`Stated\.gates` must be named by Python identifiers .* got 1"),
    "a gate like a state": ({"gates": ("c_before",), "states": ("c",)}, r"`Stated\.gates` must be .* got 'c_before'"),
    "a gate like a sum": ({"gates": ("a", "a_input"), "apart": ("a",)}, r"`Stated\.gates` must be .* got 'a_input'"),
    "apart": ({"apart": ("n",)}, r"`Stated\.apart` must be names of gates, which are a, b, got 'n'"),
    "a gate like a state in code": (
        {"gates": ("c_before",), "states": ("sum_c",)},
        r"`Stated\.gates` must be .* got 'sum_c_before'",
    ),
    "a weight": ({"parameters": {"weight_hh": 0.0}}, r"`Stated\.parameters` must be names other than .* 'weight_hh'"),
    "names alone": ({"parameters": ("p",)}, r"`Stated\.parameters` must be a dictionary .*, got \('p',\)"),
    "an initial value": ({"parameters": {"p": "zeros"}}, r"`Stated\.parameters` must be numbers, or .* 'zeros' for p"),
    "an unknown state": ({"initial_states": {"m": 1.0}}, r"`Stated\.initial_states` must be values of .* h, got 'm'"),
    "no argument for parameters": ({"parameters": {"p": 0.0}}, r"`Stated.step` must be step\(self, gate, state, param"),
    "an argument too many": (
        {"step": lambda self, gate, state, parameter: (gate.a, {})},
        r"must be step\(self, gate, state\), got step\(self, gate, state, parameter\), from the step in line \d+ of",
    ),
    "no step": ({"step": gatewise.Cell.step}, r"`Stated\.step` must be defined as step\(self, gate, state\), got none"),
    "an equality without a hash": (
        {"__eq__": lambda self, other: self is other, "__hash__": None},
        r"`Stated\.__hash__` must be defined, .* got None\. Leave out `__eq__`, as @dataclass\(eq=False\) does",
    ),
    "an initial state": ({"initial_states": {"h": "1"}}, r"`Stated\.initial_states` must be numbers, got '1' for h"),
}


@pytest.mark.parametrize("name", WRONG_ATTRIBUTES)
def test_wrong_attributes_are_refused_when_the_layer_is_made(name):
    attributes, message = WRONG_ATTRIBUTES[name]
    with pytest.raises(StatementError, match=message):
        gatewise.Recurrent(stated(**attributes), I, H)


def filled(function):
    def step(self, gate, state, parameter):
        return gate.a * parameter.p, {}

    return stated(step, parameters={"p": function})


WRONG_FUNCTIONS = {
    "returns another tensor": (lambda p: torch.zeros(p.shape), "one that leaves elements as they are"),
    "fills a part": (lambda p: p[1:].zero_(), "one that leaves elements as they are"),
    "needs a matrix": (torch.nn.init.xavier_uniform_, "ValueError: Fan in and fan out"),
    "takes no tensor": (lambda: None, "TypeError: "),
}


@pytest.mark.parametrize("make", [gatewise.Recurrent, gatewise.RecurrentCell])
@pytest.mark.parametrize("name", WRONG_FUNCTIONS)
def test_functions_that_do_not_fill_a_parameter_are_refused(name, make):
    function, got = WRONG_FUNCTIONS[name]
    message = rf"`Stated\.parameters\['p'\]` must be a function that fills a tensor \[H\] in place, got {got}"
    with pytest.raises(StatementError, match=message):
        make(filled(function), I, H)


@pytest.mark.parametrize("make", [gatewise.Recurrent, gatewise.RecurrentCell])
def test_parameters_without_values_are_not_inspected(make):
    cell = filled(torch.nn.init.normal_)
    assert all(parameter.is_meta for parameter in make(cell, I, H, device="meta").parameters())
    with torch._subclasses.FakeTensorMode():
        shapes = [parameter.shape for parameter in make(cell, I, H).parameters()]
    assert shapes[-1] == (H,)


WRONG_STEPS = {
    "no states": (lambda self, gate, state: gate.a, r"must return \(h, \{'c': c, 'd': d\}\), got"),
    "a tensor in their place": (
        lambda self, gate, state: (gate.a, gate.b),
        r"must return .*, got \((Value, Value|Tensor, Tensor)\)",
    ),
    "the hidden state twice": (
        lambda self, gate, state: (gate.a, {"h": gate.a, "c": gate.a, "d": gate.b}),
        "got the unknown state 'h', from the step .* The hidden state is the first of both results alone",
    ),
    "too few states": (lambda self, gate, state: (gate.a, {"c": gate.b}), "must return .* got no state 'd'"),
    "an unknown state": (
        lambda self, gate, state: (gate.a, {"c": gate.a, "d": gate.b, "n": gate.b}),
        "got the unknown state 'n', from the step in line .*Add 'n' to `states`",
    ),
}


@pytest.mark.parametrize("traceable", [True, False], ids=["traced", "run"])
@pytest.mark.parametrize("name", WRONG_STEPS)
@pytest.mark.filterwarnings("ignore:`Stated.step` must be composed of")
def test_wrong_results_of_a_step_are_refused_with_its_line(name, traceable):
    step, message = WRONG_STEPS[name]

    def with_another_operator(self, gate, state):
        gate.a = torch.erf(gate.a)
        return step(self, gate, state)

    cell = stated(step if traceable else with_another_operator, states=("c", "d"))
    line = type(cell).step.__code__.co_firstlineno
    with pytest.raises(StatementError, match=message) as refused:
        layer_of(cell)(x_of())
    assert "`Stated.step` must return (h, {'c': c, 'd': d})" in str(refused.value)
    assert f"from the step in line {line} of {__file__}" in str(refused.value)


@pytest.mark.filterwarnings("ignore:`Scaled.step` must be composed of")
@pytest.mark.parametrize("function", [torch.tanh, torch.erf], ids=["traced", "run"])
@pytest.mark.parametrize("values", [(1.0, 2.0), ([1.0], [2.0])], ids=["number", "list"])
def test_a_cell_is_traced_anew_where_its_attributes_change(function, values):
    class Scaled(gatewise.Cell):
        gates = ("a",)

        def step(self, gate, state):
            return function(gate.a) * (self.scale if isinstance(self.scale, float) else self.scale[0]), {}

    cell = Scaled()
    layer, x, found = layer_of(cell), x_of(1, B, I), []
    for value in (*values, values[0]):
        cell.scale = value
        y, _ = layer(x)
        found.append([y, *torch.autograd.grad(y.sum(), layer.bias_ih_l0)])
    torch.testing.assert_close([2 * one for one in found[0]], found[1])
    torch.testing.assert_close(found[0], found[2])


def test_a_state_of_parameters_alone_is_refused():
    cell = stated(lambda self, gate, state, parameter: (torch.tanh(parameter.p), {}), parameters={"p": 0.0})
    with pytest.raises(StatementError, match="a state 'h' of parameters alone"):
        layer_of(cell)(x_of())


class Erf(gatewise.Cell):
    """A cell with an operator that is not recorded, statistics over units, a parameter, and three states."""

    gates = ("i", "g")
    states = ("c", "n")
    apart = ("g",)
    parameters = {"p": 0.5}  # noqa: RUF012
    initial_states = {"n": 1.0}  # noqa: RUF012

    def step(self, gate, state, parameter):
        i = torch.erf(gate.i)
        c = torch.nn.functional.layer_norm(i * state.c + gate.g.input, (H,)) * parameter.p
        n = state.n + torch.sigmoid(gate.g.recurrent)
        return torch.tanh(c) / n, {"c": c, "n": n}


class Branching(gatewise.Cell):
    """A cell that branches on a number that it computes from all values."""

    gates = ("g",)

    def step(self, gate, state):
        if gate.g.mean() > 0:
            return torch.tanh(gate.g), {}
        return 0.5 * torch.tanh(gate.g), {}


class Global(gatewise.Cell):
    """A cell that reads a tensor from outside."""

    gates = ("g",)

    def step(self, gate, state):
        return torch.tanh(gate.g) * TABLE, {}


def looped(layer, x):
    """Return the output and the final states of a layer with one direction, by a loop over the cell's own step."""
    cell, (w_ih, w_hh, b_ih, b_hh, *own) = layer.cell, layer.all_weights[0]
    states = [x.new_full((x.shape[1], H), cell.initial_states.get(name, 0)) for name in ("h", *cell.states)]
    outputs = []
    for token in x:
        of_input = torch.nn.functional.linear(token, w_ih, b_ih).split(H, -1)
        of_state = torch.nn.functional.linear(states[0], w_hh, b_hh).split(H, -1)
        sums = {}
        for gate, one, other in zip(cell.gates, of_input, of_state, strict=True):
            apart = {f"{gate}_input": one, f"{gate}_recurrent": other}
            sums |= apart if gate in cell.apart else {gate: one + other}
        h, after = next_states(
            cell,
            sums,
            dict(zip(("h", *cell.states), states, strict=True)),
            dict(zip(cell.parameters, own, strict=True)),
        )
        states = [h, *after]
        outputs.append(h)
    return torch.stack(outputs), states


UNTRACEABLE = {"erf": (Erf(), "torch.erf"), "branching": (Branching(), ".mean"), "global": (Global(), "a tensor from")}

each_untraceable = pytest.mark.parametrize("name", UNTRACEABLE)


@each_untraceable
def test_a_cell_that_cannot_be_traced_runs_on_eager_with_a_warning(name):
    cell, reason = UNTRACEABLE[name]
    layer, x = layer_of(cell), x_of().requires_grad_()
    with pytest.warns(UserWarning, match=rf"`{cell.name}.step` must be .* got .*{reason}.* in line \d+ of") as caught:
        y, states = layer(x.clone())
    assert caught[0].filename == __file__
    assert "Only eager runs it, by its own operators under autograd." in str(caught[0].message)
    expected, finals = looped(layer, x)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(states if cell.states else (states,), tuple(state.unsqueeze(0) for state in finals))
    leaves = [x, *layer.parameters()]
    found, others = [torch.autograd.grad(one.square().sum(), leaves, create_graph=True) for one in (y, expected)]
    torch.testing.assert_close(found, others)
    twice = [torch.autograd.grad(sum(one.square().sum() for one in each), leaves) for each in (found, others)]
    torch.testing.assert_close(*twice)


@each_untraceable
@pytest.mark.filterwarnings("ignore:`.*` must be composed of")
def test_explain_says_that_a_cell_cannot_be_traced_and_other_kernels_refuse_it(name):
    cell, reason = UNTRACEABLE[name]
    decision = gatewise.explain(layer_of(cell), (T, B, I))
    verdict = decision.verdict("eager")
    assert decision.chosen == "eager"
    assert "the cell's own step, differentiated by autograd" in verdict.algorithm
    assert reason in verdict.algorithm
    for kernel in ("persistent", "stepwise"):
        refusals = [str(refusal) for refusal in decision.verdict(kernel).refusals]
        assert any(f"cell is {cell.name}, which cannot be traced" in text and reason in text for text in refusals)
        with pytest.raises(gatewise.KernelRefused, match="cannot be"):
            layer_of(cell, kernel=kernel)(x_of())


@each_untraceable
@pytest.mark.parametrize("memory", ["normal", "lean"])
@pytest.mark.filterwarnings("ignore:`.*` must be composed of")
def test_lengths_directions_and_dropout_of_a_cell_that_cannot_be_traced(name, memory):
    cell, lengths = UNTRACEABLE[name][0], [5, 2, 4]
    layer = layer_of(cell, num_layers=2, bidirectional=True, memory=memory)
    x = x_of().requires_grad_()
    y, states = layer(x, lengths=lengths)
    packed, packed_states = layer(torch.nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False))
    torch.testing.assert_close(torch.nn.utils.rnn.pad_packed_sequence(packed)[0], y)
    torch.testing.assert_close(packed_states, states)
    if name != "branching":  # which looks at all rows
        for row, length in enumerate(lengths):
            torch.testing.assert_close(layer(x[:length, row])[0], y[:length, row])
    y.sum().backward()
    assert all(parameter.grad.any() for parameter in layer.parameters())
    assert (x.grad[3:, 1] == 0).all()
    with torch.no_grad():
        torch.testing.assert_close(layer(x, lengths=lengths)[0], y)
    layer.dropout = 1.0
    torch.manual_seed(0)
    assert not torch.allclose(layer(x)[0], layer.eval()(x)[0])


@each_untraceable
@pytest.mark.filterwarnings("ignore:`.*` must be composed of")
def test_verify_sees_both_passes_of_a_cell_that_cannot_be_traced(name):
    layer = layer_of(UNTRACEABLE[name][0], num_layers=2, bidirectional=True)
    (report,) = gatewise.verify(layer, x_of(), lengths=torch.tensor([5, 2, 0])).layers
    assert set(report.forward.kernels) == set(report.backward.kernels) == {"eager"}


@pytest.mark.filterwarnings("ignore:`.*` must be composed of")
def test_verify_takes_no_operator_of_the_step_for_another_kernel():
    def step(self, gate, state):
        a, b = torch.unsafe_split(torch.cat([gate.a, gate.b], -1), H, -1)  # as PyTorch's loop does
        return torch.tanh(a) * b, {}

    (report,) = gatewise.verify(layer_of(stated(step)), x_of()).layers
    assert set(report.backward.kernels) == {"eager"}


@pytest.mark.filterwarnings("ignore:`Global.step` must be composed of")
def test_a_global_tensor_has_its_gradient(monkeypatch):
    table = TABLE.clone().requires_grad_()
    monkeypatch.setitem(globals(), "TABLE", table)
    layer, x = layer_of(Global()), x_of()
    found = torch.autograd.grad(layer(x, lengths=[T] * B)[0].square().sum(), table)
    torch.testing.assert_close(found, torch.autograd.grad(looped(layer, x)[0].square().sum(), table))


WRONG_READS = {
    "gate": (lambda self, gate, state: (gate.z, {}), r"got 'z', in line \d+ of .*test_statements"),
    "state": (lambda self, gate, state: (gate.a * state.n, {}), r"the states h, c; .* got 'n', in line"),
    "sum": (lambda self, gate, state: (gate.b.total, {}), r"gates a, b.input, b.recurrent; .* got 'total'"),
}


@pytest.mark.parametrize("name", WRONG_READS)
def test_unknown_names_in_a_step_are_refused_with_its_line(name):
    step, message = WRONG_READS[name]
    with pytest.raises(StatementError, match=rf"`Stated.step` must read the .*{message}"):
        layer_of(stated(step, states=("c",), apart=("b",)))(x_of())


WRONG_VALUES = {
    "dtype": (
        lambda self, gate, state: (torch.erf(gate.a).float(), {}),
        r"must return states of torch.float64 and shape \[3, 4\], got torch.float32 and \[3, 4\] for the state 'h'",
    ),
    "shape": (lambda self, gate, state: (torch.erf(gate.a).sum(-1), {}), r"got torch.float64 and \[3\] for the state"),
    "number": (lambda self, gate, state: (torch.erf(gate.a).sum().item(), {}), r"must return tensors, got float"),
    "dtype of a state": (
        lambda self, gate, state: (gate.a, {"c": torch.erf(gate.b).to(torch.bfloat16)}),
        r"got torch.bfloat16 and \[3, 4\] for the state 'c', from the step in line \d+ of .*test_statements",
        ("c",),
    ),
    "branch": (
        lambda self, gate, state: (gate.a if gate.a > 0 else gate.b, {}),
        r"got a comparison, .*, in line \d+ of .*test_statements_of_cells.py: lambda self.* PyTorch cannot run it "
        r"either: RuntimeError: Boolean value of Tensor .* is ambiguous, in line \d+ of .*test_statements.*: lambda",
    ),
    "branch on equality": (
        lambda self, gate, state: (gate.a if gate.a == 0 else gate.b, {}),
        r"got a comparison, .*, in line \d+ of",
    ),
    "conversion": (
        lambda self, gate, state: (gate.a * math.tanh(gate.b), {}),
        r"got a conversion of a value to a Python number, in line \d+ of .* either: ValueError: only one element",
    ),
    "sizes": (
        lambda self, gate, state: (torch.erf(gate.a) @ TABLE[:2], {}),
        r"got torch.erf, in line \d+ of .* PyTorch cannot run it either: RuntimeError: size mismatch.* in line \d+ of",
    ),
    "operand": (
        lambda self, gate, state: (torch.maximum(gate.a, 0.0), {}),
        r"got TypeError: maximum\(\): argument 'other' .* must be Tensor, not float, in line \d+ of .*: lambda",
    ),
    "name of a function": (
        lambda self, gate, state: (torch.sigmoidd(gate.a), {}),
        r"got AttributeError: module 'torch' has no attribute 'sigmoidd', in line \d+ of",
    ),
    "name of an attribute": (
        lambda self, gate, state: (gate.a * self.rate, {}),
        r"got AttributeError: 'Stated' object has no attribute 'rate', in line \d+ of (?!.* either)",
    ),
    "error of its own": (
        lambda self, gate, state: (gate.a * {}["rate"], {}),
        r"got KeyError: 'rate', in line \d+ of (?!.* either)",
    ),
}


@pytest.mark.parametrize("name", WRONG_VALUES)
@pytest.mark.filterwarnings("ignore:`Stated.step` must be composed of", "ignore:Converting a tensor with requires_grad")
def test_wrong_values_are_refused_while_the_step_runs(name):
    step, message, *states = WRONG_VALUES[name]
    with pytest.raises(StatementError, match=message) as refused:
        layer_of(stated(step, states=(*states, ())[0]))(x_of())
    assert str(refused.value).startswith("`Stated.step` must ")


RUNS_ON_EAGER = {
    "power": (lambda self, gate, state: (gate.a**2, {}), r"TypeError: unsupported operand type.* for \*\*"),
    "absolute": (lambda self, gate, state: (abs(gate.a), {}), r"TypeError: bad operand type for abs\(\)"),
    "index": (lambda self, gate, state: (gate.a[..., :], {}), "TypeError: .* object is not subscriptable"),
    "iteration": (lambda self, gate, state: (torch.stack([*gate.a]), {}), "TypeError: .* iterable"),
    "conversion": (lambda self, gate, state: (torch.as_tensor(gate.a), {}), "RuntimeError: Could not infer dtype"),
    "equality": (lambda self, gate, state: (torch.where(gate.a == 0, gate.a, gate.b), {}), "a comparison"),
    "inequality": (lambda self, gate, state: (gate.a * (gate.b != 0), {}), "a comparison"),
    "helper": (lambda self, gate, state: (torch.nn.functional.gelu(gate.a), {}), r"torch\.gelu"),
}


@pytest.mark.parametrize("name", RUNS_ON_EAGER)
def test_what_tensors_have_and_traced_values_have_not_runs_on_eager_with_a_warning(name):
    step, reason = RUNS_ON_EAGER[name]
    layer, x = layer_of(stated(step)), x_of()
    pattern = rf"`Stated\.step` must be composed of .* got {reason}.*, in line \d+ of .*Only eager runs it"
    with pytest.warns(UserWarning, match=pattern):
        y, _ = layer(x)
    torch.testing.assert_close(y, looped(layer, x)[0])


def test_running_out_of_memory_is_no_mistake_of_a_step():
    def step(self, gate, state):
        if isinstance(gate.a, torch.Tensor):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.erf(gate.a), {}

    with pytest.warns(UserWarning, match=r"torch\.erf"), pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of"):
        layer_of(stated(step))(x_of())


def test_cells_that_hold_tensors_are_equal_if_these_are_the_same():
    class Scaled(gatewise.Cell):
        gates = ("a",)

        def __init__(self, scale):
            self.scale = scale

        def step(self, gate, state):
            return gate.a * self.scale, {}

    one, other = Scaled(TABLE), Scaled(TABLE.clone())
    assert one == Scaled(TABLE)
    assert one != other
    assert Scaled(2.0) == Scaled(2.0) != Scaled(3.0)
    assert Scaled(TABLE) != Scaled(2.0)
    for cell in (one, other):
        with pytest.warns(UserWarning, match="got a tensor from outside of the step"):
            layer_of(cell)(x_of())


@pytest.mark.filterwarnings("ignore:`Scaled.step` must be composed of")
@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_cells_that_hold_tensors_in_a_list_or_a_dictionary_can_be_copied(kind):
    class Scaled(gatewise.Cell):
        gates = ("a",)

        def __init__(self):
            self.scales = kind({0: TABLE, 1: TABLE} if kind is dict else [TABLE, TABLE])

        def step(self, gate, state):
            return gate.a * self.scales[1], {}

    layer = layer_of(Scaled())
    assert copy.deepcopy(layer).cell != layer.cell
    for each in (layer, copy.deepcopy(layer)):
        torch.testing.assert_close(each(x_of())[0], layer_of(Scaled())(x_of())[0])


@pytest.mark.parametrize("function", [torch.tanh, torch.erf], ids=["traceable", "not traceable"])
def test_a_step_may_keep_a_value_as_an_attribute_which_is_a_tensor_then(function):
    def step(self, gate, state):
        self.last = function(gate.a)
        return self.last * torch.sigmoid(gate.b), {}

    def plain(self, gate, state):
        return function(gate.a) * torch.sigmoid(gate.b), {}

    cell = stated(step)
    with pytest.warns(UserWarning, match=r"`Stated\.step` must be composed of"):
        y, _ = layer_of(cell, zoneout=0.1).eval()(x_of())
    assert cell.last.shape == (B, H)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(layer_of(stated(plain), zoneout=0.1).eval()(x_of())[0], y)


@pytest.mark.filterwarnings("ignore:`Stated.step` must be composed of")
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_a_step_that_cannot_be_traced_must_not_change_in_place_what_it_reads(mode):
    def step(self, gate, state):
        h = state.h
        h *= torch.sigmoid(gate.b)
        return h + torch.erf(gate.a), {}

    with (
        mode(),
        pytest.raises(StatementError, match=r"must leave the gates, .* got one that is changed in place, from"),
    ):
        layer_of(stated(step))(x_of())

    def apart(self, gate, state):
        return state.h * torch.sigmoid(gate.b) + torch.erf(gate.a), {}

    with torch.inference_mode():
        h = torch.ones(1, B, H, dtype=torch.float64)
        torch.testing.assert_close(layer_of(stated(step))(x_of(), h), layer_of(stated(apart))(x_of(), h))
        assert (h == 1).all()


def test_methods_of_values_are_not_recorded():
    cell = stated(lambda self, gate, state: (gate.a.sigmoid(), {}))
    with pytest.warns(UserWarning, match=r"got the attribute \.sigmoid of a value"):
        y, _ = layer_of(cell)(x_of())
    torch.testing.assert_close(y, layer_of(stated(lambda self, gate, state: (torch.sigmoid(gate.a), {})))(x_of())[0])


def test_shipped_cells_are_not_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer_of(LSTM())(x_of())


def test_logsigmoid_neither_overflows_nor_loses_small_values():
    cell = stated(lambda self, gate, state: (torch.nn.functional.logsigmoid(gate.a), {}))
    layer = layer_of(cell, bias=False)
    x = torch.tensor([-1e4, -800.0, -30.0, 0.0, 30.0, 800.0, 1e4], dtype=torch.float64).view(1, -1, 1)
    with torch.no_grad():
        layer = gatewise.Recurrent(cell, 1, 1, bias=False, dtype=torch.float64)
        layer.weight_ih_l0.fill_(1)
    x.requires_grad_()
    for each in (layer(x)[0], torch.nn.functional.logsigmoid(x)):
        (gradient,) = torch.autograd.grad(each.sum(), x)
        torch.testing.assert_close(each, -torch.logaddexp(torch.zeros_like(x), -x), atol=1e-15, rtol=1e-15)
        torch.testing.assert_close(gradient, torch.sigmoid(-x), atol=1e-15, rtol=1e-14)
    assert math.isclose(layer(x)[0][0, 3].item(), -math.log(2))
