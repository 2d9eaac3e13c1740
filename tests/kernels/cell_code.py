"""The generated code of a cell that fused kernels include, compiled for the CPU in double precision."""

import ctypes
import functools
import shutil

import pytest
import torch

from gatewise.cells import SHIPPED
from gatewise.derivation.device import device_code
from gatewise.derivation.fused import carried_states
from gatewise.derivation.row import row_code
from gatewise.kernels.criteria import is_fused
from gatewise.kernels.cuda.toolchain import SHARED
from tests.kernels.cuda_on_cpu import loaded

FUSED = tuple(cell for cell in SHIPPED if is_fused(cell))
"""The shipped cells that the kernel `persistent` computes, and `stepwise` element by element."""

ROWS = tuple(cell for cell in SHIPPED if not is_fused(cell))
"""The shipped cells that `stepwise` computes a batch row at a time."""

_PRELUDE = """
#include <cmath>
using std::exp; using std::log; using std::sqrt;
#define __device__
#define __forceinline__ inline
using Real = double;
inline double sigmoid_of(double x) { return 1 / (1 + exp(-x)); }
inline double tanh_of(double x) { return std::tanh(x); }
inline float __uint_as_float(unsigned bits) { float x; __builtin_memcpy(&x, &bits, 4); return x; }
inline double reciprocal_root(double x) { return 1 / std::sqrt(x); }
#include "functions.cuh"
#include "moments.cuh"
"""

_UNITS = """
namespace cell_NUMBER {
CELL_CODE
static Kept at(const double* from, int size, int unit) {
    return {from[unit], from[size + unit], from[2 * size + unit], from[3 * size + unit]};
}
static void put(double* to, Kept values, int size, int unit) {
    to[unit] = values.x, to[size + unit] = values.y, to[2 * size + unit] = values.z, to[3 * size + unit] = values.w;
}
extern "C" void step_NUMBER(
    int size, const double* sums, const double* before, double* kept, double* state, double* hidden) {
    for (int unit = 0; unit < size; unit++) {
        const Stepped after = stepped(at(sums, size, unit), before[unit]);
        put(kept, after.kept, size, unit), state[unit] = after.state, hidden[unit] = after.hidden;
    }
}
extern "C" void step_back_NUMBER(
    int size, const double* kept, const double* after, const double* before, const double* dh, double* d,
    double* dsums) {
    for (int unit = 0; unit < size; unit++)
        put(dsums, adjoint(slopes(at(kept, size, unit), after[unit], before[unit]), dh[unit], d[unit]), size, unit);
}
}
"""

# One thread computes a row of UNITS units, and one that does not exist and whose inputs are NaN.
_ROW = """
namespace cell_NUMBER {
constexpr int UNITS = ROW_UNITS;
CELL_CODE
struct Row {
    Real reciprocal;
    bool exists(int u) const { return u < UNITS; }
    template <int PLACE, int COUNT> void add_up(Real (&numbers)[UNITS + 1][COUNT]) const {
        for (int i = 0; i < COUNT; i++) {
            Real sum = 0;
            for (int u = 0; u < UNITS; u++) sum += numbers[u][i];
            for (int u = 0; u < UNITS + 1; u++) numbers[u][i] = sum;
        }
    }
    template <int PLACE, int COUNT> void merge(Moments (&moments)[UNITS + 1][COUNT]) const {
        for (int i = 0; i < COUNT; i++) {
            Moments all = {0, 0};
            for (int u = 0; u < UNITS; u++) all.mean += moments[u][i].mean / UNITS;
            for (int u = 0; u < UNITS; u++) {
                const Real distance = moments[u][i].mean - all.mean;
                all.variance += (moments[u][i].variance + distance * distance) / UNITS;
            }
            for (int u = 0; u < UNITS + 1; u++) moments[u][i] = all;
        }
    }
};
template <class Each> static void each(Given (&given)[UNITS + 1], Each visit) {
    for (int u = 0; u < UNITS + 1; u++) {
        int place = 0;
        for (int i = 0; i < SUMS; i++) visit(given[u].sums[i], place++ * UNITS + u, u < UNITS);
        for (int i = 0; i < CARRIED; i++) visit(given[u].states[i], place++ * UNITS + u, u < UNITS);
        for (int i = 0; i < PARAMETERS; i++) visit(given[u].parameters[i], place++ * UNITS + u, u < UNITS);
    }
}
extern "C" void row_NUMBER(
    int, const double* values, const double* above, double* after, double* gradients) {
    Given given[UNITS + 1], to[UNITS + 1];
    Returned returned[UNITS + 1], gradient[UNITS + 1];
    const Row row = {Real(1) / UNITS};
    each(given, [&](Real& own, int place, bool exists) { own = exists ? values[place] : NAN; });
    Real statistics[UNITS + 1][STATISTICS + 1];
    step_of_row(given, returned, statistics, row);
    for (int u = 0; u < UNITS + 1; u++)
        for (int i = 0; i < STATES + 1; i++) {
            (i ? gradient[u].states[i - 1] : gradient[u].hidden) = u < UNITS ? above[i * UNITS + u] : NAN;
            if (u < UNITS) after[i * UNITS + u] = i ? returned[u].states[i - 1] : returned[u].hidden;
        }
    adjoint_of_row(given, gradient, to, statistics, row);
    each(to, [&](Real& own, int place, bool exists) { if (exists) gradients[place] = own; });
}
}
"""

