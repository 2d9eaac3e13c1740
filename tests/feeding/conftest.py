"""The launches on the CPU: their source, compiled by the C++ compiler of the machine.

Everything but the launch is what runs on a GPU: the layout of the argument structs, the strides, the arithmetic.
"""

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from gatewise.feeding import backward_loop, decoder, launches
from gatewise.kernels.cuda.toolchain import SHARED

_CUDA_WORDS = """
#include <cmath>
using std::tanh; using std::exp;
struct Index { unsigned x, y, z; };
static Index blockIdx, threadIdx;
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(threads)
"""
_GRID = """
extern "C" void run_{entry}(const {struct}* arguments, unsigned blocks) {{
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < THREADS; threadIdx.x++) {entry}(*arguments);
}}
"""
_ENTRIES = {
    "feeding_cell": "Cell",
    "feeding_gates": "Gates",
    "feeding_cell_gradient": "CellGradient",
    "feeding_attended": "Attended",
    "feeding_attended_gradient": "AttendedGradient",
}


@functools.cache
def compiled(macros):
    folder = Path(tempfile.mkdtemp())
    grids = "".join(_GRID.format(entry=entry, struct=struct) for entry, struct in _ENTRIES.items())
    (folder / "kernel.cpp").write_text(_CUDA_WORDS + launches.SOURCE.read_text() + grids)
    options = [f"-D{macro}={value}" for macro, value in macros]
    command = ["g++", "-shared", "-fPIC", "-std=c++17", f"-I{SHARED}", *options]
    subprocess.run([*command, "-o", folder / "kernel.so", folder / "kernel.cpp"], check=True)
    return ctypes.CDLL(str(folder / "kernel.so"))


class LaunchesOnCpu(launches.Launches):
    def _launch(self, entry, arguments):
        blocks = -(-arguments.batch * self._threads_of_a_row // launches.THREADS)
        getattr(compiled(self._macros), f"run_{entry}")(ctypes.byref(arguments), blocks)


@pytest.fixture
def launches_on_cpu(monkeypatch):
    if shutil.which("g++") is None:
        pytest.skip("needs g++")

    def parts_for(options, inputs):
        found = inputs.embedded
        return LaunchesOnCpu(inputs.batch, inputs.units, inputs.query_size, found.dtype, options.halves, found.device)

    monkeypatch.setattr(decoder, "parts_for", parts_for)
    # Products are cut as on a GPU, too.
    monkeypatch.setattr(backward_loop, "_planes", lambda inputs, depth: 4 if depth % 4 == 0 else 1)
