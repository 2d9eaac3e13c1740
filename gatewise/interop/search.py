"""Search for the recurrent layers of a cell among named tensors, by the names and shapes of a layout."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gatewise.cells import SHIPPED
from gatewise.contract.errors import ArgumentError, CheckpointError, DtypeError, ShapeError, sentence
from gatewise.contract.weights import DirectionWeights
from gatewise.interop.description import Place
from gatewise.interop.layouts import LAYOUTS, Form, WeightLayout
from gatewise.interop.packing import missing_tensors, tensor_names, unpack
from gatewise.interop.stacks import Stack, checked

_DIRECTIONS = (re.compile(r"(forward|fw)(_.*)?"), re.compile(r"(backward|bw)(_.*)?"))
_INNER_SCOPES = re.compile(
    r"cell|layers|rnn|(basic_|cudnn_compatible_|layer_norm_basic_)?lstm_cell(_\d+)?|gru_cell(_\d+)?|simple_rnn_cell(_\d+)?|(multi|bidirectional|stack_bidirectional)_rnn.*"
)
_ANY_CELL = {"kernel", "bias", "b"}
"""The names that tensors of other layers have too."""
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""The dtypes of the weights that PyTorch's layers compute with."""


class Found(NamedTuple):
    """The result of a search among named tensors.

    Attributes:
        stacks: The layers of the layout's cell, in the order of their tensors.
        left: The names of the tensors that belong to none of them.
    """

    stacks: tuple[Stack, ...]
    left: tuple[str, ...]


class _Place(NamedTuple):
    """The prefix of the names of one direction's tensors, with the layer and the direction that it denotes."""

    parts: tuple[str, ...]
    layer: int
    direction: int | None
    whole: tuple[str, ...]


def find_stacks(
    tensors: Mapping[str, Tensor],
    layout: WeightLayout,
    layers: Sequence[str] = (),
    are_apart: Callable[[Place, Place], bool] = lambda one, other: False,
) -> Found:
    """Find every stack of a layout's cell among named tensors.

    Args:
        tensors: The tensors by name; the parts of names are separated by "/" or ".".
        layout: The layout to search for.
        layers: The scopes of layers whose names do not identify the cell, for layouts whose tensors do not either.
        are_apart: Whether tensors at two places, whose names are those of two directions, belong to different layers.

    Raises:
        CheckpointError: Some tensors of a layer are missing.
        ShapeError: Shapes do not fit each other.
        DtypeError: Weights are not floating-point numbers of 16, 32 or 64 bits.
        ArgumentError: There is no layer in this layout, or it is of another kind, for example with peepholes; or two
            tensors have the name of one.
    """
    places = _places(tensors, layout, layers)
    left = set(tensors) - {name for members in places.values() for name in members.values()}
    _refuse_other_cells(tensors, places, layout)
    modules: dict[tuple[str, ...], dict[tuple[int, int], DirectionWeights]] = {}
    for place, members in _with_paired_directions(places, are_apart).items():
        if not _is_of_cell(members, tensors, layout):
            left |= set(members.values())
            continue
        missing = missing_tensors(members, layout)
        if missing:
            where = layout.separator.join(place.whole) or "the file"
            others = _complete_in(tensors, place, layout)
            if others:
                advice = f"The names are those of the layout {' or '.join(others)}."
                raise ArgumentError(sentence(where, f"in the layout {layout.name}", f"no {', '.join(missing)}", advice))
            ending = layout.suffix.format(layer=place.layer, reverse="_reverse" if place.direction else "")
            listed = ", ".join(f"{name}{ending}" for name in missing)
            raise CheckpointError(f"{where} has no {listed}: it is truncated. Take another copy.")
        for full in members.values():
            if tensors[full].dtype not in _DTYPES:
                # Integers are quantized, with a scale elsewhere; sums of biases would overflow.
                expectation = f"of a dtype of weights, {', '.join(str(dtype) for dtype in _DTYPES)}"
                advice = "Convert it to its values in one of them first; quantized weights have a scale elsewhere."
                raise DtypeError(sentence(full, expectation, tensors[full].dtype, advice))
        weights = unpack({name: tensors[full] for name, full in members.items()}, layout)
        left |= {full for name, full in members.items() if name == layout.convolved[0]}
        modules.setdefault(place.parts, {})[place.layer, place.direction or 0] = weights
    if not modules:
        raise ArgumentError(_nothing_found(tensors, layout))
    names = _module_names(list(modules))
    stacks = tuple(
        _assembled(names[parts], directions, layout)._replace(place=parts) for parts, directions in modules.items()
    )
    return Found(stacks, tuple(name for name in tensors if name in left))


