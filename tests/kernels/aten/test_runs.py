"""Packed batches that `aten` computes as runs of steps with equal batch sizes, beside PyTorch's layer in float64."""

import itertools
import random

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import gatewise
from gatewise.contract import ranking
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.kernels.aten import runs

CPU = Device.probe("cpu")
LENGTHS = {
    "runs of several steps": [7, 7, 4, 2],
    "runs of one step": [5, 4, 3, 2, 1],
    "a first run of one step": [4, 3, 3],
    "one run": [3, 3],
}


@pytest.fixture
def calls(monkeypatch):
    """Count the calls of both ways; those of PyTorch's operator are the ones for which runs are not chosen."""
    found = {"runs": 0, "packed": 0}

    def counted(way, function):
        def call(*arguments):
            found[way] += 1
            return function(*arguments)

        return call

    monkeypatch.setattr(runs, "call", counted("runs", runs.call))
    are_chosen = runs.are_chosen

    def chosen(*arguments):
        found["packed"] += not are_chosen(*arguments)
        return are_chosen(*arguments)

    monkeypatch.setattr(runs, "are_chosen", chosen)
    return found


def _results(layer, packed, states, above):
    for tensor in (packed.data, *states):
        tensor.grad = None
    layer.zero_grad()
    y, final = layer(packed, tuple(states) if len(states) == 2 else states[0])
    outputs = [y.data, *([final] if len(states) == 1 else final)]
    torch.autograd.backward(outputs, above)
    return [*outputs, packed.data.grad, *[state.grad for state in states], *[each.grad for each in layer.parameters()]]


def _both(monkeypatch, calls, kind, lengths, dtype=torch.float64, **options):
    """Return the results of the runs and of PyTorch's layer in float64: outputs, final states and all gradients."""
    monkeypatch.setattr(runs, "is_faster", lambda *_: True)
    torch.manual_seed(3)
    directions = options.get("num_layers", 1) * (1 + options.get("bidirectional", False))
    rival = getattr(nn, kind)(3, 5, **options).double()
    layer = getattr(gatewise, kind)(3, 5, **options, kernel="aten").to(dtype)
    layer.load_state_dict(rival.state_dict())
    x = torch.randn(max(lengths), len(lengths), 3)
    states = [torch.randn(directions, len(lengths), options.get("proj_size", 5))]
    if kind == "LSTM":
        states.append(torch.randn(directions, len(lengths), 5))
    above = [torch.randn(sum(lengths), states[0].shape[2] * (1 + options.get("bidirectional", False)))]
    above += [torch.randn(state.shape) for state in states]
    found = []
    for each, of in ((layer, dtype), (rival, torch.float64)):
        packed = pack_padded_sequence(x.to(of), torch.tensor(lengths), enforce_sorted=False)
        packed.data.requires_grad_()
        own = [state.detach().to(of, copy=True).requires_grad_() for state in states]
        found.append(_results(each, packed, own, [tensor.to(of) for tensor in above]))
    assert calls["runs"] == (len(set(lengths)) > 1)  # equal lengths are an ordinary batch
    return found


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("kind", ["GRU", "RNN"])
def test_runs_agree_in_float64(monkeypatch, calls, kind, lengths):
    ours, theirs = _both(monkeypatch, calls, kind, lengths, num_layers=2, bidirectional=True)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("options", [{"bias": False}, {"num_layers": 2}])
def test_options_agree_in_float64(monkeypatch, calls, options):
    ours, theirs = _both(monkeypatch, calls, "GRU", LENGTHS["runs of several steps"], **options)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("options", [{"bidirectional": True}, {"bias": False, "num_layers": 2}])
def test_onednn_computes_runs_in_float32(monkeypatch, calls, lengths, options):
    ours, theirs = _both(monkeypatch, calls, "LSTM", lengths, torch.float32, **options)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


