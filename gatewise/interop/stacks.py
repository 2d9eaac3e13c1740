"""Stacked recurrent layers, independent of their names in a file, and their names in a layout.

A `Stack` holds the weights of one `torch.nn.LSTM`, `GRU`, `RNN` or `gatewise.Recurrent`. Keras and others have one
module per layer: each is found as a stack of one layer, and `joined` combines them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from gatewise.cells import LSTM, RNN, Cell
from gatewise.contract.errors import ArgumentError, sentence
from gatewise.contract.weights import DirectionWeights
from gatewise.interop.description import Content, Place, numeric_order
from gatewise.interop.layouts import WeightLayout
from gatewise.interop.packing import pack

_NUMBERED = "numbered in the order of the model, with names that differ in nothing else"


class Stack(NamedTuple):
    """The weights of one or more recurrent layers that follow each other.

    Attributes:
        name: The name of its module; empty if the tensors had no prefix.
        layers: The weights of each direction, for each layer.
        cell: The cell.
        place: The parts with which the names of its tensors begin.
    """

    name: str
    layers: tuple[tuple[DirectionWeights, ...], ...]
    cell: Cell = LSTM()
    place: Place = ()

    @property
    def directions(self) -> int:
        """The number of directions, D: 1 or 2."""
        return len(self.layers[0])

    @property
    def input_size(self) -> int:
        """The number of input features of the first layer, I."""
        return self.layers[0][0].w_ih.shape[1]

    @property
    def hidden_size(self) -> int:
        """The number of hidden units of the first layer, H."""
        return self.layers[0][0].w_ih.shape[0] // len(self.cell.gates)

    @property
    def output_size(self) -> int:
        """The number of output features of the last layer."""
        return sum(weights.w_hh.shape[1] for weights in self.layers[-1])

    def __str__(self) -> str:
        """Return one line: layers, directions, sizes."""
        layers = "1 layer" if len(self.layers) == 1 else f"{len(self.layers)} layers"
        directions = "1 direction" if self.directions == 1 else "2 directions"
        relu = ", ReLU" if self.cell == RNN("relu") else ""
        return f"{layers}, {directions}, I {self.input_size}, H {self.hidden_size}{relu}"


def selected(stacks: Sequence[Stack], names: Sequence[str]) -> tuple[Stack, ...]:
    """Return the stacks with these names or places, in the given order; all stacks if there are no names.

    Raises:
        ArgumentError: There is no stack of a name; the message lists the known names.
    """
    known = {separator.join(stack.place): stack for stack in stacks for separator in "/."}
    known |= {stack.name: stack for stack in stacks}
    for name in names:
        if name not in known and not any(known):
            raise ArgumentError(sentence("layers", "left out for a file whose only layer has no name", repr(name)))
        if name not in known:
            listed = ", ".join(repr(stack.name) for stack in stacks)
            raise ArgumentError(sentence("layers", f"one of {listed}", repr(name)))
    return tuple(known[name] for name in names) or tuple(stacks)


def in_order(stacks: Sequence[Stack], content: Content, *, pair: bool = False) -> tuple[Stack, ...]:
    """Return stacks in the order in which a model computes them: that of its config, or else of the numbers in names.

    Args:
        stacks: The stacks, found among the tensors of the content.
        content: The content of the file.
        pair: Whether they are the forward and backward directions of layers, in turn.

    Raises:
        ArgumentError: Neither states an order, something else is computed between two stacks, or two stacks are no
            directions.
    """
    if len(stacks) < 2:
        return tuple(stacks)
    indices = [index for stack in stacks if (index := content.index_of(stack.place)) is not None]
    if not content.layers and not content.connected:
        order = numeric_order([stack.place for stack in stacks])
        if order is None:
            raise _unordered(stacks, _NUMBERED)
        return tuple(stacks[number] for number in order)
    expectation = "layers that the config of the model describes" if content.connected else _NUMBERED
    if len(set(indices)) < len(stacks):
        raise _unordered(stacks, expectation)
    stacks, indices = as_listed(stacks, content), sorted(indices)
    if content.connected and pair:
        backwards = [content.layers[index].backwards for index in indices]
        if sorted(backwards) != [False, True]:
            raise _unordered(stacks, "two layers, of which one reads backwards")
        return stacks[::-1] if backwards[0] else stacks
    if content.connected:
        for lower, upper in itertools.pairwise(indices):
            if content.layers[upper].below != lower:
                raise _unordered(stacks, "layers of which each one reads the outputs of the one before it")
        return stacks
    # Keras numbers layers in the order in which they were made, which need not be their order in the file.
    if numeric_order([content.layers[index].places[-1] for index in indices]) != list(range(len(stacks))):
        raise _unordered(stacks, _NUMBERED)
    return stacks


def _unordered(stacks: Sequence[Stack], expectation: str) -> ArgumentError:
    advice = "Name the layers in their order, the lowest first: --layer NAME for each of them, or layers=[...]."
    return ArgumentError(sentence("the layers to combine", expectation, _listed(stacks), advice))


def as_listed(stacks: Sequence[Stack], content: Content) -> tuple[Stack, ...]:
    """Return stacks in the order in which the file describes them; those that it does not describe are last."""

    def position(stack: Stack) -> int:
        index = content.index_of(stack.place)
        return len(content.layers) if index is None else index

    return tuple(sorted(stacks, key=position))


def as_described(stack: Stack, content: Content, *, second: bool) -> Stack:
    """Return a stack with the cell that the file says, after checking that its weights express all of its options.

    Args:
        stack: The stack.
        content: The content of the file.
        second: Whether the stack is to be the reverse direction of a bidirectional layer.

    Raises:
        ArgumentError: The file says that the layer has options that its weights do not express.
    """
    index = content.index_of(stack.place)
    if index is None:
        return stack
    layer = content.layers[index]
    name = f"the options of {stack.name or 'the layer'}"
    if layer.refused:
        advice = "Weights cannot express them. Leave the layer out: name the others, --layer NAME or layers=[...]."
        raise ArgumentError(sentence(name, "those of a layer of PyTorch", layer.refused, advice))
    if layer.backwards and not second:
        advice = "A layer that reads backwards can only be the second one of a pair: --pair."
        raise ArgumentError(sentence(name, "those of a layer of PyTorch", "go_backwards=True", advice))
    return stack._replace(cell=RNN("relu")) if layer.relu else stack


def paired(stacks: Sequence[Stack]) -> tuple[Stack, ...]:
    """Combine successive stacks of one direction to bidirectional stacks: forward, backward, forward, backward.

    Raises:
        ArgumentError: The number of stacks is odd, or two of them do not fit each other.
    """
    if len(stacks) % 2 or any(stack.directions == 2 for stack in stacks):
        advice = "Name them in the order forward, backward."
        raise ArgumentError(
            sentence("layers", "an even number of one direction each, to be paired", _listed(stacks), advice)
        )
    pairs = []
    for forward, backward in zip(stacks[::2], stacks[1::2], strict=True):
        if {len(forward.layers), len(backward.layers)} != {1}:
            raise ArgumentError(sentence("layers", "of one layer each, to be paired", _listed((forward, backward))))
        pairs.append(checked(forward._replace(layers=(forward.layers[0] + backward.layers[0],))))
    return tuple(pairs)


def joined(stacks: Sequence[Stack]) -> Stack:
    """Combine stacks to one stack of all their layers, the first at the bottom.

    Raises:
        ArgumentError: The sizes of two successive layers do not fit each other, or some RNNs compute tanh and others
            ReLU.
    """
    if len({stack.cell.name for stack in stacks}) > 1:
        advice = "Convert the layers one by one, without joining them."
        raise ArgumentError(sentence("the RNNs to combine", "of one nonlinearity", _listed(stacks), advice))
    return checked(Stack("", tuple(layer for stack in stacks for layer in stack.layers), stacks[0].cell))


def named_tensors(stacks: Sequence[Stack], layout: WeightLayout) -> dict[str, Tensor]:
    """Return the tensors of stacks in a layout, by name.

    A single stack needs no name. Several stacks have their own names as prefixes.

    Raises:
        ArgumentError: A stack has two directions, a projection or biases, which the layout does not support; or two
            layers would have one name.
    """
    tensors: dict[str, Tensor] = {}
    for stack in stacks:
        name = (stack.name or layout.places.names[stack.directions - 1]) if len(stacks) > 1 else ""
        for layer, directions in enumerate(stack.layers):
            for direction, weights in enumerate(directions):
                place = _written_place(name, stack, layer, direction, layout)
                suffix = layout.suffix.format(layer=layer, reverse="_reverse" if direction else "")
                for tensor_name, tensor in pack(weights, layout).items():
                    parts = [part for part in re.split("[/.]", place) if part]
                    parts += tensor_name.split("/")
                    full = layout.separator.join(parts) + suffix
                    if full in tensors:
                        # Such as that of the second layer of `lstm` in layouts of separate layers, and of `lstm_1`.
                        advice = "Convert the layers one by one: --layer NAME or layers=[...]."
                        expectation = f"different in the layout {layout.name}"
                        raise ArgumentError(sentence("the names of the layers", expectation, f"{full} twice", advice))
                    tensors[full] = tensor
    return tensors


def _written_place(name: str, stack: Stack, layer: int, direction: int, layout: WeightLayout) -> str:
    places = layout.places
    several = len(stack.layers) > 1
    if stack.directions == 2:
        template = places.stacked_bidirectional if several else places.bidirectional
    else:
        template = places.stacked if several else places.single
    if not template:
        advice = "It has no second direction."
        raise ArgumentError(
            sentence("weights", f"of one direction for the layout {layout.name}", stack.directions, advice)
        )
    if several and "{layer}" not in template + layout.suffix:
        name = name or places.names[stack.directions - 1]
        name = f"{name}_{layer}" if layer else name
    return template.format(name=name, layer=layer, direction=places.directions[direction])


def checked(stack: Stack) -> Stack:
    """Return a stack whose layers fit each other, or raise `ArgumentError`."""
    features, first = stack.input_size, stack.layers[0][0]
    for number, layer in enumerate(stack.layers):
        for weights in layer:
            where = f"layer {number} of {stack.name or 'the stack'}"
            if weights.w_ih.shape[1] != features:
                advice = "Convert the layers one by one, without joining them."
                expectation = f"of {features} features, which the layer below gives"
                raise ArgumentError(sentence(f"the input of {where}", expectation, weights.w_ih.shape[1], advice))
            if weights.w_hh.shape != first.w_hh.shape or len(layer) != stack.directions:
                expectation = f"{list(first.w_hh.shape)} in {stack.directions} directions as below"
                advice = "Convert the layers one by one, without joining them."
                got = f"{list(weights.w_hh.shape)} in {len(layer)}"
                raise ArgumentError(sentence(f"the recurrent weights of {where}", expectation, got, advice))
            if (weights.b_ih is None) != (first.b_ih is None):
                raise ArgumentError(
                    sentence(f"the bias of {where}", "present in all layers or in none", "some layers without")
                )
        features = sum(weights.w_hh.shape[1] for weights in layer)
    return stack


def _listed(stacks: Sequence[Stack]) -> str:
    return "; ".join(f"{stack.name or 'unnamed'} ({stack})" for stack in stacks) or "none"
