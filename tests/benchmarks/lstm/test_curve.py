"""A side is timed only if it learns as nn.LSTM does."""

import dataclasses
import itertools

import pytest
import torch

from gatewise.benchmarks.cases import LSTMCase
from gatewise.benchmarks.lstm import curve
from gatewise.benchmarks.lstm.call import draw
from gatewise.benchmarks.lstm.side import gatewise_side, rival_side
from gatewise.benchmarks.precision import LAYER_PRECISIONS
from tests.pairwise import each_value

CPU = torch.device("cpu")
PLAIN = LSTMCase("plain", 6, 3, 10)
RAGGED = LSTMCase("uneven_ragged", 6, 5, 7, num_layers=2, directions=2, ragged=True)


def findings(case, side, precision="fp32"):
    chosen = LAYER_PRECISIONS[precision]
    rival = curve.rival(
        rival_side(draw(case, CPU), chosen.dtype), chosen.rounding, lambda: rival_side(draw(case, CPU), torch.float64)
    )
    return rival.beside(curve.losses(side))


def ours(case, precision="fp32", kernel="auto"):
    return gatewise_side(draw(case, CPU), LAYER_PRECISIONS[precision].dtype, kernel)


@pytest.mark.parametrize(
    ("kernel", "case"),
    each_value([*itertools.product(["auto", "eager", "aten", "lean"], [PLAIN, RAGGED])]),
    ids=lambda own: getattr(own, "name", str(own)),
)
def test_kernels_learn_as_nn_lstm_does(case, kernel):
    found = findings(case, ours(case, kernel=kernel))
    assert found.agrees, str(found)
    assert found.ours[-1] < 0.99 * found.ours[0]
    assert "is that of nn.LSTM" in str(found)


def test_sixteen_bits_are_allowed_their_rounding():
    found = findings(PLAIN, ours(PLAIN, "bf16"), "bf16")
    assert found.agrees, str(found)


@pytest.mark.parametrize(
    ("change", "steps"),
    [
        pytest.param(lambda call, y: y * 1.001, 0, id="a wrong output"),
        pytest.param(lambda call, y: y if call < 2 else y * torch.nan, 2, id="a NaN in the third call"),
        pytest.param(
            lambda call, y: y if call < 3 else y.detach() * 1.0 + 0.0 * y, 4, id="no gradient from the fourth"
        ),
    ],
)
def test_what_goes_wrong_in_some_call_is_seen(change, steps):
    side, calls = ours(PLAIN), []

    def call():
        y, *states = side.call()
        calls.append(y)
        return change(len(calls) - 1, y), *states

    found = findings(PLAIN, dataclasses.replace(side, call=call))
    assert not found.agrees
    assert f"after {steps} steps" in str(found)


def test_weights_are_as_before_afterwards():
    side = ours(PLAIN)
    before = [weight.clone() for weight in side.module.parameters()]
    curve.losses(side)
    assert all(torch.equal(*pair) for pair in zip(side.module.parameters(), before, strict=True))


def test_the_rival_beside_itself_agrees():
    side = rival_side(draw(PLAIN, CPU), torch.float32)
    rival = curve.rival(side, 2.0**-23, lambda: side)
    assert rival.beside(curve.losses(side)).agrees


@pytest.mark.gpu
@pytest.mark.parametrize("precision", LAYER_PRECISIONS.values(), ids=lambda own: own.name)
@pytest.mark.parametrize("replayed", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("kernel", ["auto", "persistent", "stepwise", "lean"])
@pytest.mark.parametrize("hidden", [72, 540])
def test_kernels_learn_on_a_gpu(precision, replayed, kernel, hidden):
    call = draw(LSTMCase("gpu", 12, 9, hidden, num_layers=2), torch.device("cuda"))
    with precision.applied():
        rival = curve.rival(
            rival_side(call, precision.dtype), precision.rounding, lambda: rival_side(call, torch.float64)
        )
        found = rival.beside(curve.losses(gatewise_side(call, precision.dtype, kernel), replayed=replayed))
    assert found.agrees, str(found)
