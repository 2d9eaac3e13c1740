"""Calls of padded sequences on a CPU by an operator of PyTorch that takes equal lengths or packed batches.

Autograd records the packing and the operator in less time than the explicit passes take around them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gatewise.contract import ranking
from gatewise.contract.device import Device
from gatewise.contract.kernel import Kernel, Operator
from gatewise.contract.problem import Layout, Problem

# Members of an enumeration are hashed by a function of Python, and these values in C.
_DENSE, _PACKED = Layout.DENSE.value, Layout.PACKED.value


Ragged = Callable[
    [Tensor, Tensor, Tensor, Sequence[Tensor], Tensor, int, int, bool], tuple[Tensor, Tensor, Tensor] | None
]
"""The call of a problem with lengths, all of them positive: it returns y, h_n and c_n, or None if lengths differ and
to copy the padding, too, would take longer than to find the tokens.

Its arguments are x [T, B, I]; the initial states, [L*D, B, R] and [L*D, B, S*H]; the weights in PyTorch's flat order;
the lengths [B], int64 on the CPU, the shortest and the longest of them; and whether the initial states are zeros, which
have no order.
"""


def ragged(kernel: Kernel, problem: Problem, device: Device) -> Ragged | None:
    """Return the call of a problem with lengths by a kernel's operators, or None if the kernel has none.

    It cannot be differentiated in forward mode, which PyTorch's packing does not support.

    Args:
        kernel: The kernel, which reads packed batches.
        problem: The problem.
        device: The device of the call, a CPU.
    """
    time, pair = problem.time, bool(problem.cell.states)
    limit = "padded training" if problem.needs_grad else "padded inference"
    pads = time * problem.batch * problem.input_size <= ranking.weights(device, "aten packed limits")[limit]

    # The operators of the latest numbers of steps. They follow from the problem alone.
    @functools.lru_cache(maxsize=16)
    def operator(layout: str, longest: int) -> Operator | None:
        return kernel.operator(problem.replace(layout=Layout(layout), time=longest), device)

    def call(
        x: Tensor,
        h0: Tensor,
        c0: Tensor,
        weights: Sequence[Tensor],
        lengths: Tensor,
        shortest: int,
        longest: int,
        zeros: bool,
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        if shortest == longest:  # an ordinary batch
            dense = operator(_DENSE, longest)
            assert dense is not None
            x = x if longest == time else x[:longest]
            if problem.needs_grad:
                # As where lengths differ, autograd keeps copies, so that the caller may change its tensors and y.
                x = x.clone()
                if not zeros:
                    h0 = h0.clone()
                    c0 = c0.clone() if pair else h0
            y, h_n, c_n = dense(x, h0, c0, weights, None)
            if longest < time:
                y = torch.cat([y, y.new_zeros(time - longest, *y.shape[1:])])
            elif problem.needs_grad:
                y = y.clone()
            return y, h_n, c_n
        if not pads:
            return None
        packed = operator(_PACKED, longest)
        assert packed is not None
        # These are the operators of `torch.nn.utils.rnn`, which takes more of them to sort and to return to the order.
        lengths, rows = lengths.sort(descending=True)
        back = rows.argsort()
        if not zeros:
            h0 = h0.index_select(1, rows)
            c0 = c0.index_select(1, rows) if pair else h0
        tokens, batch_sizes = torch._pack_padded_sequence(x.index_select(1, rows), lengths, False)
        y, h_n, c_n = packed(tokens, h0, c0, weights, batch_sizes)
        y, _ = torch._pad_packed_sequence(y, batch_sizes, False, 0.0, time)
        h_n = h_n.index_select(1, back)
        return y.index_select(1, back), h_n, c_n.index_select(1, back) if pair else h_n

    return None if operator(_PACKED, time) is None else call
