"""Greedy search, which on a GPU replays CUDA graphs of a few steps."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from gatewise.contract.capture import for_cuda_graph
from gatewise.models.search import LOOK, Decoder, Search, Translation, log_probabilities, longest_translations

Work = Callable[[], None]

_MAX_GRAPHS = 32
_FEW = 64
"""Up to this number of sentences the batch is padded to a power of two, beyond it to a multiple of this number."""


class _Buffers(NamedTuple):
    """The tensors that greedy search writes to; their addresses do not change.

    Attributes:
        done: The number of steps done, int64 [].
        tokens: The last token of each translation, int64 [N].
        ended: Whether each translation has ended, bool [N].
        total: The log-probability of each translation so far, float32 [N].
        limits: The maximum number of tokens of each translation, the end token included, int64 [N].
        written: The tokens of every step, int64 [T, N].
        attention: The attention weights of every step, float32 [T, N, S].
    """

    done: Tensor
    tokens: Tensor
    ended: Tensor
    total: Tensor
    limits: Tensor
    written: Tensor
    attention: Tensor

    @classmethod
    def empty(cls, source: Tensor, lengths: Tensor, search: Search) -> _Buffers:
        """Allocate the tensors for the longest translation and the steps until the host next checks for the end."""
        most = int(longest_translations(torch.tensor(len(source), device="cpu"))) + LOOK
        return cls(
            done=lengths.new_zeros(()),
            tokens=torch.full_like(lengths, search.beginning),
            ended=torch.zeros_like(lengths, dtype=torch.bool),
            total=torch.zeros_like(lengths, dtype=torch.float32),
            limits=longest_translations(lengths),
            written=torch.full((most, len(lengths)), search.end, device=lengths.device),
            attention=torch.zeros(most, len(lengths), len(source), device=lengths.device),
        )


def greedy_search(
    model: Decoder, source: Tensor, lengths: Tensor, search: Search, graphs: GreedyGraphs | None = None
) -> list[list[Translation]]:
    """Take the likeliest token at each step; see `gatewise.models.translate`.

    Every few steps the host checks whether all translations have ended.

    Args:
        model: The model, in evaluation mode.
        source: The source tokens, int64 [S, B].
        lengths: The source lengths, int64 [B].
        search: The options of the search.
        graphs: CUDA graphs of this model's steps, which are replayed for batches of the same padded shape.
    """
    given = lengths
    if graphs is not None:
        source, lengths = graphs.padded(source, lengths)
    memory, state = model.encode(source, lengths)
    buffers = _Buffers.empty(source, lengths, search)
    # The first step runs outside the graph: the state after it has the dtypes of all later states.
    state = _run_step(model, memory, state, buffers, search)
    steps = graphs.steps(memory, state, buffers, search) if graphs is not None else None
    if steps is None:
        # A shape that may be captured next time is run with the kernels that the capture will use.
        with for_cuda_graph() if graphs is not None else contextlib.nullcontext():
            while not buffers.ended.all():
                for _ in range(LOOK):
                    state = _run_step(model, memory, state, buffers, search)
    else:
        buffers = steps.until_ended(memory, state, buffers)
    return _translations(buffers, given, search)


def _run_step(model: Decoder, memory: Any, state: Any, buffers: _Buffers, search: Search) -> Any:
    """Run one step, write its results in place, and return the next state."""
    logits, state, attention = model.step(buffers.tokens, memory, state)
    best, tokens = log_probabilities(logits, buffers.limits <= buffers.done + 1, search).max(-1)
    buffers.total.add_(best.masked_fill(buffers.ended, 0.0))
    tokens = tokens.masked_fill(buffers.ended, search.end)
    buffers.written.index_copy_(0, buffers.done[None], tokens[None])
    buffers.attention.index_copy_(0, buffers.done[None], attention.float()[None])
    buffers.ended.logical_or_(tokens == search.end)
    buffers.tokens.copy_(tokens)
    buffers.done.add_(1)
    return state


def _translations(buffers: _Buffers, lengths: Tensor, search: Search) -> list[list[Translation]]:
    steps = int(buffers.done)
    rows, looks = buffers.written[:steps].t().tolist(), buffers.attention[:steps].transpose(0, 1).cpu()
    found = []
    # A padded batch has more rows than there are sentences.
    for row, log_probability, look, length in zip(rows, buffers.total.tolist(), looks, lengths.tolist(), strict=False):
        count = row.index(search.end)
        score = search.score(log_probability, count + 1)
        found.append([Translation(tuple(row[:count]), log_probability, score, look[: count + 1, :length].clone())])
    return found


class GreedyGraphs:
    """CUDA graphs of a model's greedy steps, one for each padded batch shape that occurs more than once.

    A graph runs a few steps in one launch, so that a step is not slowed down by the launches of its kernels. Batches
    are padded to few shapes: the length to a multiple of an eighth of it, the number of sentences to a power of two or
    a multiple of 64. The graphs of the most recently used shapes are kept.

    Args:
        model: The model. Its weights may change, but their addresses and all precision settings must not.
        capture: A function that captures another function without running it and returns one that replays it, as
            `gatewise.training.graph.cuda_graphs` creates it.

    Attributes:
        refusal: The reason why a capture failed, after which none is tried; otherwise empty.
    """

    def __init__(self, model: Decoder, capture: Callable[[Work], Work]) -> None:
        self._model, self._capture = model, capture
        self._known: collections.OrderedDict[tuple[Any, ...], _CapturedSteps | None] = collections.OrderedDict()
        self.refusal = ""

    def padded(self, source: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return the batch padded with steps, and with sentences of one token, to one of few shapes."""
        steps, rows = source.shape
        unit = 1 << max(0, steps.bit_length() - 4)
        more_steps = -steps % unit
        more_rows = (1 << (rows - 1).bit_length()) - rows if rows < _FEW else -rows % _FEW
        return functional.pad(source, (0, more_rows, 0, more_steps)), functional.pad(lengths, (0, more_rows), value=1)

    def steps(self, memory: Any, state: Any, buffers: _Buffers, search: Search) -> _CapturedSteps | None:
        """Return the graph for a batch; None for a shape that is new, or that cannot be captured."""
        key = (tuple((part.shape, part.dtype) for part in (*memory, *state)), _autocast_dtype(buffers), search)
        if key not in self._known:
            # The first batch of a shape runs without a graph, so that libraries and caches are initialised.
            self._known[key] = None
        elif self._known[key] is None and not self.refusal:
            try:
                self._known[key] = _CapturedSteps(self._model, self._capture, memory, state, buffers, search)
            except RuntimeError as error:
                self.refusal = next(iter(str(error).splitlines()), type(error).__name__)
        self._known.move_to_end(key)
        while len(self._known) > _MAX_GRAPHS:
            self._known.popitem(last=False)
        return self._known[key]


