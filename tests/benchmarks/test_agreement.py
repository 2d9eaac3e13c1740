"""A correct way agrees in every precision; a way with an error in any part is reported as wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gatewise.benchmarks import rivals
from gatewise.benchmarks.agreement import Finding, Judge
from gatewise.benchmarks.cases import LanguageModelCase
from gatewise.benchmarks.precision import PRECISIONS
from gatewise.benchmarks.rivals import Way
from gatewise.benchmarks.training_step import starting_weights
from gatewise.data import Window
from tests.processor import AUTOCAST, needs_bfloat16_autocast

CASE = LanguageModelCase("tiny", 24, dropout=0.5, clip_norm=5.0, initial_scale=0.1, time=7, batch=5)
ON_CPU = ["fp32", "bf16", AUTOCAST]
RUNNABLE = [way for way in rivals.ways() if way.kernel not in ("persistent", "stepwise", "cudnn")]
REPLAYED = Way("nn.LSTM", rivals.torch_lstm).replayed()


def new_judge(capture) -> Judge:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(40, (3, CASE.time + 1, CASE.batch), generator=generator)
    batches = [Window(batch[:-1], batch[1:]) for batch in tokens]
    return Judge(CASE, 40, starting_weights(CASE, 40, torch.device("cpu"), seed=0), batches, capture)


@pytest.fixture(scope="module")
def judge() -> Judge:
    return new_judge(lambda work: work)


class Spoiled(nn.Module):
    """`torch.nn.LSTM` with one error; the names and the order of its parameters are correct."""

    def __init__(self, size: int, num_layers: int, dropout: float) -> None:
        super().__init__()
        self.lstm = nn.LSTM(size, size, num_layers, dropout=dropout)


class SwappedGates(Spoiled):
    def forward(self, x, state):
        order = torch.cat([torch.arange(24, 48), torch.arange(24), torch.arange(48, 96)])
        swapped = {name: value[order] for name, value in self.lstm.named_parameters()}
        return torch.func.functional_call(self.lstm, swapped, (x, state))


class ForgottenState(Spoiled):
    def forward(self, x, state):
        return self.lstm(x)


class DroppedLastStep(Spoiled):
    def forward(self, x, state):
        y, state = self.lstm(x, state)
        return torch.cat([y[:-1], torch.zeros_like(y[-1:])]), state


class CutGradient(Spoiled):
    def forward(self, x, state):
        first, state = self.lstm(x[:3], state)
        second, state = self.lstm(x[3:], (state[0].detach(), state[1].detach()))
        return torch.cat([first, second]), state


class FrozenBias(Spoiled):
    def forward(self, x, state):
        values = {n: p.detach() if n == "bias_hh_l1" else p for n, p in self.lstm.named_parameters()}
        return torch.func.functional_call(self.lstm, values, (x, state))


class NotANumber(Spoiled):
    def forward(self, x, state):
        y, state = self.lstm(x, state)
        return torch.where(torch.arange(len(y))[:, None, None] == 2, torch.nan, y), state


@pytest.mark.parametrize("precision", ON_CPU)
@pytest.mark.parametrize("way", RUNNABLE, ids=lambda way: way.name)
def test_right_ways_agree(judge: Judge, way: Way, precision: str) -> None:
    finding = judge.judge(way, PRECISIONS[precision])
    assert finding.agrees, str(finding)


@pytest.mark.parametrize("precision", ON_CPU)
def test_replays_that_do_nothing_do_not_agree(precision: str) -> None:
    finding = new_judge(lambda work: lambda: None).judge(REPLAYED, PRECISIONS[precision])
    assert not finding.agrees
    assert finding.quantity == "a weight after 3 replays"


@pytest.mark.parametrize("precision", ON_CPU)
@pytest.mark.parametrize("wrong", Spoiled.__subclasses__())
def test_wrong_ways_do_not(judge: Judge, wrong: type[Spoiled], precision: str) -> None:
    finding = judge.judge(Way(wrong.__name__, wrong), PRECISIONS[precision])
    assert not finding.agrees
    assert "more than the allowed" in str(finding)


@needs_bfloat16_autocast
def test_a_coarser_format_is_not_a_finer_one(judge: Judge) -> None:
    """A way that computes in bfloat16 must not pass as float32."""

    class Coarse(Spoiled):
        def forward(self, x, state):
            with torch.autocast("cpu", torch.bfloat16):
                y, (h, c) = self.lstm(x, state)
            return y.float(), (h.float(), c.float())

    assert not judge.judge(Way("coarse", Coarse), PRECISIONS["fp32"]).agrees


@pytest.mark.parametrize(
    ("error", "allowed", "agrees"),
    [(1e-7, 2e-7, True), (3e-7, 2e-7, False), (float("nan"), 2e-7, False), (1e-7, float("nan"), False)],
)
def test_findings(error: float, allowed: float, agrees: bool) -> None:
    assert Finding("loss", error, allowed).agrees is agrees
