"""The weights of one direction of one layer, and PyTorch's flat order of all weights."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gatewise.contract.errors import ShapeError, sentence


class DirectionWeights(NamedTuple):
    """The weights of one direction of one layer, in PyTorch's order of gates (`i f g o`, or `r z n` for the GRU).

    Attributes:
        w_ih: The input weights [G*H, I].
        w_hh: The recurrent weights [G*H, R].
        b_ih: The input bias [G*H], or None.
        b_hh: The recurrent bias [G*H], or None.
        w_hr: The projection [P, H], or None.
        parameters: The learned parameters of the cell [H], in the order of `Cell.parameters`.
    """

    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor | None = None
    b_hh: Tensor | None = None
    w_hr: Tensor | None = None
    parameters: tuple[Tensor, ...] = ()

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that are not None, in PyTorch's order, then the parameters of the cell."""
        named = self.w_ih, self.w_hh, self.b_ih, self.b_hh, self.w_hr
        return (*[tensor for tensor in named if tensor is not None], *self.parameters)

    @classmethod
    def from_tensors(cls, tensors: Sequence[Tensor], parameters: int = 0) -> DirectionWeights:
        """Return the weights in a sequence of 2 to 5 tensors, in the order of `torch.nn.LSTM.all_weights`.

        Two tensors are the matrices, a third is the projection; four are matrices and biases, a fifth is the
        projection.

        Args:
            tensors: The weights, and after them the parameters of the cell.
            parameters: The number of parameters of the cell.
        """
        if parameters:
            weights, own = tensors[:-parameters], tensors[-parameters:]
            return cls.from_tensors(weights)._replace(parameters=tuple(own))
        match [*tensors]:
            case [w_ih, w_hh]:
                return cls(w_ih, w_hh)
            case [w_ih, w_hh, w_hr]:
                return cls(w_ih, w_hh, w_hr=w_hr)
            case [w_ih, w_hh, b_ih, b_hh]:
                return cls(w_ih, w_hh, b_ih, b_hh)
            case [w_ih, w_hh, b_ih, b_hh, w_hr]:
                return cls(w_ih, w_hh, b_ih, b_hh, w_hr)
        message = sentence(
            "weights",
            "2 to 5 tensors per direction (w_ih, w_hh[, b_ih, b_hh][, w_hr])",
            len(tensors),
            "Pass `module.all_weights`, for example.",
        )
        raise ShapeError(message)


def by_direction(flat: Sequence[Tensor], per_direction: int, parameters: int = 0) -> list[DirectionWeights]:
    """Split weights in PyTorch's flat order into one `DirectionWeights` for each layer and direction.

    Args:
        flat: All weights, layer by layer, the forward direction before the reverse one.
        per_direction: The number of tensors of one direction (`Problem.weights_per_direction`).
        parameters: The number of parameters of the cell, which are the last tensors of each direction.
    """
    return [
        DirectionWeights.from_tensors(flat[start : start + per_direction], parameters)
        for start in range(0, len(flat), per_direction)
    ]


def cudnn_order(flat: Sequence[Tensor]) -> list[Tensor]:
    """Return the weights in the order of cuDNN's buffer: all matrices, then all biases.

    Args:
        flat: All weights in PyTorch's flat order.
    """
    matrices = [tensor for tensor in flat if tensor.dim() == 2]
    biases = [tensor for tensor in flat if tensor.dim() == 1]
    return [*matrices, *biases]


def cudnn_buffer_size(flat: Sequence[Tensor], per_direction: int) -> int:
    """Return the number of elements of cuDNN's buffer, which has room for two biases per direction in any case."""
    return _places(tuple(tensor.shape for tensor in flat), per_direction, 1)[1]


def in_one_buffer(flat: Sequence[Tensor], per_direction: int) -> bool:
    """Return whether the weights are views of one storage, as `torch.nn.LSTM.flatten_parameters` makes them.

    Args:
        flat: All weights in PyTorch's flat order.
        per_direction: The number of tensors of one direction of one layer.
    """
    first = flat[0]
    storage = first.untyped_storage()
    pointer = storage.data_ptr()
    places, needed = _places(tuple([tensor.shape for tensor in flat]), per_direction, first.element_size())
    # Separate tensors can be adjacent in memory by chance, but then the first tensor's storage ends before the last
    # tensor. Without biases, zeros follow the matrices in the buffer; in a larger storage, other weights are at that
    # place.
    if storage.nbytes() < needed or (per_direction < 4 and storage.nbytes() > needed):
        return False
    if [tensor.data_ptr() - pointer for tensor in flat] != places:
        return False
    return all(tensor.is_contiguous() for tensor in flat)


@functools.lru_cache(maxsize=1024)
def _places(shapes: tuple[Sequence[int], ...], per_direction: int, element_bytes: int) -> tuple[Sequence[int], int]:
    """Return the offset of each weight in cuDNN's buffer, and the size of the buffer, in bytes."""
    places, end = [0] * len(shapes), 0
    for index in sorted(range(len(shapes)), key=lambda index: len(shapes[index]) == 1):
        places[index] = end
        end += math.prod(shapes[index]) * element_bytes
    if per_direction < 4:
        end += 2 * sum(shape[0] for shape in shapes[::per_direction]) * element_bytes
    return places, end


Place = tuple[tuple[int, ...], tuple[int, ...], int]
"""A tensor's size, its strides and its offset in a buffer."""


def places(shapes: Sequence[Sequence[int]], alignment: int = 1) -> tuple[tuple[Place, ...], int]:
    """Return the places of contiguous tensors, one after the other in a buffer, and the size of the buffer.

    Args:
        shapes: The shapes of the tensors.
        alignment: A number of elements, of which the offset of each tensor is a multiple.
    """
    found, begin = [], 0
    for shape in shapes:
        strides = tuple([math.prod(shape[axis + 1 :]) for axis in range(len(shape))])
        found.append((tuple(shape), strides, begin))
        begin += -(-math.prod(shape) // alignment) * alignment
    return tuple(found), begin


_ALIGNMENT = 8  # values of 16 bits are 16 bytes, which kernels read at once


def copied_together(tensors: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return contiguous copies in another dtype, which autograd does not record, in one buffer.

    One operator copies all tensors, in place of one operator for each. The copies lie in the order of cuDNN's buffer:
    where no space is left between them, because the number of elements of each is a multiple of 8, cuDNN reads the
    copies of weights with biases from this buffer.

    Args:
        tensors: The tensors, at least one, all on one device.
        dtype: The dtype of the copies.
    """
    where, size = _places_of_copies(tuple([tensor.shape for tensor in tensors]))
    with torch.no_grad():
        buffer = tensors[0].new_empty(size, dtype=dtype)
        copies = [buffer.as_strided(*place) for place in where]
        torch._foreach_copy_(copies, tensors)  # type: ignore[arg-type]
    return tuple(copies)


@functools.lru_cache(maxsize=1024)
def _places_of_copies(shapes: tuple[Sequence[int], ...]) -> tuple[tuple[Place, ...], int]:
    order = sorted(range(len(shapes)), key=lambda index: len(shapes[index]) == 1)
    found, size = places([shapes[index] for index in order], _ALIGNMENT)
    by_index = dict(zip(order, found, strict=True))
    return tuple([by_index[index] for index in range(len(shapes))]), size
