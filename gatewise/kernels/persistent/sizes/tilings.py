"""Choose the tiling of a pass (how its work is divided among thread blocks) with the least predicted time."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping

import torch

from gatewise.contract.device import Device
from gatewise.contract.ranking import weights as measured_weights
from gatewise.kernels.cuda import formats
from gatewise.kernels.persistent.sizes.cell_size import CellSize

SPAN_BYTES = 64  # of a batch row that a warp multiplies at once
_STAGING_BYTES = 80 * 1024  # of a block's weights at a time, unless its sums take more: enough to keep memory busy
_UNITS = (8, 12, 16, 20, 24, 32)
_ROWS = (8, 16, 24, 32, 48, 64)
_WARPS = (4, 8, 16)
_ROWS_OF_WARPGROUPS = (24, 32, 48, 64)  # with a product in warpgroup.cuh
_ROWS_OF_STACKED = 3  # of blocks: two layers, and the products between them


@dataclasses.dataclass(frozen=True, slots=True)
class Tiling:
    """How one pass is cut into blocks.

    Attributes:
        hidden: H, rounded up to 8.
        units: Hidden units of a block.
        rows: Batch rows of a group.
        warps: Warps of a block; they share the depth of the product.
        resident: Tensor-core tiles of weights in registers; the others lie in shared memory.
        split: Blocks that share the depth in a cluster; 1 for none.
        backward: Whether it is the backward pass.
        groups: Batch groups.
        together: Groups at work at the same time; the others follow.
        directions: Directions beside each other in one launch.
        value_bytes: The size of a value in memory: 2, or 4 for float32.
        exact: Whether float32 products are as exact as float32's own, three of TF32 each; otherwise they are `scaled`.
        one_row: Whether there is a single batch row in exact products: without tensor cores those are fewer.
        stacked: Whether `directions` are three others: a layer, the product with what it computes, the layer above it.
        cell_size: The memory for a cell that is not fused; None for a fused one.
        warpgroups: Whether the product is that of warpgroup_product.cuh, in which warps share the rows of weights and
            not the depth.
    """

    hidden: int
    units: int
    rows: int
    warps: int
    resident: int
    split: int = 1
    backward: bool = False
    groups: int = 1
    together: int = 1
    directions: int = 1
    value_bytes: int = 2
    exact: bool = False
    one_row: bool = False
    stacked: bool = False
    cell_size: CellSize | None = None
    warpgroups: bool = False

    @property
    def depth(self) -> int:
        """Values of the other operand that a block multiplies its weights with."""
        return 4 * self.hidden // self.split if self.backward else self.hidden

    @property
    def tiles(self) -> int:
        """Tensor-core tiles of 16 weight rows in a block."""
        return math.ceil((self.split if self.backward else 4) * self.units / 16)

    @property
    def scaled(self) -> bool:
        """Whether float32 products are made in float16, with powers of two taken out: one for each row of a warp."""
        return self.value_bytes == 4 and not self.exact

    @property
    def spans(self) -> int:
        """Spans of the depth that each warp takes."""
        return math.ceil(self.depth * self.value_bytes / (SPAN_BYTES * self.warps))

    @property
    def cells(self) -> int:
        """Cells of a thread."""
        return math.ceil(self.rows * self.units / (32 * self.warps))

    @property
    def weight_registers(self) -> int:
        """Registers of a thread that hold weights."""
        if self.warpgroups:
            return 4 * self._depth_steps
        return self.resident * self.spans * self._fragments * 4

    @property
    def _depth_steps(self) -> int:
        # Products of a warpgroup, of 16 values along the depth each.
        return math.ceil(self.depth / 16)

    @property
    def _fragments(self) -> int:
        # Of a lane, of one tile in one span.
        return 1 if self.scaled else 2

    @property
    def registers(self) -> int:
        """Estimated registers of a thread besides what is in flight: weights, sums, cells, and the rest."""
        if self.warpgroups:
            # With many cells, the assembler computes their addresses again instead of spilling.
            return self.weight_registers + 100
        # In flight and waiting, gates take twice as many in float32; scaled ones of several cells wait a step only.
        single = self.scaled and self.cells > 1
        cell = (17 if self.backward else 14 if single else 12) + (6 if self.value_bytes == 4 and not single else 0)
        cells = self._cell_registers if self.cell_size else cell * self.cells
        # Of the few registers of a thread of 16 warps, the assembler spills where it has many loads in flight.
        crowded = self.value_bytes == 4 and self.warps == 16
        lent = 0 if self.resident == self.tiles else 20 if crowded else 4
        parts = 40 if self.exact and not self.one_row else 12 + self.rows // 4 if self.scaled else 0
        return self.weight_registers + 4 * self.tiles + cells + lent + parts + (42 if self.split == 1 else 44)

    @property
    def _cell_registers(self) -> int:
        # Further cells of a thread take fewer than the first one in backward passes of 16 bits, but not in others, nor
        # beside the sums of many tiles, where the assembler spills.
        own = self.cell_size.registers if self.cell_size else 0
        further = own * 2 // 3 if self.backward and self.value_bytes == 2 and self.tiles <= 2 else own
        return own + (self.cells - 1) * further

    @property
    def blocks(self) -> int:
        """Blocks along the hidden units, whole clusters."""
        return math.ceil(self.hidden / (self.units * self.split)) * self.split

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: two steps' partial sums, and what a cluster sends."""
        received = 2 * 4 * self.split * self.rows * self.units if self.split > 1 else 0
        staging = self.warps * self.staged * self._span_bytes
        return max(self._sum_bytes, staging) + self._lent_bytes + received + self._cell_bytes

    @property
    def _cell_bytes(self) -> int:
        own = self.cell_size
        if own is None:
            return 0
        return 4 * (self.units * own.unit + self.rows * own.row + self.units * self.rows * own.value)

    @property
    def ring_words(self) -> int:
        """Words of memory in which the blocks of a group of batch rows exchange statistics, as in statistics.cuh."""
        own, pairs = self.cell_size, 2 * math.ceil(self.blocks / 2) + 1  # of all blocks, and their total
        return 0 if own is None else 4 * own.exchanged * self.rows * pairs

    @property
    def staged(self) -> int:
        """Spans of weights that a warp of the backward pass has in shared memory at a time until they are turned."""
        if self.value_bytes == 4 or not self.backward:
            return 0
        room = max(self._sum_bytes, _STAGING_BYTES - self._lent_bytes)
        return max(1, min(self.spans, room // (self.warps * self._span_bytes)))

    @property
    def _span_bytes(self) -> int:
        return self.tiles * 1024 + 512

    @property
    def _sum_bytes(self) -> int:
        parts = 1 if self.warpgroups else self.warps
        return 2 * 4 * parts * self.rows * (self.tiles * 16 + 4)

    @property
    def _lent_bytes(self) -> int:
        if self.warpgroups:  # batch rows instead of weights, in aligned panels of 64 values
            return math.ceil(self.depth / 64) * self.rows * 128 + 1024
        return (self.tiles - self.resident) * self.warps * self.spans * self._fragments * 512

    @property
    def grid(self) -> tuple[int, int, int]:
        """Blocks in x (units), y (groups at work) and z (directions)."""
        return self.blocks, self.together, self.directions

    @property
    def chunk(self) -> int:
        """Spans that one poll loads: as many as leave registers for a second poll in flight."""
        return self._polls[0]

    @property
    def ahead(self) -> int:
        """Polls in flight: as many as there are registers for, together at most ten loads of 16 bytes a lane."""
        return self._polls[1]

    @property
    def _polls(self) -> tuple[int, int]:
        if self.warpgroups:
            return 1, 1  # loads go to shared memory
        free, spans = (_register_limit(self.warps) - self.registers) // 4, self.spans
        sizes = (size for size in (4, 3, 2) if spans % size == 0 or size < spans)
        chunk = next((size for size in sizes if free // size >= 2), 1)
        return chunk, max(1, min(4, 10 // chunk, free // chunk))

    def macros(self, dtype: torch.dtype, ragged: bool, *, resets: bool = False) -> dict[str, int]:
        """The template parameters of the source, for tensors of a dtype of `value_bytes`."""
        names = {
            "HIDDEN": self.hidden,
            "UNITS": self.units,
            "ROWS": self.rows,
            "WARPS": self.warps,
            "SPANS": self.spans,
            "CHUNK": self.chunk,
            "RESIDENT": self.resident,
            "DEPTH": self.ahead,
            "RAGGED": int(ragged),
            "RESETS": int(resets),
            "STACKED": int(self.stacked),
            **formats.macros(dtype),
            "EXACT": int(self.exact),
            "ONE_ROW": int(self.one_row),
            "SHARED_BYTES": self.shared_bytes,
        }
        if self.cell_size is not None:
            names["RING_WORDS"] = self.ring_words
        if self.warpgroups:
            names["WARPGROUPS"] = 1
        return {**names, "SPLIT": self.split, "STAGED": self.staged} if self.backward else names

    def quantities(self) -> dict[str, float]:
        """The amounts of what a step does that its time depends on, each in a unit of its own.

        By name: `steps`, 1; `warps`, `spans` and `blocks` of the tiling; `cells` of a thread; `loads` of 64 bytes of
        the other operand; `traffic`, the bytes of it that all blocks read from the second-level cache; `memory`, the
        bytes of gates, cells and outputs; `lent`, rows of fragments of weights read from shared memory; `products` of
        tensor-core tiles with 8 rows; `items`, slices of the depth times 8 rows, and `slices` alone; `span_rows`, those
        of one warp; `sums`, partial sums added up; `rounds`, polls after the first; `uneven`, 1 where the last block
        has fewer units; `sends`, 1 where a cluster shares the depth, and `sent`, the sums that it sends.
        """
        operand = self.rows * self.depth * self.value_bytes
        at_once = self.together * self.directions
        slices, eights = self.warps * self.spans, self.rows / 8
        in_parts = 4 if self.exact and not self.one_row else 1
        return {
            "steps": 1,
            "warps": self.warps,
            "spans": self.spans,
            "blocks": self.blocks,
            "cells": self.cells,
            "loads": operand / SPAN_BYTES,
            "traffic": operand * self.blocks * at_once,
            "memory": 11 * self.value_bytes * at_once * self.rows * self.hidden,
            "lent": (self.tiles - self.resident) * slices * self.rows,
            "products": in_parts * self.tiles * slices * eights,
            "items": slices * eights,
            "slices": slices,
            "span_rows": self.spans * eights,
            "sums": self.tiles * self.warps * eights,
            "rounds": self._poll_rounds - 1,
            "uneven": self.hidden % (self.units * self.split) > 0,
            "sends": self.split > 1,
            "sent": self.split * self.rows * self.units if self.split > 1 else 0,
        }

    @property
    def rounds(self) -> int:
        """Times that a step is repeated, each for the groups at work at the same time."""
        return math.ceil(self.groups / self.together)

    def step_clocks(self, device: Device) -> float:
        """Rank a tiling among others: the clock cycles that its quantities amount to by measured weights."""
        return self.clocks_by(measured_weights(device, self.ranking))

    def clocks_by(self, weights: Mapping[str, float]) -> float:
        """Return the clock cycles that the quantities of a step amount to by weights."""
        quantities = self.quantities()
        clocks = sum(weight * quantities[name] for name, weight in weights.items() if name != "few_warps")
        few_warps = self.warps == 4 and self.spans > 4
        return self.rounds * clocks * (1 + weights.get("few_warps", 0.0) * few_warps)

    @property
    def ranking(self) -> str:
        """The name of the weights that rank such tilings."""
        number = "16-bit" if self.value_bytes == 2 else "exact" if self.exact else "TF32"
        products = " by warpgroups" if self.warpgroups else ""
        return f"persistent {'backward' if self.backward else 'forward'} {number}{products}"

    @property
    def _poll_rounds(self) -> int:
        chunk, ahead = self._polls
        return math.ceil(self.spans * self.rows / 8 / (chunk * ahead))


def hidden_of(hidden_size: int) -> int:
    """Return the hidden size that the kernels see: a multiple of 8, the rest padded."""
    return math.ceil(hidden_size / 8) * 8


@functools.lru_cache(maxsize=4096)
def tiling(
    hidden_size: int,
    batch: int,
    directions: int,
    device: Device,
    backward: bool,
    value_bytes: int = 2,
    exact: bool = False,
    cell_size: CellSize | None = None,
    masked: bool = False,
) -> Tiling | None:
    """Return the tiling with the least predicted time, or None when the weights do not fit on the chip.

    Both directions go into one launch where there is room for them; otherwise `Tiling.directions` is 1 and they follow
    each other. With `masked`, the tiling is for a cell with masks, which take registers that products by warpgroups
    need for many cells.
    """
    return min(
        (
            candidate
            for together in sorted({1, directions})
            for candidate in candidates(hidden_size, batch, together, device, backward, value_bytes, exact, cell_size)
            if not (masked and candidate.warpgroups)
        ),
        key=lambda candidate: candidate.step_clocks(device) * directions / candidate.directions,
        default=None,
    )


@functools.lru_cache(maxsize=4096)
def stacked_tiling(
    hidden_size: int, batch: int, device: Device, backward: bool, value_bytes: int = 2, exact: bool = False
) -> Tiling | None:
    """Return the tiling of two stacked layers in one launch with the least predicted time; None if there is no room."""
    sizes = hidden_size, batch, _ROWS_OF_STACKED, device, backward, value_bytes, exact
    found = [dataclasses.replace(each, stacked=True) for each in candidates(*sizes) if not each.warpgroups]
    return min(found, key=lambda candidate: candidate.step_clocks(device), default=None)


def candidates(
    hidden_size: int,
    batch: int,
    directions: int,
    device: Device,
    backward: bool,
    value_bytes: int = 2,
    exact: bool = False,
    cell_size: CellSize | None = None,
) -> list[Tiling]:
    """Return every tiling that fits on the device with so many directions at once."""
    found = []
    one_row = exact and batch == 1
    for cut in _of_one_group(hidden_of(hidden_size), device, backward, value_bytes, exact, one_row, cell_size):
        if cut.rows >= batch + 8 and cut.rows > 8:
            continue
        groups = math.ceil(batch / cut.rows)
        together = min(groups, multiprocessors(device, cut.split) // (cut.blocks * directions))
        if together > 0:
            found.append(dataclasses.replace(cut, groups=groups, together=together, directions=directions))
    return found


@functools.lru_cache(maxsize=256)
def _of_one_group(
    hidden: int,
    device: Device,
    backward: bool,
    value_bytes: int,
    exact: bool,
    one_row: bool,
    cell_size: CellSize | None,
) -> tuple[Tiling, ...]:
    """Return every tiling of which a block fits on the device: the same for each of the many batches asked for."""
    splits = (1, 2, 4) if backward and device.capability >= (9, 0) else (1,)
    found = []
    for units, rows, warps, split in itertools.product(_UNITS, _ROWS, _WARPS, splits):
        numbers = {"value_bytes": value_bytes, "exact": exact, "one_row": one_row, "cell_size": cell_size}
        cut = Tiling(hidden, units, rows, warps, 1, split, backward, **numbers)
        if _whole_tiles(cut):
            found += [placed for placed in _with_weights_placed(cut) if fits(placed, device)]
        if _has_warpgroups(cut, device):
            by_warpgroups = dataclasses.replace(cut, resident=cut.tiles, warpgroups=True)
            found += [by_warpgroups] if fits(by_warpgroups, device) else []
    return tuple(found)


def _with_weights_placed(cut: Tiling) -> list[Tiling]:
    """Return a tiling of one resident tile with as many of them as leave registers for loads."""
    # All of them in registers if three loads in flight have room beside them; otherwise as many as leave room for four.
    # Scaled ones take half the registers, and twice the loads: or as many as leave room for six.
    whole = dataclasses.replace(cut, resident=cut.tiles)
    rooms = (3, 6) if cut.scaled else (3,) if _registers_fit(whole, loads=3) else (4,)
    placed = []
    for loads in rooms:
        # Of all but the last tile, each takes as many registers as the first.
        more = (_register_limit(cut.warps) - 4 * loads - cut.registers) // cut.weight_registers
        some = 1 + max(0, min(more, cut.tiles - 2))
        placed.append(whole if _registers_fit(whole, loads) else dataclasses.replace(cut, resident=some))
    return list(dict.fromkeys(placed))


def _has_warpgroups(cut: Tiling, device: Device) -> bool:
    """Whether the product of a tiling can be computed by two warpgroups, and takes less time then."""
    # wgmma is an instruction of this architecture alone.
    possible = device.capability == (9, 0) and cut.value_bytes == 2 and not cut.backward and cut.cell_size is None
    if not possible or (cut.units, cut.warps) != (32, 8) or cut.rows not in _ROWS_OF_WARPGROUPS:
        return False
    bounds = measured_weights(device, "persistent warpgroups")
    return bounds["least_units"] <= cut.hidden <= bounds["most_units"]


def _whole_tiles(cut: Tiling) -> bool:
    return not (cut.backward and cut.split * cut.units % 16)


def _registers_fit(cut: Tiling, loads: int) -> bool:
    return cut.registers + 4 * loads <= _register_limit(cut.warps)


def _register_limit(warps: int) -> int:
    # Of 255 at most, or of an even share of the multiprocessor's; the rest is slack for the compiler.
    return min(255, 65536 // (32 * warps)) - 9


def fits(cut: Tiling, device: Device) -> bool:
    """Whether a block fits in one multiprocessor, with whole tensor-core tiles."""
    if not (_whole_tiles(cut) and _registers_fit(cut, loads=1) and cut.shared_bytes <= shared_memory(device)):
        return False
    # The pairs of four units each take the place of the partial sums of a step.
    if cut.cell_size and cut.cell_size.widest * cut.units // 2 > cut.warps * (cut.tiles * 16 + 4):
        return False
    if cut.warpgroups:
        return True
    # With fewer loads in flight a warp waits for memory once for each of them.
    chunk, ahead = cut._polls
    return ahead * chunk >= min(3, cut.spans * cut.rows // 8)


def multiprocessors(device: Device, split: int) -> int:
    """Return the multiprocessors that whole clusters can use.

    Clusters stay inside a processing cluster of the chip, and those are not all multiples of four: an H200 holds 30
    clusters of four on its 132 multiprocessors.
    """
    return (
        device.multiprocessors - device.multiprocessors // 11 if split == 4 else device.multiprocessors // split * split
    )


def shared_memory(device: Device) -> int:
    """Return the shared memory of a block, less a kilobyte for what is static and reserved."""
    kilobytes = {(8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}
    return (kilobytes.get(device.capability, 99) - 1) * 1024
