"""The values of every step on request: those of one call for each step, in values and in derivatives of two orders."""

import itertools

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

import gatewise
from gatewise.cells import GRU, LSTM, RNN, SHIPPED, CoupledLSTM, PeepholeLSTM
from gatewise.cells.step import next_states
from gatewise.contract.errors import ArgumentError, KernelRefused
from tests.compiled import in_graph
from tests.pairwise import each_value, pairwise

T, B, F, H = 5, 3, 3, 4
CELLS = {cell.name: cell for cell in SHIPPED}
LENGTHS = torch.tensor([5, 0, 3])
RESETS = torch.zeros(T, B, dtype=torch.bool)
RESETS[2, 0] = RESETS[1, 2] = True


def layer_of(cell, **options):
    torch.manual_seed(0)
    return gatewise.Recurrent(cell, F, H, dtype=torch.float64, **({"bias": True} | options))


def x_of(*shape):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*(shape or (T, B, F)), dtype=torch.float64, generator=generator).requires_grad_()


def flat(result):
    y, finals, *steps = result
    found = [y, *(finals if isinstance(finals, tuple) else (finals,))]
    return found, [value for layer in steps[0] for group in layer for value in group.values()] if steps else []


def one_by_one(cell, weights, x, h, others, reverse):
    """Return the states and sums of every step of one direction, each in a call of the cell's own step."""
    w_ih, w_hh, b_ih, b_hh, *parameters = weights
    states, sums, now = {name: {} for name in ("h", *cell.states)}, {name: {} for name in cell.sums}, [h, *others]
    for t in reversed(range(len(x))) if reverse else range(len(x)):
        of_input, of_hidden = (x[t] @ w_ih.t() + b_ih).chunk(len(cell.gates), -1), now[0] @ w_hh.t() + b_hh
        here = {}
        for gate, one, other in zip(cell.gates, of_input, of_hidden.chunk(len(cell.gates), -1), strict=True):
            here |= {f"{gate}_input": one, f"{gate}_recurrent": other} if gate in cell.apart else {gate: one + other}
        learned = dict(zip(cell.parameters, parameters, strict=True))
        hidden, after = next_states(cell, here, dict(zip(("h", *cell.states), now, strict=True)), learned)
        now = [hidden, *after]
        for name, value in zip(states, now, strict=True):
            states[name][t] = value
        for name, value in here.items():
            sums[name][t] = value

    def stacked(found):
        return {name: torch.stack([steps[t] for t in range(len(x))]) for name, steps in found.items()}

    return stacked(states), stacked(sums)


@pytest.mark.parametrize(("bidirectional", "name"), each_value([*itertools.product([False, True], CELLS)]), ids=str)
def test_they_are_the_values_of_a_loop(name, bidirectional):
    cell, layer, x = CELLS[name], layer_of(CELLS[name], num_layers=2, bidirectional=bidirectional), x_of()
    y, _, steps = layer(x, return_steps=True)
    given, expected = x, []
    for index in range(2):
        there = slice(index * (1 + bidirectional), (index + 1) * (1 + bidirectional))
        zeros = [torch.full((B, H), cell.initial_value(state), dtype=torch.float64) for state in ("h", *cell.states)]
        runs = [
            one_by_one(cell, weights, given, zeros[0], zeros[1:], direction == 1)
            for direction, weights in enumerate(layer.all_weights[there])
        ]
        for group in range(2):
            for key in runs[0][group]:
                expected.append(torch.cat([run[group][key] for run in runs], -1))
                torch.testing.assert_close(steps[index][group][key], expected[-1])
        given = torch.cat([states["h"] for states, _ in runs], -1)
        assert [*steps[index].states] == ["h", *cell.states]
        assert [*steps[index].sums] == [*cell.sums]
    torch.testing.assert_close(given, y)
    leaves, found = [x, *layer.parameters()], [value for layer in steps for group in layer for value in group.values()]

    def gradients(values):
        loss = sum((value.tanh() * (place + 1)).sum() for place, value in enumerate(values))
        return torch.autograd.grad(loss, leaves)

    torch.testing.assert_close(gradients(found), gradients(expected))


