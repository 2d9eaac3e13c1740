"""Sources of CUDA kernels on the CPU, compiled by the C++ compiler of the machine.

Everything but the launch and a few instructions is what runs on a GPU: the layout of the argument structs, the strides,
the arithmetic, and, where threads of a block work together, their barriers and exchanges, each thread being one of the
machine's.
"""

import ctypes
import functools
import re
import subprocess
import tempfile
from pathlib import Path

from gatewise.kernels.cuda.toolchain import SHARED

_WORDS = """
#include <barrier>
#include <cmath>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>
using std::tanh; using std::exp;
struct Index { unsigned x, y, z; };
static thread_local Index blockIdx, threadIdx;
static Index blockDim;
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
struct Warp { std::barrier<> all{32}; float lanes[32]; };
static std::vector<std::unique_ptr<Warp>> warps;
static std::unique_ptr<std::barrier<>> block;
inline void __syncthreads() { block->arrive_and_wait(); }
inline float __shfl_xor_sync(unsigned, float value, int mask) {
    Warp& warp = *warps[threadIdx.x / 32];
    warp.lanes[threadIdx.x % 32] = value;
    warp.all.arrive_and_wait();
    const float found = warp.lanes[threadIdx.x % 32 ^ mask];
    warp.all.arrive_and_wait();
    return found;
}
inline float __expf(float x) { return std::exp(x); }
inline float __uint_as_float(unsigned bits) { float x; std::memcpy(&x, &bits, 4); return x; }
inline unsigned __float_as_uint(float x) { unsigned bits; std::memcpy(&bits, &x, 4); return bits; }
inline unsigned short half_bits(float x) { _Float16 h = x; unsigned short b; std::memcpy(&b, &h, 2); return b; }
inline float of_half(unsigned short bits) { _Float16 h; std::memcpy(&h, &bits, 2); return h; }
inline unsigned short brain_bits(float x) {
    const unsigned bits = __float_as_uint(x);
    return std::isnan(x) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
"""
# What the inline assembly of the sources does, in C++.
_INSTRUCTIONS = {
    "cvt.rn.f16.f32": "{out} = half_bits({into});",
    "cvt.f32.f16": "{out} = of_half({into});",
    "cvt.rn.bf16.f32": "{out} = brain_bits({into});",
    "tanh.approx.f32": "{out} = std::tanh({into});",
}
_ASSEMBLY = re.compile(r'asm\("([a-z0-9.]+) %0, %1;" : "=\w"\((\w+)\) : "\w"\((\w+)\)\);')
_RUN = """
extern "C" void run_{entry}(const {struct}* arguments, unsigned blocks, unsigned threads, bool together) {{
    blockDim = {{threads, 1, 1}};
    warps.clear();
    for (unsigned warp = 0; together && warp < threads / 32; warp++) warps.push_back(std::make_unique<Warp>());
    for (unsigned x = 0; x < blocks; x++) {{
        block = std::make_unique<std::barrier<>>(threads);
        std::vector<std::thread> running;
        auto one = [=](unsigned thread) {{
            blockIdx = {{x, 0, 0}};
            threadIdx = {{thread, 0, 0}};
            {entry}(*arguments);
        }};
        for (unsigned thread = 0; thread < threads; thread++)
            if (together) running.emplace_back(one, thread); else one(thread);
        for (auto& each : running) each.join();
    }}
}}
"""


def emulate(source, macros, entry, struct, arguments, blocks, threads, *, together):
    """Run a kernel of a source on the CPU; `together`: whether the threads of a block exchange anything."""
    library = _compiled(source, macros, entry, struct)
    getattr(library, f"run_{entry}")(ctypes.byref(arguments), blocks, threads, together)


@functools.cache
def _compiled(source, macros, entry, struct):
    folder = Path(tempfile.mkdtemp())
    for path in (*source.parent.glob("*.cu*"), *SHARED.glob("*.cuh")):
        (folder / path.name).write_text(_ASSEMBLY.sub(_in_c, path.read_text()))
    text = _WORDS + (folder / source.name).read_text() + _RUN.format(entry=entry, struct=struct)
    (folder / "kernel.cpp").write_text(text)
    options = [f"-D{macro}={value}" for macro, value in macros]
    command = ["g++", "-O1", "-shared", "-fPIC", "-pthread", "-std=c++20", f"-I{folder}", *options]
    subprocess.run([*command, "-o", folder / "kernel.so", folder / "kernel.cpp"], check=True)
    return ctypes.CDLL(str(folder / "kernel.so"))


def _in_c(found):
    instruction, out, into = found.groups()
    return _INSTRUCTIONS[instruction].format(out=out, into=into)
