"""Resets inside sequences: one call equals one call for each episode, in values and in all gradients."""

import itertools
import re
from types import MappingProxyType

import pytest
import torch
from torch import nn

import gatewise
from gatewise.cells import Cell, CoupledLSTM
from gatewise.contract.errors import ArgumentError, KernelRefused, ShapeError
from tests.pairwise import each_value, exhaustive_unless, pairwise

T, B, F, H, L = 7, 4, 3, 5, 2
KINDS = {"lstm": (gatewise.LSTM, nn.LSTM), "gru": (gatewise.GRU, nn.GRU), "rnn": (gatewise.RNN, nn.RNN)}
RESETS = torch.zeros(T, B, dtype=torch.bool)
for step, row in ((2, 0), (5, 0), (0, 1), (4, 1), (6, 1), (1, 2), (2, 2), (4, 2), (6, 2)):
    RESETS[step, row] = True  # the last row is one episode
LENGTHS = [7, 5, 0, 6]


def layers(kind, **options):
    """Return a layer of gatewise and the same layer of PyTorch, with equal weights."""
    torch.manual_seed(0)
    peers = {name: value for name, value in options.items() if name not in ("memory", "kernel")}
    given = {"num_layers": L, "dtype": torch.float64}
    ours, theirs = KINDS[kind][0](F, H, **given | options), KINDS[kind][1](F, H, **given | peers)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def drawn(layer):
    """Return an input [T, B, F] and initial states, all of them leaves."""
    torch.manual_seed(1)
    rows, dtype = layer.num_layers * (1 + layer.bidirectional), next(layer.parameters()).dtype
    sizes = [layer.proj_size or H, *([] if not isinstance(layer, nn.LSTM | gatewise.LSTM) else [H])]
    x = torch.randn(T, B, F, dtype=dtype, requires_grad=True)
    return x, [torch.randn(rows, B, size, dtype=dtype, requires_grad=True) for size in sizes]


def called(layer, x, states, **options):
    """Return the output and the final states of a call, as one list."""
    y, finals = layer(x, tuple(states) if len(states) > 1 else states[0], **options)
    return [y, *(finals if isinstance(finals, tuple) else (finals,))]


def by_episode(layer, x, states, resets, lengths):
    """Return the same by one call of PyTorch's layer for each episode of each row."""
    directions = 1 + layer.bidirectional
    is_forward = torch.arange(states[0].shape[0]) % directions == 0
    outputs, finals = [], []
    for row, length in enumerate(lengths):
        of_row = [state[:, row] for state in states]
        cuts = [0, *(t for t in range(1, length) if resets[t, row]), length] if length else []
        pieces, ends = [], []
        for start, stop in itertools.pairwise(cuts):
            # The initial states enter the forward direction at the first step and the reverse one at the last.
            enters = torch.where(is_forward, start == 0 and not resets[0, row], stop == length)
            y, *after = called(layer, x[start:stop, row], [torch.where(enters[:, None], one, 0) for one in of_row])
            pieces.append(y)
            ends.append(after)
        outputs.append(torch.cat([*pieces, x.new_zeros(T - length, directions * (layer.proj_size or H))]))
        finals.append(
            [torch.where(is_forward[:, None], *both) for both in zip(ends[-1], ends[0], strict=True)]
            if ends
            else of_row
        )
    return [torch.stack(outputs, 1), *(torch.stack(each, 1) for each in zip(*finals, strict=True))]


def gradients(outputs, leaves):
    torch.manual_seed(2)
    return torch.autograd.grad(outputs, leaves, [torch.randn(output.shape, dtype=output.dtype) for output in outputs])


def assert_same(ours, theirs, resets=RESETS, lengths=None, **options):
    x, states = drawn(theirs)
    arranged = x.transpose(0, 1) if ours.batch_first else x
    given = resets.t() if ours.batch_first else resets
    found = called(ours, arranged, states, resets=given, lengths=lengths, **options)
    if ours.batch_first:
        theirs.batch_first, found[0] = False, found[0].transpose(0, 1)
    expected = by_episode(theirs, x, states, resets, lengths or [T] * B)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        gradients(found, [x, *states, *ours.parameters()]), gradients(expected, [x, *states, *theirs.parameters()])
    )


