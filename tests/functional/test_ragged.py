"""Calls with lengths on a CPU by PyTorch's operators: lengths in any order, equal ones, and settings that change."""

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import gatewise
from gatewise.contract import ranking
from gatewise.contract.device import Device
from gatewise.contract.errors import ArgumentError, DtypeError, ShapeError
from gatewise.functional import plan
from gatewise.kernels.aten import runs
from tests.pairwise import each_value, pairwise

T, B, F, H = 6, 4, 3, 5
LENGTHS = {
    "any order": [2, 6, 1, 4],
    "the longest first": [6, 4, 4, 1],
    "shorter than T": [3, 1, 2, 2],
    "equal": [6, 6, 6, 6],
    "equal and shorter than T": [4, 4, 4, 4],
    "one step": [1, 1, 1, 1],
}


def layers(kind, **options):
    torch.manual_seed(0)
    rival = getattr(nn, kind)(F, H, **options, dtype=torch.float64)
    layer = getattr(gatewise, kind)(F, H, **options, dtype=torch.float64, kernel="aten")
    layer.load_state_dict(rival.state_dict())
    return layer, rival


def padded(rival, x, lengths, state):
    first = rival.batch_first
    packed, final = rival(pack_padded_sequence(x, torch.tensor(lengths), first, enforce_sorted=False), state)
    return pad_packed_sequence(packed, first, total_length=T)[0], final


def flat(found):
    return [found] if isinstance(found, torch.Tensor) else [tensor for each in found for tensor in flat(each)]


@pytest.mark.parametrize(
    ("kind", "lengths", "shape", "given", "batch_first"),
    each_value(
        pairwise(
            ["LSTM", "GRU", "RNN", "projected"],
            [*LENGTHS],
            [{}, {"num_layers": 2}, {"bidirectional": True}],
            [False, True],
            [False, True],
        ),
        times=2,
    ),
    ids=str,
)
def test_outputs_and_gradients_are_those_of_packed_sequences(kind, lengths, shape, given, batch_first):
    size = 2 if kind == "projected" else H
    projection = {"proj_size": size} if kind == "projected" else {}
    kind = "LSTM" if kind == "projected" else kind
    layer, rival = layers(kind, batch_first=batch_first, **shape, **projection)
    x = torch.randn(*((B, T) if batch_first else (T, B)), F, dtype=torch.float64).requires_grad_()
    rows = shape.get("num_layers", 1) * (1 + shape.get("bidirectional", False))
    states = [torch.randn(rows, B, width, dtype=torch.float64).requires_grad_() for width in (size, H)]
    state = (tuple(states) if kind == "LSTM" else states[0]) if given else None
    leaves = [x, *(states[: 1 + (kind == "LSTM")] if given else [])]
    results = []
    for one, call in ((layer, lambda: layer(x, state, LENGTHS[lengths])), (rival, None)):
        outputs = flat(call() if call else padded(rival, x, LENGTHS[lengths], state))
        above = [torch.arange(output.numel(), dtype=output.dtype).view(output.shape).cos() for output in outputs]
        results.append([*outputs, *torch.autograd.grad(outputs, [*leaves, *one.parameters()], above)])
        with torch.no_grad():
            results[-1] += flat(call() if call else padded(rival, x, LENGTHS[lengths], state))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_other_lengths_of_the_same_number_count_at_once(kind):
    layer, rival = layers(kind)
    x = torch.randn(T, B, F, dtype=torch.float64)
    for lengths in (*LENGTHS.values(), *LENGTHS.values()):
        torch.testing.assert_close(layer(x, lengths=lengths), padded(rival, x, lengths, None))


