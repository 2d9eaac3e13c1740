"""Gradients that are sums over steps, added up a stretch of steps at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from gatewise.feeding.call import Inputs, Kept, LayerWeights, wide
from gatewise.feeding.elementwise import operands_in
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

    def add(self, steps: slice, dgates: tuple[Tensor, ...], scales: Tensor | None) -> None:
        """Add what a stretch of steps gives.

        Args:
            steps: Which.
            dgates: Gradients of the gate sums of each layer, one row for each of the steps [t, B, 4H].
            scales: None; or, where they are float16 numbers, what each row is to be multiplied with [L, t, B].
        """
        units, embedded = self._inputs.units, self._inputs.embedded[steps].flatten(0, 1)
        for layer, (sums, every) in enumerate(zip(self._sums, dgates, strict=True)):
            rows, operand = every[: steps.stop - steps.start].flatten(0, 1), self._operands[layer][steps].flatten(0, 1)
            weighted, largest, into_embeddings = embedded, None, self._inputs.from_embeddings
            if scales is not None:
                # The powers of two, which are the rows' and not the columns', go to the other operand. The largest of
                # them is taken out: what is too small for float16 then is too small to be seen in the sum.
                scale = scales[layer].flatten().unsqueeze(1)
                largest = scale.max()
                rows, share = operands_in(rows), scale / largest
                operand = operand * share.to(operand.dtype)
                weighted = (embedded * share).to(operand.dtype) if layer == 0 else embedded
                ones = share.to(operand.dtype)
                into_embeddings = into_embeddings.to(operand.dtype) if layer == 0 else into_embeddings
            if layer == 0:
                of_embedded = self.embedded[steps].flatten(0, 1)
                multiply(rows, into_embeddings, of_embedded)
                if largest is not None:
                    of_embedded.mul_(scale)
                self._add(rows, weighted, sums.w_ih[:, :-units], largest)
            self._add(rows, operand[:, :units], sums.w_ih[:, -units:], largest)
            self._add(rows, operand[:, units:], sums.w_hh, largest)
            if largest is not None:
                self._add(rows, ones, sums.b_ih.unsqueeze(1), largest)
            else:
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

    def _add(self, rows: Tensor, operand: Tensor, total: Tensor, scale: Tensor | None) -> None:
        if scale is None:
            multiply(rows.t(), operand, total, add=not self._whole)
        elif self._whole:
            multiply(rows.t(), operand, total)
            total.mul_(scale)
        else:
            found = torch.empty_like(total)
            multiply(rows.t(), operand, found)
            total.add_(found.mul_(scale))