@pytest.mark.parametrize(
    ("kind", "bidirectional", "lengths", "memory", "batch_first"),
    pairwise([*KINDS], [False, True], [None, LENGTHS], ["normal", "lean"], [False, True]),
    ids=str,
)
def test_every_episode_is_a_sequence_of_its_own(kind, bidirectional, lengths, memory, batch_first):
    ours, theirs = layers(kind, bidirectional=bidirectional, memory=memory, batch_first=batch_first)
    assert_same(ours, theirs, lengths=lengths)


@pytest.mark.parametrize("bidirectional", [False, True], ids=["forward", "both"])
def test_with_a_projection(bidirectional):
    assert_same(*layers("lstm", bidirectional=bidirectional, proj_size=2), lengths=LENGTHS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_reset_at_every_step_leaves_no_recurrence(kind):
    assert_same(*layers(kind, bidirectional=True), resets=torch.ones_like(RESETS))


@pytest.mark.parametrize("kind", KINDS)
def test_no_step_is_reset_where_none_is_set(kind):
    ours, _ = layers(kind, bidirectional=True, kernel="eager")
    x, states = drawn(ours)
    found = called(ours, x, states, resets=torch.zeros_like(RESETS))
    torch.testing.assert_close(found, called(ours, x, states), rtol=0, atol=0)


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["equal", "lengths"])
@pytest.mark.parametrize("kind", KINDS)
def test_nan_stays_in_its_episode(kind, lengths):
    ours, _ = layers(kind, bidirectional=True, num_layers=1)
    x, states = drawn(ours)
    y, *finals = called(ours, x, states, resets=RESETS, lengths=lengths)
    broken = x.detach().clone()
    broken[2:5, 0] = torch.nan  # an episode between two others
    broken[:4, 1] = torch.nan  # the first episode
    elsewhere = torch.ones(T, B, dtype=torch.bool)
    elsewhere[2:5, 0] = elsewhere[:4, 1] = False
    leaf = broken.requires_grad_()
    found, *others = called(ours, leaf, states, resets=RESETS, lengths=lengths)
    assert found[~elsewhere].isnan().all()
    torch.testing.assert_close(found[elsewhere], y[elsewhere], rtol=0, atol=0)
    for state, expected in zip(others, finals, strict=True):
        torch.testing.assert_close(state[0], expected[0], rtol=0, atol=0)  # the last episodes of the rows are sound
        assert state[1, 1].isnan().all()  # the reverse direction ends in the first one
    dx, *dstates = torch.autograd.grad(found.square().sum(), [leaf, *states])
    clean = torch.autograd.grad(y.square().sum(), [x, *states])
    torch.testing.assert_close(dx[elsewhere], clean[0][elsewhere])
    torch.testing.assert_close(dstates, list(clean[1:]))  # both broken episodes are behind a border or begin with one


