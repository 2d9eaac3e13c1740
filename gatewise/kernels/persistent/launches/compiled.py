"""Choose the kernel of a pass, with its tiling and launch configuration; it is compiled at its first launch."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path

import torch

from gatewise.cells import Cell
from gatewise.contract import ranking
from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from gatewise.kernels.cuda import driver, toolchain
from gatewise.kernels.persistent.sizes import memory
from gatewise.kernels.persistent.sizes.cell_size import cell_size_of
from gatewise.kernels.persistent.sizes.exactness import exact_products
from gatewise.kernels.persistent.sizes.free_multiprocessors import device_of_pass
from gatewise.kernels.persistent.sizes.step import code_of, has_fused_passes, macros_of
from gatewise.kernels.persistent.sizes.tiling import Tiling
from gatewise.kernels.persistent.sizes.tiling_choice import launched_shared_bytes, stacked_tiling, tiling

SOURCES = Path(__file__).parents[1] / "cuda"


@dataclasses.dataclass(frozen=True)
class Launch:
    """A pass for a tiling, which is compiled when it is first launched.

    Attributes:
        tiling: The tiling.
        entry: The kernel's name in the machine code.
        shape: The grid, the block size, the shared memory and the clusters.
        compile: A function that returns the machine code.
        interleaved: Whether the rows of the values that blocks exchange are interleaved, as sequence.cuh describes it.
        source: The key of the machine code, equal for launches of the same code, such as those of several batches.
    """

    tiling: Tiling
    entry: str
    shape: driver.Shape
    compile: Callable[[], bytes]
    interleaved: bool = False
    source: tuple[object, ...] = ()

    def exchange_shape(self, directions: int, time: int) -> tuple[int, int, int, int]:
        """Return a shape with as many values as the exchange buffer has, if rows are interleaved.

        In the forward pass these are the hidden states before the first step and after each [D, T + 1, rows, H], H
        padded to 64 bytes; in the backward pass the gradients of gate sums [D, T, rows, 4H], H padded to a multiple of
        8. The rows are those of all groups, also rows beyond the batch. The order of the values of a step is that of
        `interleaved_place` in product.cuh.
        """
        cut = self.tiling
        rows = cut.groups * cut.rows
        return (directions, time, rows, 4 * cut.hidden) if cut.backward else (directions, time + 1, rows, cut.row_width)

    @functools.cached_property
    def binary(self) -> bytes:
        """The machine code."""
        return self.compile()


def forward_launch(problem: Problem, batch: int, directions: int, ragged: bool, device: Device) -> Launch:
    """Return the forward pass of a layer."""
    return _launch_of("forward", problem, batch, directions, ragged, device)


def backward_launch(problem: Problem, batch: int, directions: int, ragged: bool, device: Device) -> Launch:
    """Return the backward pass of a layer."""
    return _launch_of("backward", problem, batch, directions, ragged, device)


def pair_launch(name: str, problem: Problem, batch: int, ragged: bool, device: Device) -> Launch:
    """Return the pass "forward" or "backward" of a pair of layers."""
    return _launch_of(name, problem, batch, 1, ragged, device, pair=True)


def _launch_of(
    name: str, problem: Problem, batch: int, directions: int, ragged: bool, device: Device, *, pair: bool = False
) -> Launch:
    sizes, precision = (problem.hidden_size, batch, directions), (problem.dtype, exact_products(problem))
    device = device_of_pass(problem, device, backward=name == "backward")
    interleaves = memory.interleaves_rows(problem, backward=name == "backward")
    options = pair, problem.resets, problem.time == 1, interleaves
    return launch_of(name, problem.cell, *sizes, *precision, ragged, device, *options)


@functools.lru_cache(maxsize=4096)
def launch_of(
    name: str,
    cell: Cell,
    hidden_size: int,
    batch: int,
    directions: int,
    dtype: torch.dtype,
    exact: bool,
    ragged: bool,
    device: Device,
    pair: bool = False,
    resets: bool = False,
    one_step: bool = False,
    interleaves: bool = False,
) -> Launch:
    """Return the pass "forward" or "backward" of a layer, or of a pair of layers.

    With `interleaves`, blocks may exchange values in interleaved rows.

    Raises:
        ValueError: The weights do not fit on the chip, which a criterion refuses beforehand.
    """
    asked = device, name == "backward", dtype.itemsize, exact
    fused = has_fused_passes(cell)
    if pair:
        chosen = stacked_tiling(hidden_size, batch, *asked)
    else:
        size = cell_size_of(cell, backward=name == "backward")
        masked = bool(macros_of(cell))
        steps = {"one_group": ragged, "one_step": one_step}
        chosen = tiling(hidden_size, batch, directions, *asked, size, masked=masked, **steps)
    if chosen is None:
        raise ValueError(f"the weights of hidden_size {hidden_size} do not fit on the chip")
    macros = {"SIZE": hidden_size, **chosen.macros(dtype, ragged, resets=resets), **macros_of(cell)}
    # Clusters that hold a group of rows wait for no others, so that not all have to be resident at once.
    shape = driver.Shape(
        chosen.grid,
        chosen.warps * 32,
        launched_shared_bytes(chosen, device),
        chosen.cluster,
        cooperative=not chosen.distributed,
    )

    interleaved = interleaves and not (chosen.distributed or chosen.warpgroups)
    file = name if fused else f"row_{name}"
    if not fused:
        exchange = ranking.weights(device, "persistent statistics")
        macros |= {"PAUSE": int(exchange["pause"]), "MOST_BYTES": int(exchange["bytes"])}
    elif not (pair or chosen.distributed or chosen.warpgroups):
        macros["PAUSE"] = _pause(chosen, interleaved, device)
    if interleaved:
        macros |= {"INTERLEAVED": 1, "SKIPPED_BEYOND": 0 if ragged else _rows_left_out(chosen, batch)}

    # The instructions of warpgroups are those of the architecture with the suffix.
    architecture = device.architecture + ("a" if chosen.warpgroups else "")

    def compile_pass() -> bytes:
        return toolchain.compile_source(SOURCES / f"{file}.cu", architecture, macros, code_of(cell))

    source = file, architecture, tuple(macros.items()), cell
    return Launch(chosen, f"recurrent_{file}", shape, compile_pass, interleaved, source)


def _rows_left_out(chosen: Tiling, batch: int) -> int:
    """Return which interleaved rows beyond a batch are not loaded, as sequence.cuh describes it.

    Where rows have lengths, none of these is loaded in any case. In forward passes, the condition that leaves out all
    of eight rows takes longer than to load them (benchmarks/results/interleaved.jsonl).
    """
    beyond = chosen.groups * chosen.rows - batch
    if beyond < 8:
        return int(beyond > 0)
    return 2 if chosen.backward else 0


def _pause(chosen: Tiling, interleaved: bool, device: Device) -> int:
    """Return the clock cycles between the stores of a step and the first loads of what other blocks stored."""
    shared = " of a shared depth" if not chosen.backward and chosen.split > 1 else ""
    rows = " interleaved" if interleaved else shared
    sizes = chosen.rows, chosen.blocks, math.prod(chosen.grid)
    for most, pause in ranking.weights(device, f"persistent pauses {chosen.kind}{rows}").items():
        if all(size <= float(limit) for size, limit in zip(sizes, most.split(" x "), strict=True)):
            return int(pause)
    raise ValueError(f"no pause for {chosen}")


def pointers_of_each_direction(*names: str) -> list[tuple[str, type]]:
    """Return the fields of a struct that hold two pointers for each name: one for each direction."""
    return [(f"{name}_{direction}", ctypes.c_void_p) for name in names for direction in ("forward", "reverse")]
