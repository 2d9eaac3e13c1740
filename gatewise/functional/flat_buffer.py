"""Whether weights lie in one buffer in cuDNN's order, so that cuDNN can read them without a copy."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def in_one_buffer(flat: Sequence[Tensor], per_direction: int) -> bool:
    """Tell whether the weights are views of one storage, as `torch.nn.LSTM.flatten_parameters` lays them.

    cuDNN's order: the matrices of every layer and direction, then the biases of every layer and direction; within one,
    input before recurrent (before projection).

    Args:
        flat: Weights in torch's flat order.
        per_direction: Tensors of one direction of one layer.
    """
    pointer = flat[0].data_ptr()
    storage = flat[0].untyped_storage()
    # Separate tensors can be neighbours in memory by chance; then the first one's storage ends before the last one.
    if storage.data_ptr() != pointer or storage.nbytes() < sum(tensor.nbytes for tensor in flat):
        return False
    for tensor in cudnn_order(flat, per_direction):
        if tensor.data_ptr() != pointer or not tensor.is_contiguous():
            return False
        pointer += tensor.nbytes
    return True


def cudnn_order(flat: Sequence[Tensor], per_direction: int) -> list[Tensor]:
    """Return the weights in the order of cuDNN's buffer."""
    starts = range(0, len(flat), per_direction)
    directions = [flat[start : start + per_direction] for start in starts]
    matrices = [tensor for tensors in directions for tensor in tensors if tensor.dim() == 2]
    biases = [tensor for tensors in directions for tensor in tensors if tensor.dim() == 1]
    return [*matrices, *biases]
