"""Gradients that are sums over steps, added up a stretch of steps at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from gatewise.feeding.call import Inputs, Kept, LayerWeights, wide
from gatewise.feeding.products import multiply


class WeightSums:
    """Gradients of the embeddings, and of the layers' weights, in the dtype of the parameters.

    Args:
        inputs: Of the decoder.
        kept: The operands of its products.
        whole: Whether all steps come in one stretch: then nothing is added up, in whatever dtype.
    """

    def __init__(self, inputs: Inputs, kept: Kept, *, whole: bool) -> None:
        self._inputs, self._operands, self._whole = inputs, kept.operands, whole
        self._sums = [
            LayerWeights(
                *(
                    torch.empty_like(each) if whole else torch.zeros_like(each, dtype=wide(each.dtype))
                    for each in (own.w_ih, own.w_hh, own.b_ih)
                ),
                own.b_hh,
            )
            for own in inputs.weights.layers
        ]
        self.embedded = torch.empty_like(inputs.embedded, dtype=inputs.embedded_dtype)

    def add(self, steps: slice, dgates: tuple[Tensor, ...]) -> None:
        """Add what a stretch of steps gives.

        Args:
            steps: Which.
            dgates: Gradients of the gate sums of each layer, one row for each of the steps [t, B, 4H].
        """
        units, embedded = self._inputs.units, self._inputs.embedded[steps].flatten(0, 1)
        for layer, (sums, every) in enumerate(zip(self._sums, dgates, strict=True)):
            rows, operand = every.flatten(0, 1), self._operands[layer][steps].flatten(0, 1)
            multiply(rows.t(), operand[:, :units], sums.w_ih[:, -units:], add=not self._whole)
            multiply(rows.t(), operand[:, units:], sums.w_hh, add=not self._whole)
            if layer == 0:
                multiply(rows.t(), embedded, sums.w_ih[:, :-units], add=not self._whole)
                multiply(rows, self._inputs.layers[0].weight[:, : -2 * units], self.embedded[steps].flatten(0, 1))
            bias = rows.sum(0, dtype=wide(rows.dtype))
            sums.b_ih.copy_(bias) if self._whole else sums.b_ih.add_(bias)

    def layers(self) -> tuple[LayerWeights, ...]:
        """Return the gradients of the layers' weights."""
        return tuple(
            LayerWeights(
                sums.w_ih.to(own.w_ih.dtype),
                sums.w_hh.to(own.w_hh.dtype),
                sums.b_ih.to(own.b_ih.dtype),
                sums.b_ih.to(own.b_hh.dtype, copy=True),
            )
            for sums, own in zip(self._sums, self._inputs.weights.layers, strict=True)
        )
