"""The order of calls that read their sequences from the last step to the first.

No kernel computes the reverse direction without the forward one. The sequences are reversed within their own lengths by
PyTorch operators before the call, and its outputs after it, so that every kernel computes such a call, and what knows
PyTorch's operators (autograd, `torch.func`, `torch.compile`, `torch.export`, ONNX) knows the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gatewise.contract.tracing import is_compiling, is_exporting
from gatewise.functional.lengths import as_tensor, checked_batch_sizes, checked_lengths
from gatewise.functional.resets import copied_resets


class Reversal(NamedTuple):
    """The map between the order of time and the order from the last step to the first; it is its own inverse.

    Attributes:
        source: For each token in the flat order of x, the token that takes its place [T*B] or [N]; None to reverse the
            first dimension.
    """

    source: Tensor | None

    @classmethod
    def of(cls, x: Tensor, lengths: Tensor | Sequence[int] | None, batch_sizes: Tensor | None) -> Reversal:
        """Return the map of an input; arguments and errors are those of `functional.lstm`.

        Args:
            x: The input [T, B, I], or [N, I] with `batch_sizes`.
            lengths: The lengths [B], or None.
            batch_sizes: The batch size at each step [T] of a packed batch, or None.
        """
        if lengths is None and batch_sizes is None:
            return cls(None)
        if not is_compiling():
            return cls(_checked_source(x.shape, x.device, lengths, batch_sizes))
        if lengths is not None and not isinstance(lengths, Tensor):
            lengths = as_tensor(lengths)
        if not is_exporting():
            return cls(_source(x.shape, x.device, lengths, batch_sizes))
        # An exported graph runs without gatewise, so that nothing checks the values that it is given.
        if batch_sizes is not None:
            return cls(_index_of_packed(batch_sizes).to(x.device, non_blocking=True))
        assert lengths is not None
        return cls(_index_of_padded(lengths.to(x.device, non_blocking=True), len(x)))

    def reordered(self, sequence: Tensor) -> Tensor:
        """Convert a tensor [T, B, F], or [N, F] of a packed batch, from one order to the other."""
        if self.source is None:
            return sequence.flip(0)
        if sequence.dim() == 2:
            return sequence.index_select(0, self.source)
        return sequence.flatten(0, 1).index_select(0, self.source).unflatten(0, sequence.shape[:2])

    def resets(self, resets: Tensor | None, x: Tensor) -> Tensor | None:
        """Return resets in the reversed order.

        A reset at step t is a border between the steps t - 1 and t, of which t - 1 is read later.

        Args:
            resets: The resets in the order of time, as the caller gave them.
            x: The input [T, B, I].
        """
        if resets is None:
            return None
        begins = self.reordered(copied_resets(resets, x.shape, x.device, packed=x.dim() == 2).unsqueeze(2)).squeeze(2)
        return torch.cat([torch.zeros_like(begins[:1]), begins])[: begins.shape[0]]


# One operator of a compiled graph, because values can be checked only when the graph runs, and before they give the
# order in which sequences are read.
@torch.library.custom_op("gatewise::reversal", mutates_args=())
def _source(shape: Sequence[int], device: torch.device, lengths: Tensor | None, batch_sizes: Tensor | None) -> Tensor:
    return _checked_source(shape, device, lengths, batch_sizes)


@_source.register_fake
def _source_fake(
    shape: Sequence[int], device: torch.device, lengths: Tensor | None, batch_sizes: Tensor | None
) -> Tensor:
    tokens = shape[0] if lengths is None else shape[0] * shape[1]
    return torch.empty(tokens, dtype=torch.int64, device=device)


def _checked_source(
    shape: Sequence[int], device: torch.device, lengths: Tensor | Sequence[int] | None, batch_sizes: Tensor | None
) -> Tensor:
    if batch_sizes is not None:
        checked_batch_sizes(batch_sizes, shape[0])
        return _index_of_packed(batch_sizes).to(device, non_blocking=True)
    lengths, _ = checked_lengths(lengths, shape[0], shape[1], device)
    return _index_of_padded(lengths.to(device, non_blocking=True), shape[0])


def _index_of_padded(lengths: Tensor, time: int) -> Tensor:
    batch, steps = lengths.shape[0], torch.arange(time, device=lengths.device).unsqueeze(1)
    # Lengths on the GPU are not checked before the call.
    source = torch.where(steps < lengths, (lengths - 1 - steps).clamp(max=time - 1), steps)
    return (source * batch + torch.arange(batch, device=lengths.device)).flatten()


def _index_of_packed(sizes: Tensor) -> Tensor:
    steps = torch.arange(sizes.shape[0], device=sizes.device).repeat_interleave(sizes)
    starts = sizes.cumsum(0) - sizes
    rows = torch.arange(steps.shape[0], device=sizes.device) - starts[steps]
    lengths = torch.bincount(rows)
    return starts[lengths[rows] - 1 - steps] + rows
