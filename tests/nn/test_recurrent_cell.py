"""One step of any cell: held to PyTorch's cells where it has them, otherwise to one call of the layer."""

import copy
import itertools
import pickle

import pytest
import torch

import gatewise
from gatewise.cells import GRU, LSTM, RNN, SHIPPED, SLSTM, CoupledLSTM, PeepholeLSTM, StatementError
from tests.pairwise import each_value, one_in

T, B, I, H = 5, 3, 3, 4  # noqa: E741  as in the legend


class Momentum(gatewise.Cell):
    """A cell of a user's own: several states with initial values, parameters, and separate sums of a gate."""

    gates = ("a", "g")
    states = ("mean", "scale")
    apart = ("g",)
    parameters = {"shift": 0.0, "gain": torch.nn.init.normal_}  # noqa: RUF012
    initial_states = {"h": 0.5, "scale": 1.0}  # noqa: RUF012

    def step(self, gate, state, parameter):
        a = torch.sigmoid(gate.a + parameter.shift)
        mean = a * state.mean + (1 - a) * torch.tanh(gate.g.input + a * gate.g.recurrent)
        scale = 0.9 * state.scale + 0.1 * mean * mean
        return parameter.gain * mean / torch.sqrt(scale), {"scale": scale, "mean": mean}


class Erf(gatewise.Cell):
    """A cell that cannot be traced."""

    gates = ("z",)

    def step(self, gate, state):
        return torch.erf(gate.z), {}


CELLS = [*SHIPPED, Momentum()]

each_cell = pytest.mark.parametrize("cell", CELLS, ids=repr)


def module_of(cell, **options):
    torch.manual_seed(0)
    module = gatewise.RecurrentCell(cell, I, H, **{"dtype": torch.float64, **options})
    with torch.no_grad():
        for name in cell.parameters:
            getattr(module, name).normal_(std=0.5)
    return module


def layer_like(module):
    """Return the layer with the same weights."""
    layer = gatewise.Recurrent(module.cell, I, H, bias=module.bias, dtype=module.weight_ih.dtype)
    layer.load_state_dict({f"{name}_l0": value for name, value in module.state_dict().items()})
    return layer


def x_of(*shape):
    return torch.randn(*(shape or (T, B, I)), dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def states_of(cell, *shape):
    found = tuple(x_of(*shape, H).add_(index).abs_().requires_grad_() for index in range(1 + len(cell.states)))
    return found if cell.states else found[0]


def as_list(states):
    return list(states) if isinstance(states, tuple) else [states]


def looped(module, x, states, resets=None):
    outputs = []
    for step, token in enumerate(x):
        states = module(token, states, None if resets is None else resets[step])
        outputs.append(as_list(states)[0])
    return [torch.stack(outputs), *as_list(states)]


@pytest.mark.parametrize(
    ("cell", "given", "bias"), each_value([*itertools.product(CELLS, [True, False], [True, False])]), ids=str
)
def test_steps_are_the_layer_in_values_and_all_gradients(cell, given, bias):
    module, x = module_of(cell, bias=bias), x_of().requires_grad_()
    layer, states = layer_like(module), states_of(cell, B) if given else None
    leaves = [x, *(as_list(states) if given else [])]
    found = looped(module, x, states)
    batched = tuple(state.unsqueeze(0) for state in leaves[1:])
    y, finals = layer(x, None if not given else batched if cell.states else batched[0])
    expected = [y, *(state.squeeze(0) for state in as_list(finals))]
    torch.testing.assert_close(found, expected)
    above = [torch.randn_like(one) for one in found]
    gradients = torch.autograd.grad(found, [*leaves, *module.parameters()], above)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, [*leaves, *layer.parameters()], above))
    assert all(gradient.any() for gradient in gradients)


RESETS = torch.tensor([[False, True, False], [True, False, False], [False, True, False], [True, True, False]] * 2)[:T]


@each_cell
def test_steps_with_resets_are_the_layer_with_them(cell):
    module, x, states = module_of(cell), x_of().requires_grad_(), states_of(cell, B)
    layer, leaves = layer_like(module), [x, *as_list(states)]
    batched = tuple(state.unsqueeze(0) for state in leaves[1:])
    y, finals = layer(x, batched if cell.states else batched[0], resets=RESETS)
    found, expected = looped(module, x, states, RESETS), [y, *(state[0] for state in as_list(finals))]
    torch.testing.assert_close(found, expected)
    above = [torch.randn_like(one) for one in found]
    gradients = torch.autograd.grad(found, [*leaves, *module.parameters()], above)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, [*leaves, *layer.parameters()], above))
    for gradient in gradients[1 : len(leaves)]:
        assert not gradient[1].any()  # the second row begins with an episode


