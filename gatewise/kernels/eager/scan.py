"""The loop over time as one operator of a graph, for exported programs whose number of steps is not fixed.

`torch.export` would unroll a loop of Python, and so fix its steps. PyTorch's operator `scan` has a graph of one step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Step = Callable[[tuple[Tensor, ...], tuple[Tensor, ...]], tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]
"""A step: from the carried tensors and the slices of a step to the next carried tensors, and the outputs [B, F]."""


def is_variable(time: int) -> bool:
    """Return whether a number of steps is a symbol of a graph that is being traced."""
    return isinstance(time, torch.SymInt)


def over_steps(
    step: Step, carried: Sequence[Tensor], sequences: Sequence[Tensor]
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Run a step over all steps of sequences.

    Args:
        step: The step, which changes no tensor in place.
        carried: The tensors [B, F] that the first step reads.
        sequences: The tensors [T, B, F] of which each step reads a slice.

    Returns:
        The tensors carried from the last step, and the outputs of all steps [T, B, F].
    """
    # The module loads the compiler, as does everything that traces a graph.
    from torch._higher_order_ops.scan import scan

    batch = sequences[0].shape[1]

    def one(before: tuple[Tensor, ...], slices: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        after, outputs = step(before, slices)
        # AOTInductor knows the size of an output by sizes that the step itself names.
        named = outputs[0].new_empty(batch, 1)
        # The results of an operator share no memory.
        return tuple([tensor.clone() for tensor in after]), tuple(
            [output.expand_as(named.expand_as(output)).clone() for output in outputs]
        )

    return scan(one, tuple([tensor.clone() for tensor in carried]), tuple(sequences), dim=0)
