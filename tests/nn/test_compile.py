"""gatewise.LSTM under torch.compile: one graph, the same results and gradients."""

from __future__ import annotations

import ast
import functools
import itertools
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx

from gatewise.cells import LayerNormGRU, LayerNormLSTM
from gatewise.nn import GRU, LSTM, Recurrent
from tests.pairwise import each_value, exhaustive_unless, pairwise

ROOT = Path(__file__).parents[2]
OF_2_6 = torch.__version__.startswith("2.6.")


class Network(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.lstm = LSTM(5, 4, **options)
        self.head = nn.LazyLinear(2)

    def forward(self, x, hx=None, lengths=None):
        y, (h_n, c_n) = self.lstm(x, hx, lengths)
        return self.head(y).tanh(), h_n, c_n


def outputs_and_gradients(call, model, x, *rest):
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    outputs = call(leaf, *rest)
    sum(output.square().sum() for output in outputs).backward()
    return [*outputs, leaf.grad, *(parameter.grad.clone() for parameter in model.parameters())]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.manual_seed(0)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("kernel", ["eager", "aten"])
def test_without_fullgraph_a_call_on_a_cpu_is_part_of_the_graph(kernel):
    layer, counted = LSTM(5, 4, kernel=kernel), CompileCounter()
    call = torch.compile(lambda x: layer(2 * x)[0] + 1, backend=counted)
    call(torch.randn(3, 2, 5))
    assert counted.frame_count == 1


# Graphs are kept without a compiler in tests/functional.
@pytest.mark.exhaustive
def test_without_fullgraph_the_graph_can_be_kept_for_another_backward_pass():
    layer, x = LSTM(5, 4), torch.randn(3, 2, 5, requires_grad=True)
    y = torch.compile(lambda x: layer(x)[0], backend="aot_eager")(x)
    first = torch.autograd.grad(y[0].sum(), x, retain_graph=True)[0]
    torch.testing.assert_close(first, torch.autograd.grad(layer(x)[0][0].sum(), x)[0])
    assert torch.autograd.grad(y[1].sum(), x)[0].isfinite().all()


@pytest.mark.parametrize(
    ("options", "extra"),
    each_value(
        pairwise(
            [
                {},
                {"num_layers": 2, "bidirectional": True, "batch_first": True},
                {"proj_size": 2, "bias": False},
                {"kernel": "eager"},
            ],
            ["nothing", "state", "lengths"],
        ),
        most=3,
    ),
    ids=str,
)
def test_compiled_in_one_graph_equals_eager(options, extra):
    model = Network(**options)
    x = torch.randn(3, 3, 5)
    rows = (1 + options.get("bidirectional", False)) * options.get("num_layers", 1)
    state = (torch.randn(rows, 3, options.get("proj_size", 4)), torch.randn(rows, 3, 4))
    rest = {"nothing": (), "state": (state,), "lengths": (None, torch.tensor([1, 3, 2]))}[extra]
    expected = outputs_and_gradients(model, model, x, *rest)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(outputs_and_gradients(compiled, model, x, *rest), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_layers": 2, "bidirectional": True},
        {"proj_size": 8},
        {"num_layers": 2, "memory": "lean"},
        {"kernel": "cudnn"},
        {"kernel": "stepwise"},
        {"kernel": "eager"},
    ],
    ids=str,
)
@pytest.mark.parametrize("extra", ["nothing", "state", "lengths"])
def test_compiled_on_a_gpu_equals_eager(dtype, options, extra, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    layer = LSTM(24, 32, device="cuda", dtype=dtype, **options)
    x = torch.randn(9, 5, 24, device="cuda", dtype=dtype)
    rows = (1 + options.get("bidirectional", False)) * options.get("num_layers", 1)
    sizes = (options.get("proj_size", 32), 32)
    state = tuple(torch.randn(rows, 5, size, device="cuda", dtype=dtype) for size in sizes)
    lengths = torch.tensor([9, 1, 4, 7, 3], device="cpu" if options.get("kernel") == "cudnn" else "cuda")
    rest = {"nothing": (), "state": (state,), "lengths": (None, lengths)}[extra]

    def flat(x, *rest):
        y, (h_n, c_n) = layer(x, *rest)
        return y, h_n, c_n

    expected = outputs_and_gradients(flat, layer, x, *rest)
    compiled = torch.compile(flat, backend="aot_eager", fullgraph=True)
    found = outputs_and_gradients(compiled, layer, x, *rest)
    for mine, theirs in zip(found, expected, strict=True):  # the compiled call may have chosen another kernel
        tolerance = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 3e-2}[dtype]
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance * theirs.abs().max().item())


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel", "options"),
    [
        *itertools.product(("persistent", "stepwise"), ({}, {"num_layers": 2, "dropout": 0.5})),
        ("cudnn", {"num_layers": 2}),  # called, cuDNN draws the masks of dropout itself
        *itertools.product(("persistent", "auto"), ({"memory": "lean"}, {"proj_size": 8}, {"bidirectional": True})),
    ],
    ids=str,
)
def test_other_sizes_on_a_gpu_take_two_graphs(kernel, options, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    layer = LSTM(24, 32, device="cuda", kernel=kernel, **options)

    def flat(x):
        y, (h_n, c_n) = layer(x)
        return y, h_n, c_n

    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(flat, backend=graphs, fullgraph=True)
    for time, batch in ((9, 5), (7, 8), (30, 3), (64, 40)):  # the first graph is for these sizes, the second for any
        x = torch.randn(time, batch, 24, device="cuda")
        torch.manual_seed(1)
        expected = outputs_and_gradients(flat, layer, x)
        torch.manual_seed(1)
        found = outputs_and_gradients(compiled, layer, x)
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())
    assert graphs.frame_count == 2


