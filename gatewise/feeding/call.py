"""What travels into the loop of a decoder, and from its forward pass to its backward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from gatewise import attention
from gatewise.feeding.attending import Attending
from gatewise.feeding.elementwise import Dropout

_MOST_THREADS = 1024  # of a block


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """What is not a tensor.

    Attributes:
        score: "additive" or "dot".
        attention_kernel: A name, or "auto".
        dtype: That it is computed in.
        halves: Whether what the steps' products multiply is float16, where float32 products may be rounded: as many
            bits as TensorFloat-32 has, with a power of two for each row of gradients.
        needs_grad: Whether a backward pass may follow.
        recompute: Whether the backward pass computes the gates again, a stretch of steps at a time, instead of finding
            those of all steps kept.
    """

    score: str
    attention_kernel: str
    dtype: torch.dtype
    needs_grad: bool
    halves: bool = False
    recompute: bool = False

    @property
    def operand(self) -> torch.dtype:
        """The dtype of what the steps' products multiply."""
        return torch.float16 if self.halves else self.dtype

    def stretch(self, time: int) -> int:
        """Return for how many steps at a time there is memory for gates."""
        return stretch_steps(time) if self.recompute or not self.needs_grad else time


class LayerWeights(NamedTuple):
    """The parameters of an LSTM layer.

    Attributes:
        w_ih: Of its input [4H, I]; that of the first layer is the embedding, then what it is fed: I = E + H.
        w_hh: Of its hidden state [4H, H].
        b_ih: [4H].
        b_hh: [4H].
    """

    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor
    b_hh: Tensor


class Weights(NamedTuple):
    """The parameters of a decoder with input feeding.

    Attributes:
        layers: Bottom to top.
        query: Of the additive score's query [A, H]; None for the dot score.
        attended: W_a [H, H + V], of the hidden state, then of the context.
        v: Of the additive score [A]; None for the dot score.
        norm_weight: Gain of its layer norm [A]; None without.
        norm_bias: Shift [A]; None without.
    """

    layers: tuple[LayerWeights, ...]
    query: Tensor | None
    attended: Tensor
    v: Tensor | None = None
    norm_weight: Tensor | None = None
    norm_bias: Tensor | None = None

    @classmethod
    def of(cls, tensors: Sequence[Tensor | None]) -> Weights:
        """Return the parameters that `flat` listed."""
        count = len(LayerWeights._fields)
        of_layers = range(len(cls._fields) - 1, len(tensors), count)
        layers = tuple(LayerWeights(*tensors[first : first + count]) for first in of_layers)  # type: ignore[arg-type]
        return cls(layers, *tensors[: of_layers.start])  # type: ignore[arg-type]

    def flat(self) -> tuple[Tensor | None, ...]:
        """List all parameters."""
        return (*self[1:], *(each for layer in self.layers for each in layer))


class ScoreParameters(TypedDict):
    """The parameters of attention's score, as `gatewise.attention.new_steps` calls them."""

    v: Tensor | None
    norm_weight: Tensor | None
    norm_bias: Tensor | None


class Layer(NamedTuple):
    """The weights of a layer as the steps' products read them.

    Attributes:
        weight: Of what the steps make, from below or fed, then of the layer's hidden state [4H, 2H].
        bias: [4H].
    """

    weight: Tensor
    bias: Tensor


