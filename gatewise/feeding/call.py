"""The inputs and options of the decoder's loop, and the tensors between its forward and its backward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from gatewise import attention
from gatewise.feeding.attention_part import AttentionPart
from gatewise.feeding.elementwise import Dropout

_MOST_THREADS = 1024  # per block


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """The options of a call.

    Attributes:
        score: The attention score, "additive" or "dot".
        attention_kernel: The name of an attention kernel, or "auto".
        dtype: The dtype of the computation.
        halves: Whether the operands of the steps' products are stored in float16, where float32 products may be rounded
            to TensorFloat-32, which has as many mantissa bits. Gradients have a power of two as scale for each row.
        needs_grad: Whether a backward pass may follow.
        recompute: Whether the backward pass recomputes the gates for a chunk of steps at a time, instead of keeping
            those of all steps.
    """

    score: str
    attention_kernel: str
    dtype: torch.dtype
    needs_grad: bool
    halves: bool = False
    recompute: bool = False

    @property
    def operand(self) -> torch.dtype:
        """The dtype of the operands of the steps' products."""
        return torch.float16 if self.halves else self.dtype

    def chunk_steps(self, time: int) -> int:
        """Return the number of steps whose gates are in memory at a time."""
        return steps_per_chunk(time) if self.recompute or not self.needs_grad else time


class LayerWeights(NamedTuple):
    """The parameters of an LSTM layer.

    Attributes:
        w_ih: The weights of its input [4H, I]; the input of the first layer is the embedding and the attentional output
            of the previous step: I = E + H.
        w_hh: The weights of its hidden state [4H, H].
        b_ih: The input bias [4H].
        b_hh: The hidden bias [4H].
    """

    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor
    b_hh: Tensor


class Weights(NamedTuple):
    """The parameters of a decoder with input feeding.

    Attributes:
        layers: The parameters of the layers, bottom to top.
        query: The weights of the additive score's query [A, H]; None for the dot score.
        attended: The weights W_a of the attentional output [H, H + V], of the hidden state and then of the context.
        v: The vector of the additive score [A]; None for the dot score.
        norm_weight: The weight of the additive score's layer norm [A]; None without layer norm.
        norm_bias: The bias of the layer norm [A]; None without layer norm.
    """

    layers: tuple[LayerWeights, ...]
    query: Tensor | None
    attended: Tensor
    v: Tensor | None = None
    norm_weight: Tensor | None = None
    norm_bias: Tensor | None = None

    @classmethod
    def of(cls, tensors: Sequence[Tensor | None]) -> Weights:
        """Return the parameters from the tensors that `flat` returned."""
        count = len(LayerWeights._fields)
        of_layers = range(len(cls._fields) - 1, len(tensors), count)
        layers = tuple(LayerWeights(*tensors[first : first + count]) for first in of_layers)  # type: ignore[arg-type]
        return cls(layers, *tensors[: of_layers.start])  # type: ignore[arg-type]

    def flat(self) -> tuple[Tensor | None, ...]:
        """Return all parameters as a tuple."""
        return (*self[1:], *(each for layer in self.layers for each in layer))


class ScoreParameters(TypedDict):
    """The parameters of the attention score, as `gatewise.attention.new_steps` names them."""

    v: Tensor | None
    norm_weight: Tensor | None
    norm_bias: Tensor | None


class Layer(NamedTuple):
    """The weights of a layer as operands of the steps' products.

    Attributes:
        weight: The weights of the input that the steps compute (of the first layer: the attentional output), followed
            by those of the layer's hidden state [4H, 2H].
        bias: The sum of both biases [4H].
    """

    weight: Tensor
    bias: Tensor


