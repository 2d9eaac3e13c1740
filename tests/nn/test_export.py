"""Layers under torch.export and AOTInductor: programs that run without gatewise, with the numbers of the layers."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._inductor import config
from torch.export import Dim

from gatewise import GRU, LSTM, RNN, GRUCell, LSTMCell, Recurrent, RNNCell, functional, use_kernel
from gatewise.cells import Cell, LayerNormGRU, LayerNormLSTM, PeepholeLSTM
from gatewise.contract.errors import ArgumentError
from tests.compiled import in_graph
from tests.pairwise import each_value, exhaustive, exhaustive_unless, pairwise


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def export(model, *inputs, strict=False, **options):
    """Return the exported program; `strict` is False whatever the default of this version of PyTorch."""
    if strict and torch.__version__ < "2.8":
        pytest.skip("PyTorch 2.6 and 2.7 cannot tell a strict export from torch.compile")
    return torch.export.export(model, *inputs, strict=strict, **options)


class Network(nn.Module):
    """A layer, whose results are flat, and a linear layer above it."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.head = nn.Linear(layer.hidden_size * (1 + layer.bidirectional), 2)

    def forward(self, x, hx=None, lengths=None, resets=None):
        y, finals = self.layer(x, hx, lengths, resets)
        return self.head(y), *(finals if isinstance(finals, tuple) else (finals,))


class Own(Cell):
    """A cell that is not one of the library."""

    name = "own"
    gates = ("f", "g")

    def step(self, gate, state):
        f = torch.sigmoid(gate.f)
        return f * state.h + (1 - f) * torch.tanh(gate.g), {}


def targets(program):
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


def of_gatewise(program):
    return [target for target in targets(program) if "gatewise" in target]


LAYERS = {
    "lstm": lambda: LSTM(5, 4, num_layers=2, bidirectional=True, batch_first=True),
    "projection": lambda: LSTM(5, 4, proj_size=4 - 1, bias=False),
    "gru": lambda: GRU(5, 4, num_layers=2),
    "rnn_tanh": lambda: RNN(5, 4, bidirectional=True),
    "rnn_relu": lambda: RNN(5, 4, nonlinearity="relu"),
}


@pytest.mark.parametrize(("name", "strict"), each_value(pairwise([*LAYERS], [False, True]), most=3))
def test_layers_become_operators_of_pytorch(name, strict):
    layer = LAYERS[name]().eval()
    axis = 1 - layer.batch_first
    program = export(layer, (torch.randn(3, 3, 5),), dynamic_shapes=({axis: Dim("batch")},), strict=strict)
    operator = "lstm" if name == "projection" else name
    assert targets(program).count(f"aten.{operator}.input") == 1
    assert not of_gatewise(program)
    for batch in (3, 7):
        x = torch.randn((batch, 3, 5) if layer.batch_first else (3, batch, 5))
        torch.testing.assert_close(program.module()(x), layer(x))


@pytest.mark.parametrize(
    ("cell", "strict"), each_value([*itertools.product([LSTMCell, GRUCell, RNNCell], [False, True])], most=2)
)
def test_cells_without_given_states_take_any_batch_size(cell, strict):
    layer = cell(4, 5).eval()
    program = export(layer, (torch.randn(3, 4),), dynamic_shapes={"input": {0: Dim("batch", min=2)}}, strict=strict)
    x = torch.randn(7, 4)
    torch.testing.assert_close(program.module()(x), layer(x))


def test_initial_states_one_sequence_and_the_functional_call():
    layer = LSTM(5, 4)
    state = torch.randn(1, 3, 4), torch.randn(1, 3, 4)
    call = torch.randn(2, 3, 5), state
    torch.testing.assert_close(export(layer, call).module()(*call), layer(*call))
    sequence = torch.randn(2, 5)
    torch.testing.assert_close(export(layer, (sequence,)).module()(sequence), layer(sequence))

    class Call(nn.Module):
        def forward(self, x, weights):
            return functional.lstm(x, None, weights).y

    given = call[0], [parameter.detach() for parameter in layer.parameters()]
    program = export(Call(), given)
    assert not of_gatewise(program)
    torch.testing.assert_close(program.module()(*given), layer(call[0])[0])


