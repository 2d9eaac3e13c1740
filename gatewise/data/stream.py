"""Windows of a long token stream, for truncated backpropagation through time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from numbers import Integral
from typing import NamedTuple

import torch

from gatewise.contract.errors import ArgumentError, CorpusError, sentence

GRAIN = 5
"""The number whose multiples random lengths of windows are, so that few different lengths occur."""

_HALVED = 0.05
"""The share of windows whose mean length is half of the others'."""


def check_rank(rank: int, processes: int) -> None:
    """Raise `ArgumentError` if there is no process of this rank, which would read nothing."""
    if not 0 <= rank < processes:
        raise ArgumentError(sentence("rank", f"from 0 up and below the number of processes, {processes}", rank))


class Window(NamedTuple):
    """A window of consecutive steps of every column.

    Attributes:
        inputs: The input tokens, int64 [T, B].
        targets: The next token after each input token, int64 [T, B].
    """

    inputs: torch.Tensor
    targets: torch.Tensor

    @property
    def count(self) -> int:  # pyright: ignore[reportIncompatibleMethodOverride] - not a tuple's count of equal items
        """The number of predicted tokens, T * B."""
        return self.targets.numel()


class TokenStream:
    """Splits a token stream into contiguous columns, so that the state carries over from one window to the next.

    Column b is the b-th of `batch_size` equal consecutive parts of the text; up to `batch_size` tokens at the end are
    left out. All tokens are stored on the device: a window is a slice.

    Args:
        tokens: The tokens of the text, int64 [N].
        batch_size: The number of columns over all processes.
        window: The number of time steps in a window; the last window of an epoch may be shorter.
        device: The device of the windows.
        rank: The rank of this process.
        processes: The number of processes that share the columns; process r reads the r-th run of consecutive columns.
        rotate: Whether each epoch starts at a different position of the text, drawn from `seed` and the number of the
            epoch, so that an epoch can be repeated without any state. The columns then begin and end elsewhere in each
            epoch.
        jitter: The standard deviation of the lengths of windows, multiples of `GRAIN` that are drawn from `seed` and
            the number of the epoch: 95% of them around `window`, the others around half of it. The number of windows is
            the same in every epoch. 0 makes all windows equally long.
        seed: The seed of the starting positions and of the lengths.
        name: The name of the text in error messages.
        options: The names of `batch_size` and `window` in error messages.

    Raises:
        CorpusError: The text has fewer than `batch_size * (window + 1)` tokens.
        ArgumentError: `tokens` is no such tensor, `batch_size` or `window` is no positive integer, `jitter` is negative
            or too large for the window, there are fewer columns than processes, or there is no process of this rank.

    References:
        Merity, Keskar, Socher: Regularizing and Optimizing LSTM Language Models, 2018, section 5.1 (random lengths).
    """

    def __init__(
        self,
        tokens: torch.Tensor,
        batch_size: int,
        window: int,
        *,
        device: torch.device | str = "cpu",
        rank: int = 0,
        processes: int = 1,
        rotate: bool = False,
        jitter: float = 0.0,
        seed: int = 0,
        name: str = "the text",
        options: tuple[str, str] = ("batch_size", "window"),
    ) -> None:
        columns, steps = options
        if not isinstance(tokens, torch.Tensor) or tokens.dim() != 1 or tokens.dtype != torch.int64:
            got = f"{tokens.dtype} {list(tokens.shape)}" if isinstance(tokens, torch.Tensor) else type(tokens).__name__
            raise ArgumentError(sentence("tokens", "a tensor of token numbers, int64 [N]", got))
        for option, value in ((columns, batch_size), (steps, window)):
            if not isinstance(value, Integral) or value < 1:
                raise ArgumentError(sentence(option, "a positive integer", repr(value)))
        check_rank(rank, processes)
        most = window / 4 if window >= 2 * GRAIN else 0
        if not 0 <= jitter <= most:
            allowed = f"from 0 to {most:g} for windows of {window} steps"
            expectation = allowed if most else f"0 for windows below {2 * GRAIN} steps"
            raise ArgumentError(sentence("jitter", expectation, jitter, f"Lower it, or raise `{steps}`."))
        if batch_size < processes:
            expectation = f"at least {processes}, one column a process"
            raise ArgumentError(sentence(columns, expectation, batch_size, "Start fewer processes."))
        needed = batch_size * (window + 1)
        if len(tokens) < needed:
            size = f"{batch_size} columns of {window} step{'s' if window > 1 else ''}"
            lower = f"`{columns}` or `{steps}`" if window > 1 else f"`{columns}`"
            raise CorpusError(
                f"{name} has {len(tokens):,} tokens, too few for one batch: {size} need at least {needed:,}. "
                f"Give a longer text, or lower {lower}."
            )
        self._tokens = tokens.to(device)
        self._batch_size = batch_size
        self._window = window
        self._columns = slice(batch_size * rank // processes, batch_size * (rank + 1) // processes)
        self._rotate = rotate
        self._jitter = jitter
        self._seed = seed

    @property
    def steps(self) -> int:
        """The number of time steps in an epoch."""
        return len(self._tokens) // self._batch_size - 1

    @property
    def tokens(self) -> int:
        """The number of tokens predicted in an epoch, over all processes."""
        return self.steps * self._batch_size

    def __len__(self) -> int:
        mean = self._window * (1 - _HALVED / 2) if self._jitter else self._window
        return math.ceil(self.steps / mean)

    def windows(self, epoch: int = 0, start: int = 0) -> Iterator[Window]:
        """Iterate over the windows of one epoch.

        Args:
            epoch: The number of the epoch, from 0; it matters only with `rotate` or `jitter`.
            start: The number of windows to skip, to resume an interrupted epoch.

        Yields:
            The windows in the order of the text.
        """
        tokens = self._tokens
        if self._rotate:
            beginning = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            tokens = tokens.roll(-int(torch.randint(len(tokens), (), generator=beginning)))
        height = self.steps + 1
        columns = tokens[: height * self._batch_size].view(self._batch_size, height).t()[:, self._columns].contiguous()
        ends = self._ends(epoch)
        for row, end in itertools.islice(itertools.pairwise([0, *ends]), start, None):
            yield Window(columns[row:end], columns[row + 1 : end + 1])

    def _ends(self, epoch: int) -> list[int]:
        """Return the steps after which the windows of an epoch end."""
        if not self._jitter:
            return [min(end, self.steps) for end in range(self._window, self.steps + self._window, self._window)]
        chance = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
        count = len(self)
        means = self._window * torch.where(torch.rand(count, generator=chance) < _HALVED, 0.5, 1.0)
        drawn = torch.normal(means, self._jitter, generator=chance) / GRAIN
        lengths = drawn.round().clamp(min=1).long() * GRAIN
        # Some windows, chosen at random, become longer or shorter by one grain until the lengths add up to the epoch.
        while grains := int((self.steps - lengths.sum()) / GRAIN):
            changeable = (lengths > GRAIN).nonzero().squeeze(1) if grains < 0 else torch.arange(count)
            chosen = changeable[torch.randperm(len(changeable), generator=chance)[: abs(grains)]]
            lengths[chosen] += GRAIN if grains > 0 else -GRAIN
        lengths[-1] += self.steps - lengths.sum()
        return lengths.cumsum(0).tolist()
