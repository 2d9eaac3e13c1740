"""Sentences as tokens, filters, and batches by tokens."""

from __future__ import annotations

import json

import pytest
import torch

from gatewise.contract.errors import ArgumentError, CorpusError, DataError
from gatewise.data import (
    PairBatches,
    PairFilter,
    ParallelText,
    build_vocabularies,
    encode_all,
    filter_pairs,
    load_vocabularies,
    pair_batches,
    vocabularies_to_json,
)
from gatewise.data.sentences import BEGINNING, END, PADDING

PAIRS = ParallelText("x", ("der Hund schläft", "die Katze schläft"), ("the dog sleeps", "the cat sleeps"))


@pytest.mark.parametrize("kind", ["bpe", "word", "character", "byte"])
@pytest.mark.parametrize("sharing", ["joint", "separate"])
def test_sentences_come_back_from_their_tokens_and_vocabularies_from_their_files(kind, sharing):
    if kind == "bpe":
        pytest.importorskip("tokenizers")
    both = build_vocabularies(kind, PAIRS, 300 if kind == "bpe" else None, sharing)
    again = load_vocabularies(vocabularies_to_json(*both))
    assert (again[0] is again[1]) == (both[0] is both[1]) == (sharing == "joint")
    for one, other, side in zip(both, again, (PAIRS.source, PAIRS.target), strict=True):
        for sentence in side:
            tokens = one.encode(sentence)
            assert tokens.min() >= 3
            assert tokens.max() < len(one)
            assert one.decode(tokens.tolist()) == sentence
            assert torch.equal(other.encode(sentence), tokens)
        assert one.decode([BEGINNING, PADDING, END]) == ""
        assert one.encode("").numel() == 0
        several = [*side, "", "  a \u2028 b "]
        for tokens, sentence in zip(encode_all(one, several), several, strict=True):
            assert torch.equal(tokens, one.encode(sentence))
            assert tokens.dtype == torch.int64


def test_a_word_has_the_same_tokens_wherever_it_stands():
    pytest.importorskip("tokenizers")
    source, _ = build_vocabularies("bpe", PAIRS, 300)
    assert source.encode("schläft die").tolist() == [*source.encode("schläft"), *source.encode("die")]


def test_words_that_were_never_seen_are_unknown_and_bytes_never_are():
    pytest.importorskip("tokenizers")
    words, _ = build_vocabularies("word", PAIRS)
    assert words.encode("der Igel").tolist() == [words.encode("der").item(), words.unknown]
    pieces, _ = build_vocabularies("bpe", PAIRS, 300)
    assert pieces.unknown is None
    assert pieces.decode(pieces.encode("Игел 🦔").tolist()) == "Игел 🦔"


def test_every_token_has_a_name():
    words, _ = build_vocabularies("word", PAIRS)
    assert words.pieces([BEGINNING, words.encode("Hund").item(), END, PADDING]) == ["<s>", "Hund", "</s>", "<pad>"]


def test_vocabularies_that_are_none_are_refused():
    with pytest.raises(ArgumentError, match="joint, separate"):
        build_vocabularies("word", PAIRS, None, "both")
    for document, what in (
        ("", "it is not JSON"),
        ("{}", "must be a JSON object with `source` and, unless it is joint, `target`, got {}"),
        ("[]", "must be a JSON object with `source` and, unless it is joint, `target`, got []"),
        (json.dumps({"source": {"kind": "word"}}), "`words` must be a list"),
        (json.dumps({"source": {"kind": "byte"}, "target": None}), "must be a JSON object, got None"),
    ):
        with pytest.raises(CorpusError, match="gatewise wrote") as error:
            load_vocabularies(document)
        assert what in str(error.value)


def tokens(*lengths, first=3):
    return [torch.arange(first, first + length) for length in lengths]


def test_every_pair_that_is_left_out_is_counted_once():
    kept, report = filter_pairs(tokens(3, 0, 5, 9, 1, 2), tokens(3, 4, 0, 2, 8, 6), PairFilter(longest=8, ratio=3.0))
    assert kept == [0, 5]
    assert (report.pairs, report.kept, report.empty, report.too_long, report.uneven) == (6, 2, 2, 1, 1)
    assert str(report) == "2 of 6 kept; left out: 2 empty, 1 too long, 1 of uneven length"
    assert filter_pairs(tokens(1), tokens(8), PairFilter(longest=8, ratio=0))[0] == [0]
    for wrong in ({"longest": 0}, {"ratio": 0.5}):
        with pytest.raises(ArgumentError):
            PairFilter(**wrong)


