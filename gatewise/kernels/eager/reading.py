"""The order a direction reads sequences in, and which of the padded entries are real.

A reverse direction is a forward direction over reversed sequences, each row reversed within its own length. Turning x
before the recurrence, and y after it, leaves one recurrence to write, and its loop needs no masks: padding stands at
the end of every row in either direction, steps on it compute with zeros, and their results are never used. Nothing here
waits for the device.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """How one direction reads a batch of sequences.

    Attributes:
        reverse: Whether each sequence is read from its end.
        real: Which entries are not padding [T, B, 1], bool; None when all are real.
        last: Which entry is each row's last [T, B, 1], bool; None when it is step T - 1 of every row.
        alive: Which rows have at least one step [B, 1], bool; None when all have T.
        final: Index of each row's last step, 0 for an empty row [B]; None when it is T - 1.
        turn: Flat index [T * B] of the entry read in each place; None unless reverse with lengths.
    """

    reverse: bool
    real: Tensor | None = None
    last: Tensor | None = None
    alive: Tensor | None = None
    final: Tensor | None = None
    turn: Tensor | None = None

    @classmethod
    def of(cls, x: Tensor, lengths: Tensor | None, reverse: bool) -> Reading:
        """Return the reading of x [T, B, ...] with lengths [B] (None: all T)."""
        if lengths is None:
            return cls(reverse)
        time, batch = x.shape[:2]
        lengths = lengths.to(x.device, non_blocking=True)
        steps = torch.arange(time, device=x.device).unsqueeze(1)
        real = steps < lengths
        turn = None
        if reverse:
            source = torch.where(real, lengths - 1 - steps, steps)
            turn = (source * batch + torch.arange(batch, device=x.device)).flatten()
        return cls(
            reverse,
            real.unsqueeze(2),
            (steps == lengths - 1).unsqueeze(2),
            (lengths > 0).unsqueeze(1),
            (lengths - 1).clamp(min=0),
            turn,
        )

    def turned(self, sequence: Tensor) -> Tensor:
        """Return [T, B, F] with time in reading order, or back from it: the map is its own inverse."""
        if not self.reverse:
            return sequence
        if self.turn is None:
            return sequence.flip(0)
        return sequence.flatten(0, 1).index_select(0, self.turn).view(sequence.shape)

    def masked(self, sequence: Tensor) -> Tensor:
        """Return [T, B, F] with zeros in the padding, whatever stood there."""
        return sequence if self.real is None else torch.where(self.real, sequence, 0)

    def read(self, sequence: Tensor) -> Tensor:
        """Return [T, B, F] in reading order, with zeros in the padding."""
        return self.turned(self.masked(sequence))

    def started(self, state: Tensor) -> Tensor:
        """Return the state [B, F] the recurrence starts from: zero where a row has no steps."""
        return state if self.alive is None else torch.where(self.alive, state, 0)

    def finished(self, states: Tensor, initial: Tensor) -> Tensor:
        """Return the state [B, F] after each row's last step; the initial one where a row has no steps.

        Args:
            states: After every step in reading order [T, B, F].
            initial: Before the first [B, F].
        """
        if states.shape[0] == 0:
            return initial.clone()
        if self.final is None or self.alive is None:
            return states[-1].clone()
        index = self.final.view(1, -1, 1).expand(1, *initial.shape)
        return torch.where(self.alive, states.gather(0, index).squeeze(0), initial)
