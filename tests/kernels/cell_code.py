"""The generated code of a cell that fused kernels include, compiled for the CPU in double precision."""

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

from gatewise.cells import SHIPPED
from gatewise.derivation.device import device_code
from gatewise.derivation.fused import carried_states
from gatewise.kernels.criteria import is_fused
from gatewise.kernels.cuda.toolchain import SHARED

FUSED = tuple(cell for cell in SHIPPED if is_fused(cell))
"""The shipped cells that the kernel `persistent` computes, and `stepwise` element by element."""

ROWS = tuple(cell for cell in SHIPPED if not is_fused(cell))
"""The shipped cells that `stepwise` computes a batch row at a time."""

_SOURCE = """
#include <cmath>
using std::exp; using std::log; using std::sqrt;
#define __device__
#define __forceinline__ inline
using Real = double;
inline double sigmoid_of(double x) { return 1 / (1 + exp(-x)); }
inline double tanh_of(double x) { return std::tanh(x); }
#include "functions.cuh"
CELL_CODE
static Kept at(const double* from, int size, int unit) {
    return {from[unit], from[size + unit], from[2 * size + unit], from[3 * size + unit]};
}
static void put(double* to, Kept values, int size, int unit) {
    to[unit] = values.x, to[size + unit] = values.y, to[2 * size + unit] = values.z, to[3 * size + unit] = values.w;
}
extern "C" void step(int size, const double* sums, const double* before, double* kept, double* state, double* hidden) {
    for (int unit = 0; unit < size; unit++) {
        const Stepped after = stepped(at(sums, size, unit), before[unit]);
        put(kept, after.kept, size, unit), state[unit] = after.state, hidden[unit] = after.hidden;
    }
}
extern "C" void step_back(
    int size, const double* kept, const double* after, const double* before, const double* dh, double* d,
    double* dsums) {
    for (int unit = 0; unit < size; unit++)
        put(dsums, adjoint(slopes(at(kept, size, unit), after[unit], before[unit]), dh[unit], d[unit]), size, unit);
}
"""


def carries_hidden(cell):
    """Return whether the hidden state is the state that a fused kernel carries from step to step."""
    return carried_states(cell) == ("h",)


@functools.cache
def code_of(cell):
    """Return the compiled code of a cell."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    folder = Path(tempfile.mkdtemp())
    definition = " ".join(device_code(cell).text.splitlines())
    (folder / "cell.cpp").write_text(f"#define CELL_CODE {definition}\n{_SOURCE}")
    command = ["g++", "-shared", "-fPIC", "-O1", "-std=c++17", f"-I{SHARED}", "-o", folder / "cell.so"]
    subprocess.run([*command, folder / "cell.cpp"], check=True)
    return Code(ctypes.CDLL(str(folder / "cell.so")))


class Code:
    """The compiled functions of a cell, applied to all units of a row."""

    def __init__(self, library):
        self._library = library

    def stepped(self, sums, before):
        """Return kept values [4, H], the carried and the hidden state [H], from sums [4, H] and the carried state."""
        kept, state, hidden = (torch.empty(like.shape, dtype=torch.float64) for like in (sums, before, before))
        self._call("step", sums, before, kept, state, hidden)
        return kept, state, hidden

    def adjoint(self, kept, after, before, dh, d):
        """Return the gradients of the sums [4, H] and of the carried state before the step [H]."""
        d, dsums = d.clone(), torch.empty(kept.shape, dtype=torch.float64)
        self._call("step_back", kept, after, before, dh, d, dsums)
        return dsums, d

    def _call(self, name, *tensors):
        held = [tensor.contiguous() for tensor in tensors]  # the code reads contiguous memory
        getattr(self._library, name)(held[0].shape[-1], *[ctypes.c_void_p(own.data_ptr()) for own in held])
