"""The registered operators: what torch.compile, torch.export and meta tensors see."""

import itertools

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from gatewise import functional, use_kernel
from gatewise.cells import cell_named
from gatewise.contract.device import Device
from gatewise.functional import operators
from gatewise.functional.operators import lstm_backward, lstm_forward
from tests.pairwise import exhaustive_unless

CASES = [
    {},
    {"num_layers": 2, "bidirectional": True, "lengths": True},
    {"num_layers": 3, "dropout": 0.5, "bias": False},
    {"proj_size": 2, "dtype": torch.float64},
]


@pytest.fixture(autouse=True)
def no_graph_from_another_test():
    torch._dynamo.reset()


def make(num_layers=1, bidirectional=False, dropout=0.0, bias=True, proj_size=0, lengths=False, dtype=torch.float32):
    torch.manual_seed(0)
    module = torch.nn.LSTM(3, 4, num_layers, bias=bias, bidirectional=bidirectional, proj_size=proj_size, dtype=dtype)
    weights = [parameter.detach().requires_grad_() for parameter in module.parameters()]
    x = torch.randn(5, 3, 3, dtype=dtype, requires_grad=True)
    lengths = torch.tensor([2, 5, 1]) if lengths else None

    def call(x, *weights):
        return functional.lstm(x, None, list(weights), bidirectional=bidirectional, dropout=dropout, lengths=lengths)

    return call, (x, *weights)


def gradients(call, inputs):
    torch.manual_seed(1)
    y, (h, c) = call(*inputs)
    loss = y.square().sum() + h.sum() + c.square().sum()
    return [y, h, c, *torch.autograd.grad(loss, inputs)]


@pytest.mark.parametrize(
    ("kernel", "case"),
    exhaustive_unless(
        [("eager", CASES[1]), ("auto", CASES[3])],
        itertools.product(["auto", "eager"], CASES),
    ),
    ids=str,
)
def test_the_compiled_call_is_the_same_call(kernel, case):
    call, inputs = make(**case)
    with use_kernel(kernel):
        expected = gradients(call, inputs)
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(gradients(compiled, inputs), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kernel", "within"),
    exhaustive_unless([("auto", True)], itertools.product(["auto", "eager"], [True, False])),
)
def test_the_outputs_of_a_compiled_call_may_be_changed_in_place(kernel, within):
    call, inputs = make(lengths=kernel == "eager")

    def changed(outputs):
        y, state = outputs
        for tensor in (y, *state):
            tensor.mul_(0.5)
        return y, state

    with use_kernel(kernel):
        expected = gradients(lambda *given: torch.utils._pytree.tree_map(lambda each: each * 0.5, call(*given)), inputs)
        if within:
            found = torch.compile(lambda *given: changed(call(*given)), fullgraph=True, backend="aot_eager")
        else:
            compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
            found = lambda *given: changed(compiled(*given))  # noqa: E731
        torch.testing.assert_close(gradients(found, inputs), expected, rtol=1e-5, atol=1e-6)


def test_the_kernel_is_the_one_preferred_while_compiling():
    call, inputs = make()
    seen = []

    def backend(graph, example):
        seen.extend(node.args[8] for node in graph.graph.nodes if "gatewise.recurrent" in str(node.target))
        return graph

    with use_kernel("eager"):
        torch.compile(call, fullgraph=True, backend=backend)(*inputs)
    assert seen == ["eager"]


@pytest.mark.parametrize("case", [pytest.param(CASES[0], marks=pytest.mark.exhaustive), CASES[1]], ids=str)
def test_the_fakes_agree_with_the_operators(case):
    _, (x, *weights) = make(**case)
    rows = case.get("num_layers", 1) * (1 + case.get("bidirectional", False))
    state = [torch.zeros(rows, 3, 4, requires_grad=True) for _ in range(2)]
    lengths = torch.tensor([2, 5, 1]) if case.get("lengths") else None
    arguments = (
        x,
        *state,
        weights,
        lengths,
        None,
        case.get("bidirectional", False),
        0.0,
        True,
        "eager",
        "normal",
        "lstm",
        None,
    )
    torch.library.opcheck(lstm_forward, arguments)
    detached = [tensor.detach() for tensor in (x, *state)]
    plain = [weight.detach() for weight in weights]
    y, h, c, kept = lstm_forward(*detached, plain, *arguments[4:])
    backward = (*map(torch.ones_like, (y, h, c)), *detached, plain, lengths, None, y, kept)
    options = case.get("bidirectional", False), 0.0, "eager", "normal", "lstm", None
    torch.library.opcheck(lstm_backward, (*backward, *options, True))
    # Without what the forward pass kept, the backward pass repeats it.
    again = lstm_backward(*backward[:-1], [], *options, False)
    torch.testing.assert_close(again, lstm_backward(*backward, *options, True))


def test_meta_tensors_give_shapes():
    call, inputs = make(num_layers=2, bidirectional=True)
    y, (h, c) = call(*(tensor.detach().to("meta").requires_grad_() for tensor in inputs))
    assert y.is_meta
    assert (y.shape, h.shape, c.shape) == ((5, 3, 8), (4, 3, 4), (4, 3, 4))


@pytest.mark.parametrize(
    ("kernel", "cell"),
    [
        *itertools.product(("persistent", "stepwise", "eager"), ("lstm", "gru", "layer_norm_lstm")),
        *itertools.product(("cudnn",), ("lstm", "gru")),
    ],
)
def test_a_training_call_on_a_gpu_is_traced_for_any_number_of_steps_and_sequences(monkeypatch, kernel, cell):
    monkeypatch.setattr(operators, "probed", lambda device: Device.named("h200"))
    environment = ShapeEnv()

    def symbol(name):
        found = environment.create_symbol(9, ConstantSource(name), dynamic_dim=DimDynamic.DYNAMIC)
        return environment.create_symintnode(found, hint=9)

    time, batch, stated = symbol("time"), symbol("batch"), cell_named(cell)
    rows = 32 * len(stated.gates)
    with FakeTensorMode(shape_env=environment), torch.device("cuda"):
        x, h0, c0 = torch.empty(time, batch, 24), torch.empty(2, batch, 32), torch.empty(2, batch, 32)
        weights = []
        for features in (24, 32):
            weights += [torch.empty(rows, features), torch.empty(rows, 32), torch.empty(rows), torch.empty(rows)]
            weights += [torch.empty(32) for _ in stated.parameters]
        y, _, _, kept = lstm_forward(x, h0, c0, weights, None, None, False, 0.5, True, kernel, "normal", cell, None)
    assert y.shape[:2] == (time, batch)
    assert len(kept) > 1
    assert not environment.guards
