"""One direction unrolled over time, compared with PyTorch's layers in float64, autograd and numerical derivatives."""

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from gatewise.cells.gru import GRU
from gatewise.cells.lstm import LSTM
from gatewise.contract.saved import Needs
from gatewise.contract.weights import DirectionWeights
from gatewise.derivation.pointwise import pointwise_of
from gatewise.derivation.trace import traced
from gatewise.kernels.eager import adjoint, blocks, unroll
from tests.derivation.statements import ALL, LIBRARY, name
from tests.pairwise import exhaustive

MODULES = {LSTM(): torch.nn.LSTM, GRU(): torch.nn.GRU}

each_cell = pytest.mark.parametrize("cell", ALL, ids=name)


@st.composite
def directions(draw, cells):
    """Inputs of one direction of one layer, float64."""
    cell = draw(st.sampled_from(cells))
    time, batch = draw(st.integers(0, 7)), draw(st.integers(1, 4))
    input_size, hidden_size = draw(st.sampled_from([1, 3, 31])), draw(st.sampled_from([1, 2, 3, 31]))
    may_project = hidden_size > 1 and not traced(cell).reads_hidden
    proj_size = draw(st.sampled_from([0, 1])) if may_project else 0
    bias = draw(st.booleans())
    lengths = draw(st.none() | st.lists(st.integers(0, time), min_size=batch, max_size=batch))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    return (
        cell,
        build(cell, time, batch, input_size, hidden_size, proj_size, bias, lengths, generator),
        draw(st.booleans()),
    )


