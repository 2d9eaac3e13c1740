"""A run of the benchmark: its rows and their contents."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch

from gatewise.benchmarks.nmt import agreement, learning, record, sentences, side, table
from gatewise.benchmarks.nmt.cases import IWSLT, TINY_CASES
from gatewise.benchmarks.nmt.planned import ways_of
from gatewise.benchmarks.nmt.side import Side
from gatewise.benchmarks.nmt.table import TRANSLATION_PRECISIONS
from gatewise.benchmarks.nmt.ways import PLAIN, PLANNED, Way, starting_weights, ways, with_distinct_attention
from gatewise.benchmarks.precision import PRECISIONS
from gatewise.contract.errors import OutOfMemoryPredicted
from tests.pairwise import exhaustive
from tests.processor import needs_bfloat16_autocast

CPU = torch.device("cpu")
TINY = TINY_CASES[0]


def sided(way: Way = PLAIN, case=TINY, seed: int = 1) -> Side:
    return Side(
        way,
        case,
        PRECISIONS["fp32"],
        sentences.draw(case, 2, CPU, seed),
        with_distinct_attention(starting_weights(case, CPU)),
    )


# A run of some rows is tested in test_command.py.
@pytest.mark.exhaustive
@pytest.mark.parametrize("case", TINY_CASES)
def test_every_way_is_a_row(settings, observer, case) -> None:
    kept = []
    everything = dataclasses.replace(settings, cases=(case,), ways=tuple(ways()))
    outcome = table.run(everything, observer, kept.append)
    assert kept == outcome.records
    assert observer.announced == len(observer.steps) == len(ways())
    status = {(row.case, row.way): row.status for row in outcome.records}
    assert {way for (_, way), each in status.items() if each == "measured"} >= {
        "plain PyTorch",
        *(f"{kernel}, {lstm}" for kernel in ("reference", "recompute") for lstm in ("nn.LSTM", "gatewise")),
    }
    assert set(status.values()) <= {"measured", "refused"}
    for row in outcome.records:
        if row.status == "refused":
            assert "triton is not available" in row.note


def test_a_measured_row(settings, observer) -> None:
    settings = dataclasses.replace(settings, loss=3.9, most_steps=10)
    _, row = table.run(settings, observer, lambda row: None).records
    assert row.samples_per_second("eager") == pytest.approx(TINY.batch / row.times["eager"].median)
    assert (row.samples_per_second("graph"), row.peak_bytes, row.parts) == (None, {}, {})
    assert row.error <= row.allowed
    assert (row.loss, row.steps_to_loss) == (3.9, {"eager": 5})
    assert record.TranslationRecord.from_line(json.dumps(dataclasses.asdict(row))) == row


def test_a_planned_row_says_what_was_planned(settings, observer) -> None:
    settings = dataclasses.replace(settings, ways=(PLANNED,))
    (row,) = table.run(settings, observer, lambda row: None).records
    assert (row.status, row.attention, row.lstm) == ("measured", "auto", "gatewise")
    assert "Planned: encoder 1: " in row.note
    assert row.predicted_bytes > 4 * sum(weight.numel() for weight in sided(PLANNED).model.parameters())


def test_a_plan_keeps_to_its_budget() -> None:
    batches, start = sentences.draw(TINY, 1, CPU), starting_weights(TINY, CPU)
    free = Side(PLANNED, TINY, PRECISIONS["fp32"], batches, start, 10**12)
    tight = Side(PLANNED, TINY, PRECISIONS["fp32"], batches, start, free.plan.peak_bytes - 1)
    assert tight.plan.peak_bytes < free.plan.peak_bytes
    assert ways_of(tight.plan) != ways_of(free.plan)
    with pytest.raises(OutOfMemoryPredicted):
        Side(PLANNED, TINY, PRECISIONS["fp32"], batches, start, 1000)


def test_a_loss_out_of_reach_is_given_up(settings, observer) -> None:
    settings = dataclasses.replace(settings, loss=0.01, most_steps=10)
    row, _ = table.run(settings, observer, lambda row: None).records
    assert (row.loss, row.seconds_to_loss, row.steps_to_loss, row.quickest) == (0.01, {}, {}, None)


def test_a_wrong_way_turns_red_and_gets_no_speed(settings, observer, monkeypatch) -> None:
    def backwards(way, case, device):
        model = side_model(way, case, device)
        if not way.plain:
            model.encoder[0].register_forward_pre_hook(lambda layer, inputs: (inputs[0].flip(0),))
        return model

    side_model = side.new_model
    monkeypatch.setattr(side, "new_model", backwards)
    right, wrong = table.run(settings, observer, lambda row: None).records
    assert (right.status, wrong.status, wrong.times) == ("measured", "wrong", {})
    assert wrong.error > wrong.allowed
    assert "more than the allowed" in wrong.note


@pytest.mark.parametrize(
    "weight", ["attention.weight_query", *exhaustive("decoder.1.weight_hh", "source_embedding.weight")]
)
def test_a_gradient_a_little_off_is_seen(settings, observer, monkeypatch, weight) -> None:
    evidence = Side.evidence

    def shifted(self, replayed=False):
        found = evidence(self, replayed)
        if not self.way.plain:
            found[f"gradient of {weight}"] *= 1.001
        return found

    monkeypatch.setattr(Side, "evidence", shifted)
    _, wrong = table.run(settings, observer, lambda row: None).records
    assert wrong.status == "wrong"
    assert wrong.note.startswith(f"gradient of {weight}")


def test_the_allowance_of_float32_does_not_let_tf32_through() -> None:
    exact = dict.fromkeys(["gradient"], 1e-7)
    allowed = agreement.allowance(exact, exact, 2.0**-23, IWSLT.batch * IWSLT.target)["gradient"]
    assert 4 * math.sqrt(6400) * 2**-24 < allowed < 2.0**-11 / 4


def test_a_forgotten_gradient_is_wrong() -> None:
    allowed = {"loss": 1.0, "gradient of x": 1.0}
    exact = {"loss": torch.ones(()), "gradient of x": torch.ones(3)}
    for lost in ({}, {"gradient of x": torch.full((3,), torch.nan)}, {"gradient of x": torch.ones(2)}):
        finding = agreement.finding(agreement.errors({"loss": torch.ones(())} | lost, exact), allowed)
        assert (finding.quantity, finding.agrees, finding.beyond) == ("gradient of x", False, 1)
    assert not agreement.finding({"loss": 0.1}, {"loss": math.nan}).agrees


@pytest.mark.parametrize("way", [PLAIN, Way("ours", "reference", "gatewise")], ids=["plain", "ours"])
def test_evidence_is_of_clipped_gradients_and_leaves_the_weights(way: Way) -> None:
    one, before = sided(way), with_distinct_attention(starting_weights(TINY, CPU))
    found = one.evidence()
    norm = math.sqrt(sum(float(tensor.norm()) ** 2 for name, tensor in found.items() if name != "loss"))
    tight = sided(way, dataclasses.replace(TINY, clip=norm / 4)).evidence()
    for name in found:
        torch.testing.assert_close(tight[name], found[name] * (1 if name == "loss" else 0.25), rtol=1e-4, atol=1e-9)
    for name, weight in one._weights.items():
        assert torch.equal(weight, before[name].view_as(weight)), name
    one.launch()
    assert not torch.equal(one._weights["attention.v"].flatten(), before["attention.v"])


def test_the_learning_rate_comes_from_the_case() -> None:
    slow, fast = (sided(case=dataclasses.replace(TINY, learning_rate=rate)) for rate in (1e-4, 1e-2))
    start = with_distinct_attention(starting_weights(TINY, CPU))["output.bias"]
    moved = []
    for each in (slow, fast):
        each.evidence()
        each.launch()
        moved.append(float((each._weights["output.bias"].detach() - start).abs().max()))
    assert moved[1] == pytest.approx(100 * moved[0], rel=0.1)


@needs_bfloat16_autocast
def test_bf16_is_autocast() -> None:
    precision = TRANSLATION_PRECISIONS["bf16"]
    assert (precision.name, precision.dtype, precision.autocast) == ("bf16", torch.float32, True)
    start, batches = with_distinct_attention(starting_weights(TINY, CPU)), sentences.draw(TINY, 1, CPU)
    for way in (PLAIN, Way("ours", "reference", "gatewise")):
        coarse, fine = (Side(way, TINY, each, batches, start) for each in (precision, PRECISIONS["fp32"]))
        assert coarse.evidence()["loss"] != fine.evidence()["loss"]


def test_sentences_are_the_same_everywhere_and_have_something_to_learn() -> None:
    first, again = (sentences.draw(TINY, 2, CPU, seed=3) for _ in range(2))
    other = sentences.draw(TINY, 2, CPU, seed=4)
    assert all(torch.equal(a, b) for one, two in zip(first, again, strict=True) for a, b in zip(one, two, strict=True))
    assert not torch.equal(first[0].source, other[0].source)
    batch = sentences.draw(IWSLT, 1, CPU)[0]
    assert batch.source.shape == (50, 128)
    assert batch.targets.shape == batch.inputs.shape == (50, 128)
    assert torch.equal(batch.inputs[1:], batch.targets[:-1])
    assert int(batch.source.max()) < IWSLT.source_size
    assert (batch.targets[-1] == 2).all()
    assert batch.count == 6400
    # A sentence and its translation are about the same topic: twenty words of hundreds.
    topics = (batch.source - 3) // 20
    assert (topics == topics[0]).all()
    assert ((batch.targets[:-1] - 3) // 20 == topics[0]).all()
    assert sentences.floor(IWSLT) == pytest.approx(0.98 * math.log(20))


def test_training_until_a_loss_looks_at_means() -> None:
    losses = iter(torch.tensor([5.0, 1.0, 5.0, 5.0, 5.0, 3.0, 2.0, 2.0, 2.0, 2.0]))
    found = learning.seconds_to_loss(lambda: next(losses), 2.5, 100, CPU)
    assert found is not None
    assert found[1] == 10
    assert learning.seconds_to_loss(lambda: torch.tensor(3.0), 2.5, 12, CPU) is None


def test_interrupted(settings, observer) -> None:
    outcome = table.run(dataclasses.replace(settings, cases=TINY_CASES), _StopsAt(observer, 3), lambda row: None)
    assert outcome.interrupted
    assert [row.case for row in outcome.records] == [TINY.name] * 2


class _StopsAt:
    def __init__(self, observer, number: int) -> None:
        self.begin = observer.begin
        self._left = number

    def step(self, doing: str) -> None:
        self._left -= 1
        if not self._left:
            raise KeyboardInterrupt


@pytest.mark.gpu
def test_graphs_memory_and_the_largest_batch_on_a_gpu(settings, observer) -> None:
    budget = 40_000_000
    settings = dataclasses.replace(
        settings,
        cases=TINY_CASES,
        precisions=(TRANSLATION_PRECISIONS["tf32"],),
        device=torch.device("cuda"),
        budget=budget,
        loss=3.9,
        most_steps=20,
    )
    records = table.run(settings, observer, lambda row: None).records
    assert [row.case for row in records] == ["tiny-6-5-4"] * 2 + ["tiny-best-6-5-4"] * 2 + ["tiny-6-5-largest"] * 2
    assert {row.status for row in records} == {"measured"}
    for row in records:
        assert set(row.times) == set(row.peak_bytes) == {"eager", "graph"}
        assert sum(row.parts.values()) == pytest.approx(row.peak_bytes["eager"], rel=0.1)
    assert set(records[1].steps_to_loss) == {"eager", "graph"}
    for row in records[4:]:
        assert row.budget_bytes == budget
        assert row.batch > 128
        assert budget / 2 < row.peak_bytes["eager"] <= 1.02 * budget
