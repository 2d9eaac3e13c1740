"""A tiling: how the work of a pass is divided among thread blocks, what they need, and how long a step takes."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Mapping
from typing import Any

import torch

from gatewise.contract.device import Device
from gatewise.contract.ranking import weights as measured_weights
from gatewise.kernels.cuda import formats
from gatewise.kernels.persistent.sizes.cell_size import CellSize

_SPAN_BYTES = 64  # of a batch row that a warp multiplies at once
_LEAST_PADDED_BYTES = 512  # of a batch row
_MOST_LOADS = 10  # of 16 bytes that a lane has in flight
_STAGING_BYTES = 80 * 1024  # of a block's weights at a time, unless its sums take more: enough to keep memory busy

OF_ALL_GROUPS = frozenset({"traffic", "memory"})
"""The quantities of all groups of batch rows that are at work; the others are those of one block."""


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
        buffers: Steps whose partial sums are in shared memory: 2, or 1 with a further barrier in each step where two
            do not fit.
        eights: Groups of eight batch rows whose products a warp computes at the same time: a read of weights from
            shared memory serves all of them, and the loads of all are in flight together.
        distributed: Whether the blocks of a group of batch rows are one cluster, and exchange values through
            distributed shared memory instead of the second-level cache.
        resident_blocks: Blocks that share a multiprocessor; more than 1 only with `distributed`.
        wide: Whether `eights` could be more than 1 in the call that the tiling is for. The tilings of such calls have
            a ranking of their own.
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
    buffers: int = 2
    eights: int = 1
    wide: bool = False
    distributed: bool = False
    resident_blocks: int = 1

    def replace(self, **changes: Any) -> Tiling:
        """Return a tiling with other values, in a third of the time of `dataclasses.replace`: choices make hundreds."""
        return Tiling(**dict(zip(_FIELDS, _values(self), strict=True), **changes))

    @property
    def depth(self) -> int:
        """Values of the other operand that a block multiplies its weights with."""
        return (4 if self.backward else 1) * self.hidden // self.split

    @property
    def tiles(self) -> int:
        """Tensor-core tiles of 16 weight rows in a block."""
        return _ceil_div((1 if self.backward else 4) * self.split * self.units, 16)

    @property
    def scaled(self) -> bool:
        """Whether float32 products are made in float16, with powers of two taken out: one for each row of a warp."""
        return self.value_bytes == 4 and not self.exact

    @property
    def spans(self) -> int:
        """Spans of the depth that each warp takes."""
        return _ceil_div(self.depth * self.value_bytes, _SPAN_BYTES * self.warps)

    @property
    def cells(self) -> int:
        """Cells of a thread."""
        return _ceil_div(self.rows * self.units, 32 * self.warps)

    @property
    def weight_registers(self) -> int:
        """Registers of a thread that hold weights."""
        if self.distributed:
            # Of two tiles over half of the depth of all units; or of the gates of 32 units, for two tiles of a block.
            return 64 if self.backward else 16 * math.ceil(self.blocks / 2)
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
        if self.distributed:
            return self.weight_registers + 24 * self.cells + 60
        if self.warpgroups:
            # With many cells, the assembler computes their addresses again instead of spilling.
            return self.weight_registers + 100
        scaled, own, tiles = self.scaled, self.cells, self.tiles
        # In flight and waiting, gates take twice as many in float32; scaled ones of several cells wait a step only.
        single = scaled and own > 1
        cell = (17 if self.backward else 14 if single else 12) + (6 if self.value_bytes == 4 and not single else 0)
        cells = self._cell_registers if self.cell_size else cell * own
        parts = 40 if self.exact and not self.one_row else 12 + self.rows // 4 if scaled else 0
        sums = 4 * tiles * self.eights
        return self.weight_registers + sums + cells + self.lent_registers + parts + (42 if self.split == 1 else 44)

    @property
    def lent_registers(self) -> int:
        """Registers of a thread that weights in shared memory take."""
        # Of the few registers of a thread of 16 warps, the assembler spills where it has many loads in flight.
        crowded = self.value_bytes == 4 and self.warps == 16
        return 0 if self.resident == self.tiles else 20 if crowded else 4

    @property
    def _cell_registers(self) -> int:
        # Further cells of a thread take fewer than the first one in backward passes of 16 bits, but not in others, nor
        # beside the sums of many tiles, where the assembler spills.
        own = self.cell_size.registers if self.cell_size else 0
        further = own * 2 // 3 if self.backward and self.value_bytes == 2 and self.tiles <= 2 else own
        return own + (self.cells - 1) * further

    @property
    def free_registers(self) -> int:
        """Registers of a thread that are left for loads in flight; negative if there are too few."""
        # Of 255 at most, or of an even share of the multiprocessor's; the rest is slack for the compiler.
        return min(255, 65536 // (32 * self.warps)) - 9 - self.registers

    @property
    def cluster(self) -> int:
        """Blocks of a cluster; 0 for none."""
        return self.blocks if self.distributed else self.split if self.split > 1 else 0

    @property
    def blocks(self) -> int:
        """Blocks along the hidden units, whole clusters."""
        return _ceil_div(self.hidden, self.units * self.split) * self.split

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: one or two steps' partial sums, and what a cluster sends."""
        if self.distributed:
            return self._distributed_bytes
        received = 2 * 4 * self._received
        staging = self.warps * self.staged * self._span_bytes
        return max(self._sum_bytes, staging) + self._lent_bytes + received + self._cell_bytes

    @property
    def _distributed_bytes(self) -> int:
        units = self.blocks * self.units
        if not self.backward:
            return self._sum_bytes + 2 * self.rows * _pitch_of(units)
        received = 2 * 4 * self.rows * units
        return max(received + 2 * self.rows * _pitch_of(4 * self.units), 4 * self.units * (2 * units + 16))

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
        parts = 2 if self.distributed else 1 if self.warpgroups else self.warps
        return self.buffers * 4 * parts * self.rows * (self.tiles * 16 + 4)

    @property
    def _received(self) -> int:
        # Sums that a block receives in a step: in the backward pass its own, too.
        if self.split == 1:
            return 0
        return (self.split if self.backward else 4 * (self.split - 1)) * self.rows * self.units

    @property
    def _lent_bytes(self) -> int:
        if self.warpgroups:  # batch rows instead of weights, in aligned panels of 64 values
            return math.ceil(self.depth / 64) * self.rows * 128 + 1024
        return (self.tiles - self.resident) * self.warps * self.spans * self._fragments * 512

    @property
    def row_width(self) -> int:
        """Values from one batch row of exchanged hidden states to the next: whole loads, each within a cache line.

        In a cluster nothing is loaded; padding of short rows would take more than a tenth of their memory.
        """
        row = self.hidden * self.value_bytes
        if self.distributed or row < _LEAST_PADDED_BYTES:
            return self.hidden
        return _ceil_div(row, _SPAN_BYTES) * _SPAN_BYTES // self.value_bytes

    @property
    def grid(self) -> tuple[int, int, int]:
        """Blocks in x (units), y (groups at work) and z (directions)."""
        return self.blocks, self.together, self.directions

    @property
    def chunk(self) -> int:
        """Spans that one poll loads: as many as leave registers for a second poll in flight."""
        return self.polls[0]

    @property
    def ahead(self) -> int:
        """Polls in flight: as many as there are registers for."""
        return self.polls[1]

    @property
    def polls(self) -> tuple[int, int]:
        """The spans that one poll loads for each of its groups of rows, and the polls in flight."""
        if self.warpgroups or self.distributed:
            return 1, 1  # loads go to shared memory
        spans, most = self.spans, min(self.free_registers // 4, _MOST_LOADS) // self.eights
        sizes = [size for size in (4, 3, 2) if 2 * size <= most]
        chunk = next((size for size in sizes if spans % size == 0 or size < spans), 1)
        return chunk, max(1, min(4, most // chunk))

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
            "MOST_AHEAD": self.ahead,
            "RAGGED": int(ragged),
            "RESETS": int(resets),
            "STACKED": int(self.stacked),
            **formats.macros(dtype),
            "EXACT": int(self.exact),
            "ONE_ROW": int(self.one_row),
            "SHARED_BYTES": self.shared_bytes,
            "SPLIT": self.split,
            "BUFFERS": self.buffers,
        }
        if self.eights > 1:
            names["EIGHTS"] = self.eights
        if self.cell_size is not None:
            names["RING_WORDS"] = self.ring_words
        if self.warpgroups:
            names["WARPGROUPS"] = 1
        if self.distributed:
            names |= {"DISTRIBUTED": 1, "BLOCKS": self.blocks, "RESIDENT_BLOCKS": self.resident_blocks}
        return {**names, "STAGED": self.staged} if self.backward else names

    def quantities(self) -> dict[str, float]:
        """The amounts of what a step does that its time depends on, each in a unit of its own.

        By name: `steps`, 1; `warps`, `spans` and `blocks` of the tiling; `cells` of a thread; `loads` of 64 bytes of
        the other operand; `traffic`, the bytes of it that all blocks read from the second-level cache; `memory`, the
        bytes of gates, cells and outputs; `lent`, rows of fragments of weights read from shared memory; `products` of
        tensor-core tiles with 8 rows; `passes` over the weights; `items`, slices of the depth times 8 rows, and
        `slices` alone; `span_rows`, those of one warp; `sums`, partial sums added up; `rounds`, polls after the first;
        `uneven`, 1 where the last block has fewer units; `sends`, 1 where a cluster shares the depth, and `sent`, the
        sums that a block receives; `barriers`, 1 where a step has a further one; `shares`, 1 where two blocks share a
        multiprocessor.
        """
        operand, tiles, spans, blocks = self.rows * self.depth * self.value_bytes, self.tiles, self.spans, self.blocks
        at_once = self.together * self.directions
        slices, row_groups = self.warps * spans, self.rows / 8
        in_parts = 4 if self.exact and not self.one_row else 1
        return {
            "steps": 1,
            "warps": self.warps,
            "spans": spans,
            "blocks": blocks,
            "cells": self.cells,
            "loads": operand / _SPAN_BYTES,
            "traffic": operand * blocks * at_once,
            "memory": 11 * self.value_bytes * at_once * self.rows * self.hidden,
            "lent": (tiles - self.resident) * slices * 8 * self._passes,
            "products": in_parts * tiles * slices * row_groups,
            "items": slices * row_groups,
            "slices": slices,
            "passes": self._passes,
            "span_rows": spans * row_groups,
            "sums": tiles * self.warps * row_groups,
            "rounds": self._poll_rounds - 1,
            "uneven": self.hidden % (self.units * self.split) > 0,
            "sends": self.split > 1,
            "sent": self._received,
            "barriers": self.buffers == 1,
            "shares": self.resident_blocks > 1,
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
        clocks = sum([weight * quantities[name] for name, weight in weights.items() if name != "few_warps"])
        return self.rounds * clocks * self.factor_by(weights)

    def factor_by(self, weights: Mapping[str, float]) -> float:
        """Return the factor of the clock cycles of all quantities."""
        return 1 + weights.get("few_warps", 0.0) * (self.warps == 4 and self.spans > 4)

    @property
    def ranking(self) -> str:
        """The name of the weights that rank such tilings."""
        layer = "wide " if self.wide and not self.warpgroups else ""
        products = " in clusters" if self.distributed else " by warpgroups" if self.warpgroups else ""
        return f"persistent {layer}{self.kind}{products}"

    @property
    def kind(self) -> str:
        """The pass and its numbers, as names of measured weights have them."""
        number = "16-bit" if self.value_bytes == 2 else "exact" if self.exact else "TF32"
        return f"{'backward' if self.backward else 'forward'} {number}"

    @property
    def _passes(self) -> int:
        # Over the weights, in a step.
        return _ceil_div(self.rows, 8 * self.eights)

    @property
    def _poll_rounds(self) -> int:
        chunk, ahead = self.polls
        return _ceil_div(self.spans * self._passes, chunk * ahead)


def _pitch_of(values: int) -> int:
    # The bytes of a row in shared memory whose values lanes load without bank conflicts, as in distributed.cuh.
    return values * 2 + (64 if values * 2 % 128 == 0 else 0)


def _ceil_div(total: int, each: int) -> int:
    # In less time than `math.ceil` of the quotient: choices ask for it thousands of times.
    return -(total // -each)


_FIELDS = tuple(field.name for field in dataclasses.fields(Tiling))
_values = operator.attrgetter(*_FIELDS)
