"""Greedy and beam search, compared with an exhaustive search."""

from __future__ import annotations

import itertools

import pytest
import torch
from several import Recorder

import gatewise.models.greedy_search
import gatewise.models.search
from gatewise.contract.errors import ArgumentError
from gatewise.models import Search, Seq2Seq, translate
from gatewise.models.beam_search import beam_search
from gatewise.models.greedy_search import GreedyGraphs
from tests.pairwise import each_value, pairwise

PADDING, BEGINNING, END, SIZE = 0, 1, 2, 6


@pytest.fixture
def short(monkeypatch):
    """Let a translation have at most 5 tokens with its end, so that all can be tried."""
    monkeypatch.setattr(gatewise.models.search, "_TIMES", 0)
    monkeypatch.setattr(gatewise.models.search, "_MORE", 5)


def model(seed, **options):
    torch.manual_seed(seed)
    made = Seq2Seq(9, SIZE, 5, 6, 1, 1, **options).double().eval()
    with torch.no_grad():  # else all tokens are about as likely as each other
        for parameter in made.parameters():
            parameter.mul_(4)
    return made


def sentences(*lengths):
    generator = torch.Generator().manual_seed(sum(lengths))
    source = torch.randint(3, 9, (max(lengths), len(lengths)), generator=generator)
    return source, torch.tensor(lengths)


def search(beam_size=1, length_penalty=1.0, n_best=1):
    return Search(BEGINNING, END, (PADDING, BEGINNING), beam_size, length_penalty, n_best)


def log_probability(model, source, tokens):
    """Return that of a whole translation of one sentence, renormalised as the search sees it: it is not."""
    inputs = torch.tensor([BEGINNING, *tokens])[:, None]
    logs = model(source[:, None], torch.tensor([len(source)]), inputs).log_softmax(-1)
    return sum(float(logs[step, 0, token]) for step, token in enumerate([*tokens, END]))


def all_translations(model, source, how):
    """Return every translation of up to 4 tokens and its end, the best first."""
    found = []
    for count in range(5):
        every = [*itertools.product(range(3, SIZE), repeat=count)]
        tokens, width = torch.tensor(every).long().view(len(every), count).T, (len(every),)
        inputs = torch.cat([torch.full((1, *width), BEGINNING), tokens])
        logs = model(source[:, None].expand(-1, *width), torch.full(width, len(source)), inputs).log_softmax(-1)
        ended = torch.cat([tokens, torch.full((1, *width), END)])
        for own, total in zip(every, logs.gather(2, ended[:, :, None]).sum((0, 2)).tolist(), strict=True):
            found.append((how.score(total, count + 1), own, total))
    return sorted(found, reverse=True)


@torch.no_grad()
@pytest.mark.parametrize(("seed", "penalty"), list(enumerate([0.0, 1.0, -0.5])))
def test_a_wide_beam_finds_the_best_of_all_translations(short, seed, penalty):
    ours, (source, lengths), how = model(seed), sentences(3, 1, 5), search(100, penalty, 4)
    for row, found in enumerate(translate(ours, source, lengths, how)):
        wanted = all_translations(ours, source[: lengths[row], row], how)[:4]
        assert [each.tokens for each in found] == [tokens for _, tokens, _ in wanted]
        for each, (score, _, total) in zip(found, wanted, strict=True):
            assert each.score == pytest.approx(score, rel=1e-5)
            assert each.log_probability == pytest.approx(total, rel=1e-5)


def argmax_translation(model, source):
    tokens = []
    while len(tokens) < 4:
        inputs = torch.tensor([BEGINNING, *tokens])[:, None]
        logits = model(source[:, None], torch.tensor([len(source)]), inputs)[-1, 0]
        logits[[PADDING, BEGINNING]] = -torch.inf
        if (token := int(logits.argmax())) == END:
            break
        tokens.append(token)
    return tuple(tokens)


@torch.no_grad()
@pytest.mark.parametrize("seed", range(4))
def test_one_beam_takes_the_likeliest_token_at_each_step(short, seed):
    ours, (source, lengths) = model(seed), sentences(3, 1, 5, 2)
    greedy = translate(ours, source, lengths, search())
    # The same through the code of wider beams.
    beams = beam_search(ours, source, lengths, search())
    for row, ((one,), (other,)) in enumerate(zip(greedy, beams, strict=True)):
        sentence = source[: lengths[row], row]
        assert one.tokens == other.tokens == argmax_translation(ours, sentence)
        assert one.log_probability == pytest.approx(log_probability(ours, sentence, one.tokens), rel=1e-5)
        assert one.score == pytest.approx(other.score, rel=1e-5)
        torch.testing.assert_close(one.attention, other.attention)