def test_an_exported_program_can_be_trained():
    model, x = Network(LSTM(5, 4, num_layers=2)), torch.randn(3, 2, 5)
    program = export(model, (x,)).module()
    for found, expected in zip(program(x), model(x), strict=True):
        assert found.requires_grad == expected.requires_grad
    program(x)[0].square().sum().backward()
    found = {name: parameter.grad for name, parameter in program.named_parameters()}
    model.zero_grad()
    model(x)[0].square().sum().backward()
    torch.testing.assert_close(found, {name: parameter.grad for name, parameter in model.named_parameters()})


def test_under_autocast():
    layer, x = LSTM(5, 4).eval(), torch.randn(3, 2, 5)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        program = export(layer, (x,))
        expected, _ = layer(x)
    found, _ = program.module()(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


# Steps of normalized cells and of those with peepholes are exported below, without gradients.
@pytest.mark.parametrize(
    "cell",
    [Own(), *exhaustive(LayerNormLSTM(), PeepholeLSTM())],
    ids=lambda cell: cell.name,
)
def test_cells_that_pytorch_does_not_have_become_steps(cell):
    model = Network(Recurrent(cell, 5, 4, bidirectional=True)).eval()
    program = export(model, (torch.randn(2, 2, 5),), dynamic_shapes=({1: Dim("batch")},))
    assert not of_gatewise(program)
    x = torch.randn(2, 6, 5)
    torch.testing.assert_close(program.module()(x), model(x))


def test_lengths_and_resets_become_steps():
    model = Network(LSTM(5, 4, bidirectional=True)).eval()
    resets = torch.tensor([[0, 1, 0], [1, 0, 0], [0, 1, 1]])
    call = torch.randn(3, 3, 5), None, torch.tensor([1, 3, 2]), resets
    program = export(model, call)
    assert not of_gatewise(program)
    for lengths in ([1, 3, 2], [3, 0, 1]):
        given = torch.randn(3, 3, 5), None, torch.tensor(lengths), resets.flip(0)
        torch.testing.assert_close(program.module()(*given), model(*given))
    # A length out of range cannot raise an error in a graph.
    y, *_ = program.module()(call[0], None, torch.tensor([1, 4, 2]), resets)
    assert y.isnan().any(-1).any(0).tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("layer", "extra"),
    [
        (lambda: LSTM(5, 4), {"lengths": torch.tensor([1, 3])}),
        (lambda: RNN(5, 4), {"resets": torch.tensor([[0, 1], [0, 0], [1, 0]])}),
        (lambda: Recurrent(PeepholeLSTM(), 5, 4), {}),
        (lambda: Recurrent(LayerNormGRU(), 5, 4), {}),
    ],
    ids=["lengths", "resets", "peephole_lstm", "layer_norm_gru"],
)
def test_steps_that_were_exported_without_gradients_run_and_train_with_them(layer, extra):
    model, x = layer().eval(), torch.randn(3, 2, 5)
    with torch.no_grad():
        program = torch.export.export(model, (x,), extra)
    y, _ = program.module()(x, **extra)
    torch.testing.assert_close(y, model(x, **extra)[0])
    y.sum().backward()


ANY_SIZE = {0: Dim("time"), 1: Dim("batch")}
scans = pytest.mark.skipif(not functional.export._SCANS, reason="this version of PyTorch cannot export `scan`")


# `make test` trains a scan of a cell of a user's own below, and exports one to ONNX: test_onnx.py.
@scans
@pytest.mark.parametrize(
    ("layer", "extra"),
    [
        pytest.param(lambda: LSTM(5, 4, bidirectional=True), "lengths", marks=pytest.mark.exhaustive),
        pytest.param(lambda: LSTM(5, 4, proj_size=3), "resets", marks=pytest.mark.exhaustive),
        pytest.param(lambda: Recurrent(LayerNormGRU(), 5, 4, zoneout=0.1), "nothing", marks=pytest.mark.exhaustive),
        pytest.param(lambda: Recurrent(Own(), 5, 4), "lengths", marks=pytest.mark.exhaustive),
    ],
    ids=["lstm", "projection", "layer_norm_gru", "own"],
)
def test_a_variable_number_of_steps_becomes_a_scan(layer, extra):
    layer = layer().eval()

    def given(time, batch):
        more = {"lengths": torch.randint(0, time + 1, (batch,)), "resets": torch.rand(time, batch) < 0.3}
        return (torch.randn(time, batch, 5),), {extra: more[extra]} if extra in more else {}

    call, more = given(6, 3)
    shapes = {"input": ANY_SIZE} | {name: {0: ANY_SIZE[1]} if extra == "lengths" else ANY_SIZE for name in more}
    program = export(layer, call, more, dynamic_shapes=shapes)
    assert not of_gatewise(program)
    assert targets(program).count("scan") == layer.num_layers * (1 + layer.bidirectional)
    for sizes in ((6, 3), (9, 4), (2, 2)):
        call, more = given(*sizes)
        torch.testing.assert_close(program.module()(*call, **more), layer(*call, **more))


