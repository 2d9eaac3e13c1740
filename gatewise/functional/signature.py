"""What a set of weights says about itself: layers, directions, biases, projection, and whether its shapes agree."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gatewise.contract.errors import DeviceError, DtypeError, ShapeError, sentence
from gatewise.functional.arguments import check_weights

NestedWeights = Sequence[Sequence[Tensor]]


class Form(NamedTuple):
    """What a signature is read from: a tensor without its values."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


# The same as a plain tuple, which every call reads of every tensor: what is known of a form is looked up by it.
form_of = operator.attrgetter("shape", "dtype", "device")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Signature:
    """The structure of a flat sequence of weights.

    Attributes:
        input_size: I.
        hidden_size: H.
        proj_size: P, 0 for none.
        num_layers: L.
        bidirectional: Whether D is 2.
        bias: Whether both biases exist.
        dtype: The dtype of every weight.
        device: The device of every weight.
        gates: G, the number of gates of the cell.
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

    @property
    def per_direction(self) -> int:
        """Tensors of one direction of one layer."""
        return 2 + 2 * self.bias + (self.proj_size > 0)

    def shapes(self, layer: int) -> list[tuple[int, ...]]:
        """The shapes that the tensors of one direction of a layer must have."""
        gates, state = self.gates * self.hidden_size, self.proj_size or self.hidden_size
        features = self.input_size if layer == 0 else state * (1 + self.bidirectional)
        shapes: list[tuple[int, ...]] = [(gates, features), (gates, state)]
        if self.bias:
            shapes += [(gates,), (gates,)]
        if self.proj_size:
            shapes.append((self.proj_size, self.hidden_size))
        return shapes


def flattened(weights: NestedWeights | Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return weights in torch's flat order, from that order itself or from the form of `module.all_weights`."""
    if type(weights) is not list and type(weights) is not tuple:
        check_weights(weights)
    if not weights:
        raise ShapeError(sentence("weights", "at least one direction of one layer", "none"))
    if isinstance(weights[0], Tensor):
        return tuple(weights)  # type: ignore[arg-type]
    check_weights(weights)
    return tuple(tensor for direction in weights for tensor in direction if tensor is not None)


def nested_like(weights: NestedWeights | Sequence[Tensor], flat: Sequence[Tensor | None]) -> list:
    """Return `flat` in the nesting of `weights`: gradients in the form the weights were given in."""
    if isinstance(weights[0], Tensor):
        return list(flat)
    values = iter(flat)
    return [[None if tensor is None else next(values) for tensor in direction] for direction in weights]


def signature(flat: Sequence[Tensor], bidirectional: bool, gates: int = 4) -> Signature:
    """Read the structure of flat weights and check that every shape, dtype and device agrees with it.

    Args:
        flat: Weights in torch's flat order.
        bidirectional: Whether every layer has a reverse direction.
        gates: The number of gates of the cell.

    Raises:
        ShapeError: A shape does not fit the others, or the count fits no number of layers.
        DtypeError: The weights are of different dtypes.
        DeviceError: The weights are on different devices.
    """
    return signature_of(tuple(map(form_of, flat)), bidirectional, gates)


def traced_signature(flat: Sequence[Tensor], bidirectional: bool, gates: int = 4) -> Signature:
    """Do the same while a graph is built: symbolic sizes cannot be looked up."""
    return _read(tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in flat), bidirectional, gates)


def _read(
    forms: tuple[tuple[torch.Size, torch.dtype, torch.device], ...], bidirectional: bool, gates: int = 4
) -> Signature:
    flat = [Form(*form) for form in forms]
    first = flat[0]
    if len(flat) < 2 or len(first.shape) != 2 or first.shape[0] % gates or len(flat[1].shape) != 2:
        form = f"w_ih [{gates}H, I] and w_hh [{gates}H, R] first"
        raise ShapeError(sentence("weights", form, [tuple(tensor.shape) for tensor in flat[:2]]))
    hidden_size, state_size = first.shape[0] // gates, flat[1].shape[1]
    bias = len(flat) > 2 and len(flat[2].shape) == 1
    per_direction = 2 + 2 * bias + bool(state_size != hidden_size)  # symbolic sizes compare to no bool
    per_layer = per_direction * (1 + bidirectional)
    if len(flat) % per_layer:
        expectation = f"a multiple of {per_layer} tensors ({per_direction} a direction)"
        raise ShapeError(sentence("weights", expectation, len(flat), "Check `bidirectional`."))
    found = Signature(
        input_size=first.shape[1],
        hidden_size=hidden_size,
        proj_size=state_size if state_size != hidden_size else 0,
        num_layers=len(flat) // per_layer,
        bidirectional=bidirectional,
        bias=bias,
        dtype=first.dtype,
        device=first.device,
        gates=gates,
    )
    for layer in range(found.num_layers):
        expected = found.shapes(layer) * (1 + bidirectional)
        for position, tensor in enumerate(flat[layer * per_layer : (layer + 1) * per_layer]):
            _check_weight(tensor, expected[position], found, layer)
    return found


# Reading a signature takes longer than the rest of a call's preparation; a program has few.
signature_of = functools.lru_cache(maxsize=1024)(_read)


def _check_weight(tensor: Form, shape: tuple[int, ...], found: Signature, layer: int) -> None:
    if tensor.shape != shape:
        raise ShapeError(sentence("weights", f"shaped {list(shape)} in layer {layer}", list(tensor.shape)))
    if tensor.dtype != found.dtype:
        raise DtypeError(sentence("weights", f"all {found.dtype}", tensor.dtype))
    if tensor.device != found.device:
        raise DeviceError(sentence("weights", f"all on {found.device}", tensor.device))
