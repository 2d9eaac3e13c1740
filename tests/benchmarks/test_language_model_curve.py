"""A way is timed only if its language model learns as nn.LSTM's does."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch
from torch import nn

from gatewise.benchmarks import language_model, rivals
from gatewise.benchmarks.language_model_curve import Curves
from gatewise.benchmarks.precision import PRECISIONS, Precision
from gatewise.benchmarks.rivals import Loop, Way
from gatewise.benchmarks.training_step import starting_weights
from gatewise.contract.errors import KernelRefused
from tests.pairwise import each_value, pairwise
from tests.processor import AUTOCAST, skip_where_it_fails

CPU = torch.device("cpu")
WAYS = {way.name: way for way in rivals.ways()}


def repeated(work):
    """A stand-in for the CUDA graph of a step, for machines without a GPU."""
    return work


def curves(settings, capture=repeated) -> Curves:
    batches = language_model._batches(settings, 20)
    return Curves(settings.case, 20, starting_weights(settings.case, 20, CPU, 1), batches, capture)


class Spoiled(nn.LSTM):
    """A way whose results change from the given call on; only the first two calls are compared with float64."""

    calls = 0
    wrong_from = 4
    lost = "gradient"

    def forward(self, x, state):
        self.calls += 1
        if not self.training or self.calls < self.wrong_from:
            return super().forward(x, state)
        y, state = super().forward(x, state)
        return (y.detach() + 0.0 * y if self.lost == "gradient" else y * torch.nan), state


def spoiled(lost: str, loop: Loop = Loop.LIBRARY, wrong_from: int = 4) -> Way:
    def layer(size: int, num_layers: int, dropout: float) -> nn.Module:
        made = Spoiled(size, size, num_layers, dropout=dropout)
        made.lost, made.wrong_from = lost, wrong_from
        return made

    return Way(f"spoiled {lost}", layer, loop=loop)


@pytest.mark.parametrize(
    ("name", "precision"),
    each_value(
        pairwise(
            [name for name in WAYS if "eager" in name or "aten" in name or "nn." in name],
            ["fp32", "bf16", "bf16-autocast"],
        )
    ),
)
def test_ways_learn_as_nn_lstm_does(settings, name: str, precision: str) -> None:
    skip_where_it_fails(PRECISIONS[precision].autocast)
    found = curves(settings).finding(WAYS[name], PRECISIONS[precision])
    assert found.agrees, str(found)
    assert found.ours[-1] < 0.99 * found.ours[0]
    assert "is that of nn.LSTM" in str(found)


@pytest.mark.parametrize("loop", Loop, ids=lambda loop: loop.name.lower())
@pytest.mark.parametrize("lost", ["gradient", "number"])
def test_what_goes_wrong_in_the_fourth_call_is_seen(settings, lost: str, loop: Loop) -> None:
    found = curves(settings).finding(spoiled(lost, loop), PRECISIONS["fp32"])
    assert not found.agrees
    assert f"after {4 if lost == 'gradient' else 3} steps of training" in str(found)


@pytest.mark.parametrize("precision", ["bf16", AUTOCAST])
def test_sixteen_bits_hide_no_lost_gradient(settings, precision: str) -> None:
    assert not curves(settings).finding(spoiled("gradient", wrong_from=2), PRECISIONS[precision]).agrees


def test_a_replay_that_repeats_nothing_is_seen(settings) -> None:
    """The loss then stays where the capture left it."""
    found = curves(settings, lambda work: lambda: None).finding(WAYS["nn.LSTM, graph"], PRECISIONS["fp32"])
    assert not found.agrees
    assert "after 3 steps of training" in str(found)


@pytest.mark.parametrize("lost", ["gradient", "number"])
def test_a_way_that_does_not_learn_gets_no_speed(settings, observer, lost: str) -> None:
    settings = dataclasses.replace(settings, case=dataclasses.replace(settings.case, dropout=0.0))
    wrong, right = language_model.run(settings, observer, [spoiled(lost), WAYS["nn.LSTM"]]).records
    assert (wrong.status, wrong.median, wrong.words_per_second, wrong.runs) == ("wrong", None, None, 0)
    assert wrong.error <= wrong.allowed  # the calls that are compared with float64 were correct
    assert "steps of training the loss is" in wrong.note
    assert right.status == "measured"
    assert right.note.endswith("; the loss of 8 steps of training is that of nn.LSTM")


def test_each_way_is_trained_in_the_precision_and_loop_that_is_timed(settings, observer, monkeypatch) -> None:
    asked = []
    finding = Curves.finding

    def noted(self, way: Way, precision: Precision):
        asked.append((way.name, way.loop, precision.name))
        return finding(self, way, precision)

    monkeypatch.setattr(Curves, "finding", noted)
    many = dataclasses.replace(settings, precisions=(PRECISIONS["fp32"], PRECISIONS["bf16"]))
    records = language_model.run(many, observer, [WAYS["nn.LSTM"], WAYS["gatewise eager"]]).records
    assert {record.status for record in records} == {"measured"}
    assert asked == [
        (name, loop, precision)
        for precision in ("fp32", "bf16")
        for name, loop in (("nn.LSTM", Loop.PLAIN), ("gatewise eager", Loop.LIBRARY))
    ]


def test_with_dropout_what_is_timed_is_trained_too(settings, observer) -> None:
    """The comparison without dropout has eight steps; later errors are found in the model that is timed."""

    class WrongWithDropout(nn.LSTM):
        def forward(self, x, state):
            y, state = super().forward(x, state)
            return (y * torch.nan if self.dropout else y), state

    way = Way("wrong with dropout", lambda size, layers, dropout: WrongWithDropout(size, size, layers, dropout=dropout))
    (row,) = language_model.run(settings, observer, [way]).records
    assert (row.status, row.note) == ("wrong", "the loss of a step of training with dropout is nan")


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS.values(), ids=lambda own: own.name)
@pytest.mark.parametrize("hidden", [72, 540])
def test_every_way_learns_on_a_gpu(settings, precision: Precision, hidden: int) -> None:
    case = dataclasses.replace(settings.case, hidden_size=hidden, initial_scale=0.1, time=12, batch=9)
    settings = dataclasses.replace(settings, case=case, device=torch.device("cuda"))
    batches = language_model._batches(settings, 300)
    held = Curves(case, 300, starting_weights(case, 300, settings.device, 1), batches)
    for way in rivals.ways():
        with contextlib.suppress(KernelRefused):
            found = held.finding(way, precision)
            assert found.agrees, f"{way.name}: {found}"
