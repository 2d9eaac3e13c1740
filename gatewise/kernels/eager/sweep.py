"""The loop over time of the backward pass for cells that combine hidden units or carry several states.

The functions of `gatewise.derivation.sweep` compute the values of a block of steps at once, then the gradients of one
step after another, then what no step needs for the block at once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from gatewise.cells import step_cell
from gatewise.cells.cell import Cell
from gatewise.cells.statement import before
from gatewise.contract.weights import DirectionWeights
from gatewise.derivation.sweep import sweep_of
from gatewise.kernels.eager.blocks import block_of, divided
from gatewise.kernels.eager.masks import DirectionMasks
from gatewise.kernels.eager.reading_order import ReadingOrder, carried
from gatewise.kernels.eager.unroll import Kept, state_dtype


class SweepLoop:
    """The loop over time, from the last step to the first.

    Args:
        cell: The cell.
        order: The order in which the direction reads the sequences.
        weights: The weights of the direction.
        kept: The tensors that the forward pass kept.
        y: The output [T, B, R].
        h0: The initial hidden state [B, R].
        masks: The masks of a regularised cell.

    Attributes:
        first: The gradients of the recurrent sums of the first step [B, G*H], zero in the rows where it begins an
            episode, because the state before it is not read there; None if there are no steps.
        direct: The gradient of the initial hidden state through element-wise operations [B, H], zero in the same rows;
            None if the cell has no such operations.
    """

    def __init__(
        self,
        cell: Cell,
        order: ReadingOrder,
        weights: DirectionWeights,
        kept: Kept,
        y: Tensor,
        h0: Tensor,
        masks: DirectionMasks,
    ) -> None:
        self.cell, self.order, self.weights, self.kept, self.masks = cell, order, weights, kept, masks
        self._y, self._h0, self._of_steps = y, h0, masks.in_reading_order(order)
        self._sweep = sweep_of(step_cell(cell), len(self._of_steps))
        self.inner = state_dtype(kept.sums.dtype)
        names = self._sweep.rows
        self._of_states = [names.index(before(name)) for name in cell.states]
        self._of_hidden = names.index(before("h")) if before("h") in names else None
        self._sums = len(names) - len(cell.gates)
        (time, batch, width), count = kept.sums.shape, len(cell.sums)
        size = width // count
        self._rows = kept.sums.new_empty(time, batch, len(names), size, dtype=self.inner)
        for row in self._sweep.empty:
            self._rows[:, :, row] = 0
        self._own = self._sweep.once([parameter.to(self.inner) for parameter in weights.parameters])
        # Without gates in `apart`, the gradients of the input sums are those of the recurrent sums.
        self._inputs = self._rows.new_empty(time, batch, len(cell.gates), size) if cell.apart else None
        self._parameters: list[Tensor | None] = [None] * len(weights.parameters)
        self.first: Tensor | None = None
        self.direct: Tensor | None = None

    @functools.cached_property
    def hidden(self) -> Tensor:
        """The hidden state before each step, in reading order [T, B, R]."""
        initial = self.order.initial_state(self._h0)
        return self.order.before_steps(self.order.reordered(self._y), initial, self.cell.initial_value("h"))

    def run(self, states0: Sequence[Tensor], dh: Tensor, dstates_n: Sequence[Tensor | None]) -> list[Tensor]:
        """Compute the gradients of all steps, and return those of the initial states other than the hidden state.

        Args:
            states0: The initial states other than the hidden state [B, H].
            dh: The gradients of the hidden states through the outputs [T, B, R]. The gradients through the recurrent
                products are added in place.
            dstates_n: The gradients of the final states [B, H]; None for zero.
        """
        time, batch, _, size = self._rows.shape
        starts = [state.to(self.inner) for state in states0]
        above = [
            self._rows.new_zeros(batch, size) if given is None else given.to(self.inner, copy=True)
            for given in dstates_n
        ]
        block = block_of(self._rows.device.type, batch, size)
        for stop in range(time, 0, -block):
            above = self._run_block(max(0, stop - block), stop, starts, dh, above)
        return [one.clone() for one in above]

    def of_inputs(self) -> Tensor:
        """Return the gradients of the input products [T, B, G*H]."""
        return self.of_hidden() if self._inputs is None else self._inputs.flatten(2)

    def of_hidden(self) -> Tensor:
        """Return the gradients of the recurrent sums [T, B, G*H] as a view, which matrix products read directly."""
        return self._rows[:, :, self._sums : self._sums + len(self.cell.gates)].flatten(2)

    def of_parameters(self) -> tuple[Tensor, ...]:
        """Return the gradients of the parameters [H], summed over all steps and sequences."""
        size = self._rows.shape[-1]
        return tuple(self._rows.new_zeros(size) if found is None else found for found in self._parameters)

    def _run_block(
        self, start: int, stop: int, starts: Sequence[Tensor], dh: Tensor, above: list[Tensor]
    ) -> list[Tensor]:
        valid = None if self.order.valid is None else self.order.valid[start:stop].unbind(0)
        carried_at = self.order.carried_at(dh.shape[0])[start:stop]
        changing, for_block = self._values(starts, start, stop)
        rows = self._rows[start:stop]
        spans = [
            (rows.select(2, first) if count == 1 else rows.narrow(2, first, count)).unbind(0)
            for first, count in self._sweep.spans
        ]
        recurrent = self.of_hidden()[start:stop].unbind(0)
        of_states = [rows.select(2, row).unbind(0) for row in self._of_states]
        of_hidden = None if self._of_hidden is None else rows.select(2, self._of_hidden).unbind(0)
        values = [column.unbind(0) for column in changing]
        step, own, w_hh, w_hr = self._sweep.step, self._own, self.weights.w_hh, self.weights.w_hr
        for at in reversed(range(stop - start)):
            total = dh[start + at]
            if self.first is not None:
                if self.masks.factor is None:
                    total.addmm_(self.first, w_hh)
                else:
                    total.add_(self.masks.dropped(torch.mm(self.first, w_hh)))
            if w_hr is not None:
                total = torch.mm(total, w_hr)
            total = total.to(self.inner)
            if self.direct is not None:
                total = total + self.direct
            step(total, *above, [column[at] for column in values], own, [span[at] for span in spans])
            if valid is not None:
                # In the padding, the gradients of states pass through unchanged, and all other gradients are zero.
                rows[at].masked_fill_(~valid[at].unsqueeze(1), 0)
                above = [torch.where(valid[at], row[at], one) for row, one in zip(of_states, above, strict=True)]
            else:
                above = [row[at] for row in of_states]
            carries = carried_at[at]
            above = [carried(one, carries) for one in above]
            self.first = carried(recurrent[at], carries).to(dh.dtype)
            self.direct = None if of_hidden is None else carried(of_hidden[at], carries)
        self._finish(rows, for_block, start, stop)
        return above

    def _values(self, starts: Sequence[Tensor], start: int, stop: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        after = [history[start:stop] for history in self.kept.states]
        earlier = [
            history[start - 1 : stop - 1] if start else torch.cat([state0.unsqueeze(0), here[:-1]])
            for history, here, state0 in zip(self.kept.states, after, starts, strict=True)
        ]
        if self.order.carries is not None:
            values = [self.cell.initial_value(name) for name in self.cell.states]
            earlier = [
                torch.where(self.order.carries[start:stop], history, value)
                for history, value in zip(earlier, values, strict=True)
            ]
        hidden = None if self._of_hidden is None else self.hidden[start:stop].to(self.inner)
        of_steps = [mask[start:stop].to(self.inner) for mask in self._of_steps]
        inputs, recurrent = divided(self.cell, self.kept.sums[start:stop].to(self.inner))
        return self._sweep.values(inputs, recurrent, [hidden, *earlier], after, of_steps, self._own)

    def _finish(self, rows: Tensor, for_block: tuple[Tensor, ...], start: int, stop: int) -> None:
        """Compute the gradients of the input sums and of the parameters through the steps of a block."""
        of_inputs, of_parameters = self._sweep.bulk(rows, for_block, self._own)
        for index, found in enumerate(of_parameters):
            known = self._parameters[index]
            self._parameters[index] = found if known is None else known if found is None else known.add_(found)
        if self._inputs is None:
            return
        into = self._inputs[start:stop]
        if len(self.cell.apart) < len(self.cell.gates):
            into.copy_(rows.narrow(2, self._sums, len(self.cell.gates)))
        for name, found in zip(self._sweep.inputs, of_inputs, strict=True):
            into[:, :, self.cell.sums.index(name)] = 0 if found is None else found
        if self.order.valid is not None:
            into.masked_fill_(~self.order.valid[start:stop].unsqueeze(2), 0)