@scans
@pytest.mark.slow
@pytest.mark.parametrize(
    "layer",
    [lambda: Recurrent(Own(), 5, 4), *exhaustive(lambda: GRU(5, 4))],  # whose steps take four times as long to trace
    ids=["own", "gru"],
)
def test_a_scan_of_any_size_can_be_trained(layer):
    layer, shapes = layer(), {"input": ANY_SIZE, "lengths": {0: ANY_SIZE[1]}}
    call = (torch.randn(6, 3, 5),), {"lengths": torch.tensor([6, 0, 2])}
    exported = export(layer, *call, dynamic_shapes=shapes)
    assert not of_gatewise(exported)
    assert targets(exported).count("scan") == 1
    program = exported.module()
    for x, lengths in ((torch.randn(9, 4, 5), [9, 0, 3, 4]), (torch.randn(2, 2, 5), [1, 2])):
        found, expected = (each(x, lengths=torch.tensor(lengths)) for each in (program, layer))
        torch.testing.assert_close(found, expected)
    gradients = torch.autograd.grad(found[0].square().sum(), program.parameters())
    torch.testing.assert_close(gradients, torch.autograd.grad(expected[0].square().sum(), layer.parameters()))


@pytest.mark.parametrize(
    ("cell", "strict"), each_value([*itertools.product([None, LayerNormGRU()], [False, True])]), ids=str
)
def test_without_scan_a_variable_number_of_steps_takes_gatewise(cell, strict, monkeypatch):
    if not strict:
        monkeypatch.setattr(functional.export, "_SCANS", False)
    model = Network(LSTM(5, 4) if cell is None else Recurrent(cell, 5, 4)).eval()
    program = export(model, (torch.randn(3, 2, 5),), dynamic_shapes=(ANY_SIZE,), strict=strict)
    assert len(of_gatewise(program)) == 1
    x = torch.randn(6, 3, 5)
    torch.testing.assert_close(program.module()(x), model(x))


def test_a_cell_of_ones_own_that_no_graph_can_express(monkeypatch):
    monkeypatch.setattr(functional.export, "_SCANS", False)
    model = Network(Recurrent(Own(), 5, 4))
    with pytest.raises(ArgumentError, match="Leave dimension T"):
        export(model, (torch.randn(3, 2, 5),), dynamic_shapes=(ANY_SIZE,))
    with pytest.raises(torch._dynamo.exc.Unsupported, match=in_graph("strict=False")):  # around the error
        export(model, (torch.randn(3, 2, 5),), strict=True)


def test_a_packed_batch_is_refused():
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = LSTM(5, 4)

        def forward(self, x, lengths):
            return self.layer(nn.utils.rnn.pack_padded_sequence(x, lengths))[0].data

    with pytest.raises(ArgumentError, match="padded tensor with `lengths`"):
        export(Packed(), (torch.randn(3, 2, 5), torch.tensor([3, 1])))


@pytest.mark.parametrize("way", ["argument", "context"])
def test_a_named_kernel_takes_gatewise(way):
    layer, x = LSTM(5, 4, kernel="eager" if way == "argument" else "auto").eval(), torch.randn(3, 2, 5)
    with use_kernel("eager"):
        program = export(layer, (x,))
    assert of_gatewise(program) == ["gatewise.lstm_forward.default"]
    assert "eager" in next(node for node in program.graph.nodes if "gatewise" in str(node.target)).args
    torch.testing.assert_close(program.module()(x), layer(x))


def test_a_program_with_gatewises_operator_can_be_trained_with_dropout():
    layer, x = LSTM(5, 4, num_layers=3, dropout=0.5, kernel="eager"), torch.randn(3, 2, 5)
    program = export(layer, (x,)).module()

    def gradients(call):
        torch.manual_seed(3)
        y, _ = call(x)
        return torch.autograd.grad(y.square().sum(), call.parameters())

    torch.testing.assert_close(gradients(program), gradients(layer))


