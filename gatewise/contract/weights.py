"""The weights of one direction of one layer, and the flat order they travel in."""

from __future__ import annotations

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


def cudnn_order(flat: Sequence[Tensor], per_direction: int) -> list[Tensor]:
    """Return weights in the order of cuDNN's buffer: every matrix of the stack, then every bias.

    Args:
        flat: All weights in torch's flat order.
        per_direction: Tensors of one direction (`Problem.weights_per_direction`).
    """
    starts = range(0, len(flat), per_direction)
    directions = [flat[start : start + per_direction] for start in starts]
    matrices = [tensor for tensors in directions for tensor in tensors if tensor.dim() == 2]
    biases = [tensor for tensors in directions for tensor in tensors if tensor.dim() == 1]
    return [*matrices, *biases]


def cudnn_buffer_size(flat: Sequence[Tensor], per_direction: int) -> int:
    """Return the elements of cuDNN's buffer, which has room for two biases a direction even where there are none."""
    elements = sum(tensor.numel() for tensor in flat)
    if per_direction >= 4:
        return elements
    gates = sum(tensor.shape[0] for tensor in flat[::per_direction])
    return elements + 2 * gates


def in_one_buffer(flat: Sequence[Tensor], per_direction: int) -> bool:
    """Tell whether the weights are views of one storage, as `torch.nn.LSTM.flatten_parameters` lays them.

    Args:
        flat: Weights in torch's flat order.
        per_direction: Tensors of one direction of one layer.
    """
    pointer = flat[0].data_ptr()
    storage = flat[0].untyped_storage()
    needed = cudnn_buffer_size(flat, per_direction) * flat[0].element_size()
    # Separate tensors can be neighbours in memory by chance; then the first one's storage ends before the last one.
    if storage.data_ptr() != pointer or storage.nbytes() < needed:
        return False
    for tensor in cudnn_order(flat, per_direction):
        if tensor.data_ptr() != pointer or not tensor.is_contiguous():
            return False
        pointer += tensor.nbytes
    return True
