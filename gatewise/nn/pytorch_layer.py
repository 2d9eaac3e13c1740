"""Functions that the drop-ins for `torch.nn.LSTM`, `GRU` and `RNN` share.

The classes derive from those of PyTorch, because programs check the class, and have these functions as methods. The
attributes in which PyTorch's layers store references to their weights are kept as PyTorch keeps them.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gatewise.contract.errors import ArgumentError, ShapeError, sentence
from gatewise.contract.problem import NORMAL
from gatewise.contract.tracing import is_compiling
from gatewise.nn.arguments import check_dtype, check_layer_options, check_rate, checked_sizes, warn_of_idle_dropout
from gatewise.nn.flat_weights import flatten
from gatewise.nn.recurrent_weights import check_tensors

OPTIONS = ("kernel", "memory", "weight_dropout", "reverse")
"""The options of gatewise's layers that PyTorch's layers do not have."""

_GIVEN = "_given_to_gatewise"
"""The attribute of a layer of a subclass with the options that its results depend on, as its constructor got them."""

_OTHERWISE = "make the model with PyTorch's layers and call gatewise.accelerate, which leaves such layers as they are."


def initialise(
    layer: Any,
    mode: str,
    input_size: int,
    hidden_size: int,
    num_layers: int,
    bias: bool,
    batch_first: bool,
    dropout: float,
    bidirectional: bool,
    proj_size: int,
    device: torch.device | str | int | None,
    dtype: torch.dtype | None,
    kernel: str,
    memory: str,
    weight_dropout: float,
    reverse: bool,
) -> None:
    """Check the arguments of a layer's constructor, and create its attributes and parameters.

    Args:
        layer: The layer.
        mode: The `mode` of PyTorch's layer.
        input_size: I, the number of input features.
        hidden_size: H, the number of hidden units.
        num_layers: L, the number of layers.
        bias: Whether the two bias vectors exist.
        batch_first: Whether input and output are [B, T, features].
        dropout: The probability of dropping an output between layers in training mode.
        bidirectional: Whether there is a second direction.
        proj_size: P, the number of features of the projected hidden state; 0 for no projection.
        device: The device of the parameters.
        dtype: The dtype of the parameters.
        kernel: "auto", or the name of the only kernel that may run.
        memory: "normal" or "lean".
        weight_dropout: The probability of dropping an element of a recurrent matrix in training mode.
        reverse: Whether the layers read each sequence from its last step to its first.

    Raises:
        ArgumentError: An argument has a wrong type or is out of range, or the class of the layer is a subclass with an
            attribute of its own that is named as an option is.
        KernelRefused: No kernel is named `kernel`.
    """
    derived = not _is_ours(type(layer))
    if derived:
        _check_names(type(layer))
    sizes = checked_sizes(input_size, hidden_size, num_layers, proj_size)
    check_layer_options(bias, batch_first, bidirectional, dropout, kernel, memory, reverse)
    check_dtype(dtype)
    rate = check_rate("weight_dropout", weight_dropout)
    warn_of_idle_dropout(dropout, sizes.num_layers, stacklevel=4)
    nn.RNNBase.__init__(
        layer,
        mode,
        sizes.input_size,
        sizes.hidden_size,
        num_layers=sizes.num_layers,
        bias=bias,
        batch_first=batch_first,
        bidirectional=bool(bidirectional),
        proj_size=sizes.proj_size,
        device=device,
        dtype=dtype,
    )
    layer.dropout = float(dropout)  # afterwards, because PyTorch would warn of idle dropout too
    layer.kernel, layer.memory, layer.weight_dropout, layer.reverse = kernel, memory, rate, reverse
    if derived:
        setattr(layer, _GIVEN, (rate, reverse))


def check_assigned_options(layer: Any) -> None:
    """Check the options on which results depend where they are not the defaults: programs may assign them.

    A class that was written for PyTorch's layer may have an attribute of its own named `reverse`, and flip the sequence
    itself. The layer would flip it back.

    Args:
        layer: The layer.

    Raises:
        ArgumentError: `weight_dropout` is no probability below 1, or the layer is one of a subclass, and
            `weight_dropout` or `reverse` was not set when its constructor returned.
    """
    check_rate("weight_dropout", layer.weight_dropout)
    given = getattr(layer, _GIVEN, None)
    if given is None:
        return
    for name, before in zip(OPTIONS[2:], given, strict=True):
        value = getattr(layer, name)
        if value and not before:
            kind = type(layer)
            expectation = (
                f"an argument of the constructor of gatewise.{_ours(kind).__name__} in a class derived from it"
            )
            advice = f"If it is an attribute of {kind.__name__} itself, rename it, or {_OTHERWISE}"
            raise ArgumentError(sentence(name, expectation, f"{value!r}, assigned later", advice))


def _check_names(kind: type) -> None:
    between = kind.__mro__[: kind.__mro__.index(_ours(kind))]
    for name in OPTIONS:
        if any(name in vars(each) for each in between):
            expectation = f"left to gatewise.{_ours(kind).__name__}, which has an option of this name"
            raise ArgumentError(
                sentence(name, expectation, f"an attribute of the class {kind.__name__}", f"Rename it, or {_OTHERWISE}")
            )


def _ours(kind: type) -> type:
    return next(each for each in kind.__mro__ if _is_ours(each))


def _is_ours(kind: type) -> bool:
    return kind.__module__.startswith("gatewise.nn.")


def weights_of(layer: Any) -> tuple[Tensor, ...]:
    """Return the weights of a call in PyTorch's flat order.

    Weights are looked up by name in every call, because parametrizations compute them and `functional_call` replaces
    them. As in PyTorch's layers, tensors that a program has put into `_flat_weights` are used until a weight is
    replaced under its name.

    Args:
        layer: The layer.

    Raises:
        ShapeError: The sizes of the layer have been changed, and do not fit its weights.
        ArgumentError: A weight is None, or something else than a tensor.
    """
    names, found = layer._flat_weights_names, layer._parameters
    try:
        weights = tuple([found[name] for name in names])
    except KeyError:
        weights = tuple([_named(layer, name) for name in names])
    directions = layer.num_layers * (2 if layer.bidirectional else 1)
    if len(weights) != directions * (2 + 2 * layer.bias + (layer.proj_size > 0)):
        sizes = ", ".join(
            f"{name} {getattr(layer, name)}" for name in ("num_layers", "bidirectional", "bias", "proj_size")
        )
        advice = "Make a new layer of these sizes instead of changing them."
        raise ShapeError(sentence("weights", f"as many as {sizes} take", f"{len(weights)} tensors", advice))
    listed, references = layer._flat_weights, layer._flat_weight_refs
    if len(listed) == len(references) == len(weights):
        # The usual case, in one loop. The lists are as long as each other.
        for weight, one, reference in zip(weights, listed, references):  # noqa: B905
            if one is not weight or weight is None or reference is None or reference() is not weight:
                break
        else:
            return weights
    are_listed = len(listed) == len(weights) and all(map(operator.is_, weights, listed))
    if not are_listed and len(references) == len(weights) and not any(map(_is_other, weights, references)):
        return check_tensors(names, tuple(listed))
    check_tensors(names, weights)
    # Tensors that a parametrization computes, or that `functional_call` lends in place of parameters, are not stored:
    # they belong to one call.
    if not is_compiling() and (are_listed or all(map(functools.partial(_is_held, layer), names, weights))):
        layer._flat_weights = list(weights)
        layer._flat_weight_refs = [None if weight is None else weakref.ref(weight) for weight in weights]
    return weights


def weights_of_cell(cell: Any) -> tuple[Any, ...]:
    """Return the weights of a call of a drop-in for `torch.nn.LSTMCell`, `GRUCell` or `RNNCell`; None without a bias.

    They are looked up in every call, as those of a layer. Attribute access finds a parameter only after an
    AttributeError.

    Raises:
        ArgumentError: A matrix is None.
    """
    found = cell._parameters
    try:
        weights = found["weight_ih"], found["weight_hh"], found["bias_ih"], found["bias_hh"]
    except KeyError:
        weights = cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh
    if weights[0] is None or weights[1] is None:
        check_tensors(("weight_ih", "weight_hh"), weights[:2])
    return weights


def _named(layer: Any, name: str) -> Any:
    # None for a weight that was deleted, as pruning and weight dropout do before they set another one. `hasattr` of the
    # layer would compute a parametrization one more time.
    has_one = any(name in held for held in (layer._parameters, layer._buffers, layer.__dict__)) or hasattr(
        type(layer), name
    )
    return getattr(layer, name) if has_one else None


def _is_other(weight: Tensor | None, reference: weakref.ref | None) -> bool:
    return weight is not None and reference is not None and reference() is not weight


def _is_held(layer: Any, name: str, weight: Tensor | None) -> bool:
    return isinstance(weight, nn.Parameter) or any(held.get(name) is weight for held in (layer._buffers, vars(layer)))


def flatten_parameters(self: Any) -> None:
    """Move the parameters into one buffer in cuDNN's order, so that cuDNN need not copy them in every call.

    This is done automatically when the layer is created, moved, converted, copied or unpickled. Call it after replacing
    parameters, as `load_state_dict(assign=True)` does. The Parameter objects and their values do not change. Nothing
    happens on other devices than CUDA, without cuDNN, or if weights are parametrised, tied to each other, of a tensor
    subclass or of several dtypes.
    """
    flatten(self, self.mode, self._flat_weights_names, len(self._all_weights[0]))


def extra_repr(self: Any) -> str:
    """Return the sizes and every option that differs from its default."""
    defaults = {"nonlinearity": "tanh", "kernel": "auto", "memory": NORMAL, "weight_dropout": 0.0, "reverse": False}
    given = [(name, getattr(self, name, default), default) for name, default in defaults.items()]
    own = [f"{name}={value}" for name, value, default in given if value != default]
    return ", ".join([nn.RNNBase.extra_repr(self), *own])


def apply(self: Any, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    """Apply a function to all parameters, as `.to()` does, and store references to them anew."""
    nn.RNNBase._apply(self, fn, recurse)
    release_graphs(self)
    return self


def release_graphs(layer: Any) -> None:
    """Detach what PyTorch's layer has stored of the weights that parametrizations computed.

    PyTorch stores it with its graph: the memory would not be freed, and the layer could not be copied.

    Args:
        layer: The layer.
    """
    for place, weight in enumerate(layer._flat_weights):
        if weight is not None and not weight.is_leaf:
            layer._flat_weights[place] = weight.detach()


def set_state(self: Any, d: dict[str, Any]) -> None:
    """Set the attributes of a layer that is copied or unpickled."""
    nn.RNNBase.__setstate__(self, d)
    self.flatten_parameters()
