"""Calls of padded sequences on a CPU by an operator of PyTorch that takes equal lengths or packed batches.

Autograd records the packing and the operator in less time than the explicit passes take around them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from gatewise.contract.device import Device
from gatewise.contract.kernel import Kernel, Operator
from gatewise.contract.problem import Layout, Problem
from gatewise.functional.packing import places_of

# Members of an enumeration are hashed by a function of Python, and these values in C.
_DENSE, _PACKED = Layout.DENSE.value, Layout.PACKED.value


class Ragged(Protocol):
    """The call of a problem with lengths, all of them positive."""

    def __call__(
        self, x: Tensor, h0: Tensor, c0: Tensor, weights: Sequence[Tensor], lengths: Sequence[int], *, zeros: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return y, h_n and c_n.

        Args:
            x: The input [T, B, I].
            h0: The initial hidden state [L*D, B, R].
            c0: The other initial states [L*D, B, S*H].
            weights: The weights in PyTorch's flat order.
            lengths: The lengths [B], from 1 to T.
            zeros: Whether the initial states are zeros, which have no order.
        """
        ...


def ragged(kernel: Kernel, problem: Problem, device: Device) -> Ragged | None:
    """Return the call of a problem with lengths by a kernel's operators, or None if the kernel has none.

    Args:
        kernel: The kernel, which reads packed batches.
        problem: The problem.
        device: The device of the call, a CPU.
    """
    time, pair = problem.time, bool(problem.cell.states)

    # The operator of each number of steps, of which there are at most T. It follows from the problem alone.
    @functools.cache
    def operator(layout: str, longest: int) -> Operator | None:
        return kernel.operator(problem.replace(layout=Layout(layout), time=longest), device)

    def call(
        x: Tensor, h0: Tensor, c0: Tensor, weights: Sequence[Tensor], lengths: Sequence[int], *, zeros: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        longest = max(lengths)
        if min(lengths) == longest:  # an ordinary batch
            dense = operator(_DENSE, longest)
            assert dense is not None
            y, h_n, c_n = dense(x if longest == time else x[:longest], h0, c0, weights, None)
            if longest < time:
                y = torch.cat([y, y.new_zeros(time - longest, *y.shape[1:])])
            return y, h_n, c_n
        packed = operator(_PACKED, longest)
        batch_sizes, tokens, rows, back = places_of(lengths, time, x.device)
        assert packed is not None
        assert back is not None  # every row has a token
        if not zeros:
            h0 = h0.index_select(1, rows)
            c0 = c0.index_select(1, rows) if pair else h0
        y, h_n, c_n = packed(tokens.packed(x), h0, c0, weights, batch_sizes)
        h_n = h_n.index_select(1, back)
        c_n = c_n.index_select(1, back) if pair else h_n
        return tokens.padded(y), h_n, c_n

    return None if operator(_PACKED, time) is None else call
