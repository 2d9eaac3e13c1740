"""Streams: contiguous columns, without skipped or repeated tokens."""

from __future__ import annotations

import math

import pytest
import torch

from gatewise.contract.errors import ArgumentError, CorpusError
from gatewise.data import TokenStream, unigram_perplexity
from gatewise.data.stream import GRAIN

TOKENS = torch.arange(1003)


def columns_of(windows):
    inputs, targets = zip(*windows, strict=True)
    return torch.cat(inputs), torch.cat(targets)


@pytest.mark.parametrize(("batch", "window"), [(1, 1), (3, 35), (7, 50), (31, 31), (20, 35)])
def test_columns_are_consecutive_parts_of_the_text(batch, window):
    stream = TokenStream(TOKENS, batch, window)
    inputs, targets = columns_of(stream.windows())
    height = len(TOKENS) // batch
    expected = TOKENS[: height * batch].view(batch, height).t()
    assert torch.equal(inputs, expected[:-1])
    assert torch.equal(targets, expected[1:])
    assert stream.tokens == targets.numel()


def test_length_is_the_number_of_windows_and_the_last_may_be_short():
    stream = TokenStream(TOKENS, 4, 35)
    windows = list(stream.windows())
    assert len(windows) == len(stream)
    assert [len(window.inputs) for window in windows[:-1]] == [35] * (len(stream) - 1)
    assert len(windows[-1].inputs) == stream.steps - 35 * (len(stream) - 1)
    assert windows[-1].count == windows[-1].targets.numel()


@pytest.mark.parametrize("rotate", [False, True])
def test_an_epoch_goes_on_where_it_stopped(rotate):
    stream = TokenStream(TOKENS, 4, 35, rotate=rotate)
    whole, rest = list(stream.windows(2)), list(stream.windows(2, start=3))
    assert len(rest) == len(whole) - 3
    for one, other in zip(whole[3:], rest, strict=True):
        assert torch.equal(one.inputs, other.inputs)
        assert torch.equal(one.targets, other.targets)


def test_rotation_begins_elsewhere_in_every_epoch_and_reads_the_same_text():
    stream = TokenStream(TOKENS, 1, 35, rotate=True)
    starts = [next(stream.windows(epoch)).inputs[0].item() for epoch in range(5)]
    assert len(set(starts)) == 5
    _, targets = columns_of(stream.windows(1))
    assert len(set(targets.flatten().tolist())) == len(TOKENS) - 1
    other = TokenStream(TOKENS, 1, 35, rotate=True, seed=1)
    assert next(other.windows(0)).inputs[0].item() != starts[0]


@pytest.mark.parametrize(("batch", "window", "jitter"), [(1, 70, 5.0), (3, 35, 5.0), (7, 20, 5.0), (2, 10, 2.5)])
def test_windows_of_random_lengths_read_the_same_columns(batch, window, jitter):
    tokens = torch.arange(12_345)
    stream, plain = TokenStream(tokens, batch, window, jitter=jitter), TokenStream(tokens, batch, window)
    ways = set()
    for epoch in range(3):
        windows = list(stream.windows(epoch))
        assert len(windows) == len(stream)
        for found, expected in zip(columns_of(windows), columns_of(plain.windows()), strict=True):
            assert torch.equal(found, expected)
        lengths = [len(each.inputs) for each in windows]
        assert all(length % GRAIN == 0 for length in lengths[:-1])
        ways.add(tuple(lengths))
        rest = list(stream.windows(epoch, start=4))
        assert [len(each.inputs) for each in rest] == lengths[4:]
    assert len(ways) == 3
    other = TokenStream(tokens, batch, window, jitter=jitter, seed=1)
    assert tuple(len(each.inputs) for each in other.windows()) not in ways


