"""The masks of a layer as the passes read them, and their arguments."""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

from torch import Tensor


class Masks(NamedTuple):
    """The masks of a layer with dropout or zoneout in the recurrence; all tensors are contiguous.

    Attributes:
        hidden: The initial hidden state without dropout [D, B, H].
        kept: The units of the hidden state that recurrent dropout keeps [D, B, H], bool; None without it.
        scale: The factor of these units.
        of_steps: The masks that change at every step [T, B, D*H], bool.
    """

    hidden: Tensor
    kept: Tensor | None
    scale: float
    of_steps: tuple[Tensor, ...]


def of_episodes_and_masks(resets: Tensor | None, masks: Masks | None) -> tuple[object, ...]:
    """Return the last arguments of a pass: those of resets, then those of masks.

    Kernels that are compiled without resets and masks have no such arguments, and read none.
    """
    if resets is None and masks is None:
        return ()
    of_resets = (None, 0) if resets is None else (resets.data_ptr(), resets.shape[0])
    if masks is None:
        return of_resets
    kept = None if masks.kept is None else masks.kept.data_ptr()
    of_steps = [mask.data_ptr() for mask in masks.of_steps] or [None]
    return *of_resets, masks.hidden.data_ptr(), kept, masks.scale, (ctypes.c_void_p * len(of_steps))(*of_steps)


def with_masks(struct: type[ctypes.Structure], masks: Masks | None) -> type[ctypes.Structure]:
    """Return the struct of a pass with the fields of its masks, if there are any."""
    return struct if masks is None else _with_masks(struct, len(masks.of_steps))


@functools.cache
def _with_masks(struct: type[ctypes.Structure], count: int) -> type[ctypes.Structure]:
    fields = [
        ("hidden", ctypes.c_void_p),
        ("kept", ctypes.c_void_p),
        ("scale_of_kept", ctypes.c_float),
        ("of_steps", ctypes.c_void_p * max(1, count)),
    ]
    return type(f"{struct.__name__}WithMasks", (struct,), {"_fields_": fields})