def test_nan_in_the_initial_states_is_reset():
    ours, _ = layers("lstm")
    x, states = drawn(ours)
    resets = RESETS.clone()
    resets[0] = True
    expected = called(ours, x, states, resets=resets)
    bad = [torch.full_like(state, torch.nan) for state in states]
    torch.testing.assert_close(called(ours, x, bad, resets=resets), expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_stop_at_a_reset(kind):
    ours, _ = layers(kind)
    x, states = drawn(ours)
    y, *_ = called(ours, x, states, resets=RESETS)
    dx, *dstates = torch.autograd.grad(y[5, 0].sum() + y[4, 3].sum(), [x, *states])
    assert dx[:5, 0].count_nonzero() == 0
    assert dx[5, 0].count_nonzero() == F
    assert dx[:5, 3].count_nonzero() == 5 * F
    for gradient in dstates:
        assert gradient[:, :3].count_nonzero() == 0
        assert gradient[:, 3].count_nonzero() == gradient[:, 3].numel()


class TwoStates(Cell):
    """A cell of two states whose step reads all of them."""

    gates = ("a", "g")
    states = ("c", "n")

    def step(self, gate, state):
        a = torch.sigmoid(gate.a)
        c, n = a * state.c + torch.tanh(gate.g), a * state.n + 1
        return torch.tanh(c / n) + 0.1 * state.h, {"c": c, "n": n}


@pytest.mark.parametrize("cell", [CoupledLSTM(), TwoStates()], ids=lambda cell: cell.name)
def test_cells_of_ones_own(cell):
    torch.manual_seed(0)
    layer = gatewise.Recurrent(cell, F, H, 1, bidirectional=True, dtype=torch.float64)
    x = torch.randn(T, 1, F, dtype=torch.float64, requires_grad=True)
    resets = torch.tensor([False, False, True, False, False, True, False])
    y, finals = layer(x, resets=resets.unsqueeze(1))
    pieces = [layer(x[start:stop]) for start, stop in ((0, 2), (2, 5), (5, 7))]
    expected = [torch.cat([y for y, _ in pieces])]
    for place, state in enumerate(finals):
        expected.append(torch.stack([pieces[-1][1][place][0], pieces[0][1][place][1]]))
        assert state.shape == (2, 1, H)
    found, leaves = [y, *finals], [x, *layer.parameters()]
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(found, leaves), gradients(expected, leaves))


@pytest.mark.parametrize("kind", KINDS)
def test_one_sequence(kind):
    ours, _ = layers(kind, bidirectional=True)
    x, states = drawn(ours)
    expected = called(ours, x, states, resets=RESETS)
    found = called(ours, x[:, 2], [state[:, 2] for state in states], resets=RESETS[:, 2])
    torch.testing.assert_close(found[0], expected[0][:, 2])
    torch.testing.assert_close(found[1:], [state[:, 2] for state in expected[1:]])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64], ids=str)
def test_integers_from_a_buffer(dtype):
    ours, _ = layers("lstm")
    x, states = drawn(ours)
    expected = called(ours, x, states, resets=RESETS)
    torch.testing.assert_close(called(ours, x, states, resets=RESETS.to(dtype)), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("value", "compiled"),
    exhaustive_unless(
        [(2, False), (-1, False), (256, False), (256, True)], itertools.product([2, -1, 256], [False, True])
    ),
)
def test_every_integer_but_zero_is_a_reset(value, compiled):
    ours, _ = layers("lstm")
    x, states = drawn(ours)
    expected = ours(x, states, resets=RESETS)
    torch.compiler.reset()
    call = torch.compile(ours, backend="eager", fullgraph=True) if compiled else ours
    torch.testing.assert_close(call(x, states, resets=RESETS * value), expected, rtol=0, atol=0)


def test_a_buffer_may_be_written_over_before_the_backward_pass():
    ours, _ = layers("lstm")
    x, states = drawn(ours)
    expected = gradients(called(ours, x, states, resets=RESETS), [x, *ours.parameters()])
    buffer = RESETS.clone()
    found = called(ours, x, states, resets=buffer)
    buffer.fill_(True)
    torch.testing.assert_close(gradients(found, [x, *ours.parameters()]), expected, rtol=0, atol=0)


def test_dropout_between_layers_is_that_of_the_seed():
    ours, _ = layers("gru", dropout=0.5, kernel="eager")
    x, states = drawn(ours)
    found, expected = [], []
    for into, resets in ((found, RESETS), (expected, None)):
        torch.manual_seed(3)
        into += called(ours, x, states, resets=resets)
    torch.testing.assert_close(found[0][:, 3], expected[0][:, 3], rtol=0, atol=0)  # this row is one episode
    assert not torch.equal(found[0][5:, 0], expected[0][5:, 0])


