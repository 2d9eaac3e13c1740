"""The sequences of a batch as indices into its flattened input, without a loop in Python over its tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gatewise.contract.saved import Inputs


class Sequences(NamedTuple):
    """Sequences in the order of a `PackedSequence`: step by step, and at each step the longest sequence first.

    Attributes:
        tokens: The indices in the flattened input of the steps of all sequences [N].
        backwards: The same for sequences that are read from their last step to their first [N].
        sizes: The number of sequences that have each step; descending.
        order: The index of each sequence that has steps, the longest first [S].
    """

    tokens: Tensor
    backwards: Tensor
    sizes: tuple[int, ...]
    order: Tensor

    def to(self, device: torch.device | str) -> Sequences:
        """Return the sequences with their indices on a device."""
        return Sequences(self.tokens.to(device), self.backwards.to(device), self.sizes, self.order.to(device))


class Batch(NamedTuple):
    """The place of every token in the flattened input, and the length of each row. All tensors are on the CPU.

    Attributes:
        places: The index of the first row's token at each step [T].
        lengths: The number of steps of each row [B].
    """

    places: Tensor
    lengths: Tensor

    @staticmethod
    def of(inputs: Inputs) -> Batch:
        """Return the batch of a call."""
        if inputs.batch_sizes is not None:
            sizes = inputs.batch_sizes.cpu()
            rows = torch.arange(inputs.h0.shape[1], device="cpu")
            return Batch(sizes.cumsum(0) - sizes, (sizes[:, None] > rows).sum(0))
        time, batch = inputs.x.shape[:2]
        lengths = (
            torch.full((batch,), time, device="cpu")
            if inputs.lengths is None
            else inputs.lengths.to("cpu", torch.int64)
        )
        return Batch(torch.arange(time, device="cpu") * batch, lengths)

    def sequences(self) -> Sequences:
        """Return one sequence for each row."""
        rows = torch.arange(len(self.lengths), device="cpu")
        return self.pieces(torch.zeros_like(rows), rows, self.lengths)

    def pieces(self, first: Tensor, rows: Tensor, lengths: Tensor) -> Sequences:
        """Return sequences that are pieces of rows.

        Args:
            first: The step of the row with which each sequence begins [S].
            rows: The row of each sequence [S].
            lengths: The number of steps of each sequence [S].
        """
        order = lengths.argsort(descending=True, stable=True)
        order = order[: int((lengths > 0).sum())]
        first, rows, lengths = first[order], rows[order], lengths[order]
        longest = int(lengths[0]) if len(lengths) else 0
        has_step = torch.arange(longest, device="cpu")[:, None] < lengths
        step, at = has_step.nonzero(as_tuple=True)
        tokens = self.places[first[at] + step] + rows[at]
        backwards = self.places[first[at] + lengths[at] - 1 - step] + rows[at]
        return Sequences(tokens, backwards, tuple(has_step.sum(1).tolist()), order)

    def row_of_token(self, tokens: int) -> Tensor:
        """Return the row of each token of the flattened input [tokens]; 0 in the padding."""
        found, own = torch.zeros(tokens, dtype=torch.int64, device="cpu"), self.sequences()
        at = torch.cat([own.order[:size] for size in own.sizes]) if own.sizes else own.order
        found[own.tokens] = at
        return found


class Episodes(NamedTuple):
    """The pieces of rows between resets, in the order of rows and of steps. All tensors are on the CPU.

    Attributes:
        sequences: The episodes as sequences.
        number: The number of episodes.
        rows: The rows that have steps [R].
        first: The first episode of each of these rows [R].
        last: The last episode of each of these rows [R].
        continued: Whether the first episode of each of these rows continues the initial state, because the row does
            not begin with a reset [R].
    """

    sequences: Sequences
    number: int
    rows: Tensor
    first: Tensor
    last: Tensor
    continued: Tensor

    @staticmethod
    def of(batch: Batch, resets: Tensor) -> Episodes:
        """Return the episodes of a batch.

        Args:
            batch: The batch, which must not be packed.
            resets: Whether the state is reset before each step [T, B], bool, on any device.
        """
        resets, lengths = resets.cpu(), batch.lengths
        steps = torch.arange(len(resets), device="cpu")[:, None]
        begins = (resets | (steps == 0)) & (steps < lengths)
        row, begin = begins.t().nonzero(as_tuple=True)
        rows = (lengths > 0).nonzero()[:, 0]
        each = begins.sum(0)[rows]
        last = each.cumsum(0) - 1
        first = last - each + 1
        end = begin.roll(-1)  # an episode ends where the next one of its row begins, the last one of a row with the row
        end[last] = lengths[rows]
        return Episodes(
            batch.pieces(begin, row, end - begin), len(row), rows, first, last, ~resets[:1].expand(1, -1)[:, rows][0]
        )