def plain_beam_search(model, source, how):
    """Return tokens and score of one sentence's translations, by lists of partial translations."""
    limit, alive, ended = 2 * len(source) + 10, [(0.0, ())], []
    for count in range(1, limit + 1):
        options = []
        for total, tokens in alive:
            inputs = torch.tensor([BEGINNING, *tokens])[:, None]
            logs = model(source[:, None], torch.tensor([len(source)]), inputs)[-1, 0].log_softmax(-1)
            allowed = [END] if count == limit else [END, *range(3, SIZE)]
            options += [(total + float(logs[token]), tokens, token) for token in allowed]
        options.sort(key=lambda option: -option[0])
        options = options[: 2 * how.beam_size]
        ended += [
            (how.score(total, count), tokens)
            for total, tokens, token in options[: how.beam_size]
            if token == END
        ]  # fmt: skip
        alive = [(total, (*tokens, token)) for total, tokens, token in options if token != END][: how.beam_size]
        ended.sort(key=lambda each: -each[0])
        if not alive:
            break
        bound = max(how.score(alive[0][0], count + 1), how.score(alive[0][0], limit))
        if len(ended) >= how.n_best and ended[how.n_best - 1][0] >= bound:
            break
    return ended[: how.n_best]


@torch.no_grad()
@pytest.mark.parametrize(
    ("seed", "beam"),
    each_value(pairwise(range(2), [(1, 1, 1.0), (2, 1, 0.0), (3, 2, 1.0), (4, 4, 0.6)]), most=2),
    ids=str,
)
def test_a_narrow_beam_finds_what_a_plain_one_finds(seed, beam):
    beams, n_best, penalty = beam
    ours, how = model(seed), search(beams, penalty, n_best)
    source, lengths = sentences(3, 1, 6, 2, 1)  # those that are settled early leave the batch
    for row, found in enumerate(beam_search(ours, source, lengths, how)):
        wanted = plain_beam_search(ours, source[: lengths[row], row], how)
        assert [each.tokens for each in found] == [tokens for _, tokens in wanted]
        assert [each.score for each in found] == pytest.approx([score for score, _ in wanted], rel=1e-5)


@pytest.mark.parametrize("beams", [1, 3])
def test_a_model_of_nans_still_comes_to_an_end(beams):
    ours, (source, lengths) = model(0), sentences(4, 1)
    with torch.no_grad():
        ours.output.weight.fill_(torch.nan)
    for found in translate(ours, source, lengths, search(beams)):
        assert found[0].score != found[0].score


@pytest.mark.parametrize(("feeding", "beams"), each_value([*itertools.product([True, False], [1, 3])]), ids=str)
def test_a_sentence_alone_is_translated_as_among_others(feeding, beams):
    ours, (source, lengths) = model(1, input_feeding=feeding), sentences(4, 1, 9, 2, 9)
    together = translate(ours, source, lengths, search(beams, n_best=beams))
    for row, found in enumerate(together):
        length = lengths[row : row + 1]
        (alone,) = translate(ours, source[: length.item(), row : row + 1], length, search(beams, n_best=beams))
        assert [each.tokens for each in found] == [each.tokens for each in alone]
        for one, other in zip(found, alone, strict=True):
            torch.testing.assert_close(one.attention, other.attention)


@pytest.mark.parametrize("beams", [1, 4])
def test_every_token_and_the_end_looked_at_the_sentence(beams):
    source, lengths = sentences(4, 1, 9)
    for row, found in enumerate(translate(model(2), source, lengths, search(beams))):
        assert found[0].attention.shape == (len(found[0].tokens) + 1, lengths[row])
        torch.testing.assert_close(found[0].attention.sum(-1), torch.ones(len(found[0].tokens) + 1))
        assert not {PADDING, BEGINNING, END} & set(found[0].tokens)


@pytest.mark.parametrize("beams", [1, 4])
def test_a_translation_that_would_never_end_is_ended(beams):
    ours = model(0)
    with torch.no_grad():
        ours.output.bias[END] = -1000.0
    source, lengths = sentences(4, 1)
    found = translate(ours, source, lengths, search(beams))
    assert [len(each[0].tokens) for each in found] == [2 * 4 + 9, 2 * 1 + 9]


def test_length_penalty_decides_between_long_and_short(short):
    source, lengths = sentences(3, 1, 5, 2)

    def total(penalty):
        return sum(len(each[0].tokens) for each in translate(model(1), source, lengths, search(100, penalty)))

    assert total(0.0) < total(3.0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"beam_size": 0}, "beam_size"),
        ({"beam_size": 2.5}, "`beam_size` must be an integer, got 2.5"),
        ({"n_best": 2}, "from 1 to the beam size, 1, got 2"),
        ({"n_best": 0}, "n_best"),
    ],
)
def test_searches_that_make_no_sense_are_refused(wrong, message):
    with pytest.raises(ArgumentError, match=message):
        search(**wrong)


