"""A way is timed only if its translation model learns as plain PyTorch's does."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from gatewise.benchmarks.curve import followed
from gatewise.benchmarks.nmt import agreement, side, table
from gatewise.benchmarks.nmt.cases import TINY_CASES
from gatewise.benchmarks.nmt.check import Check
from gatewise.benchmarks.nmt.table import TRANSLATION_PRECISIONS
from gatewise.benchmarks.nmt.ways import PLAIN, PLANNED, Way, ways
from gatewise.contract.errors import KernelRefused
from tests.pairwise import each_value
from tests.processor import skip_where_it_fails

CPU = torch.device("cpu")
OURS = Way("ours", "reference", "gatewise")


@pytest.fixture
def check(case) -> Check:
    return Check(case, TRANSLATION_PRECISIONS["fp32"], CPU)


@pytest.fixture
def replays(monkeypatch):
    """Count the replays of a stand-in for a CUDA graph."""
    counted = []

    def capture(work):
        return lambda: (counted.append(0), work())

    monkeypatch.setattr(side, "cuda_graph", capture)
    return counted


@pytest.mark.parametrize(
    ("case", "way", "precision"),
    each_value(
        [
            *itertools.product(
                TINY_CASES, [PLAIN, OURS, Way("keeps less", "recompute", "nn.LSTM"), PLANNED], ["fp32", "bf16"]
            )
        ]
    ),
    ids=lambda value: getattr(value, "name", value),
    indirect=["case"],
)
def test_ways_learn_as_plain_pytorch_does(case, way: Way, precision: str, replays) -> None:
    skip_where_it_fails(TRANSLATION_PRECISIONS[precision].autocast)
    check = Check(case, TRANSLATION_PRECISIONS[precision], CPU)
    own = check.side(way)
    eager = check.learning(own, own.launch)
    own.record()
    replays.clear()
    replayed = check.learning(own, own.replay)
    assert len(replays) == len(replayed.ours)
    for found in (eager, replayed):
        assert found.agrees, str(found)
        assert "is that of plain PyTorch" in str(found)
    # Four batches, used in turn.
    assert sum(eager.ours[4:]) < 0.99 * sum(eager.ours[:4])


@pytest.mark.parametrize(
    "case",
    [TINY_CASES[0], *(pytest.param(each, marks=pytest.mark.exhaustive) for each in TINY_CASES[1:])],
    ids=lambda case: case.name,
    indirect=True,
)
def test_a_rival_that_adds_up_pieces_learns_alike(case, check, monkeypatch) -> None:
    own = check.side(PLAIN)
    whole = check.learning(own, own.launch)
    monkeypatch.setattr(agreement, "_MAP", 12 * case.source * case.target * case.hidden_size)  # three rows at a time
    again = Check(case, TRANSLATION_PRECISIONS["fp32"], CPU)
    pieces = again.learning(own, own.launch)
    assert pieces.theirs != whole.theirs
    assert pieces.agrees, str(pieces)


def test_a_restart_is_a_fresh_side(check) -> None:
    fresh, used = check.side(OURS), check.side(OURS)
    used.evidence()
    used.launch()
    used.restart(check.start)
    assert followed(used.launch) == followed(fresh.launch)


@pytest.fixture
def spoiled(monkeypatch):
    """Return a context in which the encoders of gatewise's models compute wrong results after some calls."""

    def spoil(change, calls: int) -> None:
        made = side.new_model

        def new_model(way, case, device):
            model, count = made(way, case, device), [0]

            def after(layer, inputs, output):
                count[0] += 1
                return (change(output[0]), *output[1:]) if count[0] > calls else None

            if not way.plain:
                model.encoder[0].register_forward_hook(after)
            return model

        monkeypatch.setattr(side, "new_model", new_model)

    return spoil


@pytest.mark.parametrize(
    ("change", "steps"),
    [
        pytest.param(lambda y: y * torch.nan, 3, id="a NaN in the fourth step"),
        pytest.param(lambda y: y.detach() + 0.0 * y, 4, id="no gradient from the fourth step on"),
    ],
)
def test_a_way_that_does_not_learn_gets_no_speed(settings, observer, spoiled, change, steps: int) -> None:
    spoiled(change, 4)  # the first call is compared with float64
    right, wrong = table.run(settings, observer, lambda row: None).records
    assert right.status == "measured"
    assert right.note.endswith("; the loss of 8 steps of training is that of plain PyTorch.")
    assert (wrong.status, wrong.times, wrong.peak_bytes) == ("wrong", {}, {})
    assert wrong.error <= wrong.allowed
    assert wrong.note.startswith("eager: after ")
    assert int(wrong.note.split()[2]) in (steps, steps + 1)


def test_a_replay_that_repeats_nothing_is_seen(check, monkeypatch) -> None:
    def capture(work):
        once = iter([work])
        return lambda: next(once, lambda: None)()

    monkeypatch.setattr(side, "cuda_graph", capture)
    own = check.side(OURS)
    own.record()
    found = check.learning(own, own.replay)
    assert not found.agrees
    assert "after 0 steps of training" in str(found)


def test_with_dropout_what_is_timed_is_trained_too(settings, observer, monkeypatch) -> None:
    made = side.new_model

    def new_model(way, case, device):
        model = made(way, case, device)
        if not way.plain and case.dropout:
            model.encoder[0].register_forward_hook(lambda layer, inputs, output: (output[0] * torch.nan, *output[1:]))
        return model

    monkeypatch.setattr(side, "new_model", new_model)
    case = dataclasses.replace(TINY_CASES[0], dropout=0.2)
    right, wrong = table.run(dataclasses.replace(settings, cases=(case,)), observer, lambda row: None).records
    assert (right.status, wrong.status) == ("measured", "wrong")
    assert wrong.note == "eager: the loss of a step of training with dropout is nan."


@pytest.mark.gpu
@pytest.mark.parametrize("precision", TRANSLATION_PRECISIONS.values(), ids=lambda own: own.name)
@pytest.mark.parametrize("hidden", [72, 256])
def test_every_way_learns_on_a_gpu(case, precision, hidden: int) -> None:
    case = dataclasses.replace(case, hidden_size=hidden, embedding_size=hidden, source=17, target=15, batch=31)
    with precision.applied():
        check = Check(case, precision, torch.device("cuda"))
        for way in ways():
            try:
                own = check.side(way)
                found = {"eager": check.learning(own, own.launch)}
                own.record()
            except KernelRefused:
                continue
            if not own.refusal:
                found["graph"] = check.learning(own, own.replay)
            for how, each in found.items():
                assert each.agrees, f"{way.name}, {how}: {each}"