class _CapturedSteps:
    """A CUDA graph of a few steps, with the tensors that it reads and writes."""

    def __init__(
        self,
        model: Decoder,
        capture: Callable[[Work], Work],
        memory: Any,
        state: Any,
        buffers: _Buffers,
        search: Search,
    ) -> None:
        self._memory = type(memory)(*map(torch.clone, memory))
        self._state = type(state)(*map(torch.clone, state))
        self._buffers = _Buffers(*map(torch.clone, buffers))

        def work() -> None:
            after = self._state
            # Autocast's cache of converted weights is off: the weights may change before the next replay.
            with torch.autocast(
                buffers.total.device.type, _autocast_dtype(buffers), bool(_autocast_dtype(buffers)), False
            ):
                for _ in range(LOOK):
                    after = _run_step(model, self._memory, after, self._buffers, search)
            _copy(after, self._state)

        self._replay = capture(work)

    def until_ended(self, memory: Any, state: Any, buffers: _Buffers) -> _Buffers:
        """Replay until all translations have ended; the result is overwritten by the next batch."""
        for source, target in ((memory, self._memory), (state, self._state), (buffers, self._buffers)):
            _copy(source, target)
        while not self._buffers.ended.all():
            self._replay()
        return self._buffers


def _copy(sources: Any, targets: Any) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def _autocast_dtype(buffers: _Buffers) -> torch.dtype | None:
    device = buffers.total.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