@each_cell
def test_a_reset_without_a_batch_takes_the_initial_states(cell):
    module, x, states = module_of(cell), x_of(I), states_of(cell)
    for value in (True, torch.tensor(1)):
        torch.testing.assert_close(module(x, states, torch.as_tensor(value)), module(x))
    torch.testing.assert_close(module(x, states, torch.tensor(False)), module(x, states))


PYTORCH = {
    LSTM(): torch.nn.LSTMCell,
    GRU(): torch.nn.GRUCell,
    RNN("tanh"): torch.nn.RNNCell,
    RNN("relu"): lambda *sizes, **options: torch.nn.RNNCell(*sizes, nonlinearity="relu", **options),
}


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("cell", PYTORCH, ids=repr)
def test_pytorchs_cells_are_the_same(cell, bias):
    ours = module_of(cell, bias=bias)
    theirs = PYTORCH[cell](I, H, bias=bias, dtype=torch.float64)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    for x, states in ((x_of(B, I), states_of(cell, B)), (x_of(I), states_of(cell)), (x_of(B, I), None)):
        torch.testing.assert_close(ours(x, states), theirs(x, states))


@each_cell
def test_a_row_without_a_batch_is_one_of_a_batch(cell):
    module, x, states = module_of(cell), x_of(B, I), states_of(cell, B)
    expected = as_list(module(x, states))
    row = tuple(state[1] for state in as_list(states))
    found = as_list(module(x[1], row if cell.states else row[0]))
    assert [state.shape for state in found] == [(H,)] * len(expected)
    torch.testing.assert_close(found, [state[1] for state in expected])
    torch.testing.assert_close(as_list(module(x[1])), [state[1] for state in as_list(module(x))])


@pytest.mark.parametrize("cell", one_in(3, [cell for cell in CELLS if cell != RNN("relu")]), ids=repr)
def test_second_derivatives_are_right(cell):
    module, x, states = module_of(cell), x_of(2, I).requires_grad_(), as_list(states_of(cell, 2))

    def step(x, weight, *states):
        given = {"weight_hh": weight}
        return torch.func.functional_call(module, given, (x, states if cell.states else states[0]))

    weight = module.weight_hh.detach().requires_grad_()
    assert torch.autograd.gradgradcheck(step, (x, weight, *states), fast_mode=True)


@each_cell
def test_parameters_have_the_names_and_order_of_a_layer_without_its_number(cell):
    for bias in (True, False):
        module = module_of(cell, bias=bias)
        layer = gatewise.Recurrent(cell, I, H, bias=bias)
        names = [name.removesuffix("_l0") for name, _ in layer.named_parameters()]
        assert [name for name, _ in module.named_parameters()] == names == list(module.state_dict())
        torch.manual_seed(0)
        expected = gatewise.Recurrent(cell, I, H, bias=bias)
        torch.manual_seed(0)
        found = gatewise.RecurrentCell(cell, I, H, bias=bias)
        torch.testing.assert_close(list(found.parameters()), list(expected.parameters()), rtol=0, atol=0)
        assert bias or (module.bias_ih is None and module.bias_hh is None)


def test_parametrized_parameters_are_initialised_and_computed():
    module = module_of(Momentum())
    torch.nn.utils.parametrize.register_parametrization(module, "shift", torch.nn.Softplus(), unsafe=True)
    with torch.no_grad():
        module.parametrizations.shift.original.fill_(7.0)
    module.reset_parameters()
    assert (module.parametrizations.shift.original == 0).all()
    plain = module_of(Momentum())
    plain.load_state_dict({name: getattr(module, name) for name in plain.state_dict()})
    torch.testing.assert_close(module(x_of(B, I)), plain(x_of(B, I)))
    assert (plain.shift > 0.5).all()


@pytest.mark.parametrize("cell", [PeepholeLSTM(), GRU()], ids=repr)
def test_autocast_converts_what_is_given(cell):
    module, x, states = module_of(cell, dtype=torch.float32), x_of(B, I), states_of(cell, B)
    given = tuple(state.float() for state in as_list(states))
    with torch.autocast("cpu", torch.bfloat16):
        found = as_list(module(x.float(), given if cell.states else given[0]))
        mixed = as_list(module(x.bfloat16(), found[0] if not cell.states else (given[0], found[1])))
    assert {state.dtype for state in (*found, *mixed)} == {torch.bfloat16}
    expected = as_list(module.double()(x, states))
    torch.testing.assert_close([state.double() for state in found], expected, atol=0.05, rtol=0.05)