def test_most_lengths_are_near_the_window_and_some_near_its_half():
    stream = TokenStream(torch.arange(2_000_000), 10, 70, jitter=5.0)
    lengths = torch.tensor([len(each.inputs) for each in stream.windows()])[:-1].double()
    short = lengths < 52
    assert abs(short.double().mean() - 0.05) < 0.02
    assert abs(lengths[~short].mean() - 70) < 1
    assert abs(lengths[short].mean() - 35) < 2
    assert abs(lengths[~short].std() - 5) < 1
    assert len(lengths.unique()) < 20


@pytest.mark.parametrize(
    ("window", "jitter", "allowed"),
    [
        (70, 18.0, "from 0 to 17.5 for windows of 70 steps"),
        (70, -1.0, "from 0 to 17.5 for windows of 70 steps"),
        (9, 1.0, "0 for windows below 10 steps"),
    ],
)
def test_too_much_jitter_is_refused(window, jitter, allowed):
    message = f"`jitter` must be {allowed}, got {jitter}"
    with pytest.raises(ArgumentError, match=message):
        TokenStream(TOKENS, 4, window, jitter=jitter)


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_processes_share_the_columns(processes):
    whole = columns_of(TokenStream(TOKENS, 6, 35).windows())[0]
    parts = [
        columns_of(TokenStream(TOKENS, 6, 35, rank=rank, processes=processes).windows())[0] for rank in range(processes)
    ]
    assert torch.equal(torch.cat(parts, dim=1), whole)


def test_a_short_text_hears_how_long_it_must_be():
    with pytest.raises(
        CorpusError, match=r"the training text has 719 tokens, .* 20 columns of 35 steps need at least 720"
    ):
        TokenStream(TOKENS[:719], 20, 35, name="the training text")
    assert len(TokenStream(TOKENS[:720], 20, 35)) == 1


def test_a_short_text_hears_the_options_that_can_help():
    names = ("columns", "steps")
    with pytest.raises(CorpusError, match=r"2 columns of 3 steps .*, or lower `columns` or `steps`\."):
        TokenStream(TOKENS[:7], 2, 3, options=names)
    with pytest.raises(CorpusError, match=r"2 columns of 1 step need .*, or lower `columns`\."):
        TokenStream(TOKENS[:3], 2, 1, options=names)
    with pytest.raises(ArgumentError, match="`steps` must be a positive integer"):
        TokenStream(TOKENS, 2, 0, options=names)


@pytest.mark.parametrize(
    ("batch", "window", "name"),
    [(0, 35, "batch_size"), (20, 0, "window"), (-1, 35, "batch_size"), (2.0, 35, "batch_size"), (20, "35", "window")],
)
def test_sizes_are_positive(batch, window, name):
    with pytest.raises(ArgumentError, match=f"`{name}` must be a positive integer, got"):
        TokenStream(TOKENS, batch, window)


@pytest.mark.parametrize("tokens", [TOKENS.float(), TOKENS[:1000].view(10, 100), TOKENS.tolist()])
def test_what_is_no_stream_of_tokens_is_refused(tokens):
    with pytest.raises(ArgumentError, match="`tokens` must be a tensor of token numbers, int64"):
        TokenStream(tokens, 3, 5)


@pytest.mark.parametrize(("rank", "processes"), [(2, 2), (-1, 2), (0, 0)])
def test_a_process_that_is_not_there_reads_nothing(rank, processes):
    with pytest.raises(ArgumentError, match=rf"`rank` must be from 0 up and below .*, {processes}, got {rank}"):
        TokenStream(TOKENS, 4, 5, rank=rank, processes=processes)


def test_more_processes_than_columns_are_refused():
    with pytest.raises(ArgumentError, match="`batch_size` must be at least 4, one column a process, got 3"):
        TokenStream(TOKENS, 3, 35, processes=4)


def test_unigram_perplexity_of_equal_and_of_certain_tokens():
    assert math.isclose(unigram_perplexity(torch.arange(8).repeat(5)), 8.0)
    assert math.isclose(unigram_perplexity(torch.zeros(10, dtype=torch.int64)), 1.0)
    uneven = torch.tensor([0, 0, 0, 1])
    assert math.isclose(unigram_perplexity(uneven), math.exp(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25))))