def test_dropout_draws_what_pytorch_draws(monkeypatch, calls):
    found = []
    for faster in (True, False):
        monkeypatch.setattr(runs, "is_faster", lambda *_, faster=faster: faster)
        torch.manual_seed(4)
        layer = gatewise.LSTM(3, 5, num_layers=3, dropout=0.5, kernel="aten")
        packed = pack_padded_sequence(torch.randn(6, 3, 3), torch.tensor([6, 4, 4]))
        found.append(layer(packed)[0].data)
    assert calls == {"runs": 1, "packed": 1}
    torch.testing.assert_close(*found)


def test_lengths_with_an_empty_sequence(monkeypatch, calls):
    monkeypatch.setattr(runs, "is_faster", lambda *_: True)
    layer = gatewise.GRU(3, 5, bidirectional=True, kernel="aten").double()
    x, lengths = torch.randn(6, 4, 3, dtype=torch.float64), [2, 0, 6, 5]
    y, h_n = layer(x, lengths=lengths)
    assert calls["runs"] == 1
    with gatewise.use_kernel("eager"):
        layer.kernel = "auto"
        expected, hidden = layer(x, lengths=lengths)
    for one, other in ((y, expected), (h_n, hidden)):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_the_second_derivative_of_runs(monkeypatch, calls):
    monkeypatch.setattr(runs, "is_faster", lambda *_: True)
    layer = gatewise.GRU(2, 3, kernel="aten").double()

    def of(data):
        packed = pack_padded_sequence(data, torch.tensor([3, 1]))
        return layer(packed)[0].data

    assert torch.autograd.gradgradcheck(of, torch.randn(3, 2, 2, dtype=torch.float64, requires_grad=True))
    assert calls["runs"]


@pytest.mark.parametrize("layout", ["transposed", "columns", "one row"])
def test_data_with_any_strides(monkeypatch, calls, layout):
    monkeypatch.setattr(runs, "is_faster", lambda *_: True)
    sizes = torch.tensor([4, 4, 4, 2, 2])
    tokens = int(sizes.sum())
    made = {
        "transposed": lambda: torch.randn(3, tokens).t(),
        "columns": lambda: torch.randn(tokens, 7)[:, 2:5],
        "one row": lambda: torch.randn(1, 3).expand(tokens, 3),
    }
    layer, rival, data = gatewise.LSTM(3, 5, kernel="aten"), nn.LSTM(3, 5), made[layout]()
    rival.load_state_dict(layer.state_dict())
    outputs = [each(PackedSequence(data, sizes))[0].data for each in (layer, rival)]
    assert calls["runs"] == 1
    torch.testing.assert_close(*outputs)
    gradients = [
        torch.autograd.grad(y.square().sum(), each.weight_ih_l0)
        for y, each in zip(outputs, (layer, rival), strict=True)
    ]
    torch.testing.assert_close(*gradients)


def test_derivatives_in_forward_mode_are_those_of_pytorchs_operator(calls):
    layer, sizes = gatewise.LSTM(3, 5, kernel="aten"), torch.tensor([4] * 60 + [2] * 60)
    data = torch.randn(int(sizes.sum()), 3)
    layer(PackedSequence(data, sizes))
    assert calls == {"runs": 1, "packed": 0}
    with forward_ad.dual_level():
        y, _ = layer(PackedSequence(forward_ad.make_dual(data, torch.ones_like(data)), sizes))
        assert forward_ad.unpack_dual(y.data).tangent is not None
    assert calls == {"runs": 1, "packed": 1}


def test_what_was_not_measured_is_not_computed_run_by_run():
    problem = Problem(200, 4, 64, 64, layout=Layout.PACKED, needs_grad=True)
    assert runs.takes(problem, CPU)
    assert not runs.takes(problem.replace(dtype=torch.float64), CPU)
    assert not runs.takes(problem.replace(proj_size=8), CPU)
    assert not runs.takes(problem.replace(cell=gatewise.cells.GRU(), needs_grad=False), CPU)
    assert not runs.takes(problem, Device.named("h200"))
    with torch.backends.mkldnn.flags(enabled=False):
        assert not runs.takes(problem, CPU)