# A layer of the first one is compiled in test_parameters_of_cells.py, too.
@pytest.mark.parametrize(
    "cell",
    [*(pytest.param(cell, marks=pytest.mark.exhaustive) for cell in (PeepholeLSTM(), GRU())), SLSTM()],
    ids=repr,
)
def test_shipped_cells_can_be_compiled_in_one_graph(cell):
    torch.compiler.reset()
    module, x, states = module_of(cell), x_of(2, B, I), states_of(cell, B)
    compiled = torch.compile(
        lambda x, states, resets: looped(module, x, states, resets), backend="aot_eager", fullgraph=True
    )
    found, expected = compiled(x, states, RESETS[:2]), looped(module, x, states, RESETS[:2])
    torch.testing.assert_close(found, expected)
    leaves = [*as_list(states), *module.parameters()]
    gradients = [torch.autograd.grad(one[0].square().sum(), leaves) for one in (found, expected)]
    torch.testing.assert_close(*gradients)


def test_other_cells_are_refused_while_compiling():
    with pytest.raises(Exception, match=r"one of gatewise\.cells under torch\.compile"):
        torch.compile(module_of(Momentum()), backend="eager", fullgraph=True)(x_of(B, I))


def test_vmap_over_weights():
    modules = [gatewise.RecurrentCell(PeepholeLSTM(), I, H) for _ in range(3)]
    weights, _ = torch.func.stack_module_state(modules)
    x = torch.randn(B, I)
    h, c = torch.func.vmap(lambda own: torch.func.functional_call(modules[0], own, (x,)))(weights)
    expected = [module(x) for module in modules]
    torch.testing.assert_close(h, torch.stack([one for one, _ in expected]))
    torch.testing.assert_close(c, torch.stack([other for _, other in expected]))


@each_cell
def test_copies_pickles_and_conversions(cell):
    module, x = module_of(cell), x_of(B, I)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        torch.testing.assert_close(other(x), module(x))
    assert as_list(module.to(torch.bfloat16)(x.bfloat16()))[0].dtype == torch.bfloat16


def test_the_named_kernel_runs_or_refuses():
    torch.testing.assert_close(module_of(LSTM(), kernel="eager")(x_of(B, I)), module_of(LSTM())(x_of(B, I)))
    with pytest.raises(gatewise.KernelRefused, match="'persistent' cannot run this call"):
        module_of(LSTM(), kernel="persistent")(x_of(B, I))
    with gatewise.use_kernel("cudnn"), pytest.raises(gatewise.KernelRefused, match="'cudnn' cannot run this call"):
        module_of(LSTM())(x_of(B, I))
    with pytest.raises(gatewise.KernelRefused, match="`kernel` must be one of 'auto', "):
        module_of(LSTM(), kernel="fast")


def test_states_may_be_changed_in_place():
    module, x = module_of(CoupledLSTM()), x_of(2, B, I)
    h, c = module(x[0])
    expected, _ = module(x[1], (h * 2, c))
    found, _ = module(x[1], (h.mul_(2), c))
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(one.sum(), [*module.parameters()], retain_graph=True) for one in (found, expected)]
    torch.testing.assert_close(*gradients)


def test_a_cell_that_cannot_be_traced_runs_with_a_warning_that_names_the_callers_line():
    module, x = module_of(Erf()), x_of(B, I)
    with pytest.warns(UserWarning, match=r"`Erf\.step` must be .* got torch\.erf, in line \d+ of ") as caught:
        h = module(x)
    assert caught[0].filename == __file__
    sums = torch.nn.functional.linear(x, module.weight_ih, module.bias_ih) + module.bias_hh
    torch.testing.assert_close(h, torch.erf(sums))


def test_the_representation_shows_the_cell_and_other_values_than_the_defaults():
    assert repr(module_of(GRU())) == "RecurrentCell(GRU(), 3, 4)"
    assert repr(module_of(GRU(), bias=False, kernel="eager")) == "RecurrentCell(GRU(), 3, 4, bias=False, kernel=eager)"


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("make", [gatewise.RecurrentCell, gatewise.Recurrent])
def test_torchscript_is_refused_without_a_class_that_pytorch_has_not(make):
    with pytest.raises(gatewise.ArgumentError, match=rf"`gatewise\.{make.__name__}` must be compiled .*script\.$"):
        torch.jit.script(make(GRU(), I, H))


def clashing(name):
    return type("Clashing", (Momentum,), {"parameters": {"shift": 0.0, "gain": 1.0, name: 0.0}})()