def build(cell, time, batch, input_size, hidden_size, proj_size, bias, lengths, generator):
    def drawn(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    state, gates = proj_size or hidden_size, len(cell.gates) * hidden_size
    weights = DirectionWeights(
        drawn(gates, input_size) * 0.5,
        drawn(gates, state) * 0.5,
        drawn(gates) if bias else None,
        drawn(gates) if bias else None,
        drawn(proj_size, hidden_size) if proj_size else None,
        tuple(drawn(hidden_size) * 0.5 for _ in cell.parameters),
    )
    lengths = None if lengths is None else torch.tensor(lengths)
    states = tuple(drawn(batch, hidden_size) for _ in cell.states)
    return drawn(time, batch, input_size), drawn(batch, state), states, weights, lengths


def torchs(cell, x, h0, states0, weights, lengths, reverse):
    """Run PyTorch's layer on one sequence at a time, reversed for the reverse direction."""
    options = {"proj_size": h0.shape[1]} if weights.w_hr is not None else {}
    hidden_size = weights.w_hh.shape[0] // len(cell.gates)
    module = MODULES[cell](x.shape[2], hidden_size, bias=weights.b_ih is not None, dtype=torch.float64, **options)
    parameters = dict(zip((name for name, _ in module.named_parameters()), weights.tensors(), strict=True))
    y, finals = [], []
    for row in range(x.shape[1]):
        length = x.shape[0] if lengths is None else int(lengths[row])
        state = tuple(one[None, row : row + 1] for one in (h0, *states0))
        out = x.new_zeros(x.shape[0], 1, h0.shape[1])
        if length:
            steps = x[:length, row : row + 1]
            arguments = (steps.flip(0) if reverse else steps, state if states0 else state[0])
            some, state = torch.func.functional_call(module, parameters, arguments)
            state = state if states0 else (state,)
            out = torch.cat([some.flip(0) if reverse else some, out[length:]])
        y.append(out)
        finals.append([one[0] for one in state])
    return torch.cat(y, 1), *(torch.cat(rows) for rows in zip(*finals, strict=True))


def resets_of(x, seed):
    return torch.rand(x.shape[:2], generator=torch.Generator().manual_seed(seed)) < 0.4


def leaves_of(x, h0, states0, weights):
    return [tensor.requires_grad_() for tensor in (x, h0, *states0, *weights.tensors())]


def outputs_of(run):
    return run.y, run.h_n, *run.states_n


def gradients_of(cell, x, h0, states0, weights, run, above, **options):
    dy, dh, *dstates = above
    found = adjoint.backward(cell, x, h0, states0, weights, run.y, run.kept, dy, dh, dstates, **options)
    return found.x, found.h0, *found.states0, *found.weights


def assert_all_close(found, expected):
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


@hypothesis.settings(max_examples=80, deadline=None)
@hypothesis.given(directions(LIBRARY))
def test_forward_and_backward_agree_with_torch(drawn):
    cell, (x, h0, states0, weights, lengths), reverse = drawn
    leaves = leaves_of(x, h0, states0, weights)
    expected = torchs(cell, x, h0, states0, weights, lengths, reverse)
    above = [torch.randn_like(output) for output in expected]
    # If all sequences are empty, y is not attached to autograd's graph.
    outputs, given = zip(*(pair for pair in zip(expected, above, strict=True) if pair[0].requires_grad), strict=True)
    expected_gradients = torch.autograd.grad(outputs, leaves, given, materialize_grads=True)
    options = {"reverse": reverse, "lengths": lengths}
    with torch.no_grad():
        run = unroll.forward(cell, x, h0, states0, weights, keep=True, **options)
        found = gradients_of(cell, x, h0, states0, weights, run, above, **options)
    assert_all_close(outputs_of(run), expected)
    assert_all_close(found, expected_gradients)


@hypothesis.settings(max_examples=80, deadline=None)
@hypothesis.given(directions(ALL), st.none() | st.integers(0, 1000))
def test_autograd_of_the_forward_pass_agrees_with_the_backward_pass(drawn, seed_of_resets):
    cell, (x, h0, states0, weights, lengths), reverse = drawn
    leaves, options = leaves_of(x, h0, states0, weights), {"reverse": reverse, "lengths": lengths}
    options["resets"] = None if seed_of_resets is None else resets_of(x, seed_of_resets)
    recorded = outputs_of(unroll.forward(cell, x, h0, states0, weights, keep=True, **options))
    above = [torch.randn_like(output) for output in recorded]
    expected = torch.autograd.grad(recorded, leaves, above, materialize_grads=True)
    with torch.no_grad():
        plain = unroll.forward(cell, x, h0, states0, weights, keep=True, **options)
        found = gradients_of(cell, x, h0, states0, weights, plain, above, **options)
    assert_all_close([output.detach() for output in recorded], outputs_of(plain))
    assert_all_close(found, expected)


@pytest.mark.parametrize("lengths", [*exhaustive(None), [2, 3, 0]], ids=["dense", "lengths"])
@pytest.mark.parametrize(("cell", "proj_size", "reverse"), [(LSTM(), 1, True), (LSTM(), 0, False), (GRU(), 0, True)])
def test_numerical_first_and_second_derivatives(cell, lengths, reverse, proj_size):
    generator = torch.Generator().manual_seed(1)
    x, h0, states0, weights, lengths = build(cell, 3, 3, 2, 2, proj_size, True, lengths, generator)

    def run(x, h0, *others):
        states, tensors = others[: len(states0)], others[len(states0) :]
        given = DirectionWeights.from_tensors(tensors)
        return outputs_of(unroll.forward(cell, x, h0, states, given, reverse=reverse, lengths=lengths))

    leaves = leaves_of(x, h0, states0, weights)
    assert torch.autograd.gradcheck(run, leaves)
    # Along random directions, as PyTorch's own tests do.
    assert torch.autograd.gradgradcheck(run, leaves, atol=1e-4, fast_mode=True)


@pytest.mark.parametrize("cell", LIBRARY, ids=name)
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_garbage_in_padding_does_not_reach_autograd(cell, reverse):
    generator = torch.Generator().manual_seed(2)
    x, h0, states0, weights, lengths = build(cell, 4, 3, 3, 5, 0, True, [2, 0, 4], generator)
    above = None
    results = []
    for garbage in (0.0, float("nan")):
        real = (torch.arange(4)[:, None] < lengths).unsqueeze(2)
        given = torch.where(real, x, garbage), h0, *states0, *weights.tensors()
        leaves = [tensor.detach().clone().requires_grad_() for tensor in given]
        count = 2 + len(states0)
        made = DirectionWeights.from_tensors(leaves[count:])
        run = unroll.forward(cell, *leaves[:2], leaves[2:count], made, reverse=reverse, lengths=lengths)
        above = above or [torch.randn_like(output) for output in outputs_of(run)]
        results.append((*outputs_of(run), *torch.autograd.grad(outputs_of(run), leaves, above)))
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty)


