"""The kernels that ran, according to the names in a profile."""

from __future__ import annotations

from collections.abc import Iterable

from gatewise.kernels import ALL
from gatewise.selection.reference import REFERENCE

_OF_ANY_STEP = frozenset({"aten::linear", "aten::unsafe_chunk"})
"""Operators by which a kernel is known, and which the step of a cell may call as well, in the reference's pass."""


def kernels_among(names: Iterable[str], *, backward: bool) -> dict[str, tuple[str, ...]]:
    """Return the kernels with traces among the names in a profile, each with the traces found.

    Args:
        names: The names of operators and GPU kernels in one pass of one layer.
        backward: Whether the pass is the backward pass.

    Examples:
        >>> kernels_among(["aten::lstm", "aten::_cudnn_rnn", "aten::view"], backward=False)
        {'cudnn': ('aten::_cudnn_rnn',)}
    """
    seen = frozenset(names)
    if not backward and not seen.isdisjoint(REFERENCE.traces.forward):
        seen -= _OF_ANY_STEP
    if backward and not seen.isdisjoint(REFERENCE.traces.backward):
        # The reference has marked its pass. Autograd's nodes then belong to a cell that cannot be traced, whose step
        # may contain any operator.
        seen = frozenset(name for name in seen if not name.endswith("Backward0"))
    found = {
        kernel.name: sorted(seen & (kernel.traces.backward if backward else kernel.traces.forward)) for kernel in ALL
    }
    return {name: tuple(traces) for name, traces in found.items() if traces}
