"""Calls of padded sequences on a CPU by an operator of PyTorch that takes equal lengths or packed batches.

Autograd records the packing and the operator in less time than the explicit passes take around them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from gatewise.contract.device import Device
from gatewise.contract.kernel import Kernel, Operator
from gatewise.contract.problem import Layout, Problem
from gatewise.functional.packing import places_of


@dataclasses.dataclass(frozen=True, slots=True)
class Ragged:
    """The call of a problem with lengths, all of them positive.

    Attributes:
        kernel: The kernel, which has an operator for packed batches.
        problem: The problem.
        device: The device of the call, a CPU.
    """

    kernel: Kernel
    problem: Problem
    device: Device

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
        problem, longest = self.problem, max(lengths)
        if min(lengths) == longest:
            # Equal lengths are an ordinary batch.
            operator = _operator(self.kernel, problem, self.device, Layout.DENSE, longest)
            y, h_n, c_n = operator(x if longest == problem.time else x[:longest], h0, c0, weights, None)
            if longest < problem.time:
                y = torch.cat([y, y.new_zeros(problem.time - longest, *y.shape[1:])])
            return y, h_n, c_n
        operator = _operator(self.kernel, problem, self.device, Layout.PACKED, longest)
        batch_sizes, tokens, rows, back = places_of(lengths, problem.time, x.device)
        assert back is not None  # every row has a token
        if not zeros:
            h0 = h0.index_select(1, rows)
            c0 = c0.index_select(1, rows) if problem.cell.states else h0
        y, h_n, c_n = operator(tokens.packed(x), h0, c0, weights, batch_sizes)
        h_n = h_n.index_select(1, back)
        c_n = c_n.index_select(1, back) if problem.cell.states else h_n
        return tokens.padded(y), h_n, c_n


def ragged(kernel: Kernel, problem: Problem, device: Device) -> Ragged | None:
    """Return the call of a problem with lengths by a kernel's operators, or None if the kernel has none."""
    packed = kernel.operator(_without_lengths(problem, Layout.PACKED, problem.time), device)
    return None if packed is None else Ragged(kernel, problem, device)


# What is looked up follows from the problem, the layout and the number of steps alone, as the operators themselves do.
@functools.lru_cache(maxsize=1024)
def _operator(kernel: Kernel, problem: Problem, device: Device, layout: Layout, time: int) -> Operator:
    found = kernel.operator(_without_lengths(problem, layout, time), device)
    assert found is not None  # as `ragged` has found
    return found


def _without_lengths(problem: Problem, layout: Layout, time: int) -> Problem:
    return problem.replace(layout=layout, time=time)