LENGTHS = [(number * 7 % 23 + 1, number * 5 % 19 + 1) for number in range(200)]


def batches(**options):
    source, target = tokens(*(one for one, _ in LENGTHS)), tokens(*(other for _, other in LENGTHS), first=100)
    return PairBatches(source, target, 120, **options)


@pytest.mark.parametrize("shuffle", [False, True])
def test_an_epoch_has_every_pair_once_in_batches_that_fit(shuffle):
    seen, padded, count = [], 0, 0
    reader = batches(shuffle=shuffle)
    for batch in reader.windows(3):
        assert max(batch.source.numel(), batch.targets.numel()) <= 120
        padded += batch.targets.numel()
        count += batch.count
        assert batch.count == int((batch.targets != PADDING).sum())
        assert batch.token_weight.item() == pytest.approx(1 / batch.count)
        for column, row in enumerate(batch.rows.tolist()):
            source, target = LENGTHS[row]
            assert batch.source_lengths[column] == source
            wanted = torch.arange(3, 3 + source)
            assert torch.equal(batch.source[:source, column], wanted)
            assert not batch.source[source:, column].any()
            assert batch.inputs[: target + 1, column].tolist() == [BEGINNING, *range(100, 100 + target)]
            assert batch.targets[: target + 1, column].tolist() == [*range(100, 100 + target), END]
            assert not batch.targets[target + 1 :, column].any()
        seen += batch.rows.tolist()
    assert sorted(seen) == list(range(200))
    assert count == sum(target + 1 for _, target in LENGTHS)
    assert padded < 1.6 * count  # in the order of the rows it would be more than twice as much


@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_have_few_shapes_and_say_how_much_is_padding(shuffle):
    generator = torch.Generator().manual_seed(0)
    lengths = (torch.randn(9000, generator=generator).exp() * 8 + 1).long().clamp(max=59).tolist()
    pairs = tokens(*lengths), tokens(*(max(1, length - length % 3) for length in lengths))
    reader = PairBatches(*pairs, 2000, shuffle=shuffle)
    seen = list(reader.windows(2))
    shapes = {(tuple(batch.source.shape), tuple(batch.targets.shape)) for batch in seen}
    assert len(shapes) == reader.shapes < 40 < len(reader)
    for source, target in shapes:
        assert source == target
    if shuffle:
        assert sum(columns % 8 == 0 or columns < 64 for (_, columns), _ in shapes) >= len(shapes) - 1
    places = sum(batch.source.numel() + batch.targets.numel() for batch in seen)
    used = sum(int((part != PADDING).sum()) for batch in seen for part in (batch.source, batch.targets))
    assert reader.padding == pytest.approx(1 - used / places)
    assert reader.padding < 0.12


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("batch_tokens", [120, 400])
def test_no_batch_is_larger_than_the_largest_of_its_length(processes, batch_tokens):
    largest = dict(batches(processes=processes, shuffle=True).largest(batch_tokens))
    source, target = tokens(*(one for one, _ in LENGTHS)), tokens(*(other for _, other in LENGTHS), first=100)
    reader = PairBatches(source, target, batch_tokens, processes=processes, shuffle=True)
    assert dict(reader.largest()) == largest
    seen = {}
    for epoch in range(3):
        for batch in reader.windows(epoch):
            steps, rows = batch.inputs.shape
            seen[steps] = max(seen.get(steps, 0), rows)
    assert all(rows <= largest[steps] for steps, rows in seen.items())
    assert any(rows == largest[steps] for steps, rows in seen.items())


def test_pairs_of_similar_length_are_read_together():
    lengths = [1 + number % 20 for number in range(20 * 200)]
    reader = PairBatches(tokens(*lengths), tokens(*(length - 1 for length in lengths)), 1500, shuffle=True)
    assert reader.padding < 0.02 + 1 / 20  # in each bucket a few pairs wait for the next


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"shuffle": True, "rank": 1, "processes": 3}])
def test_batches_are_the_same_however_many_are_made_at_once(monkeypatch, options):
    made = {}
    for together in (1, 300, 1 << 20):
        monkeypatch.setattr(pair_batches, "_TOGETHER", together)
        made[together] = [*batches(**options).windows(1), *batches(**options).windows(2, 3)]
    for each in made.values():
        for batch, alone in zip(each, made[1], strict=True):
            assert batch.count == alone.count
            for part, other in zip(batch, alone, strict=True):
                assert torch.equal(part, other)
                assert part.is_contiguous()