class Inputs(NamedTuple):
    """The inputs of the decoder; all tensors except the parameters have one dtype.

    Attributes:
        embedded: The embeddings of the decoder's input tokens [T, B, E].
        hidden: The initial hidden states [L, B, H].
        cell: The initial cell states [L, B, H].
        attended: The attentional output that is fed to the first step [B, H].
        keys: The attention keys [S, B, A].
        source: The encoder's outputs [S, B, V].
        lengths: The source lengths [B], int64; or None.
        weights: The parameters, in their own dtypes.
        embedded_dtype: The original dtype of the embeddings, in which their gradient is returned.
        dropout: The dropout of the attentional outputs [T, B, H]; or None.
        between: The dropouts of the inputs of the layers above the first [T, B, H]; empty for none.
        layers: The weights of the layers in the layout of the steps' products, in the dtype of operands.
        from_embeddings: The first layer's weights of the embeddings [4H, E].
        joining: The matrix by which the top hidden state is multiplied: the query's weights, if there are any, followed
            by the hidden state's half of W_a; [A + H, H] or [H, H].
        of_context: The context's half of W_a [H, V].
        values: The encoder's outputs multiplied by the context's half of W_a [S, B, H].
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
        """The number of decoder steps, T."""
        return self.embedded.shape[0]

    @property
    def batch(self) -> int:
        """The batch size, B."""
        return self.embedded.shape[1]

    @property
    def units(self) -> int:
        """The number of units of a layer, H."""
        return self.hidden.shape[2]

    @property
    def query_size(self) -> int:
        """The number of features of the query's projection; 0 if the hidden state itself is the query."""
        return self.joining.shape[0] - self.units

    def score_parameters(self) -> ScoreParameters:
        """Return the parameters of the attention score, in the dtype of the keys."""

        def cast(parameter: Tensor | None) -> Tensor | None:
            return None if parameter is None else parameter.to(self.keys.dtype)

        own = self.weights
        return {"v": cast(own.v), "norm_weight": cast(own.norm_weight), "norm_bias": cast(own.norm_bias)}

    def sums_of_embeddings(self, steps: slice, out: Tensor) -> Tensor:
        """Write the first layer's gate sums of embeddings and bias at some steps into `out`; return them [N, 4H]."""
        rows = self.embedded[steps].flatten(0, 1)
        return torch.addmm(self.layers[0].bias, rows, self.from_embeddings.t(), out=out.flatten(0, 1)[: len(rows)])

    def between_at(self, layer: int, step: int) -> Dropout | None:
        """Return the dropout at a step of the output of a layer that the layer above reads."""
        return at(self.between[layer] if layer < len(self.between) else None, step)


class Kept(NamedTuple):
    """The tensors that the forward pass keeps for the backward pass.

    Attributes:
        operands: For each layer the operands of the steps' products, [T + 1, B, 2H]: the layer's input and its hidden
            state before the step. The input of the first layer is the attentional output of the previous step, that of
            the others the hidden state of the layer below.
        gates: The activated gates of each layer [T, B, 4H]. The backward pass overwrites them and empties the list,
            which is empty from the start if it recomputes them.
        cells: The cell states of each layer [T, B, H].
        outputs: The attentional outputs [T, B, H]; a view of the first layer's operands if the dtypes are equal.
        joined: For the additive score [T, B, A + H + A]: the query, the contribution of the hidden state that is added
            to the context, and space for the query's gradient. For the dot score [T, B, H + H]: the last two. The
            backward pass overwrites the contribution with its gradient.
        attention_part: The implementation of the attention part.
        steps: The attention steps.
    """

    operands: tuple[Tensor, ...]
    gates: list[Tensor]
    cells: tuple[Tensor, ...]
    outputs: Tensor
    joined: Tensor
    attention_part: AttentionPart
    steps: attention.Steps


class Gradients(NamedTuple):
    """The gradients of `Inputs`, by the same names."""

    embedded: Tensor
    hidden: Tensor
    cell: Tensor
    attended: Tensor
    keys: Tensor
    source: Tensor
    weights: Weights


def fit_halves(dtype: torch.dtype, units: int, features: int, *, rounded: bool) -> bool:
    """Return whether the operands of the steps' products can be stored in float16 on a GPU, beside float32 numbers.

    Args:
        dtype: The dtype of the decoder's computation.
        units: The number of units, H; one block of threads handles a row of them.
        features: The number of features of the query's projection, A; 0 if there is no projection.
        rounded: Whether float32 products may be rounded to TensorFloat-32.
    """
    return rounded and dtype == torch.float32 and features > 0 and units % 8 == 0 and units <= _MOST_THREADS


def steps_per_chunk(time: int) -> int:
    """Return the number of steps in a chunk whose gates are recomputed together: a sixth of all steps."""
    return -(-time // 6)


def at(dropout: Dropout | None, step: int) -> Dropout | None:
    """Return the dropout of one step."""
    return None if dropout is None else dropout._replace(mask=dropout.mask[step])