class Inputs(NamedTuple):
    """Everything the attended outputs are a function of; tensors of one dtype, but for the parameters.

    Attributes:
        embedded: Embeddings of the decoder's tokens [T, B, E].
        hidden: Initial hidden states [L, B, H].
        cell: Initial cell states [L, B, H].
        attended: What the first step is fed [B, H].
        keys: [S, B, A].
        source: Values of the source [S, B, V].
        lengths: Of the source [B], int64; or None.
        weights: The parameters, in whatever dtype they have.
        embedded_dtype: That the embeddings came in, and their gradient has.
        dropout: Of the attended outputs [T, B, H]; or None.
        between: Of what the layers above the first read, [T, B, H] each; empty for none.
        layers: The layers' weights, side by side, in the dtype of operands.
        from_embeddings: The first layer's weights of what is embedded [4H, E].
        joining: What the top hidden state is multiplied with: the query's weights, where it has any, then the hidden
            state's half of W_a, [A + H, H] or [H, H].
        of_context: The context's half of W_a [H, V].
        values: The source's values through it [S, B, H].
    """

    embedded: Tensor
    hidden: Tensor
    cell: Tensor
    attended: Tensor
    keys: Tensor
    source: Tensor
    lengths: Tensor | None
    weights: Weights
    embedded_dtype: torch.dtype
    dropout: Dropout | None
    between: tuple[Dropout, ...]
    layers: tuple[Layer, ...]
    from_embeddings: Tensor
    joining: Tensor
    of_context: Tensor
    values: Tensor

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

    def score_parameters(self) -> ScoreParameters:
        """Return the parameters of attention's score, in the dtype of the keys."""

        def cast(parameter: Tensor | None) -> Tensor | None:
            return None if parameter is None else parameter.to(self.keys.dtype)

        own = self.weights
        return {"v": cast(own.v), "norm_weight": cast(own.norm_weight), "norm_bias": cast(own.norm_bias)}

    def sums_of_embeddings(self, steps: slice, out: Tensor) -> Tensor:
        """Write what embeddings and bias add to the first layer's gate sums at some steps; return it [N, 4H]."""
        rows = self.embedded[steps].flatten(0, 1)
        return torch.addmm(self.layers[0].bias, rows, self.from_embeddings.t(), out=out.flatten(0, 1)[: len(rows)])

    def between_at(self, layer: int, step: int) -> Dropout | None:
        """Return the dropout of what the layer above a layer reads at a step."""
        return at(self.between[layer] if layer < len(self.between) else None, step)


class Kept(NamedTuple):
    """What the backward pass needs of the forward pass.

    Attributes:
        operands: For each layer what each step's product multiplies, [T + 1, B, 2H]: what comes from below, then the
            layer's hidden state before the step. From below comes the attended output of the step before to the first
            layer, to the others the hidden state of the layer below.
        gates: Activated gates of each layer [T, B, 4H]; the backward pass uses them up and empties the list, which is
            empty where it computes them.
        cells: Cell states of each layer [T, B, H].
        outputs: The attended outputs [T, B, H]; a part of the first layer's operands where those have their dtype.
        joined: [T, B, A + H + A] of the additive score, [T, B, H + H] of the dot score: the query where a product
            makes it, what the hidden state adds to the context, and room for the query's gradient; the backward pass
            writes the gradient of the second over it.
        attending: What attends, step by step.
        steps: Of attention.
    """

    operands: tuple[Tensor, ...]
    gates: list[Tensor]
    cells: tuple[Tensor, ...]
    outputs: Tensor
    joined: Tensor
    attending: Attending
    steps: attention.Steps


class Gradients(NamedTuple):
    """Gradients of `Inputs`, by the same names."""

    embedded: Tensor
    hidden: Tensor
    cell: Tensor
    attended: Tensor
    keys: Tensor
    source: Tensor
    weights: Weights


def fit_halves(dtype: torch.dtype, units: int, features: int, *, rounded: bool) -> bool:
    """Whether what the steps' products multiply is stored in float16 on a GPU, beside float32 numbers.

    Args:
        dtype: That the decoder is computed in.
        units: H; a block of threads works on a row of them.
        features: A, of the query that a product makes; 0 where none does.
        rounded: Whether float32 products may be rounded to TensorFloat-32.
    """
    return rounded and dtype == torch.float32 and features > 0 and units % 8 == 0 and units <= _MOST_THREADS


def stretch_steps(time: int) -> int:
    """Return how many steps are computed again together: a sixth, so that little memory is left to save."""
    return -(-time // 6)


def at(dropout: Dropout | None, step: int) -> Dropout | None:
    """Return the dropout of one step."""
    return None if dropout is None else dropout._replace(mask=dropout.mask[step])
