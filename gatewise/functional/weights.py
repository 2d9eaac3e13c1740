"""The structure of a call's weights: their sizes, layers, directions, biases and projection, checked for agreement."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gatewise.contract.errors import ArgumentError, DeviceError, DtypeError, ShapeError, sentence

NestedWeights = Sequence[Sequence[Tensor]]


class Form(NamedTuple):
    """The shape, dtype and device of a tensor, without its values."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


def forms_of(tensors: Sequence[Tensor]) -> tuple[tuple[torch.Size, torch.dtype, torch.device], ...]:
    """Return the forms of several tensors as plain tuples, which are faster to make than a `Form`."""
    # In a loop of its own: an interpreter reads attributes of objects of one type in a third of `attrgetter`'s time.
    return tuple([(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors])


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """The structure of a flat sequence of weights.

    Attributes:
        input_size: I, the number of input features.
        hidden_size: H, the number of hidden units.
        proj_size: P, the number of features of the projection; 0 for none.
        num_layers: L, the number of layers.
        bidirectional: Whether every layer has a reverse direction.
        bias: Whether both biases exist.
        dtype: The dtype of every weight.
        device: The device of every weight.
        gates: The number of gates of the cell.
        parameters: The number of parameters of the cell.
    """

    input_size: int
    hidden_size: int
    proj_size: int
    num_layers: int
    bidirectional: bool
    bias: bool
    dtype: torch.dtype
    device: torch.device
    gates: int = 4
    parameters: int = 0

    def shapes(self, layer: int) -> list[tuple[int, ...]]:
        """Return the shapes that the weights of one direction of a layer must have."""
        gates, state = self.gates * self.hidden_size, self.proj_size or self.hidden_size
        features = self.input_size if layer == 0 else state * (1 + self.bidirectional)
        shapes: list[tuple[int, ...]] = [(gates, features), (gates, state)]
        if self.bias:
            shapes += [(gates,), (gates,)]
        if self.proj_size:
            shapes.append((self.proj_size, self.hidden_size))
        return shapes + [(self.hidden_size,)] * self.parameters


def flattened(weights: NestedWeights | Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the weights in torch's flat order.

    Args:
        weights: The weights in torch's flat order already, or nested as `module.all_weights`.

    Raises:
        ArgumentError: `weights` is no sequence of tensors, nor a sequence of sequences of tensors.
        ShapeError: `weights` is empty.
    """
    if type(weights) is not list and type(weights) is not tuple:
        _check_weights(weights)
    if not weights:
        raise ShapeError(sentence("weights", "at least one direction of one layer", "none"))
    if isinstance(weights[0], Tensor):
        return tuple(weights)  # type: ignore[arg-type]
    _check_weights(weights)
    return tuple(tensor for direction in weights for tensor in direction if tensor is not None)


def nested_like(weights: NestedWeights | Sequence[Tensor], flat: Sequence[Tensor | None]) -> list:
    """Return the flat gradients in the nesting that the weights were given in."""
    if isinstance(weights[0], Tensor):
        return list(flat)
    values = iter(flat)
    return [[None if tensor is None else next(values) for tensor in direction] for direction in weights]


def structure_while_traced(
    flat: Sequence[Tensor], bidirectional: bool, gates: int = 4, parameters: int = 0
) -> Structure:
    """Return the structure of weights while a graph is traced, where symbolic sizes cannot be looked up.

    Args:
        flat: The weights in torch's flat order.
        bidirectional: Whether every layer has a reverse direction.
        gates: The number of gates of the cell.
        parameters: The number of parameters of the cell.

    Raises:
        ShapeError: A shape does not fit the others, or the count fits no number of layers.
        DtypeError: The weights are of different dtypes.
        DeviceError: The weights are on different devices.
    """
    return _read(
        tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in flat), bidirectional, gates, parameters
    )


def kind_of(given: object) -> str:
    """Return the name of the type of an argument for an error message, with the types of a short sequence's members."""
    if isinstance(given, (tuple, list)) and len(given) < 5:
        return f"({', '.join('None' if each is None else type(each).__name__ for each in given)})"
    return "None" if given is None else type(given).__name__


def _read(
    forms: tuple[tuple[torch.Size, torch.dtype, torch.device], ...],
    bidirectional: bool,
    gates: int = 4,
    parameters: int = 0,
) -> Structure:
    flat = [Form(*form) for form in forms]
    first = flat[0]
    if len(flat) < 2 or len(first.shape) != 2 or first.shape[0] % gates or len(flat[1].shape) != 2:
        form = f"w_ih [{gates}H, I] and w_hh [{gates}H, R] first"
        raise ShapeError(sentence("weights", form, [tuple(tensor.shape) for tensor in flat[:2]]))
    hidden_size, state_size = first.shape[0] // gates, flat[1].shape[1]
    projected = bool(state_size != hidden_size)  # comparing symbolic sizes gives no bool
    # Without biases, a projection or the parameters of the cell follow the matrices, then the next direction.
    after_matrices = 2 if projected else 2 + parameters
    bias = len(flat) > after_matrices and len(flat[after_matrices].shape) == 1
    per_direction = 2 + 2 * bias + projected + parameters
    per_layer = per_direction * (1 + bidirectional)
    if len(flat) % per_layer:
        expectation = f"a multiple of {per_layer} tensors ({per_direction} per direction)"
        advice = "Check `bidirectional`."
        if projected:
            columns = f"Check `bidirectional`, and w_hh, whose {state_size} columns are R with a projection"
            advice = f"{columns}; without one there are H = {hidden_size}."
        raise ShapeError(sentence("weights", expectation, len(flat), advice))
    found = Structure(
        input_size=first.shape[1],
        hidden_size=hidden_size,
        proj_size=state_size if state_size != hidden_size else 0,
        num_layers=len(flat) // per_layer,
        bidirectional=bidirectional,
        bias=bias,
        dtype=first.dtype,
        device=first.device,
        gates=gates,
        parameters=parameters,
    )
    for layer in range(found.num_layers):
        expected = found.shapes(layer) * (1 + bidirectional)
        for position, tensor in enumerate(flat[layer * per_layer : (layer + 1) * per_layer]):
            _check_weight(tensor, expected[position], found, layer)
    return found


# The same function for forms with known sizes. Reading a structure takes longer than the rest of a call's preparation,
# and a program has few structures.
structure_of = functools.lru_cache(maxsize=1024)(_read)


def _check_weight(tensor: Form, shape: tuple[int, ...], found: Structure, layer: int) -> None:
    if tensor.shape != shape:
        raise ShapeError(sentence("weights", f"shaped {list(shape)} in layer {layer}", list(tensor.shape)))
    if tensor.dtype != found.dtype:
        raise DtypeError(sentence("weights", f"all {found.dtype}", tensor.dtype))
    if tensor.device != found.device:
        raise DeviceError(sentence("weights", f"all on {found.device}", tensor.device))


def _check_weights(weights: Any) -> None:
    expectation = "a sequence of tensors, or one sequence of them for each direction of each layer"
    advice = "Give `module.all_weights`, or the tensors of `module.parameters()` as a list."
    if isinstance(weights, (Tensor, str, Mapping)) or not (
        hasattr(weights, "__getitem__") and hasattr(weights, "__len__")
    ):
        raise ArgumentError(sentence("weights", expectation, kind_of(weights), advice))
    for index, member in enumerate(weights):  # type: ignore[arg-type]
        if not isinstance(member, (Tensor, list, tuple)) or isinstance(member, Tensor) != isinstance(
            weights[0], Tensor
        ):  # type: ignore[index]
            raise ArgumentError(sentence("weights", expectation, f"{kind_of(member)} as weights[{index}]", advice))