def _places(
    tensors: Mapping[str, Tensor], layout: WeightLayout, layers: Sequence[str] | None = ()
) -> dict[_Place, dict[str, str]]:
    """Return for every place the full names of its tensors by the layout's names.

    Args:
        tensors: The tensors by name.
        layout: The layout.
        layers: The scopes that are layers although the layout's marker is not in their names; None for every scope.
    """
    own = "|".join(re.escape(name).replace("/", "[/.]") for name in tensor_names(layout))
    suffix = layout.suffix.format(layer=r"(?P<layer>\d+)", reverse="(?P<reverse>_reverse)?")
    pattern = re.compile(rf"(?:(?P<place>.*)[/.])?(?P<own>{own}){suffix}")
    places: dict[_Place, dict[str, str]] = {}
    for name in tensors:
        match = pattern.fullmatch(_plain(name))
        if match is None:
            continue
        whole = tuple(re.split("[/.]", match["place"])) if match["place"] else ()
        if layout.suffix:
            place = _Place(whole, int(match["layer"]), int(match["reverse"] is not None), whole)
        else:
            place = _place(whole, layout)
        marked = not layout.marker or not whole or re.search(layout.marker, whole[-1], re.IGNORECASE)
        if not marked and layers is not None and not {"/".join(place.parts), "/".join(whole)} & set(layers):
            continue
        members, own_name = places.setdefault(place, {}), match["own"].replace(".", "/")
        other = members.setdefault(own_name, name)
        if other != name and not torch.equal(tensors[other], tensors[name]):
            advice = "Both would be the same tensor of one layer. Rename or leave out one of them."
            raise ArgumentError(sentence(name, f"of another name than {other}", "other numbers", advice))
    return places


def _plain(name: str) -> str:
    """Return a name without the prefixes and suffixes of TensorFlow and Flax."""
    name = name.removesuffix("/.ATTRIBUTES/VARIABLE_VALUE").removesuffix(":0").removeprefix("params/")
    return name.removesuffix("/value").removesuffix(".value")


def _place(whole: tuple[str, ...], layout: WeightLayout) -> _Place:
    layer, direction = 0, None
    parts = list(whole)
    numbers = [re.fullmatch(layout.layer_numbers, part) if layout.layer_numbers else None for part in whole]
    for index, number in reversed(list(enumerate(numbers))):
        if number:  # the innermost one: modules further out may be numbered too
            layer = int(number[1])
            del parts[index]
            break
    for index, pattern in enumerate(_DIRECTIONS):
        found = [part for part in parts if pattern.fullmatch(part)]
        if found and direction is None:
            direction = index
            parts.remove(found[-1])
    # TensorFlow numbers cells through the whole model, including those of the two directions of one layer.
    if direction is not None and parts and (numbered := re.fullmatch(r"((?:lstm|gru|simple_rnn)_cell)_\d+", parts[-1])):
        parts[-1] = numbered[1]
    return _Place(tuple(parts), layer, direction, whole)


def _with_paired_directions(
    places: dict[_Place, dict[str, str]], are_apart: Callable[[Place, Place], bool]
) -> dict[_Place, dict[str, str]]:
    """Return the places, treating a direction as such only if the other one exists: "forward" may be just a name."""
    seen: dict[tuple[Place, int], dict[int | None, Place]] = {}
    for place in places:
        seen.setdefault((place.parts, place.layer), {})[place.direction] = place.whole
    paired = {
        key: directions.keys() == {0, 1} and not are_apart(directions[0], directions[1])
        for key, directions in seen.items()
    }
    return {
        place
        if place.direction is None or paired[place.parts, place.layer]
        else place._replace(parts=place.whole, direction=None): members
        for place, members in places.items()
    }


def _is_of_cell(members: Mapping[str, str], tensors: Mapping[str, Tensor], layout: WeightLayout) -> bool:
    if not layout.marker and not members.keys() - _ANY_CELL:
        return False
    gains = {tensor for tensor, names, *_ in layout.parameters if names[0].startswith("gain")}
    if gains and not gains & members.keys():
        return False  # a plain layer
    matrix = layout.matrices[-1]
    own = matrix.name.format(gate=layout.gates[0])
    if matrix.form.rank == 3:
        return own in members
    if own in members and tensors[members[own]].dim() > 2:
        return False  # a convolutional layer
    if layout.recurrent is None or layout.recurrent.gates_along is None or layout.recurrent.name not in members:
        return True
    # The recurrent layers of a system have the same names, but another number of gates; plain ones have one matrix.
    shape = sorted(tensors[members[layout.recurrent.name]].shape)
    if len(shape) != 2:
        return True
    if matrix.form is Form.ROWS_OF_BLOCKS:
        return shape[0] > 0 and shape[1] % (len(layout.gates) * shape[0]) == 0
    counts = {1, *(len(cell.gates) for cell in SHIPPED)}
    if shape[1] > max(counts) * shape[0]:
        return bool(layout.projection)  # a projection has fewer features than the cell has units
    return shape[1] not in {count * shape[0] for count in counts - {len(layout.gates)}}