@pytest.mark.gpu
@pytest.mark.parametrize("ragged", [False, True], ids=["whole", "ragged"])
@pytest.mark.parametrize("cell", ["LSTM", "GRU", "LayerNormLSTM"])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_other_sizes_compiled_by_inductor_equal_eager(mode, cell, ragged):
    kinds = {"LSTM": LSTM, "GRU": GRU, "LayerNormLSTM": functools.partial(Recurrent, LayerNormLSTM())}
    layer = kinds[cell](24, 32, num_layers=2, bidirectional=True, device="cuda", dtype=torch.bfloat16)

    def flat(x, lengths):
        y, finals = layer(x, lengths=lengths)
        return y, *(finals if isinstance(finals, tuple) else (finals,))

    compiled = torch.compile(flat, mode=mode)
    for time, batch in 2 * ((9, 5), (7, 8), (30, 3)):
        x = torch.randn(time, batch, 24, device="cuda", dtype=torch.bfloat16)
        lengths = torch.randint(time + 1, (batch,), device="cuda") if ragged else None
        expected = outputs_and_gradients(flat, layer, x, lengths)
        found = [own.clone() for own in outputs_and_gradients(compiled, layer, x, lengths)]
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=3e-2, atol=3e-2 * theirs.abs().max().item())


def test_compiled_inference_equals_eager():
    model = Network(num_layers=2).eval()
    x = torch.randn(3, 2, 5)
    with torch.no_grad():
        expected = model(x)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), expected)


def test_compiled_dropout_trains():
    model = Network(num_layers=2, dropout=0.5)
    model(torch.randn(3, 2, 5))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(3, 2, 5)
    torch.manual_seed(4)
    expected = outputs_and_gradients(model, model, x)
    torch.manual_seed(4)
    torch.testing.assert_close(outputs_and_gradients(compiled, model, x), expected)


def test_one_sequence_compiles():
    model = Network()
    x = torch.randn(3, 5)
    expected = model(x)
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(x), expected)


def test_packed_sequence_compiles():
    layer = LSTM(5, 4)
    packed = nn.utils.rnn.pack_sequence([torch.randn(length, 5) for length in (2, 4, 1)], enforce_sorted=False)
    expected, state = layer(packed)
    found, found_state = torch.compile(layer, backend="aot_eager")(packed)
    torch.testing.assert_close(found.data, expected.data)
    torch.testing.assert_close(found_state, state)


def test_training_with_other_sizes_takes_two_graphs():
    model = Network()
    model(torch.randn(3, 2, 5))
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    for time, batch in ((3, 2), (7, 4), (4, 5)):  # the first graph is for these sizes, the second one for any
        x = torch.randn(time, batch, 5)
        torch.testing.assert_close(outputs_and_gradients(compiled, model, x), outputs_and_gradients(model, model, x))
    assert graphs.frame_count == 2


TRANSFORMS = {
    "grad": lambda call: torch.func.grad(lambda x: call(x).sum()),
    "vmap": lambda call: torch.func.vmap(call, in_dims=1),
    "jacrev": lambda call: torch.func.jacrev(call),
    "jvp": lambda call: lambda x: torch.func.jvp(call, (x,), (x,)),
}