def test_sentences_that_are_settled_leave_the_batch():
    ours, rows = model(0), []

    class Spy:
        encode = staticmethod(ours.encode)

        def step(self, tokens, memory, state):
            rows.append(len(tokens))
            return ours.step(tokens, memory, state)

    with torch.no_grad():
        ours.output.bias[END] = -1000.0
    source, lengths = sentences(1, 1, 1, 20)
    beam_search(Spy(), source, lengths, search(2))
    assert rows[:12] == [8] * 12  # a sentence of one token may have 12
    assert rows[12:] == [2] * (2 * 20 + 10 - 12)


def same_translations(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        assert [each.tokens for each in one] == [each.tokens for each in other]
        for left, right in zip(one, other, strict=True):
            assert left.score == pytest.approx(right.score, rel=1e-6)
            torch.testing.assert_close(left.attention, right.attention)


@pytest.mark.parametrize(
    ("feeding", "lengths"),
    each_value([*itertools.product([True, False], [(3, 1, 5), (17, 2, 9, 1, 1), (1,)])]),
    ids=str,
)
def test_recorded_steps_translate_as_steps_do(feeding, lengths):
    ours, recorder = model(1, input_feeding=feeding), Recorder()
    graphs = GreedyGraphs(ours, recorder)
    for turn in range(4):
        source, counts = sentences(*lengths)
        source = source.roll(turn, 1) if turn % 2 else source  # other sentences of the same lengths
        source[:, turn % len(lengths)] = source[:, turn % len(lengths)].flip(0).clamp(min=3)
        if turn == 3:
            with torch.no_grad():
                ours.output.bias.add_(torch.linspace(-1, 1, SIZE, dtype=torch.float64))
        same_translations(translate(ours, source, counts, search(), graphs), translate(ours, source, counts, search()))
    assert recorder.records == 1
    assert recorder.replays >= 3  # the first time steps are done one by one


def test_few_shapes_are_recorded_and_those_of_long_ago_forgotten(monkeypatch):
    ours, recorder = model(1), Recorder()
    graphs = GreedyGraphs(ours, recorder)
    for rows in (5, 6, 7, 8, 5, 65, 100, 128):
        source, lengths = sentences(*[3] * rows)
        assert len(translate(ours, source, lengths, search(), graphs)) == rows
    assert recorder.records == 2
    monkeypatch.setattr(gatewise.models.greedy_search, "_MAX_GRAPHS", 1)
    for length in (2, 3, 2, 3):
        translate(ours, *sentences(length), search(), graphs)
    assert recorder.records == 2


def test_steps_that_cannot_be_recorded_are_done_one_by_one():
    ours, recorder = model(1), Recorder(refuses="operation not permitted\nwhen stream is capturing")
    graphs = GreedyGraphs(ours, recorder)
    source, lengths = sentences(3, 1, 5)
    wanted = translate(ours, source, lengths, search())
    for _ in range(4):
        same_translations(translate(ours, source, lengths, search(), graphs), wanted)
    assert (recorder.records, graphs.refusal) == (1, "operation not permitted")


def test_the_end_must_not_be_forbidden():
    with pytest.raises(ArgumentError, match=r"`forbidden` must be without the end token, 2, got \(0, 2\)"):
        Search(BEGINNING, END, (PADDING, END))


@pytest.mark.parametrize("beam_size", [1, 3])
def test_tokens_that_the_model_does_not_have_are_refused(beam_size):
    source, lengths = sentences(3, 1)
    with pytest.raises(ArgumentError, match="`end` must be a token from 0 to 5, got 6"):
        translate(model(0), source, lengths, Search(BEGINNING, SIZE, beam_size=beam_size))
    with pytest.raises(ArgumentError, match="`forbidden` must be a token from 0 to 5, got -1"):
        translate(model(0), source, lengths, Search(BEGINNING, END, (-1,), beam_size=beam_size))


@pytest.mark.parametrize("beam_size", [1, 3])
def test_no_sentences_have_no_translations(beam_size):
    source, lengths = sentences(3, 1)
    assert translate(model(0), source[:, :0], lengths[:0], search(beam_size)) == []


@pytest.mark.parametrize("beam_size", [1, 3])
@pytest.mark.parametrize("dtypes", [(torch.int32, torch.int64), (torch.int64, torch.int32), (torch.uint8, torch.int16)])
def test_integers_of_every_width_are_translated(beam_size, dtypes):
    source, lengths = sentences(4, 2)
    translator = model(0)
    expected = translate(translator, source, lengths, search(beam_size))
    found = translate(translator, source.to(dtypes[0]), lengths.to(dtypes[1]), search(beam_size))
    assert [[each.tokens for each in best] for best in found] == [[each.tokens for each in best] for best in expected]