def test_runs_are_grouped():
    assert runs.runs_of([3, 3, 2, 1, 1, 1]) == (runs.Run(2, 3), runs.Run(1, 2), runs.Run(3, 1))


def test_long_runs_are_chosen_and_short_ones_are_not():
    problem = Problem(200, 4, 64, 64, layout=Layout.PACKED, needs_grad=True)
    assert runs.is_faster(runs.costs_of(problem, CPU), (4,) * 100 + (2,) * 100)
    short = problem.replace(time=6)
    assert not runs.is_faster(runs.costs_of(short, CPU), (4, 3, 2, 2, 1, 1))
    assert not runs.is_faster(runs.costs_of(problem, CPU), (4,) * 200), "PyTorch's operator does that itself"
    assert not runs.takes(problem.replace(dtype=torch.bfloat16), CPU)


def test_quantities_count_steps_and_runs():
    problem = Problem(6, 3, 2, 4, layout=Layout.PACKED, needs_grad=True)
    found = runs.quantities(problem, (3, 3, 2, 1, 1, 1), by_onednn=False)
    matrices = 16 * (2 + 4)
    assert found["packed"] == {"call": 1, "steps": 6, "products": 11 * matrices, "zeros": 6 * 11 * 16}
    several = {"runs": 2, "run weights": 0, "run steps": 5, "single steps": 1, "single weights": matrices}
    assert found["runs"] == {"call": 1, **several, "products": 11 * matrices}


@pytest.mark.parametrize(("kind", "needs_grad"), [("LSTM", False), ("LSTM", True), ("GRU", True), ("RNN", True)])
def test_the_way_that_is_predicted_is_that_of_the_quantities(kind, needs_grad):
    generator, found = random.Random(0), []
    for _ in range(400):
        H, B, T = generator.choice([4, 64, 512]), generator.choice([2, 8, 64]), generator.choice([3, 10, 100])
        problem = Problem(T, B, H, H, layout=Layout.PACKED, needs_grad=needs_grad, cell=_cell(kind))
        lengths = [generator.choice([T, T // 2, generator.randint(1, T)]) for _ in range(B)]
        sizes = [sum(length > step for length in lengths) for step in range(max(lengths))]
        weights = ranking.weights(CPU, f"aten packed {kind.lower()}")
        mode = "training" if needs_grad else "inference"
        times = [
            sum(amount * weights[f"{mode} {way} {name}"] for name, amount in counted.items() if amount)
            for way, counted in runs.quantities(problem, sizes, by_onednn=kind == "LSTM").items()
        ]
        part = ranking.weights(Device.probe("cpu"), "aten packed limits")["training"]
        limit = part * times[0] if needs_grad else times[0]
        expected = len(set(sizes)) > 1 and times[1] < limit
        assert runs.is_faster(runs.costs_of(problem, CPU), sizes) == expected, (problem, sizes)
        found.append(expected)
    assert {*found} == {True, False}


@pytest.mark.parametrize(("kind", "needs_grad"), list(itertools.product(["LSTM", "GRU", "RNN"], [False, True])))
def test_a_call_takes_the_way_that_is_predicted(calls, kind, needs_grad):
    layer = getattr(gatewise, kind)(4, 4, kernel="aten")
    lengths = [150, 75]
    with torch.set_grad_enabled(needs_grad):
        layer(torch.randn(150, 2, 4), lengths=lengths)
    problem = Problem(150, 2, 4, 4, layout=Layout.PACKED, needs_grad=needs_grad, cell=_cell(kind))
    expected = runs.takes(problem, CPU) and runs.is_faster(runs.costs_of(problem, CPU), (2,) * 75 + (1,) * 75)
    assert calls == {"runs": int(expected), "packed": int(runs.may_take(problem) and not expected)}


def _cell(kind):
    return {"LSTM": gatewise.cells.LSTM(), "GRU": gatewise.cells.GRU(), "RNN": gatewise.cells.RNN("tanh")}[kind]
