"""Run CUDA kernels on the CPU, with their sources compiled by the C++ compiler of the machine.

Except for the launch and a few instructions, the code is the same as on a GPU: the layout of the argument structs, the
strides, the arithmetic, and the barriers and exchanges between the threads of a block. The threads run one after
another, each until it must wait, first in one order and then in the reverse order. A thread that reads a value before
another thread has written it therefore gets a wrong value.
"""

import ctypes
import functools
import re

from gatewise.derivation.device import device_code
from gatewise.feeding.elementwise import CELL
from tests.kernels.cuda_on_cpu import PRELUDE, compile_cpp, precompiled, rewritten

_THREADS = """
#include <memory>
#include <ucontext.h>
#include <vector>
#define __shared__ static
constexpr unsigned STACK_BYTES = 1 << 16;
struct Thread {
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[STACK_BYTES]};
    bool done;
};
static std::vector<Thread> block_threads;
static ucontext_t whose_turn;
static bool moved;
struct Barrier {
    unsigned count, arrived, passed;
    void wait() {
        const unsigned mine = passed;
        moved = true;
        if (++arrived == count) arrived = 0, passed++;
        while (passed == mine) swapcontext(&block_threads[threadIdx.x].context, &whose_turn);
    }
};
struct Warp { Barrier all; float lanes[32]; };
static std::vector<Warp> warps;
static Barrier block;
inline void __syncthreads() { block.wait(); }
inline float __shfl_xor_sync(unsigned, float value, int mask) {
    Warp& warp = warps[threadIdx.x / 32];
    warp.lanes[threadIdx.x % 32] = value;
    warp.all.wait();
    const float found = warp.lanes[threadIdx.x % 32 ^ mask];
    warp.all.wait();
    return found;
}
static bool run_block(unsigned threads, void (*one)()) {
    block = {threads, 0, 0};
    warps.assign(threads / 32, {{32, 0, 0}, {}});
    if (block_threads.size() < threads) block_threads.resize(threads);
    for (unsigned thread = 0; thread < threads; thread++) {
        Thread& own = block_threads[thread];
        own.done = false;
        getcontext(&own.context);
        own.context.uc_stack.ss_sp = own.stack.get();
        own.context.uc_stack.ss_size = STACK_BYTES;
        makecontext(&own.context, one, 0);
    }
    moved = true;
    for (unsigned left = threads, turn = 0; left; turn++) {
        if (!moved) return false;  // they wait for each other
        moved = false;
        for (unsigned n = 0; n < threads; n++) {
            threadIdx = {turn % 2 ? threads - 1 - n : n, 0, 0};
            Thread& own = block_threads[threadIdx.x];
            if (own.done) continue;
            swapcontext(&whose_turn, &own.context);
            if (own.done) left--, moved = true;
        }
    }
    return true;
}
inline float __expf(float x) { return std::exp(x); }
"""
_OPTIONS = ("-O0",)
_ENTRY = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\(const (\w+) a\)')
_RUN = """
static const {struct}* arguments_of_{entry};
static void one_{entry}() {{
    {entry}(*arguments_of_{entry});
    block_threads[threadIdx.x].done = true;
    swapcontext(&block_threads[threadIdx.x].context, &whose_turn);
}}
extern "C" bool run_{entry}(const {struct}* arguments, unsigned blocks, unsigned threads, bool together) {{
    blockDim = {{threads, 1, 1}};
    arguments_of_{entry} = arguments;
    for (unsigned x = 0; x < blocks; x++) {{
        blockIdx = {{x, 0, 0}};
        if (together && !run_block(threads, one_{entry})) return false;
        for (unsigned thread = 0; !together && thread < threads; thread++) {{
            threadIdx = {{thread, 0, 0}};
            {entry}(*arguments);
        }}
    }}
    return true;
}}
"""


def emulate(source, macros, entry, arguments, blocks, threads, *, together):
    """Run a kernel of a source on the CPU; `together` tells whether the threads of a block exchange data."""
    run = getattr(_compiled(source, macros), f"run_{entry}")
    run.restype = ctypes.c_bool
    assert run(ctypes.byref(arguments), blocks, threads, together), f"threads of {entry} wait for each other for ever"


@functools.cache
def _compiled(source, macros):
    """Compile all kernels of a source at once."""
    headers = rewritten(source.parent)
    text = (headers / source.name).read_text()
    code = " ".join(device_code(CELL).text.splitlines())
    runs = [_RUN.format(entry=entry, struct=struct) for entry, struct in _ENTRY.findall(text)]
    text = "".join([f"#define CELL_CODE {code}\n", text, *runs])
    return compile_cpp(text, headers, precompiled(PRELUDE + _THREADS, _OPTIONS), _OPTIONS, macros)
