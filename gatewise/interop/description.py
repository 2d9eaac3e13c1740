"""What a file says of its recurrent layers besides their weights: their order, and options that change results."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

Place = tuple[str, ...]
"""The parts of the names that all tensors of a layer begin with."""


class Description(NamedTuple):
    """The description of one recurrent layer.

    Attributes:
        places: The places under which the layer's tensors may be found; the last one is the path in the file.
        below: The index of the layer whose outputs are this layer's input; None if something else is.
        refused: The options that weights of a layer cannot express, as text; empty if there are none.
        backwards: Whether the layer reads its input from the last step to the first.
        relu: Whether the layer is an RNN that computes ReLU.
    """

    places: tuple[Place, ...]
    below: int | None = None
    refused: str = ""
    backwards: bool = False
    relu: bool = False


class Content(NamedTuple):
    """The content of a file.

    Attributes:
        tensors: The tensors by name.
        layers: The descriptions of recurrent layers, in the order of the file.
        connected: Whether the file has the model, so that `below` is known and every layer is described.
        apart: Whether the two directions of a layer have one description, so that two descriptions are of two layers,
            whatever their names.
    """

    tensors: dict[str, Tensor]
    layers: tuple[Description, ...] = ()
    connected: bool = False
    apart: bool = False

    def are_apart(self, one: Place, other: Place) -> bool:
        """Return whether the file says that two places are not those of the two directions of a layer."""
        indices = self.index_of(one), self.index_of(other)
        return self.apart and None not in indices and indices[0] != indices[1]

    def index_of(self, place: Place) -> int | None:
        """Return the index of the description of the layer at a place, or None if there is none."""
        fitting = [
            (len(known), index)
            for index, layer in enumerate(self.layers)
            for known in layer.places
            if place[: len(known)] == known
        ]
        return max(fitting)[1] if fitting else None


def numeric_order(places: Sequence[Place]) -> list[int] | None:
    """Return the order that the numbers in places state, or None if the places differ in more than their numbers.

    Numbers are compared as numbers. A part without a final number comes before the numbered ones, as in `lstm` and
    `lstm_1`.
    """
    texts, numbers = zip(*(_numbered(place) for place in places), strict=True)
    if len(set(texts)) > 1 or len(set(numbers)) < len(numbers):
        return None
    return sorted(range(len(places)), key=numbers.__getitem__)


def _numbered(place: Place) -> tuple[tuple[str, ...], tuple[int, ...]]:
    texts, numbers = [], []
    for part in place:
        pieces = re.split(r"[_-]?(\d+)", part)
        if pieces[-1] or len(pieces) == 1:
            pieces += ["-1", ""]
        texts += pieces[::2]
        numbers += map(int, pieces[1::2])
    return tuple(texts), tuple(numbers)
