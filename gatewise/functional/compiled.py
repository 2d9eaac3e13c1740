"""The operator that stands for a call on a CPU in what `torch.compile` traces, and what takes its place in the graph.

`torch.compile` traces a program twice: first its Python code, then the operators that the code calls. This operator is
replaced in the second trace, where the choice of a kernel is ordinary Python code that knows whether gradients follow:

- Where the kernel is PyTorch's own code, the graph has PyTorch's operators, or small ones around them (`in_graph` of
  the kernel).
- A call of one step is in the graph as the operators of that step, so that the compiler can fuse them.
- Other calls are `gatewise::lstm_forward`, which prepares the call whenever the graph runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gatewise.cells import cell_named
from gatewise.contract.masks import draws_masks
from gatewise.contract.problem import NORMAL, Layout
from gatewise.functional.arguments import check_input, described_while_traced
from gatewise.functional.export import in_steps
from gatewise.functional.passes import without_autocast
from gatewise.functional.plan import chosen_for_graph, probed
from gatewise.functional.weights import structure_while_traced
from gatewise.selection import AUTO, REFERENCE, kernel_named

# PyTorch keeps compiled graphs on the disk and knows an operator by its name alone: another number belongs to another
# schema, and to another choice of the operators that take its place.
_NAME = "recurrent_v3"
_SCHEMA = (
    "(Tensor x, Tensor h0, Tensor c0, Tensor[] weights, Tensor? lengths, Tensor? batch_sizes, bool bidirectional,"
    " float dropout, str kernel, str memory, str cell, Tensor? resets) -> (Tensor, Tensor, Tensor)"
)


def _recurrent(
    x: Tensor,
    h0: Tensor,
    c0: Tensor,
    weights: Sequence[Tensor],
    lengths: Tensor | None,
    batch_sizes: Tensor | None,
    bidirectional: bool,
    dropout: float,
    kernel: str,
    memory: str,
    cell: str,
    resets: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    flat, stated = tuple(weights), cell_named(cell)
    found = structure_while_traced(flat, bidirectional, len(stated.gates), len(stated.parameters))
    check_input(x, found, packed=batch_sizes is not None)
    needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, h0, c0, *flat))
    problem = described_while_traced(x, h0, found, lengths, batch_sizes, dropout, memory, stated, resets is not None)
    problem = problem.replace(needs_grad=needs_grad)
    device = probed(x.device)
    name = chosen_for_graph(problem, device, kernel)
    if problem.layout is Layout.DENSE and resets is None:
        # A size of one is a number in every graph. The compiler would draw other masks than a call outside of graphs.
        one_step = isinstance(problem.time, int) and problem.time == 1 and not draws_masks(problem)
        if one_step and memory == NORMAL and kernel in (AUTO, REFERENCE.name):
            return in_steps(found, x, h0, c0, flat, None, 0.0, stated, None)
        operator = kernel_named(name).in_graph(problem, device)
        if operator is not None:
            with without_autocast(x):
                return operator(x, h0, c0, flat, None)
    options = lengths, batch_sizes, bidirectional, dropout, needs_grad, kernel, memory, cell, resets
    y, h_n, c_n, _ = torch.ops.gatewise.lstm_forward.default(x, h0, c0, flat, *options)
    return y, h_n, c_n


_LIBRARY = torch.library.Library("gatewise", "FRAGMENT")
if not hasattr(torch.ops.gatewise, _NAME):  # gatewise may be imported anew
    _LIBRARY.define(_NAME + _SCHEMA)
    _LIBRARY.impl(_NAME, _recurrent, "CompositeImplicitAutograd")

recurrent = getattr(torch.ops.gatewise, _NAME).default
"""The operator; its arguments are those of `operators.traced`, with the name of the cell."""
