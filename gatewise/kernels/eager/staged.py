"""The steps of a forward pass that autograd does not record, by the functions of `gatewise.derivation.stages`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gatewise.cells.cell import Cell
from gatewise.derivation.stages import stages_of
from gatewise.kernels.eager.blocks import block_of, divided


class StagedSteps:
    """The steps of one direction of one layer.

    Args:
        cell: The cell whose step is computed, with the masks of steps as its last parameters.
        w_hh: The recurrent weights [G*H, H].
        bias: The bias of the recurrent products [G*H], or None.
        inputs: The input products of all steps [T, B, G*H]; overwritten.
        parameters: The parameters [H], in the dtype of states.
        masks: The masks of steps [T, B, H], in the dtype of states.
        keep: Whether `kept` will be called after the last step.
    """

    def __init__(
        self,
        cell: Cell,
        w_hh: Tensor,
        bias: Tensor | None,
        inputs: Tensor,
        parameters: Sequence[Tensor],
        masks: Sequence[Tensor],
        *,
        keep: bool,
    ) -> None:
        self._cell, self._bias, self._masks = cell, bias, masks
        self._w_hh, self._stages = w_hh.t(), stages_of(cell, len(masks))
        self._own = self._stages.once(parameters)
        self._all = inputs
        if cell.apart and keep:
            (time, batch, width), gates = inputs.shape, len(cell.gates)
            self._all = inputs.new_empty(time, batch, width // gates * len(cell.sums))
            divided(cell, self._all)[0].copy_(inputs)
        self._inputs, recurrent = divided(cell, self._all) if cell.apart and keep else (inputs, None)
        self._steps = self._inputs.unbind(0)
        self._recurrent = None if recurrent is None else recurrent.unbind(0)
        self._is_ahead = len(cell.apart) == len(cell.gates)
        self._ahead: list[tuple[Tensor, ...]] = []
        self._start = 0

    def __call__(self, t: int, rounded: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the states after step t.

        Args:
            t: The number of the step; steps are computed in order.
            rounded: The hidden state before the step [B, R], as the recurrent product reads it.
            states: The states before the step [B, H], the hidden state first, in the dtype of states.
        """
        inner, inputs = states[0].dtype, self._steps[t]
        recurrent, ahead = None, ()
        if not self._cell.apart:
            inputs.addmm_(rounded, self._w_hh)
        elif self._is_ahead:
            recurrent = self._product(rounded, None if self._recurrent is None else self._recurrent[t])
            ahead = self._ahead_of(t, inner)
        else:
            recurrent = self._mixed(t, rounded)
        masks = [mask[t] for mask in self._masks]
        recurrent = None if recurrent is None else recurrent.to(inner)
        return self._stages.step(inputs.to(inner), recurrent, states, masks, ahead, self._own)

    def kept(self) -> Tensor:
        """Return the sums of all steps [T, B, S*H]."""
        return self._all

    def _product(self, rounded: Tensor, out: Tensor | None) -> Tensor:
        if self._bias is None:
            return torch.mm(rounded, self._w_hh, out=out)
        return torch.addmm(self._bias, rounded, self._w_hh, out=out)

    def _mixed(self, t: int, rounded: Tensor) -> Tensor:
        """Add the recurrent products of gates with a single sum to it, and return those of the other gates."""
        gates = len(self._cell.gates)
        product = self._product(rounded, None).unflatten(-1, (gates, -1)).unbind(-2)
        sums = self._steps[t].unflatten(-1, (gates, -1)).unbind(-2)
        apart = []
        for gate, own, of_state in zip(self._cell.gates, sums, product, strict=True):
            if gate in self._cell.apart:
                apart.append(of_state)
            else:
                own += of_state
        return torch.cat(apart, -1, out=None if self._recurrent is None else self._recurrent[t])

    def _ahead_of(self, t: int, inner: torch.dtype) -> tuple[Tensor, ...]:
        if t == self._start + len(self._ahead):
            self._start = t
            stop = t + block_of(self._inputs.device.type, self._inputs.shape[1], self._inputs.shape[2])
            values = self._stages.ahead(self._inputs[t:stop].to(inner), self._own)
            steps = min(stop, len(self._steps)) - t
            self._ahead = list(zip(*[value.unbind(0) for value in values], strict=True)) or [()] * steps
        return self._ahead[t - self._start]
