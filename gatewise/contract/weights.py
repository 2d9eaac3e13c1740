"""The weights of one direction of one layer, and the flat order they travel in."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from gatewise.contract.errors import ShapeError, sentence


class DirectionWeights(NamedTuple):
    """The weights of one direction of one layer, gates stacked in the order `i f g o`.

    Attributes:
        w_ih: Input weights [4H, I].
        w_hh: Recurrent weights [4H, R].
        b_ih: First bias [4H], or None.
        b_hh: Second bias [4H], or None.
        w_hr: Projection [P, H], or None.
    """

    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor | None = None
    b_hh: Tensor | None = None
    w_hr: Tensor | None = None

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that exist, in torch's order."""
        return tuple(tensor for tensor in self if tensor is not None)

    @classmethod
    def from_tensors(cls, tensors: Sequence[Tensor]) -> DirectionWeights:
        """Name the tensors of one direction by how many there are.

        Two are the matrices, a third the projection, four matrices and biases, a fifth the projection: the order of
        `torch.nn.LSTM.all_weights`.
        """
        match len(tensors):
            case 2:
                return cls(*tensors)
            case 3:
                return cls(tensors[0], tensors[1], w_hr=tensors[2])
            case 4 | 5:
                return cls(*tensors)
        message = sentence(
            "weights",
            "2 to 5 tensors a direction (w_ih, w_hh[, b_ih, b_hh][, w_hr])",
            len(tensors),
            "`module.all_weights` has the form that is meant.",
        )
        raise ShapeError(message)


def by_direction(flat: Sequence[Tensor], per_direction: int) -> list[DirectionWeights]:
    """Split torch's flat order into one `DirectionWeights` for each layer and direction.

    Args:
        flat: All weights, layer by layer, forward direction before reverse.
        per_direction: Tensors of one direction (`Problem.weights_per_direction`).
    """
    return [
        DirectionWeights.from_tensors(flat[start : start + per_direction])
        for start in range(0, len(flat), per_direction)
    ]


def cudnn_order(flat: Sequence[Tensor]) -> list[Tensor]:
    """Return weights in the order of cuDNN's buffer: every matrix of the stack, then every bias.

    Args:
        flat: All weights in torch's flat order.
    """
    matrices = [tensor for tensor in flat if tensor.dim() == 2]
    biases = [tensor for tensor in flat if tensor.dim() == 1]
    return [*matrices, *biases]


def cudnn_buffer_size(flat: Sequence[Tensor], per_direction: int) -> int:
    """Return the elements of cuDNN's buffer, which has room for two biases a direction even where there are none."""
    return _places(tuple(tensor.shape for tensor in flat), per_direction, 1)[1]


def in_one_buffer(flat: Sequence[Tensor], per_direction: int) -> bool:
    """Tell whether the weights are views of one storage, as `torch.nn.LSTM.flatten_parameters` lays them.

    Args:
        flat: Weights in torch's flat order.
        per_direction: Tensors of one direction of one layer.
    """
    first = flat[0]
    storage = first.untyped_storage()
    pointer = storage.data_ptr()
    places, needed = _places(tuple([tensor.shape for tensor in flat]), per_direction, first.element_size())
    # Separate tensors can be neighbours in memory by chance; then the first one's storage ends before the last one.
    # Where there are no biases, the buffer ends with zeros in their place; elsewhere other layers' weights lie there.
    if storage.nbytes() < needed or (per_direction < 4 and storage.nbytes() > needed):
        return False
    if [tensor.data_ptr() - pointer for tensor in flat] != places:
        return False
    return all(tensor.is_contiguous() for tensor in flat)


@functools.lru_cache(maxsize=1024)
def _places(shapes: tuple[Sequence[int], ...], per_direction: int, element_bytes: int) -> tuple[Sequence[int], int]:
    """Return at which byte of cuDNN's buffer each weight begins, and the bytes of the whole buffer."""
    places, end = [0] * len(shapes), 0
    for index in sorted(range(len(shapes)), key=lambda index: len(shapes[index]) == 1):
        places[index] = end
        end += math.prod(shapes[index]) * element_bytes
    if per_direction < 4:
        end += 2 * sum(shape[0] for shape in shapes[::per_direction]) * element_bytes
    return places, end
