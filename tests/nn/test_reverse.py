"""Layers with `reverse=True`: each row is what PyTorch's layer computes for it alone between two flips."""

import copy
import itertools
import pickle
import re

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import gatewise
from gatewise.cells import GRU, LSTM, RNN
from gatewise.contract.errors import ArgumentError, DtypeError, ShapeError
from tests.pairwise import pairwise

T, B, F, H = 6, 4, 3, 5
LENGTHS = [6, 2, 0, 4]
PYTORCH = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}
OURS = {"lstm": gatewise.LSTM, "gru": gatewise.GRU, "rnn": gatewise.RNN}
CELLS = {"lstm": LSTM(), "gru": GRU(), "rnn": RNN("tanh")}
KINDS = [*OURS, *(f"{name} recurrent" for name in OURS)]


def pair_of(kind, dtype=torch.float64, **options):
    """Return a reversed layer, and a layer of PyTorch with the same weights."""
    torch.manual_seed(0)
    name, _, recurrent = kind.partition(" ")
    theirs = PYTORCH[name](F, H, dtype=dtype, **{key: options[key] for key in options if key != "kernel"})
    options |= {"reverse": True, "dtype": dtype}
    ours = gatewise.Recurrent(CELLS[name], F, H, **options) if recurrent else OURS[name](F, H, **options)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def drawn(*shape, dtype=torch.float64, seed=1):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def states_of(name, layers=1):
    states = drawn(layers, B, H, seed=2), drawn(layers, B, H, seed=3)
    return states if name.startswith("lstm") else states[0]


def row(states, b):
    return tuple(s[:, b : b + 1] for s in states) if isinstance(states, tuple) else states[:, b : b + 1]


def listed(y, states):
    return [y, *(states if isinstance(states, tuple) else (states,))]


def one_by_one(theirs, x, lengths, states, resets=None):
    """Return output and final states, each row and each of its episodes computed alone."""
    outputs, finals = [], []
    for b, length in enumerate(lengths or [T] * B):
        borders = [0, length] if resets is None else [0, *(t for t in range(1, length) if resets[t, b]), length]
        y, state = [], row(states, b)
        for first, last in reversed(list(itertools.pairwise(borders))):
            if first < last:
                part, state = theirs(x[first:last, b : b + 1].flip(0), state if last == length else None)
                y = [part.flip(0), *y]
        outputs.append(torch.cat([*y, x.new_zeros(T - length, 1, H)]))
        finals.append(listed(None, state)[1:])
    return [torch.cat(outputs, 1), *(torch.cat(each, 1) for each in zip(*finals, strict=True))]


def gradients(outputs, leaves):
    torch.manual_seed(3)
    return torch.autograd.grad(outputs, leaves, [torch.randn_like(output) for output in outputs])


def close(found, expected):
    torch.testing.assert_close(list(found), list(expected), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("kind", "num_layers", "lengths", "resets", "kernel"),
    pairwise(KINDS, [1, 2], [None, LENGTHS], [False, True], ["auto", "eager"]),
    ids=str,
)
def test_rows_are_read_from_their_last_step(kind, num_layers, lengths, resets, kernel):
    num_layers = 1 if resets else num_layers  # the oracle of an episode has no state between the layers
    ours, theirs = pair_of(kind, num_layers=num_layers, kernel=kernel)
    x, states = drawn(T, B, F), states_of(kind, num_layers)
    marks = torch.rand(T, B, generator=torch.Generator().manual_seed(5)) < 0.4 if resets else None
    found = listed(*ours(x, states, lengths=lengths, resets=marks))
    expected = one_by_one(theirs, x, lengths, states, marks)
    close(found, expected)
    own, other = (listed(x, states) + list(layer.parameters()) for layer in (ours, theirs))
    close(gradients(found, own), gradients(expected, other))


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_batch(kind):
    ours, theirs = pair_of(kind)
    x, lengths = drawn(T, B, F), [6, 2, 1, 4]
    states = states_of(kind)
    y, finals = ours(pack_padded_sequence(x, lengths, enforce_sorted=False), states)
    found = listed(pad_packed_sequence(y, total_length=T)[0], finals)
    expected = one_by_one(theirs, x, lengths, states)
    close(found, expected)
    close(gradients(found, [x, *ours.parameters()]), gradients(expected, [x, *theirs.parameters()]))


