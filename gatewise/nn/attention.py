"""Attention as a layer: `gatewise.attention.attend` with the projections of queries and keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gatewise.attention import Score, attend
from gatewise.attention.choice import AUTO, kernel_named
from gatewise.contract.errors import ArgumentError, DtypeError, GatewiseError, ShapeError, sentence
from gatewise.nn.arguments import check_dtype, check_flag, checked_size
from gatewise.nn.call_errors import check_dense


class Attention(nn.Module):
    r"""Attention of a decoder over the outputs of an encoder.

    $$\text{context} = \sum_s \operatorname{softmax}_s(\text{score}(q, x_s)) \, x_s$$

    | score | of a query q and a source position x |
    |---|---|
    | additive | $v \cdot \tanh(W_q q + W_k x + b)$; the layer norm is taken of the sum, before the tanh |
    | general | $q \cdot W x$, computed as $(q W) \cdot x$ |
    | dot | $q \cdot x$ |

    The projection of the source is the same at every decoder step: compute it once with `keys(source)` and pass it to
    each call. If only the source is passed, the call computes it.

    Args:
        query_size: The number of features of a query (the decoder's state).
        source_size: The number of features of a source position (the encoder's output).
        hidden_size: H, the number of features of the additive score. Default: query_size.
        score: "additive", "general", or "dot" (which needs query_size = source_size).
        layer_norm: Whether the additive score has a layer norm before its tanh.
        kernel: The name of the kernel, or "auto"; see `gatewise.attention.attend`.
        device: The device of the parameters.
        dtype: The dtype of the parameters.

    Raises:
        ArgumentError: An argument has a wrong type or is out of range.
        DtypeError: `dtype` is not one of floating-point numbers.
        KernelRefused: No attention kernel is named `kernel`.

    Examples:
        >>> import torch, gatewise.nn
        >>> attention = gatewise.nn.Attention(8, 6)
        >>> source = torch.randn(7, 2, 6)
        >>> context, weights = attention(torch.randn(5, 2, 8), source, [7, 4], need_weights=True)
        >>> context.shape, weights.shape
        (torch.Size([5, 2, 6]), torch.Size([5, 2, 7]))
        >>> keys = attention.keys(source)  # once per sequence; then any number of steps
        >>> attention(torch.randn(2, 8), source, [7, 4], keys=keys).shape
        torch.Size([2, 6])
    """

    weight_query: nn.Parameter | None
    weight_key: nn.Parameter | None
    bias: nn.Parameter | None
    v: nn.Parameter | None
    weight: nn.Parameter | None
    norm_weight: nn.Parameter | None
    norm_bias: nn.Parameter | None

    def __init__(
        self,
        query_size: int,
        source_size: int,
        hidden_size: int | None = None,
        *,
        score: str = "additive",
        layer_norm: bool = False,
        kernel: str = AUTO,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        query_size, source_size = checked_size("query_size", query_size), checked_size("source_size", source_size)
        hidden_size = query_size if hidden_size is None else checked_size("hidden_size", hidden_size)
        check_flag("layer_norm", layer_norm)
        check_dtype(dtype)
        if score not in {each.value for each in Score}:
            raise ArgumentError(sentence("score", "'additive', 'dot' or 'general'", repr(score)))
        if layer_norm and score != "additive":
            raise ArgumentError(sentence("layer_norm", f"False for the {score} score", "True"))
        if score == "dot" and query_size != source_size:
            advice = "Use the general score for a source of another size."
            raise ArgumentError(sentence("source_size", f"query_size = {query_size}", source_size, advice))
        if kernel != AUTO:
            kernel_named(kernel)
        self.query_size, self.source_size = query_size, source_size
        self.hidden_size = hidden_size
        self.score, self.layer_norm, self.kernel = score, layer_norm, kernel
        made = {"device": device, "dtype": dtype}

        def parameter(wanted: bool, *shape: int) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(shape, **made)) if wanted else None  # type: ignore[arg-type]

        additive, hidden = score == "additive", self.hidden_size
        self.register_parameter("weight_query", parameter(additive, hidden, query_size))
        self.register_parameter("weight_key", parameter(additive, hidden, source_size))
        self.register_parameter("bias", parameter(additive, hidden))
        self.register_parameter("v", parameter(additive, hidden))
        self.register_parameter("norm_weight", parameter(self.layer_norm, hidden))
        self.register_parameter("norm_bias", parameter(self.layer_norm, hidden))
        self.register_parameter("weight", parameter(score == "general", query_size, source_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise weights as `torch.nn.Linear` does (v as a layer with one output), biases to 0 and gains to 1."""
        bounds = {
            "weight_query": self.query_size,
            "weight_key": self.source_size,
            "v": self.hidden_size,
            "weight": self.query_size,
        }
        for name, parameter in self.named_parameters():
            if name in bounds:
                nn.init.uniform_(parameter, -(bounds[name] ** -0.5), bounds[name] ** -0.5)
            else:
                nn.init.constant_(parameter, float(name == "norm_weight"))

    def keys(self, source: Tensor) -> Tensor:
        """Return the keys, with which every decoder step compares its query.

        Args:
            source: The outputs of the encoder [S, B, source_size].

        Returns:
            The projected source [S, B, H] for the additive score; the source itself for the others.

        Raises:
            ShapeError: The source does not have `source_size` features.
        """
        _check_features("source", source, self.source_size)
        if self.score != "additive":
            return source
        return nn.functional.linear(source, self.weight_key, self.bias)  # type: ignore[arg-type]

    def forward(
        self,
        query: Tensor,
        source: Tensor,
        lengths: Tensor | Sequence[int] | None = None,
        *,
        keys: Tensor | None = None,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the context, and the attention weights if `need_weights` is True.

        Args:
            query: The queries [T, B, query_size], or [B, query_size] for one step.
            source: The outputs of the encoder [S, B, source_size].
            lengths: The lengths of the source sequences [B]; see `gatewise.attention.attend`.
            keys: The result of `keys(source)`; None computes it in the call.
            need_weights: Whether the attention weights are returned too.

        Returns:
            The context [T, B, source_size] ([B, source_size]); the attention weights [T, B, S] ([B, S]).

        Raises:
            ShapeError: The query or the source has another number of features; or as `gatewise.attention.attend`, which
                raises the other errors too.
        """
        _check_features("query", query, self.query_size)
        try:
            projected = query
            if self.score == "additive":
                projected = nn.functional.linear(query, self.weight_query)  # type: ignore[arg-type]
            return attend(
                projected,
                self.keys(source) if keys is None else keys,
                source,
                lengths,
                score=self.score,
                v=self.v,
                weight=self.weight,
                norm_weight=self.norm_weight,
                norm_bias=self.norm_bias,
                kernel=self.kernel,
                need_weights=need_weights,  # type: ignore[arg-type]
            )
        except RuntimeError as error:
            if not isinstance(error, GatewiseError):
                self._explain(error, query, source)
            raise

    def _explain(self, error: Exception, query: Tensor, source: Tensor) -> None:
        """Raise the error of a call that PyTorch has refused for the kind of a tensor."""
        like = next(self.parameters(), source)
        for name, tensor in (("query", query), ("source", source)):
            check_dense(name, tensor, error)
            if tensor.dtype != like.dtype and not torch._C._is_any_autocast_enabled():
                advice = "Convert one of them with .to(dtype)."
                raise DtypeError(sentence(name, f"{like.dtype} like the parameters", tensor.dtype, advice)) from error

    def extra_repr(self) -> str:
        """Return the sizes and the score."""
        norm = ", layer_norm=True" if self.layer_norm else ""
        hidden = f", {self.hidden_size}" if self.score == "additive" else ""
        return f"{self.query_size}, {self.source_size}{hidden}, score={self.score!r}{norm}"


def _check_features(name: str, tensor: Tensor, size: int) -> None:
    if not isinstance(tensor, Tensor):
        raise ArgumentError(sentence(name, "a tensor", type(tensor).__name__, "Convert it with torch.as_tensor."))
    if not tensor.dim() or tensor.shape[-1] != size:
        raise ShapeError(sentence(name, f"of {name}_size = {size} features", f"shape {list(tensor.shape)}"))
