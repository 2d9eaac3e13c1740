"""A run of the benchmark: its rows and their contents."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from gatewise.benchmarks import language_model, rivals
from gatewise.benchmarks.precision import PRECISIONS, chosen
from gatewise.benchmarks.rivals import LanguageModel, Loop, Way
from gatewise.benchmarks.training_step import TrainingStep, new_model
from gatewise.contract.errors import ArgumentError, CorpusError
from gatewise.data import Window
from gatewise.training.graph import Capture, cuda_graph
from tests.processor import needs_bfloat16_autocast


class Backwards(nn.LSTM):
    """A wrong way, which reads the sequence from its end."""

    def __init__(self, size: int, num_layers: int, dropout: float) -> None:
        super().__init__(size, size, num_layers, dropout=dropout)

    def forward(self, x, state):
        return super().forward(x.flip(0), state)


class Broken(Backwards):
    def forward(self, x, state):
        raise RuntimeError("the library said no\nand much more")


def test_every_way_is_a_row(settings, observer) -> None:
    outcome = language_model.run(settings, observer)
    assert not outcome.interrupted
    status = {record.way: record.status for record in outcome.records}
    assert list(status) == [way.name for way in rivals.ways()]
    refused = {name for name, each in status.items() if each == "refused"}
    assert refused >= {way.name for way in rivals.ways() if way.loop is Loop.GRAPH}
    assert refused >= {f"gatewise {kernel}" for kernel in ("persistent", "stepwise", "cudnn")}
    measured = {name for name, each in status.items() if each == "measured"}
    assert measured >= {"nn.LSTM", "gatewise aten", "gatewise eager"}
    assert refused | measured == status.keys()
    assert observer.announced == len(observer.steps) + len(refused) * settings.runs


def test_a_measured_row(settings, observer, plain_ways) -> None:
    (record,) = language_model.run(settings, observer, [plain_ways["nn.LSTM"]]).records
    assert record.q20 <= record.median <= record.q80
    assert record.runs == settings.runs
    assert record.words_per_second == pytest.approx(settings.case.words / record.median)
    assert record.error <= record.allowed
    assert record.peak_bytes is None
    assert record.settings["vocabulary"] == 20
    assert record.settings["dropout"] == 0.5


def test_a_refused_row_says_why(settings, observer) -> None:
    record, _ = language_model.run(dataclasses.replace(settings, only=("cudnn",)), observer).records
    assert (record.status, record.median, record.words_per_second) == ("refused", None, None)
    assert record.note.startswith("device is ")
    assert "allowed: a CUDA GPU" in record.note


def test_a_graph_needs_a_gpu(settings, observer, plain_ways) -> None:
    (record,) = language_model.run(settings, observer, [plain_ways["nn.LSTM, graph"]]).records
    assert (record.status, record.note) == ("refused", "device is cpu, allowed: a CUDA GPU, which can replay a graph")


def test_a_wrong_way_turns_red_and_gets_no_speed(settings, observer, plain_ways) -> None:
    ways = [Way("backwards", Backwards), plain_ways["nn.LSTM"]]
    wrong, right = language_model.run(settings, observer, ways).records
    assert (wrong.status, wrong.median, wrong.words_per_second, wrong.runs) == ("wrong", None, None, 0)
    assert wrong.error > wrong.allowed
    assert "more than the allowed" in wrong.note
    assert right.status == "measured"


def test_a_way_that_fails_does_not_take_the_others_with_it(settings, observer, plain_ways) -> None:
    failed, right = language_model.run(settings, observer, [Way("broken", Broken), plain_ways["nn.LSTM"]]).records
    assert (failed.status, failed.note, failed.median) == ("failed", "the library said no", None)
    assert right.status == "measured"


def test_interrupted_while_timing_keeps_what_has_samples(settings, observer, plain_ways, monkeypatch) -> None:
    def step(doing: str) -> None:
        if doing == "timing nn.LSTM":
            raise KeyboardInterrupt

    monkeypatch.setattr(observer, "step", step)
    ways = [plain_ways["nn.LSTMCell loop"], plain_ways["nn.LSTM"], plain_ways["nn.LSTM, native loop"]]
    outcome = language_model.run(settings, observer, ways)
    assert outcome.interrupted
    assert [(record.way, record.runs) for record in outcome.records] == [("nn.LSTMCell loop", 1)]


def test_interrupted_in_the_second_table_keeps_the_first(settings, observer, plain_ways, monkeypatch) -> None:
    begun = []

    def step(doing: str) -> None:
        begun.append(doing)
        if begun.count("checking nn.LSTM") == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(observer, "step", step)
    both = dataclasses.replace(settings, vocabularies=(20, 30))
    outcome = language_model.run(both, observer, [plain_ways["nn.LSTM"]])
    assert outcome.interrupted
    assert [record.settings["vocabulary"] for record in outcome.records] == [20]


def test_only_some_ways(settings, observer) -> None:
    outcome = language_model.run(dataclasses.replace(settings, only=("CELL", "aten")), observer)
    assert [record.way for record in outcome.records] == ["nn.LSTMCell loop", "gatewise aten", "gatewise aten, graph"]
    with pytest.raises(ArgumentError, match=r"`--way` must be part of one of: 'nn\.LSTMCell loop', .*, got 'nonsense'"):
        language_model.run(dataclasses.replace(settings, only=("nonsense",)), observer)


def test_a_budget_ends_the_samples(settings, observer, plain_ways) -> None:
    spent = dataclasses.replace(settings, runs=50, budget=0.0)
    (record,) = language_model.run(spent, observer, [plain_ways["nn.LSTM"]]).records
    assert record.runs == 3


# Other tests have one table.
@pytest.mark.exhaustive
def test_precisions_and_vocabularies_are_tables(settings, observer, plain_ways) -> None:
    many = dataclasses.replace(settings, vocabularies=(20, 30), precisions=(PRECISIONS["fp32"], PRECISIONS["bf16"]))
    records = language_model.run(many, observer, [plain_ways["nn.LSTM"]]).records
    tables = [(record.settings["vocabulary"], record.dtype) for record in records]
    assert tables == [(20, "fp32"), (20, "bf16"), (30, "fp32"), (30, "bf16")]


def test_a_corpus(settings, observer, plain_ways, corpus: Path) -> None:
    with_text = dataclasses.replace(settings, corpus=corpus)
    (record,) = language_model.run(with_text, observer, [plain_ways["nn.LSTM"]]).records
    assert (record.status, record.settings["corpus"]) == ("measured", "text.txt")


def test_a_corpus_that_is_too_short_says_how_long_it_must_be(settings, observer, corpus: Path) -> None:
    corpus.write_text("four words and end", encoding="utf-8")
    with pytest.raises(CorpusError, match=r"at least 33 words, two batches, got 4 words in .*text\.txt"):
        language_model.run(dataclasses.replace(settings, corpus=corpus), observer)


def test_a_missing_corpus(settings, observer, tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="there is no text file"):
        language_model.run(dataclasses.replace(settings, corpus=tmp_path / "absent.txt"), observer)


def _step(case, way: Way, precision: str = "fp32", capture: Capture = cuda_graph) -> tuple[LanguageModel, TrainingStep]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(20, (2, case.time + 1, case.batch), generator=generator)
    torch.manual_seed(0)
    model = new_model(way, case, 20, PRECISIONS[precision], torch.device("cpu"), dropout=case.dropout)
    batches = [Window(batch[:-1], batch[1:]) for batch in tokens]
    return model, TrainingStep(model, batches, case, PRECISIONS[precision], way.loop, capture)


def test_a_step_trains(settings, plain_ways) -> None:
    """Steps lower the loss and change every parameter, by no more than the clipping norm; no gradients remain."""
    case = dataclasses.replace(settings.case, dropout=0.0, clip_norm=0.5)
    model, step = _step(case, plain_ways["nn.LSTM"])
    before = [parameter.detach().clone() for parameter in model.parameters()]
    first = float(step.losses().detach().mean())
    step()
    moves = [(new.detach() - old).norm() for new, old in zip(model.parameters(), before, strict=True)]
    assert all(move > 0 for move in moves)
    assert math.sqrt(sum(float(move) ** 2 for move in moves)) <= 0.5 * (1 + 1e-5)
    assert all(parameter.grad is None for parameter in model.parameters())
    for _ in range(40):
        step()
    assert float(step.losses().detach().mean()) < 0.9 * first


def test_every_loop_trains_alike(settings, plain_ways) -> None:
    """The plain loop, the step of gatewise.training and its replay give the same weights."""
    case = dataclasses.replace(settings.case, dropout=0.0, clip_norm=0.5)
    replays = []

    def capture(work):
        return lambda: (replays.append(0), work())

    ends = []
    for loop in Loop:
        model, step = _step(case, dataclasses.replace(plain_ways["nn.LSTM"], loop=loop), capture=capture)
        for _ in range(6):
            step()
        ends.append([parameter.detach().clone() for parameter in model.parameters()])
    assert len(replays) == 3
    for plain, library, replayed in zip(*ends, strict=True):
        assert torch.equal(library, replayed)
        torch.testing.assert_close(library, plain, rtol=1e-5, atol=1e-6)  # clipping rounds differently


def test_a_capture_that_fails_is_a_refused_row(settings, plain_ways) -> None:
    def capture(work):
        raise RuntimeError("operation not permitted")

    _, step = _step(settings.case, plain_ways["nn.LSTM, graph"], capture=capture)
    step.warm_up()
    assert step.refusal == ""
    step()
    assert step.refusal == "operation not permitted"


def test_the_state_is_carried(settings, plain_ways) -> None:
    case = dataclasses.replace(settings.case, dropout=0.0)
    _, step = _step(case, plain_ways["nn.LSTM"])
    with torch.no_grad():
        first, _, again = step.losses(), step.losses(), step.losses()
    assert not torch.equal(first, again)  # the same tokens, from another state


def test_dropout_changes_the_loss(settings, plain_ways) -> None:
    def losses(dropout: float) -> torch.Tensor:
        _, step = _step(dataclasses.replace(settings.case, dropout=dropout), plain_ways["nn.LSTM"])
        return step.losses()

    assert torch.equal(losses(0.0), losses(0.0))
    assert not torch.equal(losses(0.0), losses(0.5))


@pytest.mark.parametrize(
    ("precision", "parameters", "scores"),
    [
        ("fp32", torch.float32, torch.float32),
        ("bf16", torch.bfloat16, torch.bfloat16),
        pytest.param("bf16-autocast", torch.float32, torch.bfloat16, marks=needs_bfloat16_autocast),
    ],
)
def test_precision_is_what_runs(settings, plain_ways, precision, parameters, scores) -> None:
    model, step = _step(settings.case, plain_ways["nn.LSTM"], precision)
    seen = []
    model.decoder.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    step()
    assert {parameter.dtype for parameter in model.parameters()} == {parameters}
    assert seen == [scores]


def test_tf32_is_switched_for_the_block_only() -> None:
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    for name, allowed in (("fp32", False), ("tf32", True)):
        with PRECISIONS[name].applied():
            assert torch.backends.cudnn.allow_tf32 is allowed
            assert torch.backends.cuda.matmul.allow_tf32 is allowed
    assert (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32) == before


def test_default_precisions() -> None:
    assert [precision.name for precision in chosen([], torch.device("cpu"))] == ["fp32"]
    assert [precision.name for precision in chosen([], torch.device("cuda"))] == list(PRECISIONS)
    assert [precision.name for precision in chosen(["bf16", "bf16"], torch.device("cpu"))] == ["bf16"]
    with pytest.raises(ArgumentError, match="`--dtype` must be one of fp32, tf32, bf16, bf16-autocast, got 'int8'"):
        chosen(["int8"], torch.device("cpu"))
    with pytest.raises(ArgumentError, match="which has no TF32"):
        chosen(["tf32"], torch.device("cpu"))
