"""The order in which a direction reads padded sequences, and which steps are padding.

The reverse direction is computed as a forward direction over sequences that are reversed within their own lengths. x is
reordered before the recurrence and y after it, so that one loop serves both directions. The loop needs no masks: in
either direction the padding is at the end of every sequence, its steps compute with zeros, and their results are not
used. Nothing here synchronizes with the device.

Resets divide a sequence into episodes, and neither direction carries a state from one into another. A reset at step t
is a border between the steps t - 1 and t. In the reverse direction, the state that crosses it is the one that step t
passes to step t - 1, so that the border belongs to step t - 1, the later one in reading order.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ReadingOrder:
    """The order in which one direction reads a batch of padded sequences.

    Attributes:
        reverse: Whether each sequence is read from its last step to its first.
        valid: A mask [T, B, 1], bool, that is true except in the padding; None if there is no padding.
        is_last: A mask [T, B, 1], bool, of each sequence's last step; None if all sequences have T steps.
        nonempty: A mask [B, 1], bool, of the sequences with at least one step; None if all have T steps.
        last_index: The index of each sequence's last step [B], 0 for an empty sequence; None if all have T steps.
        permutation: For each position in reading order, the flat index of the step that is read there [T * B]; None
            unless `reverse` is true and lengths are given.
        carries: A mask [T, B, 1], bool, in reading order, that is false where a step begins an episode, so that the
            states before it are the initial ones of the cell; None without resets.
    """

    reverse: bool
    valid: Tensor | None = None
    is_last: Tensor | None = None
    nonempty: Tensor | None = None
    last_index: Tensor | None = None
    permutation: Tensor | None = None
    carries: Tensor | None = None

    @classmethod
    def of(cls, x: Tensor, lengths: Tensor | None, reverse: bool, resets: Tensor | None = None) -> ReadingOrder:
        """Return the order in which a direction reads an input.

        Args:
            x: The input [T, B, ...].
            lengths: The lengths of the sequences [B]; None if all sequences have T steps.
            reverse: Whether each sequence is read from its last step to its first.
            resets: The steps at which episodes begin in the order of time [T, B], bool; None without resets.
        """
        order = cls(reverse) if lengths is None else cls._of_lengths(x, lengths, reverse)
        return order if resets is None else order._with_resets(resets)

    @classmethod
    def _of_lengths(cls, x: Tensor, lengths: Tensor, reverse: bool) -> ReadingOrder:
        time, batch = x.shape[:2]
        lengths = lengths.to(x.device, non_blocking=True)
        steps = torch.arange(time, device=x.device).unsqueeze(1)
        valid = steps < lengths
        permutation = None
        if reverse:
            source = torch.where(valid, lengths - 1 - steps, steps)
            permutation = (source * batch + torch.arange(batch, device=x.device)).flatten()
        return cls(
            reverse,
            valid.unsqueeze(2),
            (steps == lengths - 1).unsqueeze(2),
            (lengths > 0).unsqueeze(1),
            (lengths - 1).clamp(min=0),
            permutation,
        )

    def _with_resets(self, resets: Tensor) -> ReadingOrder:
        begins = self.reordered(resets.unsqueeze(2))
        if self.reverse:
            begins = torch.cat([torch.zeros_like(begins[:1]), begins])[: begins.shape[0]]
        if self.valid is not None:
            begins = begins & self.valid  # the backward pass hands gradients of states through the padding
        return dataclasses.replace(self, carries=~begins)

    def reordered(self, sequence: Tensor) -> Tensor:
        """Convert a tensor [T, B, F] from the order of time to reading order, or back: the map is its own inverse."""
        if not self.reverse:
            return sequence
        if self.permutation is None:
            return sequence.flip(0)
        return sequence.flatten(0, 1).index_select(0, self.permutation).view(sequence.shape)

    def masked(self, sequence: Tensor) -> Tensor:
        """Return a tensor [T, B, F] with its padding replaced by zeros."""
        return sequence if self.valid is None else torch.where(self.valid, sequence, 0)

    def read(self, sequence: Tensor) -> Tensor:
        """Return a tensor [T, B, F] in reading order, with zeros in the padding."""
        return self.reordered(self.masked(sequence))

    def initial_state(self, state: Tensor) -> Tensor:
        """Return the state [B, F] with which the recurrence starts: `state`, or zero for an empty sequence."""
        return state if self.nonempty is None else torch.where(self.nonempty, state, 0)

    def carried_at(self, time: int) -> tuple[Tensor | None, ...]:
        """Return the mask `carries` of each of T steps [B, 1]; None for every step without resets."""
        return (None,) * time if self.carries is None else self.carries.unbind(0)

    def before_steps(self, states: Tensor, initial: Tensor, reset: float = 0.0) -> Tensor:
        """Return the state before every step, in reading order [T, B, F].

        Args:
            states: The states after every step, in reading order [T, B, F].
            initial: The state with which the recurrence starts [B, F].
            reset: The value of the state before a step that begins an episode.
        """
        earlier = torch.cat([initial.unsqueeze(0), states])[: states.shape[0]]
        return earlier if self.carries is None else torch.where(self.carries, earlier, reset)

    def final_state(self, states: Tensor, initial: Tensor) -> Tensor:
        """Return the state after each sequence's last step [B, F]; for an empty sequence, the initial state.

        Args:
            states: The states after every step, in reading order [T, B, F].
            initial: The initial states [B, F].
        """
        if states.shape[0] == 0:
            return initial.clone()
        if self.last_index is None or self.nonempty is None:
            return states[-1].clone()
        index = self.last_index.view(1, -1, 1).expand(1, *initial.shape)
        return torch.where(self.nonempty, states.gather(0, index).squeeze(0), initial)


def carried(state: Tensor, carries: Tensor | None, initial: float = 0.0) -> Tensor:
    """Return a state or its gradient [B, F], with its initial value in the rows that begin an episode.

    The value is selected, not multiplied by zero, so that NaN in one episode does not reach another.

    Args:
        state: The state that a step passes to the next one in reading order, or its gradient.
        carries: A mask [B, 1], bool, from `ReadingOrder.carried_at`, or None.
        initial: The initial value of the state; 0 for a gradient.
    """
    return state if carries is None else torch.where(carries, state, initial)