def test_lengths_that_change_after_the_call_do_not_change_its_gradients():
    layer, rival = layers("LSTM")
    x, lengths = torch.randn(T, B, F, dtype=torch.float64), torch.tensor([2, 6, 1, 4])
    y = layer(x, lengths=lengths)[0]
    expected = padded(rival, x, lengths.tolist(), None)[0]
    lengths.fill_(1)
    y.sum().backward()
    expected.sum().backward()
    for one, other in zip(layer.parameters(), rival.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("lengths", [[2, 6, 1, 4], [6, 6, 6, 6], [4, 4, 4, 4]], ids=["different", "whole", "equal"])
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_the_callers_tensors_may_change_after_the_call(kind, lengths):
    layer, rival = layers(kind)
    layer, rival = layer.float(), rival.float()
    x = torch.randn(T, B, F)
    state = torch.randn_like(layer(x, lengths=lengths)[1][0] if kind == "LSTM" else layer(x, lengths=lengths)[1])
    given = (state.clone(), state.clone()) if kind == "LSTM" else state.clone()
    expected, _ = padded(rival, x, lengths, (state, state) if kind == "LSTM" else state)
    changed = x.clone()
    y, _ = layer(changed, given, lengths=lengths)
    for tensor in (changed, *(given if kind == "LSTM" else [given])):
        tensor.zero_()
    y.mul_(2)
    y.sum().backward()
    (2 * expected).sum().backward()
    for one, other in zip(layer.parameters(), rival.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("lengths", [[2, 6, 1, 4], [6, 6, 6, 6]], ids=["different", "equal"])
def test_inputs_made_in_inference_mode_may_be_learned_from(lengths):
    layer, _ = layers("LSTM")
    with torch.inference_mode():
        x = torch.randn(T, B, F, dtype=torch.float64)
    layer(x, lengths=lengths)[0].sum().backward()
    assert all(weight.grad is not None for weight in layer.parameters())


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_only_small_inputs_are_padded(mode, monkeypatch):
    layer, rival = layers("LSTM")
    pad, calls = torch._pad_packed_sequence, []
    monkeypatch.setattr(torch, "_pad_packed_sequence", lambda *given: calls.append(given) or pad(*given))
    most = int(ranking.weights(Device.probe("cpu"), "aten packed limits")[f"padded {mode}"])
    for batch, padded_too in ((8, True), (most // T, False)):
        x = torch.randn(T, batch, F, dtype=torch.float64)
        lengths = [T, *[2] * (batch - 1)]
        calls.clear()
        with torch.set_grad_enabled(mode == "training"):
            found = layer(x, lengths=lengths)[0]
        assert bool(calls) == padded_too
        torch.testing.assert_close(found, padded(rival, x, lengths, None)[0])


def test_batch_sizes_that_change_after_the_call_do_not_change_its_gradients():
    for kind in ("LSTM", "GRU"):
        layer, rival = layers(kind)
        packed = pack_padded_sequence(torch.randn(T, B, F, dtype=torch.float64), torch.tensor([6, 4, 4, 1]))
        found, expected = layer(packed)[0].data, rival(packed)[0].data
        packed.batch_sizes.fill_(1)
        found.sum().backward()
        expected.sum().backward()
        for one, other in zip(layer.parameters(), rival.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)


def test_the_padding_is_not_read():
    layer, _ = layers("GRU")
    x = torch.randn(T, B, F, dtype=torch.float64)
    for lengths in ([2, 6, 1, 4], [4, 4, 4, 4]):
        expected = layer(x, lengths=lengths)
        spoiled = x.clone()
        for row, length in enumerate(lengths):
            spoiled[length:, row] = torch.nan
        torch.testing.assert_close(layer(spoiled, lengths=lengths), expected, rtol=0, atol=0)


def test_derivatives_in_forward_mode():
    layer, rival = layers("GRU")
    x, tangent = torch.randn(T, B, F, dtype=torch.float64), torch.randn(T, B, F, dtype=torch.float64)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, tangent)
        y = forward_ad.unpack_dual(layer(dual, lengths=[2, 6, 1, 4])[0]).tangent
        for row, length in enumerate([2, 6, 1, 4]):
            expected = forward_ad.unpack_dual(rival(dual[:length, row : row + 1])[0]).tangent
            torch.testing.assert_close(y[:length, row : row + 1], expected)
            assert not y[length:, row].any()


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.parametrize("lengths", [[2, 6, 1, 4], [4, 4, 4, 4]], ids=str)
def test_second_derivatives(kind, lengths):
    layer, _ = layers(kind)
    x = torch.randn(T, B, F, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: layer(x, lengths=lengths)[0], (x,), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int64], ids=str)
def test_lengths_of_any_integer_type(dtype):
    layer, rival = layers("GRU")
    x = torch.randn(T, B, F, dtype=torch.float64)
    found = layer(x, lengths=torch.tensor([2, 6, 1, 4], dtype=dtype))
    torch.testing.assert_close(found, padded(rival, x, [2, 6, 1, 4], None))


@pytest.mark.parametrize("lengths", [None, [2, 6, 1, 4]], ids=["dense", "lengths"])
def test_a_setting_of_pytorch_that_changes_counts_in_the_next_call(lengths, monkeypatch):
    # The operator of a call is looked up once for equal calls; it must not have read the setting by then.
    torch.manual_seed(0)
    layer = gatewise.LSTM(F, H, kernel="aten")
    x = torch.randn(T, B, F)

    def operators():
        with torch.no_grad(), torch.profiler.profile() as profile:
            layer(x, lengths=lengths)
        return {event.name for event in profile.events()}

    # Runs of steps are computed by oneDNN, as equal lengths are.
    monkeypatch.setattr(runs, "is_faster", lambda *_: True)
    if not torch.backends.mkldnn.is_available():
        pytest.skip("PyTorch has no oneDNN here")
    for _ in range(2):
        assert "aten::mkldnn_rnn_layer" in operators()
        with torch.backends.mkldnn.flags(enabled=False):
            assert "aten::mkldnn_rnn_layer" not in operators()


def test_plans_are_made_anew_when_there_are_too_many(monkeypatch):
    monkeypatch.setattr(plan, "_MOST_PLANS", 3)
    layer, rival = layers("LSTM")
    for time in (*range(1, 7), *range(1, 7)):
        x = torch.randn(time, B, F, dtype=torch.float64)
        torch.testing.assert_close(layer(x), rival(x))
        assert plan.plan_of.cache_info().currsize <= 3


@pytest.mark.parametrize(
    ("lengths", "error"),
    [
        ([1, 2], ShapeError),
        ([1, 2, 3, T + 1], ShapeError),
        ([1, 2, 3, -1], ShapeError),
        (torch.ones(B), DtypeError),
        (torch.ones(B, dtype=torch.bool), DtypeError),
        ("abcd", ArgumentError),
    ],
    ids=str,
)
def test_lengths_that_do_not_fit(lengths, error):
    layer, _ = layers("LSTM")
    with pytest.raises(error, match="lengths"):
        layer(torch.randn(T, B, F, dtype=torch.float64), lengths=lengths)
