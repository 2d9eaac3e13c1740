"""An allocation belongs to the innermost scope around it, in whatever file its code is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gatewise import nn
from gatewise.benchmarks.nmt import scopes, sentences
from gatewise.benchmarks.nmt.cases import TINY_CASES
from gatewise.benchmarks.nmt.memory import parts_at_peak
from gatewise.benchmarks.nmt.rival_attention import AdditiveAttention
from gatewise.benchmarks.nmt.side import Side
from gatewise.benchmarks.nmt.ways import PLAIN, Way
from gatewise.benchmarks.precision import PRECISIONS
from gatewise.models import Seq2Seq

CPU = torch.device("cpu")
LONG = dataclasses.replace(TINY_CASES[0], source=31, target=29)
WAYS = [
    PLAIN,
    *(Way(f"{lstm} {name}", name, lstm) for name in ("reference", "recompute") for lstm in ("nn.LSTM", "gatewise")),
]


def new(count: int) -> Tensor:
    """Allocate the given number of bytes."""
    return torch.empty(count, dtype=torch.uint8)


class OwnBackward(torch.autograd.Function):
    """Allocates 3000 bytes in the forward pass, and 5000 in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        new(3000)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        new(5000)
        scopes._within("output", new)(6000)
        return gradient.clone()


def parts_by_size(step: Callable[[], object]) -> dict[int, str]:
    return {size: part for _, size, part in scopes.allocations(step, CPU) if size > 0}


def launched(way: Way, case: Any = LONG) -> Side:
    return Side(way, case, PRECISIONS["fp32"], sentences.draw(case, 1, CPU), None)


def test_the_innermost_scope_decides() -> None:
    def attend() -> None:
        new(1000)
        scopes._within("LSTM", new)(2000)
        new(4000)

    def step() -> None:
        scopes._within("attention", attend)()
        new(7000)

    assert parts_by_size(step) == {1000: "attention", 2000: "LSTM", 4000: "attention", 7000: "backward"}


def test_a_function_goes_back_in_the_scope_that_it_was_called_in() -> None:
    x = torch.ones(100, requires_grad=True)

    def step() -> None:
        scopes._within("attention", OwnBackward.apply)(scopes._within("other", torch.exp)(x)).sum().backward()

    found = parts_by_size(step)
    assert {size: found[size] for size in (3000, 5000, 6000)} == {3000: "attention", 5000: "attention", 6000: "output"}


def test_what_autograd_does_by_itself_has_no_scope() -> None:
    x = torch.ones(1000, requires_grad=True)

    def step() -> None:
        y = scopes._within("attention", torch.exp)(x)
        y.backward(torch.ones_like(y))

    parts = [part for _, size, part in scopes.allocations(step, CPU) if size == 4 * len(x)]
    assert parts[0] == "attention"
    assert set(parts[1:]) == {"backward"}


@pytest.mark.parametrize(
    "way",
    [
        *(pytest.param(way, id=way.name) for way in (PLAIN, WAYS[3])),
        *(pytest.param(way, marks=pytest.mark.exhaustive, id=way.name) for way in (WAYS[1], WAYS[2], WAYS[4])),
    ],
)
def test_every_part_of_a_step_has_its_own(way: Way) -> None:
    side = launched(way)
    side.launch()
    side.forget()
    seen = scopes.allocations(side.launch, CPU)
    parts = parts_at_peak(seen, before=0)
    one_map = LONG.source * LONG.batch * LONG.hidden_size * 4
    scores = LONG.target * LONG.batch * LONG.target_size * 4
    # What is kept for the backward pass: a map for each step, or one for all, beside weights.
    kept = 1 if way.attention == "recompute" else LONG.target
    assert parts["attention"] >= kept * one_map
    assert (parts["attention"] < LONG.target * one_map) == (way.attention == "recompute")
    assert any(size >= scores and part == "output" for _, size, part in seen)
    assert all(parts[part] > 0 for part in ("LSTM", "other"))
    assert parts["weights"] == 0


@pytest.mark.parametrize(
    ("part", "module", "inputs"),
    [
        ("LSTM", torch.nn.LSTM(8, 8), (torch.randn(5, 3, 8),)),
        ("LSTM", torch.nn.LSTMCell(8, 8), (torch.randn(3, 8),)),
        ("LSTM", nn.LSTM(8, 8), (torch.randn(5, 3, 8),)),
        ("attention", nn.Attention(8, 8), (torch.randn(5, 3, 8), torch.randn(6, 3, 8))),
        (
            "attention",
            AdditiveAttention(8, layer_norm=False),
            (torch.randn(3, 8), torch.randn(3, 6, 8), torch.randn(3, 6, 8), torch.zeros(3, 6, dtype=torch.bool)),
        ),
    ],
    ids=["nn.LSTM", "nn.LSTMCell", "LSTM", "Attention", "AdditiveAttention"],
)
def test_whatever_a_layer_allocates_is_its_own(part: str, module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
    assert set(parts_by_size(lambda: module(*inputs)).values()) == {part}


def test_every_scope_is_entered_by_some_way(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = set()

    def counted(owner: object, name: str) -> Callable[..., Any]:
        function = vars(owner)[name]

        def counting(*given: Any, **options: Any) -> Any:
            entered.add((owner, name))
            return function(*given, **options)

        return counting

    named = {(owner, name) for _, owner, names in scopes._SCOPES for name in names}
    for owner, name in named:
        monkeypatch.setattr(owner, name, counted(owner, name))
    for way in WAYS:
        launched(way, TINY_CASES[0]).launch()
    without_feeding = Seq2Seq(30, 40, 8, 8, input_feeding=False)
    without_feeding.loss(sentences.draw(TINY_CASES[0], 1, CPU)[0])
    assert entered == named


def test_the_functions_are_put_back() -> None:
    before = [vars(owner)[name] for _, owner, names in scopes._SCOPES for name in names]

    def step() -> None:
        assert all(vars(owner)[name] not in before for _, owner, names in scopes._SCOPES for name in names)
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        scopes.allocations(step, CPU)
    assert [vars(owner)[name] for _, owner, names in scopes._SCOPES for name in names] == before


def test_a_scope_of_a_function_that_is_gone_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scopes, "_SCOPES", (("attention", torch.nn.LSTM, ("forward", "attend")),))
    forward = torch.nn.LSTM.forward
    with pytest.raises(KeyError, match="attend"), scopes.scoped():
        pass
    assert torch.nn.LSTM.forward is forward


def test_allocations_of_another_device_do_not_count() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as recording:
        kept = new(1000)
    events = recording.profiler.kineto_results.experimental_event_tree()
    assert [each.size for each in scopes.allocations_of(events, CPU)] == [len(kept)]
    assert scopes.allocations_of(events, torch.device("cuda", 0)) == []
