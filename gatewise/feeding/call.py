"""What travels into the loop of a decoder, and from its forward pass to its backward pass."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from gatewise import attention
from gatewise.feeding.elementwise import Dropout


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """What is not a tensor.

    Attributes:
        score: "additive" or "dot".
        attention_kernel: A name, or "auto".
        needs_grad: Whether a backward pass may follow.
        recompute: Whether the backward pass computes the gates again, a stretch of steps at a time, instead of finding
            those of all steps kept.
    """

    score: str
    attention_kernel: str
    needs_grad: bool
    recompute: bool = False

    def stretch(self, time: int) -> int:
        """Return for how many steps at a time there is memory for gates."""
        return stretch_steps(time) if self.recompute or not self.needs_grad else time


class Layer(NamedTuple):
    """The weights of an LSTM layer.

    Attributes:
        weight: Of the layer's input, then of its hidden state [4H, I + H]; the input of the first layer is the
            embedding, then the attended output of the step before: I = E + H.
        bias: [4H].
    """

    weight: Tensor
    bias: Tensor


class Inputs(NamedTuple):
    """Everything the attended outputs are a function of, in one dtype.

    Attributes:
        embedded: Embeddings of the decoder's tokens [T, B, E].
        hidden: Initial hidden states [L, B, H].
        cell: Initial cell states [L, B, H].
        attended: What the first step is fed [B, H].
        keys: [S, B, A].
        values: [S, B, H], the source's through the context's half of W_a.
        lengths: Of the source [B], int64; or None.
        joining: What the top hidden state is multiplied with: the query's weights, where it has any, then the hidden
            state's half of W_a, [A + H, H] or [H, H].
        v: Of the additive score [A]; or None.
        norm_weight: Gain of its layer norm [A]; or None.
        norm_bias: Shift [A]; or None.
        layers: Bottom to top.
        dropout: Of the attended outputs [T, B, H]; or None.
        between: Of what the layers above the first read, [T, B, H] each; empty for none.
    """

    embedded: Tensor
    hidden: Tensor
    cell: Tensor
    attended: Tensor
    keys: Tensor
    values: Tensor
    lengths: Tensor | None
    joining: Tensor
    v: Tensor | None
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    layers: tuple[Layer, ...]
    dropout: Dropout | None
    between: tuple[Dropout, ...]

    @property
    def time(self) -> int:
        """T."""
        return self.embedded.shape[0]

    @property
    def batch(self) -> int:
        """B."""
        return self.embedded.shape[1]

    @property
    def units(self) -> int:
        """H."""
        return self.hidden.shape[2]

    @property
    def query_size(self) -> int:
        """Features of the query that a product makes; 0 where the hidden state is the query."""
        return self.joining.shape[0] - self.units

    def recurrent(self, layer: int) -> Tensor:
        """Return a layer's weights for what the steps themselves make [4H, 2H]."""
        return self.layers[layer].weight[:, -2 * self.units :]

    def sums_of_embeddings(self, steps: slice, out: Tensor) -> Tensor:
        """Write what embeddings and bias add to the first layer's gate sums at some steps; return it [N, 4H]."""
        weight, bias = self.layers[0]
        rows = self.embedded[steps].flatten(0, 1)
        return torch.addmm(bias, rows, weight[:, : rows.shape[1]].t(), out=out.flatten(0, 1)[: len(rows)])

    def between_at(self, layer: int, step: int) -> Dropout | None:
        """Return the dropout of what the layer above a layer reads at a step."""
        return at(self.between[layer] if layer < len(self.between) else None, step)


class Kept(NamedTuple):
    """What the backward pass needs of the forward pass.

    Attributes:
        operands: For each layer what each step's product multiplies, [T + 1, B, 2H]: what comes from below, then the
            layer's hidden state before the step. From below comes the attended output of the step before to the first
            layer, to the others the hidden state of the layer below.
        gates: Activated gates of each layer [T, B, 4H]; the backward pass uses them up. Empty where it computes them.
        cells: Cell states of each layer [T, B, H].
        joined: [T, B, A + H + A] of the additive score, [T, B, H + H] of the dot score: the query where a product
            makes it, what the hidden state adds to the context, and room for the query's gradient; the backward pass
            writes the gradient of the second over it.
        steps: Of attention.
    """

    operands: tuple[Tensor, ...]
    gates: tuple[Tensor, ...]
    cells: tuple[Tensor, ...]
    joined: Tensor
    steps: attention.Steps


class Gradients(NamedTuple):
    """Gradients of `Inputs`, field by field."""

    embedded: Tensor
    hidden: Tensor
    cell: Tensor
    attended: Tensor
    keys: Tensor
    values: Tensor
    joining: Tensor
    v: Tensor | None
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    layers: tuple[Layer, ...]


def stretch_steps(time: int) -> int:
    """Return how many steps are computed again together: a sixth, so that little memory is left to save."""
    return -(-time // 6)


def at(dropout: Dropout | None, step: int) -> Dropout | None:
    """Return the dropout of one step."""
    return None if dropout is None else dropout._replace(mask=dropout.mask[step])


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that states are carried in between steps."""
    return torch.float32 if dtype.itemsize == 2 else dtype