def _complete_in(tensors: Mapping[str, Tensor], place: _Place, layout: WeightLayout) -> list[str]:
    """Return the names of the other layouts of the cell in which no tensor of a place is missing."""
    return [
        other.name
        for other in LAYOUTS.values()
        if other is not layout and other.cell == layout.cell
        for found, members in _places(tensors, other).items()
        if found.whole == place.whole and not missing_tensors(members, other)
    ]


def _refuse_other_cells(tensors: Mapping[str, Tensor], places: Mapping[_Place, object], layout: WeightLayout) -> None:
    cells = {"/".join(place.whole) for place in places}
    for name in tensors:
        for pattern, what, other in layout.refuses:
            match = re.fullmatch(rf"(?:(.*)[/.])?({pattern})", _plain(name))
            if match and (match[1] or "").replace(".", "/") in cells:
                advice = (
                    f"Its layout is {other}." if other else "gatewise cannot compute this cell. Leave the layer out."
                )
                raise ArgumentError(sentence(name, f"absent: {layout.called} without {what}", "present", advice))


def _assembled(name: str, directions: Mapping[tuple[int, int], DirectionWeights], layout: WeightLayout) -> Stack:
    count = 1 + max(direction for _, direction in directions)
    numbers = sorted({layer for layer, _ in directions})
    layers = []
    for expected, layer in enumerate(numbers):
        missing = [direction for direction in range(count) if (layer, direction) not in directions]
        if layer != expected or missing:
            part = "" if layer != expected else f"{('forward', 'reverse')[missing[0]]} direction in "
            where = name or f"the {layout.layer}"
            raise CheckpointError(f"{where} has no {part}layer {expected}: it is truncated. Take another copy.")
        layers.append(tuple(directions[layer, direction] for direction in range(count)))
    return checked(Stack(name, tuple(layers), layout.cell))


def _module_names(modules: Sequence[tuple[str, ...]]) -> dict[tuple[str, ...], str]:
    """Return a name for each module: its place without the inner scopes that all modules have."""
    short = {}
    for parts in modules:
        kept = list(parts)
        while len(kept) > (len(modules) > 1) and _INNER_SCOPES.fullmatch(kept[-1]):
            kept.pop()
        short[parts] = "/".join(kept)
    names = list(short.values())
    return {parts: name if names.count(name) == 1 else "/".join(parts) for parts, name in short.items()}


def _nothing_found(tensors: Mapping[str, Tensor], layout: WeightLayout) -> str:
    others = []
    for other in LAYOUTS.values():
        places = _places(tensors, other)
        if other is not layout and any(_is_of_cell(members, tensors, other) for members in places.values()):
            others.append(other.name)
    advice = f"The names are those of the layout {' or '.join(others)}." if others else layout.not_found
    if not others and (scopes := _scopes_of_its_shape(tensors, layout)):
        listed = ", ".join(scopes[:5]) + (", ..." if len(scopes) > 5 else "")
        advice = f"Scopes with tensors of such shapes: {listed}. If one is the cell, name it: --layer {scopes[0]}."
    got = ", ".join(list(tensors)[:5]) + (", ..." if len(tensors) > 5 else "") or "nothing"
    return sentence("the tensors", f"those of {layout.called} in the layout {layout.name}", got, advice)


def _scopes_of_its_shape(tensors: Mapping[str, Tensor], layout: WeightLayout) -> list[str]:
    """Return the scopes whose tensors have the names and shapes of a cell, which dense layers may have too."""
    if not layout.marker:
        return []
    scopes = []
    for place, members in _places(tensors, layout, None).items():
        if missing_tensors(members, layout) or place.whole[-1:] in (("gates",), ("candidate",)):  # of TensorFlow's GRU
            continue
        try:
            unpack({name: tensors[full] for name, full in members.items()}, layout)
        except ShapeError:
            continue
        scopes.append("/".join(place.parts))
    return list(dict.fromkeys(scopes))
