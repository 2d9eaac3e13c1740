"""The indices of sequences and episodes, against the same written as loops over tokens."""

import itertools
import random

import pytest
import torch

from gatewise.contract.saved import Inputs
from gatewise.testing.sequences import Batch, Episodes

TIME, ROWS = 7, 5


def rows_of(lengths):
    return [[step * ROWS + row for step in range(length)] for row, length in enumerate(lengths)]


def tokens_by_step(sequences):
    longest_first = sorted((own for own in sequences if own), key=lambda own: -len(own))
    longest = max(map(len, longest_first), default=0)
    return [[own[step] for own in longest_first if len(own) > step] for step in range(longest)]


def check(found, sequences):
    expected = tokens_by_step(sequences)
    assert found.sizes == tuple(map(len, expected))
    assert found.tokens.tolist() == list(itertools.chain(*expected))
    backwards = tokens_by_step([own[::-1] for own in sequences])
    assert found.backwards.tolist() == list(itertools.chain(*backwards))
    # Sorting in Python is stable, too.
    order = sorted((at for at, own in enumerate(sequences) if own), key=lambda at: -len(sequences[at]))
    assert found.order.tolist() == order


@pytest.mark.parametrize("lengths", [[7, 7, 7, 7, 7], [0, 3, 7, 3, 1], [0, 0, 0, 0, 0]], ids=str)
def test_sequences_of_lengths(lengths):
    batch = Batch(torch.arange(TIME) * ROWS, torch.tensor(lengths))
    check(batch.sequences(), rows_of(lengths))
    row_of_token = batch.row_of_token(TIME * ROWS)
    for row, tokens in enumerate(rows_of(lengths)):
        assert row_of_token[tokens].tolist() == [row] * len(tokens)


def test_sequences_of_a_packed_batch():
    lengths = [4, 3, 3, 1]
    packed = torch.nn.utils.rnn.pack_sequence([torch.zeros(length, 1) for length in lengths])
    states = torch.zeros(1, 4, 2)
    batch = Batch.of(Inputs(packed.data, states, states, (), batch_sizes=packed.batch_sizes))
    assert batch.lengths.tolist() == lengths
    check(batch.sequences(), [[0, 4, 7, 10], [1, 5, 8], [2, 6, 9], [3]])


@pytest.mark.parametrize("seed", range(6))
def test_episodes_are_the_pieces_of_rows_between_resets(seed):
    generator = random.Random(seed)
    lengths = [generator.choice([0, 1, 3, TIME]) for _ in range(ROWS)]
    resets = torch.rand(TIME, ROWS, generator=torch.Generator().manual_seed(seed)) < 0.4
    found = Episodes.of(Batch(torch.arange(TIME) * ROWS, torch.tensor(lengths)), resets)
    episodes, first, last = [], [], []
    for row, tokens in enumerate(rows_of(lengths)):
        if tokens:
            first.append(len(episodes))
        for step, token in enumerate(tokens):
            if step == 0 or resets[step, row]:
                episodes.append([])
            episodes[-1].append(token)
        if tokens:
            last.append(len(episodes) - 1)
    check(found.sequences, episodes)
    assert found.number == len(episodes)
    assert (found.first.tolist(), found.last.tolist()) == (first, last)
    assert found.rows.tolist() == [row for row, length in enumerate(lengths) if length]
    assert found.continued.tolist() == [not resets[0, row] for row in found.rows.tolist()]