ROW_UNITS = 5
"""The number of units of a row in `row_codes`."""


def carries_hidden(cell):
    """Return whether the hidden state is the state that a fused kernel carries from step to step."""
    return carried_states(cell) == ("h",)


@functools.cache
def code_of(cell):
    """Return the compiled code of a cell."""
    return _of_fused()[cell] if cell in FUSED else codes_of([cell])[0]


@functools.cache
def _of_fused():
    # The compiler takes about as long for all of them as for one: most of the time it reads the library's headers.
    return dict(zip(FUSED, codes_of(FUSED), strict=True))


def codes_of(cells):
    """Return the compiled code of several fused cells, from one call of the compiler."""
    library = _compiled(_UNITS, [device_code(cell) for cell in cells])
    return [Code(library, number) for number in range(len(cells))]


def row_codes(cells):
    """Return the compiled code of several cells for a row, from one call of the compiler.

    Each is a function of the values that a step reads, which are the sums, the carried states and the parameters
    [N, H], and of the gradients [1 + S, H] of the hidden state and the other states after the step. It returns these
    states [1 + S, H], and the gradients of the values [N, H].
    """
    library = _compiled(_ROW, [row_code(cell) for cell in cells])

    def of_row(number, values, above):
        after, gradients = torch.empty_like(above), torch.empty_like(values)
        _called(library, f"row_{number}", values, above, after, gradients)
        return after, gradients

    return [functools.partial(of_row, number) for number in range(len(cells))]


def _compiled(template, codes):
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    template = template.replace("ROW_UNITS", str(ROW_UNITS))
    texts = [
        template.replace("CELL_CODE", code.text).replace("NUMBER", str(number)) for number, code in enumerate(codes)
    ]
    command = ["g++", "-fPIC", "-O0", "-w", "-std=c++17", f"-I{SHARED}"]
    return loaded("".join([_PRELUDE, *texts]), command)


class Code:
    """The compiled functions of a cell, applied to all units of a row."""

    def __init__(self, library, number):
        self._library, self._number = library, number

    def stepped(self, sums, before):
        """Return kept values [4, H], the carried and the hidden state [H], from sums [4, H] and the carried state."""
        kept, state, hidden = (torch.empty(like.shape, dtype=torch.float64) for like in (sums, before, before))
        _called(self._library, f"step_{self._number}", sums, before, kept, state, hidden)
        return kept, state, hidden

    def adjoint(self, kept, after, before, dh, d):
        """Return the gradients of the sums [4, H] and of the carried state before the step [H]."""
        d, dsums = d.clone(), torch.empty(kept.shape, dtype=torch.float64)
        _called(self._library, f"step_back_{self._number}", kept, after, before, dh, d, dsums)
        return dsums, d


def _called(library, name, *tensors):
    held = [tensor.contiguous() for tensor in tensors]  # the code reads contiguous memory
    getattr(library, name)(held[0].shape[-1], *[ctypes.c_void_p(own.data_ptr()) for own in held])
