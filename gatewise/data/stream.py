"""Windows of a long token stream, for truncated backpropagation through time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from gatewise.contract.errors import ArgumentError, CorpusError, sentence


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
        seed: The seed of the starting positions.
        name: The name of the text in error messages.

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
        """The number of time steps in an epoch."""
        return len(self._tokens) // self._batch_size - 1

    @property
    def tokens(self) -> int:
        """The number of tokens predicted in an epoch, over all processes."""
        return self.steps * self._batch_size

    def __len__(self) -> int:
        return -(-self.steps // self._window)

    def windows(self, epoch: int = 0, start: int = 0) -> Iterator[Window]:
        """Iterate over the windows of one epoch.

        Args:
            epoch: The number of the epoch, from 0; it matters only with `rotate`.
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
        for row in range(start * self._window, self.steps, self._window):
            end = min(row + self._window, self.steps)
            yield Window(columns[row:end], columns[row + 1 : end + 1])