@pytest.mark.parametrize("kind", KINDS)
def test_autocast(kind):
    ours, _ = layers(kind, dtype=torch.float32)
    x, states = drawn(ours)
    with torch.autocast("cpu", torch.bfloat16):
        found = called(ours, x, states, resets=RESETS)
    assert found[0].dtype == torch.bfloat16
    expected = called(ours, x, states, resets=RESETS)
    torch.testing.assert_close(found[0].float(), expected[0], rtol=0.05, atol=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_second_derivatives(kind):
    ours, _ = layers(kind, bidirectional=True, num_layers=1)
    weights = dict(ours.named_parameters())
    x, states = drawn(ours)
    x, *states = (tensor[:4, :2].detach().requires_grad_() for tensor in (x, *states))

    def call(x, w_hh, *states):
        given = weights | {"weight_hh_l0": w_hh}
        hx = states if kind == "lstm" else states[0]
        y, _ = torch.func.functional_call(ours, given, (x, hx), {"resets": RESETS[:4, :2]})
        return y

    assert torch.autograd.gradgradcheck(
        call, (x, weights["weight_hh_l0"].detach().requires_grad_(), *states), fast_mode=True
    )


@pytest.mark.parametrize("kind", KINDS)
def test_transforms_of_torch_func(kind):
    ours, _ = layers(kind)
    x, _ = drawn(ours)

    def loss(weights, x, resets):
        y, _ = torch.func.functional_call(ours, weights, (x,), {"resets": resets})
        return y.square().sum()

    weights = dict(ours.named_parameters())
    rows = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 1, 1))(weights, x, RESETS)
    y, _ = ours(x, resets=RESETS)
    expected = torch.autograd.grad(y.square().sum(), list(weights.values()))
    torch.testing.assert_close([each.sum(0) for each in rows.values()], list(expected))


@pytest.mark.parametrize(
    ("kind", "options"),
    each_value(pairwise([*KINDS], [{}, {"num_layers": 2, "bidirectional": True, "batch_first": True}]), most=2),
    ids=str,
)
def test_compiled_in_one_graph(kind, options):
    torch.compiler.reset()
    ours, _ = layers(kind, **{"num_layers": 1, **options})
    x, states = drawn(ours)
    x = x.detach().transpose(0, 1).contiguous().requires_grad_() if ours.batch_first else x
    resets, leaves = (RESETS.t() if ours.batch_first else RESETS), [x, *states, *ours.parameters()]
    expected = called(ours, x, states, resets=resets)
    compiled = torch.compile(
        lambda x, states, resets: called(ours, x, states, resets=resets), backend="aot_eager", fullgraph=True
    )
    found = compiled(x, states, resets)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(found, leaves), gradients(expected, leaves))


def test_empty_calls():
    ours, _ = layers("lstm", bidirectional=True)
    for time, batch in ((0, 2), (3, 0)):
        x = torch.zeros(time, batch, F, dtype=torch.float64)
        y, _ = ours(x, resets=torch.ones(time, batch, dtype=torch.bool))
        assert y.shape == (time, batch, 2 * H)
    x, states = drawn(ours)
    _, *finals = called(ours, x, states, resets=torch.ones_like(RESETS), lengths=[0] * B)
    torch.testing.assert_close(finals, states, rtol=0, atol=0)


def test_the_decision_shows_them():
    ours, _ = layers("lstm", dtype=torch.float32)
    decision = gatewise.explain(ours, (T, B, F), resets=True, device="h200")
    assert decision.chosen == "persistent"
    assert ", resets," in str(decision.problem)
    for name in ("cudnn", "aten"):
        assert "resets" in [refusal.quantity for refusal in decision.verdict(name).refusals]
    x, _ = drawn(ours)
    report = gatewise.verify(ours, x, resets=RESETS)
    assert report.layers[0].decision.problem.resets
    assert report.agrees


@pytest.mark.parametrize("kernel", ["aten", "cudnn"])
def test_a_named_kernel_refuses(kernel):
    ours, _ = layers("lstm", kernel=kernel)
    x, _ = drawn(ours)
    with pytest.raises(KernelRefused, match="resets is given, allowed: none"):
        ours(x, resets=RESETS)


