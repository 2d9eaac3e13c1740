"""A layer of any cell as a loop over steps, of PyTorch's operators or of its cells (`torch.lstm_cell`)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gatewise.cells import GRU, LSTM, Cell, Regularised
from gatewise.cells.step import next_states
from gatewise.contract.masks import CellMasks
from gatewise.contract.problem import Problem
from gatewise.contract.weights import DirectionWeights, by_direction
from gatewise.testing.sequences import Batch, Sequences


class LoopLayer:
    """One layer, all its directions.

    Args:
        problem: The problem, which determines the cell and the number of directions.
        weights: The weights of the layer in PyTorch's flat order.
        masks: The masks of a regularised cell.
        row_of_token: The index of the sequence of each step in the flattened input; None without masks.
        of_pytorch: Whether steps are those of PyTorch's cells rather than of gatewise's statement; the cell must be
            one of PyTorch's. Projections are allowed only then.
    """

    def __init__(
        self,
        problem: Problem,
        weights: Sequence[Tensor],
        masks: CellMasks = CellMasks(),  # noqa: B008  an immutable tuple
        row_of_token: Tensor | None = None,
        *,
        of_pytorch: bool = False,
    ) -> None:
        cell = problem.cell
        self._pytorch_step = _step_of_pytorch(cell) if of_pytorch else None
        self._cell = cell.masked if isinstance(cell, Regularised) else cell
        self._scale = 1 / (1 - cell.recurrent_dropout) if isinstance(cell, Regularised) else 1.0
        self._masks, self._row_of_token = masks, row_of_token
        self.all_weights = [list(weights)]
        self._directions = by_direction(tuple(weights), problem.weights_per_direction, len(problem.cell.parameters))

    def __call__(
        self, x: Tensor, h0: Tensor, c0: Tensor, rows: Sequences | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the output and the final states.

        Args:
            x: The input [T, B, I] or [N, I].
            h0: The initial hidden state [D, S, H], of each sequence.
            c0: The other initial states side by side [D, S, n*H].
            rows: The sequences, on the device of the input; None if there are B of T steps each.
        """
        flat = x.reshape(-1, x.shape[-1])
        if rows is None:
            time, batch = x.shape[:2]
            whole = Batch(torch.arange(time, device="cpu") * batch, torch.full((batch,), time, device="cpu"))
            rows = whole.sequences().to(x.device)
        found = [
            self._direction(index, flat, h0[index], c0[index], rows, weights)
            for index, weights in enumerate(self._directions)
        ]
        y = torch.cat([output for output, _, _ in found], -1)
        return y.view(*x.shape[:-1], y.shape[1]), (
            torch.stack([h for _, h, _ in found]),
            torch.stack([c for _, _, c in found]),
        )

    def _direction(
        self, index: int, flat: Tensor, h0: Tensor, c0: Tensor, rows: Sequences, weights: DirectionWeights
    ) -> tuple[Tensor, Tensor, Tensor]:
        tokens, sizes = rows.backwards if index else rows.tokens, rows.sizes
        inputs = flat.index_select(0, tokens).split(sizes)
        factors, masks = self._masks_of(index, tokens, sizes, h0)
        h, c = h0.index_select(0, rows.order), c0.index_select(0, rows.order)
        outputs, ended = [], []
        for step, (size, after) in enumerate(itertools.pairwise((*sizes, 0))):
            h, c = self._step(inputs[step], h, c, weights, factors[step], [mask[step] for mask in masks])
            outputs.append(h)
            if after < size:
                # The sequences that end here are the last ones, because longer ones come first.
                ended.append((h[after:], c[after:]))
                h, c = h[:after], c[:after]
        y = flat.new_zeros(flat.shape[0], h0.shape[1])
        if not outputs:
            return y, h0, c0
        finals = (torch.cat(parts) for parts in zip(*reversed(ended), strict=True))
        h_n, c_n = (before.index_copy(0, rows.order, last) for before, last in zip((h0, c0), finals, strict=True))
        return y.index_copy(0, tokens, torch.cat(outputs)), h_n, c_n

    def _masks_of(
        self, index: int, tokens: Tensor, sizes: Sequence[int], like: Tensor
    ) -> tuple[Sequence[Tensor | float], list[Sequence[Tensor]]]:
        """Return, for each step, the factors of the hidden states [b, H] and the masks [b, H] of each name."""
        units, factors = like.shape[1], [1.0] * len(sizes)
        if self._masks.hidden is not None and self._row_of_token is not None:
            kept = self._masks.hidden[index].index_select(0, self._row_of_token.index_select(0, tokens))
            factors = (kept.to(like.dtype) * self._scale).split(sizes)
        own = slice(index * units, (index + 1) * units)
        of_steps = [mask.flatten(0, -2)[:, own].index_select(0, tokens) for mask in self._masks.of_steps]
        return factors, [mask.to(like.dtype).split(sizes) for mask in of_steps]

    def _step(
        self, x: Tensor, h: Tensor, c: Tensor, weights: DirectionWeights, factor: Tensor | float, masks: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        cell, size = self._cell, h.shape[1]
        if self._pytorch_step is not None:
            return self._pytorch_step(x, h, c, weights)
        of_input = torch.nn.functional.linear(x, weights.w_ih, weights.b_ih)
        entering = h * factor if isinstance(factor, Tensor) else h
        of_state = torch.nn.functional.linear(entering, weights.w_hh, weights.b_hh)
        if cell.apart:
            each = zip(cell.gates, of_input.split(size, -1), of_state.split(size, -1), strict=True)
            sums = {}
            for gate, own, other in each:
                if gate in cell.apart:
                    sums |= {f"{gate}_input": own, f"{gate}_recurrent": other}
                else:
                    sums[gate] = own + other
        else:
            sums = dict(zip(cell.gates, (of_input + of_state).split(size, -1), strict=True))
        states = dict(zip(cell.states, c.split(size, -1) if cell.states else (), strict=True))
        parameters = dict(zip(cell.parameters, (*weights.parameters, *masks), strict=True))
        after, others = next_states(cell, sums, {"h": h, **states}, parameters)
        return after, torch.cat(others, -1) if others else c


def _step_of_pytorch(cell: Cell) -> Callable[[Tensor, Tensor, Tensor, DirectionWeights], tuple[Tensor, Tensor]]:
    """Return one step of a cell as PyTorch computes it."""

    def lstm(x: Tensor, h: Tensor, c: Tensor, own: DirectionWeights) -> tuple[Tensor, Tensor]:
        if own.w_hr is None:
            return torch.lstm_cell(x, (h, c), own.w_ih, own.w_hh, own.b_ih, own.b_hh)
        # PyTorch's cell has no projection.
        linear = torch.nn.functional.linear
        i, f, g, o = (linear(x, own.w_ih, own.b_ih) + linear(h, own.w_hh, own.b_hh)).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return linear(o.sigmoid() * c.tanh(), own.w_hr), c

    def gru(x: Tensor, h: Tensor, c: Tensor, own: DirectionWeights) -> tuple[Tensor, Tensor]:
        return torch.gru_cell(x, h, own.w_ih, own.w_hh, own.b_ih, own.b_hh), c

    def rnn(x: Tensor, h: Tensor, c: Tensor, own: DirectionWeights) -> tuple[Tensor, Tensor]:
        function = torch.rnn_tanh_cell if cell.nonlinearity == "tanh" else torch.rnn_relu_cell  # type: ignore[attr-defined]
        return function(x, h, own.w_ih, own.w_hh, own.b_ih, own.b_hh), c

    return lstm if isinstance(cell, LSTM) else gru if isinstance(cell, GRU) else rnn
