"""The plain PyTorch model computes the same as gatewise's model, including padding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import nn

from gatewise.benchmarks.nmt import agreement, sentences
from gatewise.benchmarks.nmt.cases import TINY_CASES, TranslationCase
from gatewise.benchmarks.nmt.rival import PlainSeq2Seq, seq2seq_name
from gatewise.benchmarks.nmt.ways import LibraryLSTM, Way, new_model, seq2seq, starting_weights, with_distinct_attention
from gatewise.benchmarks.precision import FLOAT64
from gatewise.data import PairBatch
from gatewise.data.sentences import PADDING

CPU = torch.device("cpu")


def ragged(case: TranslationCase) -> PairBatch:
    """Sentences of different lengths, one of a single token."""
    (batch,) = sentences.draw(case, 1, CPU)
    lengths = torch.tensor([case.source, 1, 3, case.source][: case.batch])
    ends = torch.tensor([case.target, 2, case.target, 1][: case.batch])
    beyond = torch.arange(case.target)[:, None] >= ends
    source = batch.source.masked_fill(torch.arange(case.source)[:, None] >= lengths, PADDING)
    return PairBatch(
        source,
        lengths,
        batch.inputs.masked_fill(beyond, PADDING),
        batch.targets.masked_fill(beyond, PADDING),
        (1 / ends.sum()).double(),
        batch.rows,
    )


def computed(loss: Callable[[], torch.Tensor], model: nn.Module, name: Callable[[str], str]) -> dict[str, torch.Tensor]:
    value = loss()
    value.backward()
    return {"loss": value.detach()} | {
        name(key): weight.grad.flatten() for key, weight in model.named_parameters() if weight.grad is not None
    }


@pytest.mark.parametrize("whole", [True, False], ids=["equal lengths", "ragged"])
def test_loss_and_every_gradient(case: TranslationCase, whole: bool) -> None:
    start = with_distinct_attention(starting_weights(case, CPU))
    batch = sentences.draw(case, 1, CPU)[0] if whole else ragged(case)
    batch = PairBatch(*batch[:4], batch.token_weight.double(), batch.rows)
    rival = PlainSeq2Seq(case, packed=not whole).double()
    rival.load(start)
    model = seq2seq(case, CPU, "reference").double()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(start[name])
    theirs = computed(lambda: rival(batch), rival, seq2seq_name)
    mine = computed(lambda: model.loss(batch)[0], model, str)
    assert mine.keys() == theirs.keys()
    for name, expected in theirs.items():
        # Both sides compute in float64 and differ only in the order of additions, on gradients that partly cancel.
        torch.testing.assert_close(mine[name], expected, rtol=1e-7, atol=1e-11, msg=name)


def test_the_truth_is_the_same_in_pieces(case: TranslationCase, monkeypatch: pytest.MonkeyPatch) -> None:
    case = dataclasses.replace(case, clip=0.05)
    (batch,), start = sentences.draw(case, 1, CPU), with_distinct_attention(starting_weights(case, CPU))
    whole = agreement.plain_result(case, batch, start, FLOAT64)
    monkeypatch.setattr(agreement, "_MAP", case.source * case.target * case.hidden_size)
    for name, piece in agreement.plain_result(case, batch, start, FLOAT64).items():
        torch.testing.assert_close(piece, whole[name], rtol=1e-9, atol=1e-13)
    norm = torch.stack([tensor.norm() for name, tensor in whole.items() if name != "loss"]).norm()
    assert float(norm) == pytest.approx(0.05, rel=1e-3)


def test_rows_on_the_librarys_lstm_have_no_other() -> None:
    case = TINY_CASES[1]
    library = new_model(Way("x", "reference", "nn.LSTM"), case, CPU)
    own = new_model(Way("x", "reference", "gatewise"), case, CPU)
    names = [type(module).__name__ for module in library.modules()]
    assert names.count(LibraryLSTM.__name__) == 2
    assert "LSTM" not in names
    assert [name for name, _ in library.named_parameters()] == [name for name, _ in own.named_parameters()]
    between = [module.dropout for module in library.modules() if isinstance(module, LibraryLSTM)]
    assert between == [0.0, case.dropout]


def test_the_model_has_the_sizes_of_the_case() -> None:
    case = TINY_CASES[1]
    model = seq2seq(case, CPU)
    assert model.output.weight is model.target_embedding.weight
    assert (model.label_smoothing, model.dropout.p) == (case.label_smoothing, case.dropout)
    assert model.attention.layer_norm
    rival = PlainSeq2Seq(case)
    assert sum(weight.numel() for weight in rival.parameters()) == sum(each.numel() for each in model.parameters())