# Transforms and compiled functions are tested by themselves.
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "name"),
    # `jacrev` is `vmap` of gradients.
    exhaustive_unless([(LSTM, "jacrev"), (GRU, "jvp")], itertools.product([LSTM, GRU], TRANSFORMS)),
)
def test_transforms_of_torch_func_in_a_compiled_function(kind, name):
    if OF_2_6 and name == "jacrev":
        pytest.skip("PyTorch 2.6 compiles it wrongly, also that of nn.LSTM")
    layer, x = kind(5, 4), torch.randn(3, 2, 5)
    function = TRANSFORMS[name](lambda x: layer(x)[0])
    torch.testing.assert_close(torch.compile(function, backend="aot_eager")(x), function(x))


@pytest.mark.parametrize("kind", [LSTM, pytest.param(GRU, marks=pytest.mark.exhaustive)])
def test_make_fx_with_symbolic_sizes_records_a_graph_for_any_size(kind):
    layer = kind(5, 4, num_layers=2)

    def gradient(x, weights):
        y, _ = torch.func.functional_call(layer, weights, (x,))
        return y, *torch.autograd.grad(y.square().sum(), (x, *weights.values()))

    weights = {name: weight.detach().requires_grad_() for name, weight in layer.named_parameters()}
    graph = make_fx(gradient, tracing_mode="symbolic")(torch.randn(3, 2, 5, requires_grad=True), weights)
    for time, batch in ((3, 2), (4, 3)):
        x = torch.randn(time, batch, 5, requires_grad=True)
        torch.testing.assert_close(graph(x, weights), gradient(x, weights))


@pytest.mark.parametrize("kind", [LSTM, GRU])
def test_make_fx_with_symbolic_sizes_of_weights_alone(kind):
    layer, x = kind(1, 5), torch.randn(1, 1, 1)
    weights = {name: weight.detach() for name, weight in layer.named_parameters()}

    def call(x, weights):
        return torch.func.functional_call(layer, weights, (x,))[0]

    graph = make_fx(call, tracing_mode="symbolic")(x, weights)
    torch.testing.assert_close(graph(x, weights), call(x, weights))


class OfUnits(nn.Module):
    """A layer whose step combines hidden units, for which the kernel `eager` has no derived adjoint."""

    def __init__(self, cell):
        super().__init__()
        self.layer = Recurrent(cell, 5, 4, bidirectional=True)

    def forward(self, x):
        y, finals = self.layer(x)
        return y, *(finals if isinstance(finals, tuple) else (finals,))


@pytest.mark.parametrize(
    "cell", [LayerNormLSTM(), pytest.param(LayerNormGRU(), marks=pytest.mark.exhaustive)], ids=lambda cell: cell.name
)
def test_layer_norm_compiled_in_one_graph_equals_eager(cell):
    model, x = OfUnits(cell), torch.randn(2, 3, 5)
    expected = outputs_and_gradients(model, model, x)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(outputs_and_gradients(compiled, model, x), expected)
    assert all(gradient.any() for gradient in expected)


# `make test` compiles a call with a packed batch, and one whose step combines units.
@pytest.mark.exhaustive
def test_layer_norm_of_a_packed_batch_is_compiled():
    layer = Recurrent(LayerNormLSTM(), 5, 4)
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(2, 3, 5), torch.tensor([2, 2, 1]))
    expected = torch.autograd.grad(layer(packed)[0].data.square().sum(), layer.parameters())
    found = torch.autograd.grad(
        torch.compile(layer, backend="aot_eager")(packed)[0].data.square().sum(), layer.parameters()
    )
    torch.testing.assert_close(found, expected)


def test_compiling_a_layer_of_a_cell_warns_of_nothing():
    layer = Recurrent(LayerNormGRU(), 5, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        torch.compile(layer, backend="eager")(torch.randn(3, 2, 5))


def test_calls_ask_for_several_classes_by_a_tuple():
    """PyTorch 2.6 cannot trace `isinstance(cell, One | Other)`."""
    packages = "cells", "contract", "functional", "kernels", "nn", "selection"
    paths = [path for package in packages for path in (ROOT / "gatewise" / package).rglob("*.py")]
    asked = [
        (path, node)
        for path in paths
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance"
    ]
    found = [
        f"{path}:{node.lineno}"
        for path, node in asked
        if any(isinstance(each, ast.BitOr) for each in ast.walk(node.args[1]))
    ]
    assert not found