def test_batches_have_memory_of_their_own():
    first, *others = batches(shuffle=True).windows()
    before = [[part.clone() for part in batch] for batch in others]
    for part in first[:4]:
        part.fill_(7)
    assert all(map(torch.equal, batch, kept) for batch, kept in zip(others, before, strict=True))
    # Triton compiles other code for addresses that are no multiples of 16.
    assert not any(part.data_ptr() % 16 for batch in others for part in batch[:4])


def test_epochs_differ_repeat_and_go_on_where_they_stopped():
    reader = batches(shuffle=True, seed=5)

    def rows(*place):
        return [batch.rows.tolist() for batch in reader.windows(*place)]

    assert rows(0) == rows(0)
    assert len(rows(0)) == len(rows(1)) == len(reader)
    assert rows(0) != rows(1)
    assert rows(1, 4) == rows(1)[4:]
    assert [batch.rows.tolist() for batch in batches(shuffle=True, seed=6).windows(0)] != rows(0)


def test_processes_share_every_training_batch_equally():
    shares = [list(batches(shuffle=True, rank=rank, processes=3).windows(1)) for rank in range(3)]
    assert len({len(share) for share in shares}) == 1
    seen = []
    for parts in zip(*shares, strict=True):
        assert len({len(part.rows) for part in parts}) == 1
        total = sum(int((part.targets != PADDING).sum()) for part in parts)
        # The mean over processes of sum(loss) * token_weight is then the mean over all tokens.
        assert all(part.count == pytest.approx(total / 3) for part in parts)
        seen += [row for part in parts for row in part.rows.tolist()]
    assert len(set(seen)) == len(seen) >= 198


def test_processes_share_evaluation_without_leaving_anything_out():
    shares = [list(batches(rank=rank, processes=3).windows()) for rank in range(3)]
    seen = [row for share in shares for part in share for row in part.rows.tolist()]
    assert sorted(seen) == list(range(200))
    assert sum(part.count for share in shares for part in share) == sum(target + 1 for _, target in LENGTHS)


def test_a_pair_that_is_too_long_for_any_batch_is_named():
    with pytest.raises(DataError, match=r"pair 2 of the test pairs .* has 31 tokens, .* room for 30\."):
        PairBatches(tokens(3, 5), tokens(3, 30), 30, name="the test pairs")
    with pytest.raises(DataError, match="room for 15 for each of 2 processes"):
        PairBatches(tokens(3, 16), tokens(3, 4), 30, processes=2, shuffle=True)
    assert len(PairBatches(tokens(3, 5), tokens(3, 30), 31)) == 2


def test_nothing_to_read_is_refused():
    with pytest.raises(DataError, match="0 pairs"):
        PairBatches([], [], 30)
    with pytest.raises(DataError, match="1 pairs for 2 processes"):
        PairBatches(tokens(3), tokens(3), 30, processes=2, shuffle=True)
    with pytest.raises(ArgumentError, match="batch_tokens"):
        PairBatches(tokens(3), tokens(3), 0)
    with pytest.raises(ArgumentError, match="`target` must be as many sentences as `source`, 2, got 1"):
        PairBatches(tokens(3, 4), tokens(3), 30)


def test_a_batch_without_a_sentence_has_one_step():
    (batch,) = PairBatches(tokens(0), tokens(0), 30).windows()
    assert batch.source.tolist() == [[PADDING]]
    assert batch.source_lengths.tolist() == [0]
    assert (batch.inputs.tolist(), batch.targets.tolist()) == ([[BEGINNING]], [[END]])


def test_an_epoch_goes_on_after_any_batch_and_may_be_over():
    numbers = [torch.full((length,), 5) for length in (1, 2, 3, 4, 5, 6, 7, 8, 9)]
    batches = PairBatches(numbers, numbers, 12, shuffle=True, seed=3)
    whole = list(batches.windows(1))
    assert len(whole) > 3
    for start in range(len(whole) + 1):
        rest = list(batches.windows(1, start))
        assert len(rest) == len(whole) - start
        for one, other in zip(rest, whole[start:], strict=True):
            assert one.count == other.count
            assert one.token_weight == torch.tensor(1 / one.count)
            assert all(torch.equal(*parts) for parts in zip(one, other, strict=True))
