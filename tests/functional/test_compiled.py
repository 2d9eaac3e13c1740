"""Calls on a CPU in the graphs of torch.compile: which operators the graphs have, and that their results are right."""

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd

import gatewise
from gatewise import use_kernel


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.manual_seed(0)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def pair(kind, *sizes, **options):
    theirs, ours = getattr(nn, kind)(*sizes, **options), getattr(gatewise, kind)(*sizes, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def outputs_and_gradients(call, layer, x, hx=None):
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    y, state = call(leaf, hx)
    states = state if isinstance(state, tuple) else (state,)
    (y.square().sum() + sum(one.sum() for one in states)).backward()
    return [y, *states, leaf.grad, *(parameter.grad.clone() for parameter in layer.parameters())]


def operators_of(layer, x, *, training):
    """Return the names of the operators in the graphs, after the compiler's second trace."""
    seen = set()

    def kept(graph, example):
        seen.update(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    call = torch.compile(layer, backend=aot_autograd(fw_compiler=kept), fullgraph=True)
    with torch.set_grad_enabled(training):
        y, _ = call(x)
        if training:
            y.sum().backward()
    return seen


@pytest.mark.parametrize(
    ("kind", "steps", "training", "expected"),
    [
        ("LSTM", 3, False, {"aten.mkldnn_rnn_layer.default"}),
        ("LSTM", 3, True, {"gatewise.onednn_forward.default", "gatewise.onednn_backward.default"}),
        ("GRU", 3, False, {"gatewise.pytorch_layers.default"}),
        ("GRU", 3, True, {"gatewise.lstm_forward.default", "gatewise.lstm_backward.default"}),
        ("LSTM", 1, True, set()),
        ("RNN", 1, False, set()),
    ],
)
def test_the_graph_has_the_operators_that_take_the_least_time(kind, steps, training, expected):
    if (kind, steps) == ("LSTM", 3) and not torch.backends.mkldnn.is_available():
        pytest.skip("PyTorch was built without oneDNN")
    seen = operators_of(pair(kind, 5, 4)[1], torch.randn(steps, 2, 5), training=training)
    recurrent = {name for name in seen if name.startswith("gatewise.") or "rnn_layer" in name}
    assert recurrent == expected


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("LSTM", {"num_layers": 2, "bidirectional": True}),
        ("LSTM", {"bias": False}),
        ("GRU", {"num_layers": 2}),
    ],
    ids=str,
)
def test_one_graph_for_all_sizes_has_the_results_of_pytorch(kind, options):
    theirs, ours = pair(kind, 5, 4, **options)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True, dynamic=True)
    rows = options.get("num_layers", 1) * (1 + options.get("bidirectional", False))
    for time, batch in ((3, 2), (7, 3), (1, 2)):
        x, h = torch.randn(time, batch, 5), torch.randn(rows, 1, 4).expand(-1, batch, -1)
        hx = (h, torch.randn(rows, batch, 4)) if kind == "LSTM" else h
        expected = outputs_and_gradients(theirs, theirs, x, hx)
        torch.testing.assert_close(outputs_and_gradients(compiled, ours, x, hx), expected, rtol=1e-5, atol=1e-5)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x, hx), theirs(x, hx))


@pytest.mark.slow
def test_the_compilers_own_code_drops_what_a_call_outside_of_graphs_drops():
    _, layer = pair("LSTM", 5, 4, num_layers=3, dropout=0.5)
    x = torch.randn(6, 3, 5)
    torch.manual_seed(1)
    expected = outputs_and_gradients(layer, layer, x)
    compiled = torch.compile(layer, fullgraph=True)
    torch.manual_seed(1)
    torch.testing.assert_close(outputs_and_gradients(compiled, layer, x), expected, rtol=1e-5, atol=1e-6)
    torch.manual_seed(1)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x)[0], expected[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}], ids=str)
def test_results_may_be_changed_in_place_before_the_backward_pass(options):
    theirs, ours = pair("LSTM", 5, 4, **options)
    x = torch.randn(6, 3, 5)
    found = []
    for call, layer in ((theirs, theirs), (torch.compile(ours), ours)):  # the default backend removes copies
        y, states = call(x)
        with torch.no_grad():
            for state in states:
                state.zero_()
        if call is not theirs:  # whose output may not be changed
            y.mul_(3.0)
            y = y / 3.0
        found.append(torch.autograd.grad((y * y).sum(), list(layer.parameters())))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("steps", [1, 3])
def test_autocast(steps):
    _, layer = pair("LSTM", 5, 4)
    x = torch.randn(steps, 2, 5)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        expected = outputs_and_gradients(layer, layer, x)
        found = outputs_and_gradients(compiled, layer, x)
    assert found[0].dtype is torch.bfloat16
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=3e-2, atol=3e-2 * theirs.abs().max().item())


def test_a_copy_of_the_first_byte_of_a_workspace_is_no_workspace():
    theirs, ours = pair("LSTM", 5, 4)
    x = torch.randn(3, 2, 5)
    expected = outputs_and_gradients(theirs, theirs, x)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor):
        found = outputs_and_gradients(compiled, ours, x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_gradients_of_final_states_alone():
    theirs, ours = pair("LSTM", 5, 4, bidirectional=True)
    x = torch.randn(3, 2, 5)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    (expected, found) = (
        torch.autograd.grad(call(x)[1][1][0].sum(), layer.parameters(), allow_unused=True, materialize_grads=True)
        for call, layer in ((theirs, theirs), (compiled, ours))
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_kernel_that_is_named_computes_one_step():
    _, layer = pair("GRU", 5, 4)
    with use_kernel("aten"):
        seen = operators_of(layer, torch.randn(1, 2, 5), training=False)
    assert "gatewise.pytorch_layers.default" in seen


def test_the_operators_agree_with_their_fakes():
    x, h0, c0 = torch.randn(3, 2, 5), torch.randn(2, 4), torch.randn(2, 4)
    weights = [torch.randn(16, 5), torch.randn(16, 4), torch.randn(16), torch.randn(16)]
    given = (x, *weights, h0, c0)
    names = torch.ops.gatewise
    tests = "test_schema", "test_faketensor"
    torch.library.opcheck(names.onednn_forward.default, (*given, True, True), test_utils=tests)
    y, h, c, workspace, size, *_ = names.onednn_forward.default(*given, True, True)
    assert workspace.untyped_storage().nbytes() == int(size) > workspace.numel()
    backward = (torch.ones_like(y), None, None, *given, y, h, c, workspace, size, True)
    torch.library.opcheck(names.onednn_backward.default, backward, test_utils=tests)
    options = "lstm", True, 1, False
    torch.library.opcheck(names.pytorch_layers.default, (x, h0[None], c0[None], weights, *options), test_utils=tests)