@each_cell
@pytest.mark.parametrize("lengths", [None, [9, 4, 0]], ids=["dense", "lengths"])
@pytest.mark.parametrize("with_resets", [False, True], ids=["plain", "resets"])
def test_the_block_size_does_not_change_the_result(cell, lengths, with_resets, monkeypatch):
    generator = torch.Generator().manual_seed(3)
    x, h0, states0, weights, lengths = build(cell, 9, 3, 3, 5, 0, True, lengths, generator)
    options = {"lengths": lengths, "resets": resets_of(x, 3) if with_resets else None}
    run = unroll.forward(cell, x, h0, states0, weights, keep=True, **options)
    above = [torch.randn_like(output) for output in outputs_of(run)]
    whole = gradients_of(cell, x, h0, states0, weights, run, above, **options)
    for steps in (1, 2, 4):
        for module in (adjoint, blocks):
            monkeypatch.setitem(module._BLOCKS, "cpu", (steps, 1))
        assert adjoint.block_steps(cell, 3, 5, "cpu") == steps
        assert_all_close(gradients_of(cell, x, h0, states0, weights, run, above, **options), whole)


@each_cell
def test_backward_may_run_twice_and_does_not_modify_the_kept_tensors(cell):
    generator = torch.Generator().manual_seed(4)
    x, h0, states0, weights, _ = build(cell, 5, 3, 3, 5, 0, True, None, generator)
    run = unroll.forward(cell, x, h0, states0, weights, keep=True)
    kept = (run.kept.sums, *run.kept.states)
    copies = [tensor.clone() for tensor in kept]
    above = [torch.randn_like(output) for output in outputs_of(run)]
    first, second = (gradients_of(cell, x, h0, states0, weights, run, above, needs=Needs()) for _ in range(2))
    assert torch.equal(first[0], second[0])
    for tensor, copy in zip(kept, copies, strict=True):
        assert torch.equal(tensor, copy)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_a_pass_in_16_bits_rounds_only_the_operands_of_products(dtype):
    cell, generator = LSTM(), torch.Generator().manual_seed(5)
    x, h0, states0, weights, _ = build(cell, 40, 3, 3, 31, 0, True, None, generator)
    half = DirectionWeights.from_tensors([tensor.to(dtype) for tensor in weights.tensors()])
    with torch.no_grad():
        run = unroll.forward(cell, x.to(dtype), h0.to(dtype), [states0[0].to(dtype)], half, keep=True)
    assert {tensor.dtype for tensor in outputs_of(run)} == {dtype}
    assert (run.kept.sums.dtype, run.kept.states[0].dtype) == (dtype, unroll.state_dtype(dtype))
    replayed = states0[0].to(dtype).float()
    for sums, c in zip(run.kept.sums, run.kept.states[0], strict=True):
        _, replayed = pointwise_of(cell).step(sums.float(), replayed, replayed)
        assert torch.equal(replayed, c)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_small_increments_of_a_hidden_state_in_16_bits_are_not_lost(dtype):
    # With the candidate n = 1 and the update gate z = 511/512 of a GRU, h increases from 0 towards 1.
    cell, steps = GRU(), 512
    x = torch.zeros(steps, 1, 1, dtype=dtype)
    bias = torch.tensor([0.0, torch.logit(torch.tensor(511 / 512)).item(), 40.0], dtype=dtype)
    weights = DirectionWeights(*(torch.zeros(3, 1, dtype=dtype) for _ in range(2)), bias, torch.zeros_like(bias))
    with torch.no_grad():
        run = unroll.forward(cell, x, torch.zeros(1, 1, dtype=dtype), (), weights)
    share = torch.sigmoid(-bias[1].double()).item()
    assert abs(run.h_n.item() - (1 - (1 - share) ** steps)) < 2 * torch.finfo(dtype).eps