@pytest.mark.parametrize(
    ("name", "shape", "lengths", "resets", "batch_first", "option"),
    each_value(
        pairwise(
            [*CELLS],
            [(1, False), (2, True)],
            [None, LENGTHS],
            [None, RESETS],
            [False, True],
            [
                {},
                {"memory": "lean"},
                {"recurrent_dropout": 0.3, "zoneout": 0.2},
                {"weight_dropout": 0.3, "bias": False},
            ],
        )
    ),
    ids=lambda value: "given" if isinstance(value, torch.Tensor) else str(value),
)
def test_the_outputs_are_those_of_a_plain_call(name, shape, lengths, resets, batch_first, option):
    options = {"num_layers": shape[0], "bidirectional": shape[1], "batch_first": batch_first, **option}
    layer, x = layer_of(CELLS[name], **options), x_of()
    given = x.transpose(0, 1) if batch_first else x
    resets = resets.t() if batch_first and resets is not None else resets
    torch.manual_seed(2)
    expected, _ = flat(layer(given, lengths=lengths, resets=resets))
    torch.manual_seed(2)
    result = layer(given, lengths=lengths, resets=resets, return_steps=True)
    found, values = flat(result)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(result[2][-1].states["h"], found[0])
    leaves = [x, *layer.parameters()]
    results = [torch.autograd.grad(sum(one.tanh().sum() for one in each[:2]), leaves) for each in (found, expected)]
    torch.testing.assert_close(*results)
    for value in values:
        assert value.shape == found[0].shape
        if lengths is not None:
            in_time = value.transpose(0, 1) if batch_first else value
            assert all(in_time[length:, row].count_nonzero() == 0 for row, length in enumerate(LENGTHS))
            assert in_time[:3, 2].ne(0).any()


@pytest.mark.parametrize("reverse", [False, True])
def test_the_last_states_are_the_final_ones(reverse):
    layer, x = layer_of(PeepholeLSTM(), bidirectional=True), x_of()
    _, (h_n, c_n), (steps,) = layer(x, lengths=LENGTHS, return_steps=True)
    for name, final in (("h", h_n), ("c", c_n)):
        value = steps.states[name].split(H, -1)[reverse]
        for row in (0, 2):
            torch.testing.assert_close(value[0 if reverse else LENGTHS[row] - 1, row], final[int(reverse), row])


def test_zoneout_is_in_the_states():
    layer, x = layer_of(LSTM(), zoneout={"c": 0.5}), x_of(40, 50, F)
    _, _, (steps,) = layer(x, return_steps=True)
    kept = (steps.states["c"][1:] == steps.states["c"][:-1]).double().mean().item()
    assert abs(kept - 0.5) < 4 * (0.25 / (39 * 50 * H)) ** 0.5


def test_gradgradcheck():
    layer, x = layer_of(GRU()), x_of(3, 1, F)

    def call(x):
        _, _, (steps,) = layer(x, lengths=[3], return_steps=True)
        return steps.states["h"], *steps.sums.values()

    assert torch.autograd.gradcheck(call, (x,))
    assert torch.autograd.gradgradcheck(call, (x,))


def test_one_sequence():
    layer, x = layer_of(CoupledLSTM(), num_layers=2), x_of()
    _, _, steps = layer(x[:, 0], return_steps=True)
    _, _, batched = layer(x[:, :1], return_steps=True)
    assert len(steps) == 2
    torch.testing.assert_close(steps[1].states["c"], batched[1].states["c"].squeeze(1))


def test_without_gradients_and_without_steps():
    layer, x = layer_of(LSTM()), x_of()
    with torch.no_grad():
        _, _, (steps,) = layer(x, return_steps=True)
    recorded = layer(x, return_steps=True)[2][0]
    torch.testing.assert_close(steps.sums, {name: value.detach() for name, value in recorded.sums.items()})
    _, _, (steps,) = layer(x[:0], return_steps=True)
    assert steps.states["c"].shape == steps.sums["i"].shape == (0, B, H)


def test_autocast():
    layer, x = layer_of(RNN("tanh"), kernel="eager").float(), x_of().float()
    with torch.autocast("cpu", torch.bfloat16):
        y, _, (steps,) = layer(x, return_steps=True)
        torch.testing.assert_close(y, layer(x)[0])
    assert {value.dtype for group in steps for value in group.values()} == {torch.bfloat16}


def test_verify_shows_the_reference_kernel():
    report = gatewise.verify(layer_of(LSTM()), x_of(), return_steps=True)
    assert report.agrees
    assert report.layers[0].decision.chosen == "eager"


def test_calls_that_cannot_return_them_are_refused():
    x = x_of()
    with pytest.raises(KernelRefused, match="`kernel` must be 'auto' or 'eager' where the values of all steps are"):
        layer_of(LSTM(), kernel="aten")(x, return_steps=True)
    with pytest.raises(ArgumentError, match="`return_steps` must be False for a PackedSequence, got True"):
        layer_of(LSTM())(pack_sequence([x[:, 0]]), return_steps=True)
    torch.compiler.reset()
    layer = layer_of(LSTM())
    with pytest.raises(Exception, match=in_graph(r"`return_steps` must be False under torch\.compile")):
        torch.compile(lambda x: layer(x, return_steps=True)[0], backend="eager", fullgraph=True)(x)
    torch.compiler.reset()
