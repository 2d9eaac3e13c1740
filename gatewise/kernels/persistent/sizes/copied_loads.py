"""Choose where the values that a product waits for arrive: in registers, or as copies in shared memory."""

from __future__ import annotations

import math
from typing import NamedTuple

from gatewise.contract.device import Device
from gatewise.kernels.persistent.sizes.tilings import SPAN_BYTES, Tiling, shared_memory


class CopiedLoads(NamedTuple):
    """Polls in flight as copies to shared memory, where registers have no room for as many.

    Attributes:
        chunk: Spans of a poll.
        polls: Polls of a warp in flight.
        spare: Those of them with memory of their own; the others take that of the warp's sums, as in copied_loads.cuh.
        spare_bytes: The memory of the former, for all warps of a block.
    """

    chunk: int
    polls: int
    spare: int
    spare_bytes: int

    def macros(self, shared_bytes: int) -> dict[str, int]:
        """The template parameters of the source, with those of the tiling that change; it takes `shared_bytes`."""
        names = {"CHUNK": self.chunk, "COPIED": self.polls, "SPARE": self.spare}
        return {**names, "SHARED_BYTES": shared_bytes + self.spare_bytes}


def copied_loads_of(cut: Tiling, device: Device) -> CopiedLoads | None:
    """Return the copies of a tiling's product, or None where as many loads are in flight without them."""
    if cut.exact or cut.stacked or cut.cell_size is not None:
        return None
    chunk = next((size for size in (2, 3, 5) if cut.spans % size == 0), min(4, cut.spans))
    eights, polls_of_eight = cut.rows // 8, math.ceil(cut.spans / chunk)
    items, item_bytes = eights * polls_of_eight, 8 * SPAN_BYTES * chunk
    room = (shared_memory(device) - cut.shared_bytes) // (cut.warps * item_bytes)
    spare = max(0, min(items, room))
    sum_bytes = 8 * 4 * (16 * cut.tiles + 4)  # of eight rows
    polls = min(items, spare + _in_sums(spare, eights, polls_of_eight, item_bytes, sum_bytes))
    if polls * chunk <= cut.ahead * cut.chunk or items > polls + spare:
        return None
    return CopiedLoads(chunk, polls, spare, spare * cut.warps * item_bytes)


def _in_sums(spare: int, eights: int, polls_of_eight: int, item_bytes: int, sum_bytes: int) -> int:
    """Return how many polls behind the spare ones have room in the sums' memory, whose end they take.

    The sums of a group of eight rows are stored when its polls, and no others, have been multiplied.
    """
    return min(
        max(0, (done + 1) * polls_of_eight - spare) + (eights - done - 1) * sum_bytes // item_bytes
        for done in range(-1, eights - 1)
    )