def test_a_packed_batch_under_a_default_device():
    ours, _ = pair_of(KINDS[0])
    packed = pack_padded_sequence(drawn(T, B, F), [6, 2, 1, 4], enforce_sorted=False)
    expected = ours(packed)[0].data
    with torch.device("meta"):
        found = ours(packed)[0].data
    torch.testing.assert_close(found, expected)


def test_a_layer_that_becomes_bidirectional_is_refused():
    layer = gatewise.LSTM(3, 4, bidirectional=True)
    layer.reverse = True
    with pytest.raises(ArgumentError, match="`reverse` must be False with bidirectional=True"):
        layer(torch.randn(5, 2, 3))


@pytest.mark.parametrize("kind", KINDS)
def test_other_arrangements(kind):
    ours, _ = pair_of(kind)
    x = drawn(T, B, F)
    expected, _ = ours(x)
    torch.testing.assert_close(ours(x[:, 0])[0], expected[:, 0])
    ours.batch_first = True
    torch.testing.assert_close(ours(x.transpose(0, 1))[0].transpose(0, 1), expected)


def test_padding_is_not_read():
    ours, _ = pair_of("lstm")
    x = drawn(T, B, F).detach()
    x[4:, 3] = x[2:, 1] = x[:, 2] = float("nan")
    y, (h_n, _) = ours(x, lengths=LENGTHS)
    assert y.isfinite().all()
    assert h_n.isfinite().all()
    assert not y[4:, 3].any()


def test_the_functional_call():
    ours, _ = pair_of("lstm")
    x = drawn(T, B, F)
    found = gatewise.functional.lstm(x, None, ours.all_weights, lengths=LENGTHS, reverse=True)
    y, (h_n, c_n) = ours(x, lengths=LENGTHS)
    assert all(map(torch.equal, (found.y, *found.state), (y, h_n, c_n)))
    assert not torch.equal(y, gatewise.functional.lstm(x, None, ours.all_weights, lengths=LENGTHS).y)


def test_steps_are_in_the_order_of_the_input():
    ours, _ = pair_of("lstm recurrent")
    y, (_, c_n), (steps,) = ours(drawn(T, B, F), lengths=LENGTHS, return_steps=True)
    assert torch.equal(steps.states["h"], y)
    assert torch.equal(steps.states["c"][0, :2], c_n[0, :2])
    assert not steps.states["c"][4:, 3].any()


def test_derivatives_of_derivatives_and_transforms():
    ours, _ = pair_of("lstm")
    x = drawn(T, B, F)
    assert torch.autograd.gradgradcheck(lambda given: ours(given, lengths=LENGTHS)[0].sum(0), (x,), fast_mode=True)
    weights = dict(ours.named_parameters())

    def loss(given):
        return torch.func.functional_call(ours, given, (x,))[0].square().sum()

    expected = torch.autograd.grad(loss(weights), list(weights.values()))
    close(torch.func.grad(loss)(weights).values(), expected)


