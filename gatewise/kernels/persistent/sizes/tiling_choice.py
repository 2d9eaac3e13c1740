"""Choose the tiling of a pass with the least predicted time among all that fit on a device."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from gatewise.contract.device import Device
from gatewise.contract.ranking import weights as measured_weights
from gatewise.kernels.persistent.sizes.cell_size import CellSize
from gatewise.kernels.persistent.sizes.padding import hidden_of
from gatewise.kernels.persistent.sizes.tiling import OF_ALL_GROUPS, Tiling

_UNITS = (8, 12, 16, 20, 24, 32)
_ROWS = (8, 16, 24, 32, 40, 48, 56, 64)
_WARPS = (4, 8, 16)
_ROWS_OF_WIDE_LAYERS = (40, 56)
_MOST_ROWS_OF_TF32 = 32
_MOST_GROUPS, _WARPS_OF_SEVERAL_GROUPS = 5, 8  # of eight batch rows that a warp multiplies at the same time
_ROWS_OF_WARPGROUPS = (24, 32, 48, 64)  # with a product in warpgroup.cuh
_DISTRIBUTED = {"units": 32, "rows": 8, "warps": 8}  # with blocks in clusters, as in distributed.cuh
_MOST_BLOCKS_OF_CLUSTER = 8  # on every GPU with clusters
_PARTS_OF_PAIR = 3  # of blocks: two layers, and the products between them


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
    one_group: bool = False,
    one_step: bool = False,
) -> Tiling | None:
    """Return the tiling with the least predicted time, or None when the weights do not fit on the chip.

    Both directions go into one launch where there is room for them; otherwise `Tiling.directions` is 1 and they follow
    each other.

    With `one_group`, blocks multiply one group of eight batch rows at a time, which takes less time where rows end at
    different steps. With `masked`, the tiling is for a cell with masks, which take registers: blocks multiply one group
    at a time, and not by warpgroups. With `one_step`, it is for a single step, whose time is that of reading the
    weights. Blocks multiply one group at a time then, too, and the tilings of `_is_for_wide_layers`, with which weights
    may be read for more groups of batch rows, are chosen only where no other fits.
    """
    sizes = device, backward, value_bytes, exact, cell_size
    found = [
        candidate
        for at_once in sorted({1, directions})
        for candidate in _candidates(hidden_size, batch, at_once, *sizes, several=not (one_group or one_step or masked))
        if not (masked and candidate.block.cut.warpgroups)
        and not ((masked or one_step) and candidate.block.cut.distributed)
    ]
    best = min(
        found,
        key=lambda candidate: (
            one_step and _is_for_wide_layers(candidate.block.cut),
            candidate.clocks * directions / candidate.directions,
        ),
        default=None,
    )
    return None if best is None else best.tiling()


@functools.lru_cache(maxsize=4096)
def stacked_tiling(
    hidden_size: int, batch: int, device: Device, backward: bool, value_bytes: int = 2, exact: bool = False
) -> Tiling | None:
    """Return the tiling of two stacked layers in one launch with the least predicted time; None if there is no room."""
    sizes = hidden_size, batch, _PARTS_OF_PAIR, device, backward, value_bytes, exact
    found = [candidate for candidate in _candidates(*sizes, several=False) if _can_be_stacked(candidate.block.cut)]
    best = min(found, key=lambda candidate: candidate.clocks, default=None)
    return None if best is None else best.tiling().replace(stacked=True)


def _can_be_stacked(cut: Tiling) -> bool:
    return not cut.warpgroups and not cut.distributed and (cut.backward or cut.split == 1)


def candidates(
    hidden_size: int,
    batch: int,
    directions: int,
    device: Device,
    backward: bool,
    value_bytes: int = 2,
    exact: bool = False,
    cell_size: CellSize | None = None,
    *,
    several: bool = True,
) -> list[Tiling]:
    """Return every tiling that fits on the device with so many directions at once.

    With `several`, those of wide layers may multiply several groups of batch rows at a time.
    """
    sizes = hidden_size, batch, directions, device, backward, value_bytes, exact, cell_size
    return [candidate.tiling() for candidate in _candidates(*sizes, several=several)]


class _Block(NamedTuple):
    """A tiling of one group of batch rows, with the values that choices for many batches need.

    Attributes:
        cut: The tiling.
        most: The number of groups that fit on the device at the same time, those of all directions together.
        terms: The summands of the clock cycles of a step: a constant, and a weight and a quantity for each group at
            work.
        factor: The factor of the sum.
    """

    cut: Tiling
    most: int
    terms: tuple[tuple[float, float, float], ...]
    factor: float

    @classmethod
    def of(cls, cut: Tiling, device: Device) -> _Block:
        """Return the values of a tiling on a device."""
        weights, quantities = measured_weights(device, cut.ranking), cut.quantities()
        terms = [
            (0.0, weight, quantities[name]) if name in OF_ALL_GROUPS else (weight * quantities[name], 0.0, 0.0)
            for name, weight in weights.items()
            if name != "few_warps"
        ]
        shared = clusters(device, cut.blocks) * cut.resident_blocks
        most = shared if cut.distributed else multiprocessors(device, cut.split) // cut.blocks
        return cls(cut, most, tuple(terms), cut.factor_by(weights))


class _Candidate(NamedTuple):
    """A block with the numbers of groups of batch rows: those in all, those at work together, and the directions."""

    block: _Block
    groups: int
    together: int
    directions: int

    @property
    def clocks(self) -> float:
        """The clock cycles of a step, which are those of `Tiling.step_clocks`."""
        _, _, terms, factor = self.block
        at_once = self.together * self.directions
        clocks = sum([alone + weight * (quantity * at_once) for alone, weight, quantity in terms])
        return math.ceil(self.groups / self.together) * clocks * factor

    def tiling(self) -> Tiling:
        """Return the tiling; few of those that are compared are asked for it."""
        return self.block.cut.replace(groups=self.groups, together=self.together, directions=self.directions)


def _candidates(
    hidden_size: int,
    batch: int,
    directions: int,
    device: Device,
    backward: bool,
    value_bytes: int,
    exact: bool,
    cell_size: CellSize | None = None,
    *,
    several: bool = True,
) -> Iterator[_Candidate]:
    """Yield every tiling that fits on the device with so many directions at once."""
    hidden, one_row = hidden_of(hidden_size), exact and batch == 1
    least = measured_weights(device, "persistent wide layers")["least_units_of_several_groups"]
    several = several and cell_size is None and not exact and hidden >= least
    for block in _of_one_group(hidden, device, backward, value_bytes, exact, one_row, cell_size, several):
        rows = block.cut.rows
        groups = -(-batch // rows)
        together = min(groups, block.most // directions)
        if block.cut.distributed and not _in_one_wave(block, groups * directions):
            continue
        if together and (rows < batch + 8 or rows == 8):
            yield _Candidate(block, groups, together, directions)


@functools.lru_cache(maxsize=256)
def _of_one_group(
    hidden: int,
    device: Device,
    backward: bool,
    value_bytes: int,
    exact: bool,
    one_row: bool,
    cell_size: CellSize | None,
    several: bool,
) -> tuple[_Block, ...]:
    """Return every tiling of which a block fits on the device: the same for each of the many batches asked for."""
    splits = (1,) if device.capability < (9, 0) else (1, 2, 4) if backward else (1, 2)
    # In wide layers, blocks of more rows are faster although a step takes them longer, because they have fewer turns.
    # Where blocks may multiply several groups at a time, that begins with fewer units.
    least = measured_weights(device, "persistent wide layers")["least_units"]
    may_be_wide = several or (cell_size is None and not exact and hidden >= least)
    numbers = {"value_bytes": value_bytes, "exact": exact, "one_row": one_row, "cell_size": cell_size, "wide": several}
    found = []
    for units, rows, warps, split in itertools.product(_UNITS, _ROWS, _WARPS, splits):
        cut = Tiling(hidden, units, rows, warps, 1, split, backward, **numbers)
        if cut.blocks > multiprocessors(device, split):
            continue  # the blocks of a group of rows run at the same time
        possible = _whole_tiles(cut) and _can_share_depth(cut) and _was_ranked(cut)
        if possible and (may_be_wide or not _is_for_wide_layers(cut)):
            found += [
                held
                for multiplied in _with_groups_multiplied(cut)
                for placed in _with_weights_placed(multiplied)
                for held in _with_sums_held(placed, device, may_be_wide)
            ]
        if _has_warpgroups(cut, device):
            by_warpgroups = cut.replace(resident=cut.tiles, warpgroups=True)
            found += [by_warpgroups] if fits(by_warpgroups, device) else []
    found += _in_clusters(hidden, device, backward, numbers)
    return tuple([_Block.of(cut, device) for cut in found])


def _in_clusters(hidden: int, device: Device, backward: bool, numbers: dict[str, Any]) -> list[Tiling]:
    """Return the tilings whose blocks exchange values in clusters."""
    possible = device.capability >= (9, 0) and numbers["value_bytes"] == 2 and numbers["cell_size"] is None
    tiles = 2 if backward else 8
    cut = Tiling(hidden, **_DISTRIBUTED, resident=tiles, backward=backward, distributed=True, **numbers)
    gains = not (backward and cut.blocks == 1)
    if not (possible and gains and clusters(device, cut.blocks) and fits(cut, device)):
        return []
    # Two blocks share a multiprocessor on GPUs of as many as those on which the clusters were counted: so not where a
    # backward pass leaves multiprocessors free.
    shared = (1, 2) if _is_counted(device) else (1,)
    return [cut.replace(resident_blocks=number) for number in shared]


def _in_one_wave(block: _Block, number: int) -> bool:
    """Whether so many clusters are resident at once, and not with fewer blocks in a multiprocessor.

    Those of a second wave would begin after the whole sequence of the first.
    """
    alone = block.most // block.cut.resident_blocks
    return number <= block.most and (block.cut.resident_blocks == 1 or number > alone)


def _with_groups_multiplied(cut: Tiling) -> list[Tiling]:
    """Return a tiling with one group of eight batch rows multiplied at a time, and where it may be, with several."""
    if not cut.wide or cut.warps != _WARPS_OF_SEVERAL_GROUPS:
        return [cut]
    groups = cut.rows // 8
    # Of the numbers of groups with the same number of passes over the weights, the smallest.
    eights = {-(-groups // passes) for passes in range(1, groups + 1)}
    return [cut.replace(eights=number) for number in sorted(eights) if number <= _MOST_GROUPS]


def _with_weights_placed(cut: Tiling) -> list[Tiling]:
    """Return a tiling of one resident tile with as many of them as leave registers for loads."""
    # All of them in registers if three loads in flight have room beside them; otherwise as many as leave room for four.
    # Scaled ones take half the registers, and twice the loads: or as many as leave room for six. Where several groups
    # of rows are multiplied at the same time, as many as leave room for one to three loads of each.
    free, each = cut.free_registers, cut.weight_registers
    free_of_whole = free + cut.lent_registers - (cut.tiles - 1) * each
    if max(free, free_of_whole) < 4 * cut.eights:  # no room for a load
        return []
    if cut.eights > 1:
        rooms = [loads * cut.eights for loads in (1, 2, 3)]
    else:
        rooms = [3, 6] if cut.scaled else [3] if free_of_whole >= 12 else [4]
    placed = []
    for loads in rooms:
        # Of all but the last tile, each takes as many registers as the first.
        more = (free - 4 * loads) // each
        some = 1 + max(0, min(more, cut.tiles - 2))
        placed.append(cut.tiles if free_of_whole >= 4 * loads else some)
    return [cut.replace(resident=tiles) for tiles in dict.fromkeys(placed)]


def _with_sums_held(cut: Tiling, device: Device, may_be_wide: bool) -> list[Tiling]:
    """Return a tiling that fits, with the partial sums of two steps in shared memory; or of one, in wide layers."""
    # In TF32 with more rows, the assembler spills weights.
    one = may_be_wide and not (cut.scaled and cut.rows > _MOST_ROWS_OF_TF32)
    if fits(cut, device):
        return [cut]
    held = cut.replace(buffers=1)
    return [held] if one and fits(held, device) else []


def _can_share_depth(cut: Tiling) -> bool:
    """Whether the blocks of a cluster can share the depth of a product, if they do."""
    if cut.backward or cut.split == 1:
        return True
    # In 16 bits, sending the sums of four gates takes as long as the loads that it saves. A block's loads of 16 bytes
    # begin with its part of the depth.
    aligned = cut.hidden * cut.value_bytes % (16 * cut.split) == 0
    return aligned and cut.scaled and cut.rows <= _MOST_ROWS_OF_TF32


def _was_ranked(cut: Tiling) -> bool:
    """Whether a tiling is one of those that the weights of its ranking were fitted to."""
    if cut.wide or not cut.scaled:
        return True
    shares = not cut.backward and cut.split > 1
    return not (cut.tiles >= 8 and cut.spans >= 8) and not (shares and cut.tiles * cut.spans >= 64)


def _is_for_wide_layers(cut: Tiling) -> bool:
    """Whether a tiling is one of those that only layers with many units gain from."""
    return cut.rows in _ROWS_OF_WIDE_LAYERS or cut.buffers == 1 or (not cut.backward and cut.split > 1)


def _has_warpgroups(cut: Tiling, device: Device) -> bool:
    """Whether the product of a tiling can be computed by two warpgroups, and takes less time then."""
    # wgmma is an instruction of this architecture alone.
    possible = device.capability == (9, 0) and cut.value_bytes == 2 and not cut.backward and cut.cell_size is None
    if not possible or (cut.units, cut.warps, cut.split) != (32, 8, 1) or cut.rows not in _ROWS_OF_WARPGROUPS:
        return False
    bounds = measured_weights(device, "persistent warpgroups")
    return bounds["least_units"] <= cut.hidden <= bounds["most_units"]


def _whole_tiles(cut: Tiling) -> bool:
    return not (cut.backward and cut.split * cut.units % 16)


def fits(cut: Tiling, device: Device) -> bool:
    """Whether a block fits in one multiprocessor, with whole tensor-core tiles."""
    if not (_whole_tiles(cut) and cut.free_registers >= 4 * cut.eights and cut.shared_bytes <= shared_memory(device)):
        return False
    # The pairs of four units each take the place of the partial sums of a step.
    if cut.cell_size and cut.cell_size.widest * cut.units // 2 > cut.warps * (cut.tiles * 16 + 4):
        return False
    if cut.warpgroups:
        # The resets of 64 rows need a second kilobyte of static memory.
        return cut.shared_bytes + 1024 <= shared_memory(device)
    if cut.distributed:
        return True
    # With fewer loads in flight a warp waits for memory once for each of them.
    chunk, ahead = cut.polls
    return ahead * chunk * cut.eights >= min(3, cut.spans * cut.rows // 8)


def multiprocessors(device: Device, split: int) -> int:
    """Return the multiprocessors that whole clusters can use.

    A cluster stays inside a graphics processing cluster (GPC) of the chip, and not all GPCs have a multiple of four
    multiprocessors. An H200 holds 30 clusters of four on its 132: other GPUs are taken to lose the same share, 1/11.
    """
    return (
        device.multiprocessors - device.multiprocessors // 11 if split == 4 else device.multiprocessors // split * split
    )


def clusters(device: Device, blocks: int) -> int:
    """Return how many clusters of so many blocks are resident at once, with a multiprocessor for each block."""
    # A small part of a GPU may have no processing cluster with enough multiprocessors.
    if blocks > _MOST_BLOCKS_OF_CLUSTER or device.multiprocessors < 2 * blocks:
        return 0
    counted = measured_weights(device, "persistent clusters")
    return int(counted[str(blocks)] * device.multiprocessors / counted["multiprocessors"])


def _is_counted(device: Device) -> bool:
    counted = measured_weights(device, "persistent clusters")["multiprocessors"]
    return device.capability == (9, 0) and device.multiprocessors == counted


def launched_shared_bytes(cut: Tiling, device: Device) -> int:
    """Return the shared memory with which blocks are launched: more than they use where they are not to share any.

    On a GPU of which the size of the memory is not known, blocks may share a multiprocessor, which takes more time.
    """
    alone = cut.distributed and cut.resident_blocks == 1
    return max(cut.shared_bytes, shared_memory(device) // 2 + 1024) if alone else cut.shared_bytes


def shared_memory(device: Device) -> int:
    """Return the shared memory of a block, less a kilobyte for what is static and reserved."""
    kilobytes = {(8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}
    return (kilobytes.get(device.capability, 99) - 1) * 1024
