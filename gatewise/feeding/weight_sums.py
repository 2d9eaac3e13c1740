"""Gradients that are sums over steps, accumulated chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gatewise.feeding.call import Inputs, Kept, LayerWeights
from gatewise.feeding.elementwise import elementwise_dtype, operands_in
from gatewise.feeding.products import multiply


class WeightSums:
    """The gradients of the embeddings and of the layers' weights, in the dtype of the parameters.

    Args:
        inputs: The inputs of the decoder.
        kept: The kept tensors, of which the operands of products are used.
        whole: Whether all steps are one chunk; the gradients are then written and need no accumulators.
    """

    def __init__(self, inputs: Inputs, kept: Kept, *, whole: bool) -> None:
        self._inputs, self._operands, self._whole = inputs, kept.operands, whole

        def new(parameter: Tensor) -> Tensor:
            return (
                torch.empty_like(parameter)
                if whole
                else torch.zeros_like(parameter, dtype=elementwise_dtype(parameter.dtype))
            )

        self._sums = [
            LayerWeights(new(own.w_ih), new(own.w_hh), new(own.b_ih), own.b_hh) for own in inputs.weights.layers
        ]
        self.embedded = torch.empty_like(inputs.embedded, dtype=inputs.embedded_dtype)

    def add(self, steps: slice, dgates: Sequence[Tensor], scales: Tensor | None) -> None:
        """Add the contribution of a chunk of steps.

        Args:
            steps: The steps of the chunk.
            dgates: The gradients of the gate sums of each layer, one row for each of the steps [t, B, 4H].
            scales: None; or the scale of each row if the gradients are float16 numbers [L, t, B].
        """
        count = steps.stop - steps.start
        for layer, (sums, every) in enumerate(zip(self._sums, dgates, strict=True)):
            rows, operand = every[:count].flatten(0, 1), self._operands[layer][steps].flatten(0, 1)
            if scales is None:
                self._add_rows(layer, sums, steps, rows, operand)
            else:
                self._add_scaled(layer, sums, steps, operands_in(rows), operand, scales[layer].flatten().unsqueeze(1))

    def _add_rows(self, layer: int, sums: LayerWeights, steps: slice, rows: Tensor, operand: Tensor) -> None:
        units, add = self._inputs.units, not self._whole
        if layer == 0:
            embedded = self._inputs.embedded[steps].flatten(0, 1)
            multiply(rows, self._inputs.from_embeddings, self.embedded[steps].flatten(0, 1))
            multiply(rows.t(), embedded, sums.w_ih[:, :-units], add=add)
        multiply(rows.t(), operand[:, :units], sums.w_ih[:, -units:], add=add)
        multiply(rows.t(), operand[:, units:], sums.w_hh, add=add)
        bias = rows.sum(0, dtype=elementwise_dtype(rows.dtype))
        sums.b_ih.copy_(bias) if self._whole else sums.b_ih.add_(bias)

    def _add_scaled(
        self, layer: int, sums: LayerWeights, steps: slice, rows: Tensor, operand: Tensor, scale: Tensor
    ) -> None:
        # The scales belong to rows, over which the product sums: they are applied to the other operand. The largest
        # scale is factored out; numbers that are then too small for float16 are negligible in the sum.
        units, half, largest = self._inputs.units, operand.dtype, scale.max()
        share = scale / largest
        operand = operand * share.to(half)
        if layer == 0:
            embedded, of_embedded = self._inputs.embedded[steps].flatten(0, 1), self.embedded[steps].flatten(0, 1)
            multiply(rows, self._inputs.from_embeddings.to(half), of_embedded)
            of_embedded.mul_(scale)
            self._add(rows, (embedded * share).to(half), sums.w_ih[:, :-units], largest)
        self._add(rows, operand[:, :units], sums.w_ih[:, -units:], largest)
        self._add(rows, operand[:, units:], sums.w_hh, largest)
        self._add(rows, share.to(half), sums.b_ih.unsqueeze(1), largest)

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

    def _add(self, rows: Tensor, operand: Tensor, total: Tensor, scale: Tensor) -> None:
        """Add a product times a number."""
        if self._whole:
            multiply(rows.t(), operand, total)
            total.mul_(scale)
        else:
            found = torch.empty_like(total)
            multiply(rows.t(), operand, found)
            total.add_(found.mul_(scale))