# Compiled layers are tested in test_compile.py.
@pytest.mark.exhaustive
def test_the_graph_is_the_same_after_compiling():
    # A kernel that was chosen while a training step was compiled kept a tensor of unknown size, which AOTInductor
    # cannot return in a list.
    layer, shape = LSTM(5, 4, kernel="aten"), (3, 2, 5)

    def graph():
        # A new tensor: to PyTorch 2.8 and 2.9 the size of one that was given to a compiled call may be variable.
        return str(export(layer, (torch.randn(shape),)).graph)

    before = graph()
    torch.compile(layer, backend="aot_eager")(torch.randn(shape))
    assert graph() == before
    torch.compiler.reset()


# Looking for garbage would take a third of the time: imports leave none.
_RUN = """
import gc
gc.disable()
import sys, torch
for path, call, expected in torch.load(sys.argv[1]):
    exported = path.endswith("program.pt2")
    run = torch.export.load(path).module() if exported else torch._inductor.aoti_load_package(path)
    with torch.no_grad():
        torch.testing.assert_close(tuple(run(*call)), expected)
assert "gatewise" not in sys.modules
"""


def run_elsewhere(folder, *programs):
    """Run saved programs, each a path, a call and its results, in a process that does not import gatewise."""
    torch.save(programs, folder / "programs.pt")
    done = subprocess.run(
        [sys.executable, "-c", _RUN, str(folder / "programs.pt")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


class Several(nn.Module):
    """A layer of a cell of PyTorch's, and one that PyTorch does not have."""

    def __init__(self):
        super().__init__()
        self.lstm = LSTM(5, 4)
        self.own = Recurrent(Own(), 4, 3)

    def forward(self, x, lengths=None):
        y, (h, c) = self.lstm(x)
        return *self.own(y, lengths=lengths), h, c


def packaged(program, folder):
    """Compile a program with AOTInductor, and return the path of its package.

    A header that is compiled once for all programs, and fast code, would take longer than one program does without.
    """
    sparing = {"precompile_headers": False, "compile_wrapper_opt_level": "O0"}
    known = {f"aot_inductor.{name}": value for name, value in sparing.items() if hasattr(config.aot_inductor, name)}
    return torch._inductor.aoti_compile_and_package(
        program, package_path=str(folder / "package.pt2"), inductor_configs=known
    )


def test_a_cell_that_is_traced_for_the_first_time_leaves_nothing_in_a_graph():
    class New(Own):
        """A cell of which nothing has been computed."""

    with torch.no_grad():
        program = export(Recurrent(New(), 5, 4), (torch.randn(2, 2, 5),))
    assert not [node.target for node in program.graph.nodes if "grad" in str(node.target)]
    assert torch.is_grad_enabled()


# AOTInductor compiles the same program to C++ and a library for ten seconds, which is PyTorch's to test.
@pytest.mark.parametrize(
    ("sizes", "form"),
    exhaustive_unless([("fixed", "program")], itertools.product(["fixed", "variable"], ["program", "package"])),
)
def test_what_is_saved_loads_without_gatewise(sizes, form, tmp_path):
    if sizes == "variable" and not functional.export._SCANS:
        pytest.skip("this version of PyTorch cannot export its operator scan")
    model, call = Several().eval(), (torch.randn(2, 2, 5), torch.tensor([2, 1]))
    with torch.no_grad():
        shapes = (ANY_SIZE, {0: ANY_SIZE[1]}) if sizes == "variable" else None
        program = export(model, call, dynamic_shapes=shapes)
        path = str(tmp_path / "program.pt2")
        if form == "program":
            torch.export.save(program, path)
        else:
            path = packaged(program, tmp_path)
        if sizes == "variable":
            call = torch.randn(6, 4, 5), torch.tensor([3, 0, 6, 2])
        expected = model(*call)
    run_elsewhere(tmp_path, (path, call, expected))


@pytest.mark.slow
@pytest.mark.exhaustive
def test_aotinductor_follows_compiling(tmp_path):
    layer, x = LSTM(5, 4, num_layers=2, kernel="aten"), torch.randn(3, 2, 5)
    torch.compile(layer)(x)
    program = export(layer, (x,), dynamic_shapes=(ANY_SIZE,))
    found = torch._inductor.aoti_load_package(packaged(program, tmp_path))
    torch.testing.assert_close(found(x), layer(x))
    torch.compiler.reset()
