"""The element-wise CUDA kernels on the CPU: their sources, compiled by the C++ compiler of the machine.

Except for the launch, the code is the same as on a GPU: the layout of the argument structs, the strides, the
arithmetic.
"""

import ctypes
import functools
import shutil

import pytest

from gatewise.contract.device import Device
from gatewise.derivation.device import device_code
from gatewise.derivation.row import row_code
from gatewise.kernels.criteria import is_fused
from gatewise.kernels.stepwise import (
    backward_loop,
    chosen_algorithm,
    forward_loop,
    launch,
    layer,
    single,
    single_training,
)
from tests.kernels.cuda_on_cpu import PRELUDE, compile_cpp, precompiled, rewritten
from tests.kernels.persistent.sources_on_cpu import launch_on_cpu

_GRID = """
extern "C" void run(const {struct}* arguments, unsigned columns, unsigned rows, unsigned layers) {{
    for (unsigned z = 0; z < layers; z++)
        for (unsigned y = 0; y < rows; y++)
            for (unsigned x = 0; x < columns; x++)
                for (unsigned thread = 0; thread < THREADS; thread++) {{
                    blockIdx = {{x, y, z}};
                    threadIdx = {{thread, 0, 0}};
                    {entry}(*arguments);
                }}
}}
"""


@functools.cache
def compiled(name, entry, struct, macros, cell):
    headers = rewritten(launch.SOURCES)
    source = (headers / f"{name}.cu").read_text()
    code_of = row_code if name.startswith("row_") else device_code
    code = "" if cell is None else " ".join(code_of(cell).text.splitlines())
    text = [f"#define CELL_CODE {code}\n", source, _GRID.format(struct=struct, entry=entry)]
    return compile_cpp("".join(text), headers, precompiled(PRELUDE), (), [*macros, ("TABLE", 0)]).run


class LaunchOnCpu:
    def __init__(self, name, entry, layout, planes, dtype, cell=None, *, early=False, resets=False):
        directions, batch, units = planes.shape
        struct = "Forward" if "forward" in entry else "Backward"
        if cell is not None and not is_fused(cell):
            # One thread computes a row, so that the sums over threads are its own.
            self._grid = batch, 1, directions
            self._run = compiled(f"row_{name}", entry, struct, launch.row_macros(dtype, 1, units), cell)
            return
        width, lanes, self._grid = launch.tiling(*layout.axes(batch, units), directions, dtype.itemsize, 132)
        macros = launch.macros_of(dtype, width, lanes, layout, resets=resets)
        self._run = compiled(name, entry, struct, macros, cell)

    def __call__(self, arguments, step):
        arguments.step = step
        self._run(ctypes.byref(arguments), *self._grid)


@pytest.fixture
def on_cpu(monkeypatch):
    """Return a function that makes the kernel run on the CPU, in a given layout."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")

    def in_form(layout):
        monkeypatch.setattr(forward_loop, "Launch", LaunchOnCpu)
        monkeypatch.setattr(backward_loop, "Launch", LaunchOnCpu)
        monkeypatch.setattr(layer, "product_layout_of", lambda problem, device: layout)
        # Training calls of one step have launches of their own, which test_single_training_on_cpu.py runs.
        monkeypatch.setattr(chosen_algorithm, "is_single_training", lambda problem, device: False)

    return in_form


@pytest.fixture
def launched(monkeypatch):
    """Run the launches of single steps on the CPU, compiled as for an H200, and return the list of their names."""
    remembered = single._binary, single._launches_of, single_training._launches_of
    for each in remembered:
        each.cache_clear()
    yield launch_on_cpu(monkeypatch, Device.named("h200")).launched
    for each in remembered:
        each.cache_clear()
