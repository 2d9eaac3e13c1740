"""Beam search whose state stays on the device, so that the host need not synchronise at every step."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from gatewise.models.search import LOOK, Decoder, Search, Translation, log_probabilities, longest_translations


@dataclasses.dataclass(frozen=True, slots=True)
class _Finished:
    """The best finished translations of each sentence, the best first; a score of -inf marks an empty entry.

    Attributes:
        scores: The scores by which they are ranked, float64 [N, n].
        logs: Their log-probabilities, float32 [N, n].
        steps: The step at which each of them ended, int64 [N, n].
        beams: The beam in which each of them ended, int64 [N, n].
    """

    scores: Tensor
    logs: Tensor
    steps: Tensor
    beams: Tensor

    @classmethod
    def none(cls, sentences: int, n_best: int, device: torch.device) -> _Finished:
        """Return empty entries for some sentences."""
        scores = torch.full((sentences, n_best), -torch.inf, dtype=torch.float64, device=device)
        steps = torch.zeros_like(scores, dtype=torch.int64)
        return cls(scores, scores.float(), steps, steps.clone())

    def merged(self, scores: Tensor, logs: Tensor, step: int, beams: Tensor) -> _Finished:
        """Merge the translations that end at a step [N, k] and return the best; among equals, earlier ones first."""
        every = torch.cat([self.scores, scores], 1)
        order = every.argsort(dim=1, descending=True, stable=True)[:, : self.scores.shape[1]]
        now = torch.full_like(beams, step)
        pairs = ((self.logs, logs), (self.steps, now), (self.beams, beams))
        return _Finished(every.gather(1, order), *(torch.cat(pair, 1).gather(1, order) for pair in pairs))

    def select(self, rows: Tensor) -> _Finished:
        """Return the translations of some sentences."""
        return _Finished(self.scores[rows], self.logs[rows], self.steps[rows], self.beams[rows])

    def put(self, rows: Tensor, others: _Finished) -> None:
        """Overwrite the translations of some sentences."""
        for field in dataclasses.fields(self):
            getattr(self, field.name)[rows] = getattr(others, field.name)


@dataclasses.dataclass(frozen=True, slots=True)
class _History:
    """The results of every step.

    Attributes:
        tokens: The token appended to each beam, int64 [T, N, K].
        parents: The beam of the previous step that each beam extends, int64 [T, N, K].
        attention: The attention weights of each beam of the previous step, float32 [T, N, K, S].
    """

    tokens: Tensor
    parents: Tensor
    attention: Tensor

    @classmethod
    def of(cls, steps: int, sentences: int, beams: int, source: Tensor) -> _History:
        """Allocate the history of some steps."""
        tokens = source.new_empty(steps, sentences, beams)
        looks = source.new_empty(steps, sentences, beams, len(source), dtype=torch.float32)
        return cls(tokens, torch.empty_like(tokens), looks)


def beam_search(model: Decoder, source: Tensor, lengths: Tensor, search: Search) -> list[list[Translation]]:
    """Search with `search.beam_size` beams per sentence; see `gatewise.models.translate`.

    At each step, the best continuations of a sentence, twice as many as beams, are finished, extended or dropped. A
    sentence is finished when no unfinished beam can enter its `search.n_best` any more. Every few steps the host reads
    how many sentences are finished; if at least half of them are, the search goes on with the others alone.
    """
    beams, device = search.beam_size, source.device
    memory, state = model.encode(source, lengths)
    every = torch.arange(len(lengths), device=device).repeat_interleave(beams)
    memory, state = memory.select(every), state.select(every)
    limits = longest_translations(lengths)
    most = int(limits.max())
    weights = _weights(most + 2, search, device)
    rows = torch.arange(len(lengths), device=device)
    found = ended = _Finished.none(len(lengths), search.n_best, device)
    history = _History.of(most, len(lengths), beams, source)
    settled = torch.zeros_like(rows, dtype=torch.bool)
    tokens = torch.full_like(every, search.beginning)
    # All beams of a sentence are equal at the beginning, so that only the first one may be extended.
    totals = torch.full((len(rows), beams), -torch.inf, device=device)
    totals[:, 0] = 0.0
    step = 0
    for step in range(most):
        logits, state, attention = model.step(tokens, memory, state)
        last = limits <= step + 1
        logs = log_probabilities(logits, last.repeat_interleave(beams), search)
        options = (totals.flatten()[:, None] + logs).view(len(rows), -1)
        # With twice as many candidates as beams, enough remain to be extended even if half of them end here.
        best, places = options.topk(min(2 * beams, options.shape[1]))
        origins, words = places.div(logs.shape[-1], rounding_mode="floor"), places % logs.shape[-1]
        ends = words == search.end
        count = ends & (best != -torch.inf) & ~settled[:, None]
        scores = torch.where(count, best.double() * weights[step + 1], -torch.inf)
        ended = ended.merged(scores[:, :beams], best[:, :beams], step, origins[:, :beams])
        totals, chosen = best.masked_fill(ends, -torch.inf).topk(beams)
        parents, written = origins.gather(1, chosen), words.gather(1, chosen)
        history.tokens[step, rows], history.parents[step, rows] = written, parents
        history.attention[step, rows] = attention.float().view(len(rows), beams, -1)
        settled = settled | _is_finished(ended, totals[:, 0], weights[step + 2], weights[limits])
        tokens = written.flatten()
        state = state.select(_flat(parents))
        if (step + 1) % LOOK and step + 1 < most:
            continue
        going = int((~settled).sum())
        if not going:
            break
        if 2 * going <= len(rows):
            found.put(rows, ended)
            left = (~settled).nonzero().squeeze(1)
            flat = (torch.arange(beams, device=device) + left[:, None] * beams).flatten()
            memory, state, tokens = memory.select(flat), state.select(flat), tokens[flat]
            rows, ended, totals = rows[left], ended.select(left), totals[left]
            limits, settled = limits[left], settled[left]
    found.put(rows, ended)
    return _translations(found, history, step, lengths)


def _weights(count: int, search: Search, device: torch.device) -> Tensor:
    """Return the factors that turn a log-probability into a score, for 0, 1, 2 ... tokens, float64."""
    return torch.tensor([search.score(1.0, tokens) for tokens in range(count)], dtype=torch.float64, device=device)


def _is_finished(ended: _Finished, best: Tensor, next_weight: Tensor, last_weights: Tensor) -> Tensor:
    """Return whether no extension of the best beam [N] can enter the requested translations."""
    bound = torch.maximum(best.double() * next_weight, best.double() * last_weights)
    return (best == -torch.inf) | (ended.scores[:, -1] >= bound)


def _flat(beams: Tensor) -> Tensor:
    """Return the batch rows of beams that are given by their indices within their sentences [N, K]."""
    return (torch.arange(len(beams), device=beams.device)[:, None] * beams.shape[1] + beams).flatten()


def _translations(found: _Finished, history: _History, last: int, lengths: Tensor) -> list[list[Translation]]:
    """Follow the parents of all finished translations back to their first tokens."""
    rows, beams = torch.arange(len(lengths), device=lengths.device)[:, None], found.beams
    tokens, attention = [], []
    for step in range(last, -1, -1):
        attention.append(history.attention[step][rows, beams])
        if step:
            tokens.append(history.tokens[step - 1][rows, beams])
            beams = torch.where(found.steps >= step, history.parents[step - 1][rows, beams], beams)
    looks = torch.stack(attention[::-1]).cpu()
    words = torch.stack(tokens[::-1]).permute(1, 2, 0).tolist() if tokens else None
    every = zip(found.scores.tolist(), found.logs.tolist(), found.steps.tolist(), lengths.tolist(), strict=True)
    return [
        [
            Translation(
                tuple(words[row][rank][:step]) if words else (),
                log_probability,
                score,
                looks[: step + 1, row, rank, :length].clone(),
            )
            for rank, (score, log_probability, step) in enumerate(zip(scores, logs, steps, strict=True))
            if score != -torch.inf
        ]
        for row, (scores, logs, steps, length) in enumerate(every)
    ]
