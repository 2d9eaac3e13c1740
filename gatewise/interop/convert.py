"""Conversion of the weights of recurrent layers from one layout to another, in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gatewise.contract.errors import ArgumentError, sentence
from gatewise.interop.description import Content
from gatewise.interop.layouts import WeightLayout, adding_to_forget, layouts_of_conversion, with_heads
from gatewise.interop.search import find_stacks
from gatewise.interop.stacks import (
    Stack,
    as_described,
    as_listed,
    in_order,
    joined,
    named_tensors,
    paired,
    selected,
)


def convert(
    tensors: Mapping[str, Tensor | np.ndarray],
    source: str | WeightLayout,
    target: str | WeightLayout,
    *,
    layers: Sequence[str] = (),
    pair: bool = False,
    stack: bool = False,
    forget_bias: float | None = None,
    heads: int | None = None,
) -> dict[str, Tensor]:
    """Convert the weights of recurrent layers among named tensors to another layout.

    The numbers are moved and not changed, with two exceptions: several biases, or shifts of a normalization, are added
    where the target has one, and a constant that one of the layouts adds to the forget gate at run time is added or
    subtracted.

    Args:
        tensors: The tensors by name, as in a file or a `state_dict`; tensors that belong to no layer of the
            source layout are left out.
        source: The layout of the tensors: the name of a layout, or a `WeightLayout`.
        target: The layout of the result: the name of a layout, or a `WeightLayout`; of the same cell as the source.
            One of the two may be "gatewise", the layout of a `gatewise.Recurrent` with the cell of the other one.
        layers: The names of the layers to convert, in this order; all layers if empty.
        pair: Whether to combine successive layers of one direction to bidirectional layers: forward, backward.
        stack: Whether to combine the layers to one stack as in PyTorch, the first at the bottom. For `pair` and
            `stack`, the order is that of `layers`, or else of the numbers in the names of the layers.
        forget_bias: The constant that the cells of TensorFlow 1 add to the forget gate at run time; default 1.
        heads: The number of heads in whose blocks a layout of xLSTM is written, or a `gatewise.Recurrent` with `heads`
            that is converted from one; default 1. Reading needs none.

    Returns:
        New tensors. A single layer has the plain names of its layout; several layers have their own names as prefixes.

    Raises:
        ArgumentError: `tensors` is no mapping from names to tensors with numbers; `forget_bias` is no finite number;
            there is no such layout; the layouts are of different cells; no tensors are in the source layout; a layer
            does not exist, layers do not fit each other, or the names of layers to combine do not tell their
            order; or the target layout has no place for a direction or a projection.
        CheckpointError: Some tensors of a layer are missing.
        ShapeError: The shapes of a layer's tensors do not fit each other.
        DtypeError: The weights of a layer are not floating-point numbers of 16, 32 or 64 bits.

    Examples:
        >>> import torch
        >>> from gatewise.interop.convert import convert
        >>> layer = torch.nn.LSTM(3, 2)
        >>> keras = convert(layer.state_dict(), "torch", "keras")
        >>> {name: tuple(tensor.shape) for name, tensor in keras.items()}
        {'kernel': (3, 8), 'recurrent_kernel': (2, 8), 'bias': (8,)}
        >>> layer.load_state_dict(convert(keras, "keras", "torch"))
        <All keys matched successfully>
    """
    source, target = adding_to_forget(*layouts_of_conversion(source, target), forget_bias)
    target = with_heads(target, heads)
    if not isinstance(tensors, Mapping) or not all(isinstance(name, str) for name in tensors):
        got = type(tensors).__name__
        if isinstance(tensors, Mapping):
            got += f" with the name {next(name for name in tensors if not isinstance(name, str))!r}"
        raise ArgumentError(sentence("tensors", "a mapping from names to tensors, such as a state_dict", got))
    content = Content({name: as_tensor(name, value) for name, value in tensors.items()})
    found = find_stacks(content.tensors, source, layers)
    return named_tensors(arranged(found.stacks, content, source, layers=layers, pair=pair, stack=stack), target)


def arranged(
    stacks: Sequence[Stack],
    content: Content,
    layout: WeightLayout,
    *,
    layers: Sequence[str] = (),
    pair: bool = False,
    stack: bool = False,
    ordered: bool = False,
) -> tuple[Stack, ...]:
    """Select, order, pair and join the stacks that were found in a content; see `convert`.

    Args:
        stacks: The stacks.
        content: The content in which they were found.
        layout: The layout in which they were found.
        layers: See `convert`.
        pair: See `convert`.
        stack: See `convert`.
        ordered: Whether stacks that stay apart must be in the order of the model.

    Raises:
        ArgumentError: The file says that a layer has options that weights do not express; or as `convert`.
    """
    stacks = selected(as_listed(stacks, content), layers)
    if stack and len(stacks) > 1 and not layout.in_stacks:
        advice = "Convert the layers one by one."
        raise ArgumentError(
            sentence("stack", f"False for {layout.system}, which computes more between layers", True, advice)
        )
    if (pair or stack or ordered) and not layers:
        stacks = in_order(stacks, content, pair=pair)
    stacks = [as_described(found, content, second=pair and number % 2 == 1) for number, found in enumerate(stacks)]
    if pair:
        stacks = paired(stacks)
    return (joined(stacks),) if stack else tuple(stacks)


def as_tensor(name: str, value: Any) -> Tensor:
    """Convert a tensor or an array to a tensor on the CPU that is detached from the autograd graph.

    Raises:
        ArgumentError: The value is neither a tensor nor an array of numbers, or it is on the device "meta".
    """
    if isinstance(value, Tensor) and value.is_meta:
        advice = "Load the weights of the model first."
        raise ArgumentError(sentence(name, "a tensor with numbers", "one on the device meta, which has none", advice))
    if isinstance(value, Tensor):
        return value.detach().cpu()
    try:
        # Arrays from files may be read-only or big-endian, which PyTorch does not support.
        array = np.array(value)
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))
    except (TypeError, ValueError) as error:
        raise ArgumentError(sentence(name, "a tensor or an array of numbers", type(value).__name__)) from error
