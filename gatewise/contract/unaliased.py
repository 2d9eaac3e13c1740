"""The results of registered operators, which may share memory neither with their arguments nor with each other."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def unaliased(found: Sequence[Tensor | None], given: Sequence[Tensor | None]) -> list[Tensor]:
    """Return tensors of which each has a storage of its own, copied where that is necessary.

    Args:
        found: The tensors, all of which must be there.
        given: The arguments of the operator.

    Raises:
        RuntimeError: A tensor is None.
    """
    # Kernels return several results in one storage; both biases have one gradient; for an empty sequence the final
    # state is the initial one, and so are their gradients.
    seen = {tensor.untyped_storage()._cdata for tensor in given if tensor is not None}
    apart: list[Tensor] = []
    for tensor in found:
        if tensor is None:
            raise RuntimeError("a kernel left out a gradient that was asked for")
        if tensor.untyped_storage()._cdata in seen:
            tensor = tensor.clone()
        # Callers change results in place, which autograd does not allow for views.
        apart.append(tensor.data if tensor._is_view() else tensor)
        seen.add(apart[-1].untyped_storage()._cdata)
    return apart
