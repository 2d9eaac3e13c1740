"""Gradients that are sums over steps, added up a stretch of steps at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from gatewise.feeding.call import Inputs, Kept, Layer, wide


class WeightSums:
    """Gradients of the embeddings, and of the layers' weights.

    Args:
        inputs: Of the decoder.
        kept: The operands of its products.
        whole: Whether all steps come in one stretch: then nothing is added up, in whatever dtype.
    """

    def __init__(self, inputs: Inputs, kept: Kept, *, whole: bool) -> None:
        self._inputs, self._operands = inputs, kept.operands
        dtype = None if whole else wide(inputs.embedded.dtype)
        self._whole = whole
        self._layers = [
            Layer(*(torch.empty_like(each) if whole else torch.zeros_like(each, dtype=dtype) for each in layer))
            for layer in inputs.layers
        ]
        self.embedded = torch.empty_like(inputs.embedded)

    def add(self, steps: slice, dgates: tuple[Tensor, ...]) -> None:
        """Add what a stretch of steps gives.

        Args:
            steps: Which.
            dgates: Gradients of the gate sums of each layer, one row for each of the steps [t, B, 4H].
        """
        embedded = self._inputs.embedded[steps].flatten(0, 1)
        for layer, (found, every) in enumerate(zip(self._layers, dgates, strict=True)):
            rows, operand = every.flatten(0, 1), self._operands[layer][steps].flatten(0, 1)
            recurrent = operand.shape[1]
            self._product(rows, operand, found.weight[:, -recurrent:])
            if layer == 0:
                self._product(rows, embedded, found.weight[:, :-recurrent])
                weight = self._inputs.layers[0].weight[:, :-recurrent]
                torch.mm(rows, weight, out=self.embedded[steps].flatten(0, 1))
            bias = rows.sum(0, dtype=wide(rows.dtype))
            found.bias.copy_(bias) if self._whole else found.bias.add_(bias)

    def layers(self) -> tuple[Layer, ...]:
        """Return the gradients of the layers' weights."""
        dtype = self.embedded.dtype
        return tuple(Layer(*(each.to(dtype) for each in layer)) for layer in self._layers)

    def _product(self, rows: Tensor, operand: Tensor, total: Tensor) -> None:
        if self._whole:
            torch.mm(rows.t(), operand, out=total)
        elif rows.dtype == total.dtype:
            torch.addmm(total, rows.t(), operand, out=total)
        else:
            total.add_(rows.t() @ operand)