def test_a_packed_batch_is_refused():
    ours, _ = layers("gru")
    packed = nn.utils.rnn.pack_sequence([torch.randn(3, F, dtype=torch.float64)])
    with pytest.raises(ArgumentError, match="`resets` must be None for a packed batch, got Tensor"):
        ours(packed, resets=torch.zeros(3, 1, dtype=torch.bool))


@pytest.mark.parametrize(
    ("shape", "batch_first", "given", "expectation"),
    [
        ((T, B, F), False, (B, T), "[T, B] = [7, 4], got [4, 7]"),
        ((B, T, F), True, (T, B), "[B, T] = [4, 7], got [7, 4]"),
        ((B, T, F), True, (B,), "[B, T] = [4, 7], got [4]"),
        ((T, F), False, (T, 1), "[T] = [7], got [7, 1]"),
        ((T, F), False, (), "[T] = [7], got []"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_another_shape_is_refused_in_the_callers_arrangement(kind, shape, batch_first, given, expectation):
    ours, _ = layers(kind, batch_first=batch_first)
    with pytest.raises(ShapeError, match=re.escape(f"`resets` must be one value for each step, {expectation}")):
        ours(torch.zeros(shape, dtype=torch.float64), resets=torch.zeros(given, dtype=torch.bool))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_no_call_waits_for_the_gpu(kind):
    ours, _ = layers(kind, dtype=torch.float32, bidirectional=True)
    ours, (x, states) = ours.cuda(), drawn(ours)
    x, states, resets = x.detach().cuda().requires_grad_(), [state.detach().cuda() for state in states], RESETS.cuda()
    lengths = torch.tensor(LENGTHS, device="cuda")
    called(ours, x, states, resets=resets, lengths=lengths)[0].sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        called(ours, x, states, resets=resets, lengths=lengths)[0].sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_captured_call_reads_the_resets_of_the_moment():
    ours, _ = layers("lstm", dtype=torch.float32)
    ours, (x, states) = ours.cuda(), drawn(ours)
    x, states, resets = x.detach().cuda(), [state.detach().cuda() for state in states], RESETS.cuda()
    with torch.no_grad():
        ours(x, tuple(states), resets=resets)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y, _ = ours(x, tuple(states), resets=resets)
        resets.logical_not_()
        graph.replay()
        torch.testing.assert_close(y, ours(x, tuple(states), resets=resets)[0])


def test_a_reset_takes_the_states_of_a_cell_back_to_their_initial_values():
    """With zeros, exp(z_i - m) would underflow in the first step of an episode, and 0 / 0 would be NaN."""
    layer = gatewise.Recurrent(gatewise.cells.SLSTM(), 3, 4)
    with torch.no_grad():
        layer.bias_ih_l0[:4] = -200.0
    x, resets = torch.randn(6, 2, 3, requires_grad=True), torch.zeros(6, 2, dtype=torch.bool)
    resets[3] = True
    y = layer(x, resets=resets)[0]
    torch.testing.assert_close(y, torch.cat([layer(x[:3])[0], layer(x[3:])[0]]))
    assert torch.autograd.grad(y.sum(), x)[0].isfinite().all()


class StartsAtOne(gatewise.Cell):
    """A cell whose hidden state begins with ones."""

    gates = ("a",)
    initial_states = MappingProxyType({"h": 1.0})

    def step(self, gate, state):
        return torch.tanh(gate.a) * state.h, {}


@pytest.mark.parametrize("memory", ["normal", "lean"])
def test_the_hidden_state_is_reset_to_its_initial_value_too(memory):
    layer = gatewise.Recurrent(StartsAtOne(), 3, 4, bidirectional=True, dtype=torch.float64, memory=memory)
    x, resets = torch.randn(6, 2, 3, dtype=torch.float64, requires_grad=True), torch.zeros(6, 2, dtype=torch.bool)
    resets[3] = True
    leaves = [x, *layer.parameters()]
    found, expected = layer(x, resets=resets)[0], torch.cat([layer(x[:3])[0], layer(x[3:])[0]])
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(y.square().sum(), leaves) for y in (found, expected)]
    torch.testing.assert_close(*gradients)
