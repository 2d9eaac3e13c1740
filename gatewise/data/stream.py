"""A long text as columns that are read side by side in windows: truncated backpropagation through time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from gatewise.contract.errors import ArgumentError, CorpusError, sentence


class Window(NamedTuple):
    """A piece of every column.

    Attributes:
        inputs: Tokens, int64 [T, B].
        targets: The token after each of them, int64 [T, B].
    """

    inputs: torch.Tensor
    targets: torch.Tensor

    @property
    def count(self) -> int:  # pyright: ignore[reportIncompatibleMethodOverride] - not a tuple's count of equal items
        """How many tokens are predicted: T * B."""
        return self.targets.numel()


class TokenStream:
    """Tokens in contiguous columns, so that a state carried from window to window sees the text without a gap.

    Column b is the b-th of `batch_size` equal consecutive parts of the text; up to `batch_size` tokens at the end are
    left out. Everything lies on the device from the start: reading a window is a slice.

    Args:
        tokens: The text, int64 [N].
        batch_size: Columns in all, over every process.
        window: Time steps in a window; the last one of an epoch may be shorter.
        device: Where the windows will be read.
        rank: Which process this is.
        processes: How many processes share the columns; process r reads the r-th run of consecutive columns.
        rotate: Whether each epoch begins somewhere else in the text (drawn from `seed` and the epoch, so that no state
            is needed to repeat it); the columns then meet other borders in each epoch.
        seed: Seed of the beginnings.
        name: What to call the text in errors.

    Raises:
        CorpusError: The text has fewer than `batch_size * (window + 1)` tokens.
        ArgumentError: `batch_size` or `window` is not positive, or there are fewer columns than processes.
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
        seed: int = 0,
        name: str = "the text",
    ) -> None:
        for option, value in (("batch_size", batch_size), ("window", window)):
            if value < 1:
                raise ArgumentError(sentence(option, "a positive integer", value))
        if batch_size < processes:
            expectation = f"at least {processes}, one column a process"
            raise ArgumentError(sentence("batch_size", expectation, batch_size, "Start fewer processes."))
        needed = batch_size * (window + 1)
        if len(tokens) < needed:
            raise CorpusError(
                f"{name} has {len(tokens):,} tokens, too few for one batch: {batch_size} columns of {window} steps "
                f"need at least {needed:,}. Give a longer text, or lower `batch_size` or `window`."
            )
        self._tokens = tokens.to(device)
        self._batch_size = batch_size
        self._window = window
        self._columns = slice(batch_size * rank // processes, batch_size * (rank + 1) // processes)
        self._rotate = rotate
        self._seed = seed

    @property
    def steps(self) -> int:
        """Time steps in an epoch."""
        return len(self._tokens) // self._batch_size - 1

    @property
    def tokens(self) -> int:
        """Tokens predicted in an epoch, over every process."""
        return self.steps * self._batch_size

    def __len__(self) -> int:
        return -(-self.steps // self._window)

    def windows(self, epoch: int = 0, start: int = 0) -> Iterator[Window]:
        """Read the windows of one epoch.

        Args:
            epoch: Which epoch, from 0; matters only with `rotate`.
            start: How many windows to skip, to go on where an interrupted epoch stopped.

        Yields:
            Windows in the order of the text.
        """
        tokens = self._tokens
        if self._rotate:
            beginning = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            tokens = tokens.roll(-int(torch.randint(len(tokens), (), generator=beginning)))
        height = self.steps + 1
        columns = tokens[: height * self._batch_size].view(self._batch_size, height).t()[:, self._columns].contiguous()
        for row in range(start * self._window, self.steps, self._window):
            end = min(row + self._window, self.steps)
            yield Window(columns[row:end], columns[row + 1 : end + 1])