def test_autocast():
    ours, theirs = pair_of("lstm", dtype=torch.float32)
    x = drawn(T, B, F, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = ours(x)
    assert y.dtype == torch.bfloat16
    expected = theirs(x.flip(0))[0].flip(0)
    torch.testing.assert_close(y.float(), expected, rtol=0.05, atol=0.02)


def test_meta_tensors():
    layer = gatewise.LSTM(F, H, reverse=True, device="meta")
    y, (h_n, _) = layer(torch.empty(T, B, F, device="meta"), lengths=torch.tensor(LENGTHS))
    assert (y.shape, h_n.shape) == ((T, B, H), (1, B, H))


@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_compiled(dynamic):
    ours, _ = pair_of("lstm", dtype=torch.float32)
    x, lengths = drawn(T, B, F, dtype=torch.float32), torch.tensor(LENGTHS)
    marks = torch.zeros(T, B, dtype=torch.bool)
    marks[3] = True
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for options in ({}, {"lengths": lengths, "resets": marks}):
        torch.testing.assert_close(compiled(x, **options), ours(x, **options))
    leaves = [x, *ours.parameters()]
    for found, expected in zip(
        torch.autograd.grad(compiled(x)[0].sum(), leaves), torch.autograd.grad(ours(x)[0].sum(), leaves), strict=True
    ):
        torch.testing.assert_close(found, expected)


def test_an_exported_graph_needs_no_gatewise():
    ours, _ = pair_of("lstm", dtype=torch.float32)
    x = drawn(T, B, F, dtype=torch.float32).detach()
    program = torch.export.export(ours.eval(), (x,), strict=False)
    assert "gatewise" not in str(program.graph)
    torch.testing.assert_close(program.module()(x)[0], ours(x)[0])


# With dynamo it is made of a graph like the one above.
@pytest.mark.parametrize("dynamo", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_onnx(dynamo, tmp_path):
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    if dynamo:
        pytest.importorskip("onnxscript")
    ours, _ = pair_of("lstm", dtype=torch.float32)
    x, path = drawn(T, B, F, dtype=torch.float32).detach(), tmp_path / "layer.onnx"
    torch.onnx.export(ours.eval(), (x,), path, dynamo=dynamo, input_names=["x"])
    if not dynamo or hasattr(torch.onnx, "ops"):  # PyTorch 2.7 can put no such operator into a graph of `torch.export`
        assert {node.op_type for node in onnx.load(path).graph.node} >= {"LSTM"}
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    found = torch.from_numpy(session.run(None, {"x": x.numpy()})[0])
    torch.testing.assert_close(found, ours(x)[0].detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_option_stays(kind):
    ours, theirs = pair_of(kind)
    assert "reverse=True" in repr(ours)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    x = drawn(T, B, F)
    expected, _ = ours(x)
    for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(copied(x)[0], expected)
    assert gatewise.accelerate(nn.Sequential(ours), verbose=False)[0] is ours
    assert torch.equal(ours(x)[0], expected)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_refused(kind):
    name, _, recurrent = kind.partition(" ")
    made = (lambda **options: gatewise.Recurrent(CELLS[name], F, H, **options)) if recurrent else OURS[name]
    sizes = () if recurrent else (F, H)
    with pytest.raises(ArgumentError, match=r"`reverse` must be False with bidirectional=True, got True"):
        made(*sizes, bidirectional=True, reverse=True)
    with pytest.raises(ArgumentError, match=r"`reverse` must be True or False, got 1"):
        made(*sizes, reverse=1)


def test_what_the_call_refuses():
    ours, _ = pair_of("lstm", dtype=torch.float32)
    x = drawn(T, B, F, dtype=torch.float32)
    with pytest.raises(ShapeError, match="`lengths` must be between 0 and T = 6, got 7"):
        ours(x, lengths=[7, 1, 1, 1])
    with pytest.raises(ShapeError, match="one integer per sequence"):
        ours(x, lengths=[1])
    with pytest.raises(DtypeError, match="`resets` must be bool"):
        ours(x, resets=torch.zeros(T, B))
    with pytest.raises(ArgumentError, match="`resets` must be None for a packed batch"):
        ours(pack_padded_sequence(x, [T] * B), resets=torch.zeros(T, B, dtype=torch.bool))
    with pytest.raises(ArgumentError, match="`reverse` must be False with bidirectional=True"):
        gatewise.functional.lstm(x, None, ours.all_weights, bidirectional=True, reverse=True)
    with pytest.raises(ShapeError, match="of rank 3"):
        gatewise.functional.lstm(x[0], None, ours.all_weights, reverse=True)


@pytest.mark.parametrize(
    "lengths",
    [
        [7, 1, 1, 1],
        pytest.param([-1, 1, 1, 1], marks=pytest.mark.exhaustive),
        pytest.param([1], marks=pytest.mark.exhaustive),
        [6.0, 2.0, 0.0, 4.0],
    ],
    ids=str,
)
def test_a_compiled_call_refuses_the_same_lengths(lengths):
    ours, _ = pair_of("lstm", dtype=torch.float32)
    x, lengths = drawn(T, B, F, dtype=torch.float32), torch.tensor(lengths)
    with pytest.raises((ShapeError, DtypeError)) as eager:
        ours(x, lengths=lengths)
    torch.compiler.reset()  # a full graph is refused after several compilations of the same method
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True, dynamic=False)
    with pytest.raises(Exception, match=re.escape(str(eager.value))):
        compiled(x, lengths=lengths)


@pytest.mark.parametrize(
    "sizes",
    [[4, 3, 3, 2], *(pytest.param(own, marks=pytest.mark.exhaustive) for own in ([2, 4, 4, 3], [4, 3, 3, 3, 1]))],
    ids=str,
)
def test_a_compiled_call_refuses_the_same_batch_sizes(sizes):
    ours, _ = pair_of("lstm", dtype=torch.float32)
    data, sizes = drawn(13, F, dtype=torch.float32), torch.tensor(sizes)

    def call(data, sizes):
        states = torch.zeros(1, 4, H), torch.zeros(1, 4, H)
        return gatewise.functional.lstm(data, states, ours.all_weights, batch_sizes=sizes, reverse=True).y

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=False)
    right = torch.tensor([4, 4, 3, 2])
    torch.testing.assert_close(compiled(data, right), call(data, right))
    with pytest.raises(ShapeError) as eager:
        call(data, sizes)
    with pytest.raises(Exception, match=re.escape(str(eager.value))):
        compiled(data, sizes)


@pytest.mark.parametrize("way", ["script", "trace"])
def test_torchscript_would_run_the_other_direction(way):
    ours, _ = pair_of("lstm", dtype=torch.float32)
    with pytest.raises(ArgumentError, match=rf"`reverse` must be False for gatewise.LSTM in torch.jit.{way}"):
        torch.jit.script(ours) if way == "script" else torch.jit.trace(ours, (torch.randn(T, B, F),))


def test_accelerate_and_restore():
    class Marked(nn.LSTM):
        reverse = True  # an attribute of the program's own, which its forward pass reads elsewhere

    with pytest.warns(UserWarning, match="attributes of its own named reverse"):
        model = gatewise.accelerate(nn.Sequential(Marked(F, H)), verbose=False)
    assert type(model[0]) is Marked
    model = gatewise.accelerate(nn.Sequential(nn.LSTM(F, H)), verbose=False)
    model[0].reverse = True
    with pytest.warns(UserWarning, match="it has the option reverse"):
        gatewise.restore(model, verbose=False)
    assert isinstance(model[0], gatewise.LSTM)
    model[0].reverse = False
    assert type(gatewise.restore(model, verbose=False)[0]) is nn.LSTM


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", gatewise.kernel_names())
@pytest.mark.parametrize("lengths", [None, [6, 2, 1, 4]], ids=str)
def test_on_a_gpu(kernel, lengths):
    ours, theirs = pair_of("lstm", dtype=torch.float32, kernel=kernel)
    x, states = drawn(T, B, F, dtype=torch.float32), tuple(s.float() for s in states_of("lstm"))
    expected = one_by_one(theirs, x, lengths, states)
    ours.to("cuda")
    found = listed(*ours(x.cuda(), tuple(s.cuda() for s in states), lengths=lengths))
    torch.testing.assert_close([each.cpu() for each in found], expected, rtol=0.01, atol=0.005)
    beyond = torch.full((B,), T + 3, device="cuda")  # is not read beyond the input, and does not pass for a valid one
    assert kernel in ("cudnn", "aten") or ours(x.cuda(), lengths=beyond)[0].isnan().any()