WRONG = {
    "cell": (lambda: gatewise.RecurrentCell(LSTM, I, H), "`cell` must be a gatewise.Cell, got <class"),
    "input size": (lambda: gatewise.RecurrentCell(LSTM(), 0, H), "`input_size` must be a positive integer, got 0"),
    "hidden size": (lambda: gatewise.RecurrentCell(LSTM(), I, 2.0), "`hidden_size` must be a positive integer"),
    "bias": (lambda: module_of(LSTM(), bias=1), "`bias` must be True or False, got 1"),
    "input": (lambda: module_of(GRU())([1.0]), "`input` must be a tensor, got list"),
    "rank": (lambda: module_of(GRU())(x_of()), r"`input` must be \[B, I\], or \[I\] without a batch, got rank 3"),
    "features": (lambda: module_of(GRU())(x_of(B, I + 1)), r"`input` must be of 3 features, got 4 in \[3, 4\]"),
    "states": (lambda: module_of(SLSTM())(x_of(B, I), x_of(B, H)), r"a tuple \(h, c, n, m\) of tensors, got Tensor"),
    "number of states": (lambda: module_of(LSTM())(x_of(B, I), (x_of(B, H),)), "of tensors, got 1 of them"),
    "kind of state": (lambda: module_of(GRU())(x_of(B, I), 3.0), "`hx, the state h,` must be a tensor, got float"),
    "shape of a state": (
        lambda: module_of(LSTM())(x_of(B, I), (x_of(B, H), x_of(1, B, H))),
        r"`hx\[1\]` must be of shape \[3, 4\], got \[1, 3, 4\]",
    ),
    "state of a layer": (lambda: module_of(GRU())(x_of(B, I), x_of(1, B, H)), r"`hx` must be of shape \[3, 4\]"),
    "state without a batch": (lambda: module_of(GRU())(x_of(I), x_of(1, H)), r"`hx` must be of shape \[4\]"),
    "resets": (lambda: module_of(GRU())(x_of(B, I), None, True), "`resets` must be a tensor, got bool"),
    "shape of the resets": (
        lambda: module_of(GRU())(x_of(B, I), None, torch.ones(1, B, dtype=torch.bool)),
        r"`resets` must be one value for each step, \[B\] = \[3\], got \[1, 3\]",
    ),
    "dtype of the resets": (
        lambda: module_of(GRU())(x_of(I), None, torch.tensor(1.0)),
        "`resets` must be bool or integers, got torch.float32",
    ),
    "dtype": (lambda: module_of(GRU())(x_of(B, I).float()), "`input` must be torch.float64 like the parameters"),
    "dtype of the states": (
        lambda: module_of(GRU())(x_of(B, I), x_of(B, H).float()),
        "`hx` must be torch.float64 like input",
    ),
    "dtype of a state": (
        lambda: module_of(LSTM())(x_of(B, I), (x_of(B, H), x_of(B, H).float())),
        "`hx, the state c,` must be torch.float64 like the hidden state, got torch.float32",
    ),
    "device": (lambda: module_of(GRU())(x_of(B, I).to("meta")), "on cpu like the weights, got one on meta"),
    "device of a state": (
        lambda: module_of(LSTM())(x_of(B, I), (x_of(B, H), x_of(B, H).to("meta"))),
        "`hx, the state c,` must be on cpu like the hidden state, got one on meta",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_is_refused_in_a_sentence(name):
    call, message = WRONG[name]
    with pytest.raises(gatewise.GatewiseError, match=message):
        call()


@pytest.mark.parametrize("name", ["bias", "cell", "training", "hidden_size", "register_buffer"])
def test_parameters_that_clash_with_attributes_of_the_module_are_refused(name):
    message = rf"`Clashing\.parameters` must be names that a RecurrentCell has no attribute of, got '{name}'\."
    with pytest.raises(StatementError, match=message):
        gatewise.RecurrentCell(clashing(name), I, H)
    gatewise.Recurrent(clashing(name), I, H)  # where parameters have the layer's number in their names


@pytest.mark.gpu
@each_cell
def test_steps_on_a_gpu_are_those_on_the_cpu(cell):
    module, x, states = module_of(cell), x_of().requires_grad_(), states_of(cell, B)
    expected = looped(module, x, states, RESETS)
    leaves = [x, *as_list(states)]
    gradients = torch.autograd.grad(sum(one.square().sum() for one in expected), [*leaves, *module.parameters()])
    module, moved = module.cuda(), [leaf.detach().cuda().requires_grad_() for leaf in leaves]
    found = looped(module, moved[0], tuple(moved[1:]) if cell.states else moved[1], RESETS.cuda())
    torch.testing.assert_close([one.cpu() for one in found], expected)
    others = torch.autograd.grad(sum(one.square().sum() for one in found), [*moved, *module.parameters()])
    torch.testing.assert_close([one.cpu() for one in others], list(gradients))
