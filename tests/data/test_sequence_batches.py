"""Batches of sequences: each sequence is read once per epoch, with others of similar length, without losing steps."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from gatewise.contract.errors import ArgumentError, DataError
from gatewise.data import EqualBatch, RaggedBatch, SequenceBatches, Sequences, class_numbers, classes_of
from gatewise.data.sequences import divide_sequences
from tests.pairwise import each_value


def sequences(lengths, labels=None, name="made up"):
    lengths = torch.tensor(lengths)
    total = int(lengths.sum())
    names = np.array([str(number) for number in range(len(lengths))], dtype=object)
    return Sequences(
        name=name,
        features=("a", "b"),
        values=torch.stack([torch.arange(1.0, total + 1), -torch.arange(1.0, total + 1)], dim=1),
        lengths=lengths,
        labels=names if labels is None else np.array(labels, dtype=object),
        ids=names,
    )


RAGGED = [3, 1, 7, 2, 31, 5, 1, 3, 8, 200, 2, 4, 6]
EQUAL = [4] * 13


def batches(lengths, size=4, **options):
    return SequenceBatches(sequences(lengths), torch.arange(len(lengths)), size, **options)


@pytest.mark.parametrize(
    ("lengths", "shuffle", "size"),
    each_value([*itertools.product([RAGGED, EQUAL], [False, True], [1, 3, 4, 100])]),
    ids=str,
)
def test_every_sequence_is_read_once_and_whole(lengths, shuffle, size):
    subject, whole = batches(lengths, size, shuffle=shuffle), sequences(lengths)
    parts = whole.values.split(lengths)
    seen = []
    windows = list(subject.windows(3))
    assert len(windows) == len(subject)
    for batch in windows:
        assert isinstance(batch, RaggedBatch if lengths is RAGGED else EqualBatch)
        own = [len(batch.inputs)] * batch.count if batch.lengths is None else batch.lengths.tolist()
        assert len(batch.inputs) == max(own)
        for column, (row, length) in enumerate(zip(batch.rows.tolist(), own, strict=True)):
            assert torch.equal(batch.inputs[:length, column], parts[row])
            assert not batch.inputs[length:, column].any()
            assert batch.targets[column] == row
            seen.append(row)
    assert sorted(seen) == list(range(len(lengths)))


@pytest.mark.parametrize("lengths", [RAGGED, EQUAL], ids=["ragged", "equal"])
def test_an_epoch_is_always_the_same_and_another_one_is_not(lengths):
    def order(epoch, seed=0):
        subject = batches(lengths, shuffle=True, seed=seed)
        return torch.cat([batch.rows for batch in subject.windows(epoch)]).tolist()

    assert order(0) == order(0)
    assert order(0) != order(1)
    assert order(0) != order(0, seed=1)


def test_an_epoch_goes_on_where_it_stopped():
    subject = batches(RAGGED, shuffle=True)
    whole = [batch.rows.tolist() for batch in subject.windows(2)]
    assert [batch.rows.tolist() for batch in subject.windows(2, start=2)] == whole[2:]


def test_sequences_of_similar_length_come_together():
    lengths = torch.randint(1, 200, (2000,), generator=torch.Generator().manual_seed(0)).tolist()
    padded = sum(batch.inputs.shape[0] * batch.count for batch in batches(lengths, 20, shuffle=True).windows())
    drawn = torch.randperm(2000, generator=torch.Generator().manual_seed(0)).split(20)
    mixed = sum(max(lengths[row] for row in part.tolist()) * 20 for part in drawn)
    assert padded < 1.1 * sum(lengths)
    assert mixed > 1.7 * sum(lengths)


@pytest.mark.parametrize("lengths", [RAGGED, EQUAL], ids=["ragged", "equal"])
def test_processes_share_each_training_batch_equally(lengths):
    shares = [list(batches(lengths, 4, shuffle=True, rank=rank, processes=2).windows(1)) for rank in (0, 1)]
    assert len(shares[0]) == len(shares[1]) == len(batches(lengths, 4, shuffle=True, processes=2))
    seen = set()
    for one, other in zip(*shares, strict=True):
        assert one.count == other.count
        seen |= {*one.rows.tolist(), *other.rows.tolist()}
    assert len(seen) == 12  # the thirteenth has no partner in this epoch


def test_processes_share_an_evaluation_without_leaving_anything_out():
    shares = [list(batches(RAGGED, 4, rank=rank, processes=3).windows()) for rank in range(3)]
    assert sorted(row for share in shares for batch in share for row in batch.rows.tolist()) == list(range(13))


def test_bad_sizes_are_refused():
    with pytest.raises(ArgumentError, match="`batch_size` must be a positive integer, got 0"):
        batches(EQUAL, 0)
    with pytest.raises(ArgumentError, match="`batch_size` must be a multiple of the 2 processes, got 3"):
        batches(EQUAL, 3, shuffle=True, processes=2)
    with pytest.raises(ArgumentError, match=r"`batch_size` must be a positive integer, got 2\.5"):
        batches(EQUAL, 2.5)
    with pytest.raises(ArgumentError, match="`rank` must be from 0 up and below the number of processes, 2, got 2"):
        batches(EQUAL, 2, rank=2, processes=2)
    for count in (1, len(EQUAL) + 1):
        with pytest.raises(
            ArgumentError, match=rf"`targets` must be one for each of the .* sequences, .*, got \[{count}\]"
        ):
            SequenceBatches(EQUAL, torch.zeros(count), 2)
    with pytest.raises(DataError, match="made up has 1 sequences for 2 processes"):
        batches([3], 2, shuffle=True, processes=2)


def test_parts_are_drawn_at_random_and_have_everything():
    whole = sequences(RAGGED)
    parts = divide_sequences(whole, (0.5, 0.25, 0.25), seed=1)
    assert [len(part) for part in parts] == [6, 4, 3]
    assert sorted(name for part in parts for name in part.ids) == sorted(whole.ids)
    pieces = whole.values.split(RAGGED)
    for part in parts:
        for name, values in zip(part.ids, part.values.split(part.lengths.tolist()), strict=True):
            assert torch.equal(values, pieces[int(name)])
    assert list(divide_sequences(whole, (0.5, 0.25, 0.25), seed=2)[0].ids) != list(parts[0].ids)


def test_parts_must_be_possible():
    with pytest.raises(DataError, match="made up has 2 sequences, too few to be divided"):
        divide_sequences(sequences([1, 1]))
    with pytest.raises(ArgumentError, match="`shares` must be three positive numbers that sum to 1"):
        divide_sequences(sequences(RAGGED), (0.9, 0.2, 0.1))


def test_classes_are_ordered_as_numbers_where_they_are_numbers():
    assert classes_of(sequences([1] * 3, ["10", "9", "9"])) == ("9", "10")
    assert classes_of(sequences([1] * 3, ["b", "10", "9"])) == ("10", "9", "b")
    with pytest.raises(DataError, match="made up has one label only, 'b'"):
        classes_of(sequences([1] * 2, ["b", "b"]))


def test_an_unseen_label_is_named():
    assert class_numbers(sequences([1] * 3, ["b", "a", "b"]), ("a", "b")).tolist() == [1, 0, 1]
    with pytest.raises(
        DataError, match=r"made up, sequence 1: the label .c. was not seen in training; known are a, b\. "
    ):
        class_numbers(sequences([1] * 2, ["a", "c"]), ("a", "b"))


def test_classes_are_those_of_labels():
    unknown = dataclasses.replace(sequences([1] * 3), labels=None)
    for asked in (lambda: classes_of(unknown), lambda: class_numbers(unknown, ("a", "b"))):
        with pytest.raises(DataError, match="made up has no labels"):
            asked()
