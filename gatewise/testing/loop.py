"""A layer of any cell as a loop of PyTorch operators over steps: the reference for cells that PyTorch does not have."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gatewise.cells import Regularised
from gatewise.cells.step import next_states
from gatewise.contract.masks import CellMasks
from gatewise.contract.problem import Problem
from gatewise.contract.weights import DirectionWeights, by_direction


class LoopLayer:
    """One layer, all its directions.

    Args:
        problem: The problem, which determines the cell and the number of directions.
        weights: The weights of the layer in PyTorch's flat order.
        masks: The masks of a regularised cell.
        row_of_token: The index of the sequence of each step in the flattened input; None without masks.
    """

    def __init__(
        self,
        problem: Problem,
        weights: Sequence[Tensor],
        masks: CellMasks = CellMasks(),  # noqa: B008  an immutable tuple
        row_of_token: Tensor | None = None,
    ) -> None:
        cell = problem.cell
        self._cell = cell.masked if isinstance(cell, Regularised) else cell
        self._scale = 1 / (1 - cell.recurrent_dropout) if isinstance(cell, Regularised) else 1.0
        self._masks, self._row_of_token = masks, row_of_token
        self.all_weights = [list(weights)]
        self._directions = by_direction(tuple(weights), problem.weights_per_direction, len(problem.cell.parameters))

    def __call__(
        self, x: Tensor, h0: Tensor, c0: Tensor, rows: list[list[int]] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the output and the final states.

        Args:
            x: The input [T, B, I] or [N, I].
            h0: The initial hidden state [D, B, H].
            c0: The other initial states side by side [D, B, S*H].
            rows: For each sequence, the indices of its steps in the flattened input; None if every sequence has T.
        """
        flat, batch = x.reshape(-1, x.shape[-1]), h0.shape[1]
        if rows is None:
            rows = [list(range(row, flat.shape[0], batch)) for row in range(batch)]
        found = [
            self._direction(
                index, flat, h0[index], c0[index], rows if index == 0 else [own[::-1] for own in rows], weights
            )
            for index, weights in enumerate(self._directions)
        ]
        y = torch.cat([output for output, _, _ in found], -1)
        return y.view(*x.shape[:-1], y.shape[1]), (
            torch.stack([h for _, h, _ in found]),
            torch.stack([c for _, _, c in found]),
        )

    def _direction(
        self, index: int, flat: Tensor, h: Tensor, c: Tensor, rows: list[list[int]], weights: DirectionWeights
    ) -> tuple[Tensor, Tensor, Tensor]:
        outputs, places = [], []
        for step in range(max(map(len, rows), default=0)):
            active = [row for row, own in enumerate(rows) if len(own) > step]
            tokens = [rows[row][step] for row in active]
            at = torch.tensor(active, device=flat.device)
            masks = self._masks_at(index, tokens, h)
            after, states = self._step(flat[tokens], h[at], c[at], weights, *masks)
            h, c = h.index_copy(0, at, after), c.index_copy(0, at, states)
            outputs.append(after)
            places += tokens
        y = flat.new_zeros(flat.shape[0], h.shape[1])
        if places:
            y = y.index_copy(0, torch.tensor(places, device=flat.device), torch.cat(outputs))
        return y, h, c

    def _masks_at(self, index: int, tokens: list[int], h: Tensor) -> tuple[Tensor | float, list[Tensor]]:
        """Return the factors of the hidden states [b, H] and the masks of steps [b, H] at some tokens."""
        factor, size = 1.0, h.shape[1]
        if self._masks.hidden is not None and self._row_of_token is not None:
            factor = self._masks.hidden[index, self._row_of_token[tokens]].to(h.dtype) * self._scale
        own = slice(index * size, (index + 1) * size)
        return factor, [mask.flatten(0, -2)[tokens, own].to(h.dtype) for mask in self._masks.of_steps]

    def _step(
        self, x: Tensor, h: Tensor, c: Tensor, weights: DirectionWeights, factor: Tensor | float, masks: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        cell, size = self._cell, h.shape[1]
        of_input = torch.nn.functional.linear(x, weights.w_ih, weights.b_ih).split(size, -1)
        of_state = torch.nn.functional.linear(h * factor, weights.w_hh, weights.b_hh).split(size, -1)
        sums = {}
        for gate, own, other in zip(cell.gates, of_input, of_state, strict=True):
            if gate in cell.apart:
                sums |= {f"{gate}_input": own, f"{gate}_recurrent": other}
            else:
                sums[gate] = own + other
        states = dict(zip(cell.states, c.split(size, -1) if cell.states else (), strict=True))
        parameters = dict(zip(cell.parameters, (*weights.parameters, *masks), strict=True))
        after, others = next_states(cell, sums, {"h": h, **states}, parameters)
        return after, torch.cat(others, -1) if others else c
