"""The CUDA sources of the persistent kernel on the CPU: every launch, by the C++ compiler of the machine.

The code of the passes is the same as on a GPU, except for the instructions that are written as inline assembly: the
structs of the arguments, the tilings, the order of stores and loads, the barriers. `fibers.cpp` runs the threads.
"""

import ctypes
import functools
import hashlib
import re
import shutil
from pathlib import Path

import pytest

from gatewise.contract.device import Device
from gatewise.kernels.cuda import driver, toolchain
from gatewise.kernels.persistent import launches
from gatewise.kernels.persistent.launches import auxiliary, compiled, failure, half_products
from tests.kernels.cuda_on_cpu import (
    PRELUDE,
    compile_cpp,
    compiled_object,
    in_cpp,
    precompiled,
    rewritten,
    uninitialised_as_pattern,
)
from tests.kernels.persistent.emulation import emulate

_REAL = {
    name: getattr(launches, name)
    for name in (
        *("forward_launch", "backward_launch", "pair_launch", "forward_pass", "backward_pass", "resized"),
        *("row_forward_pass", "row_backward_pass"),
        *("write_operands", "longest_first", "activate"),
        *("halve_rows", "scale_columns", "halved", "write_results"),
    )
}
_HERE = Path(__file__).parent
_PRELUDE = PRELUDE + (_HERE / "fibers.h").read_text()
# Each source is compiled for a few small calls: to optimize it takes longer than they do without. The fibers, which are
# compiled once, compute the products of all calls.
_OPTIONS = ("-O0", "-fno-strict-aliasing", "-w")
_OPTIONS_OF_FIBERS = ("-O1", *_OPTIONS[1:])
_MOST_BLOCKS = 32
_DYNAMIC = "extern __shared__ float4 shared[];"
_STATIC = re.compile(r"__shared__ ([\w ]+?) (\w+)(\[[^\]]*\])?;")
# Instructions as statements with their operands; the functions are those of fibers.cpp.
_STATEMENTS = {
    '"" : "+r"': "(void)0",
    "// kept": "(void)0",
    "// common": "(void)0",
    "@p st.relaxed.gpu.global.u32": "if ({2}) *(unsigned*)({0}) = {1}",
    "@p st.global.v2.u32": "if ({3}) ((unsigned*)({0}))[0] = {1}, ((unsigned*)({0}))[1] = {2}",
    "@p st.global.u16": "if ({2}) *(unsigned short*)({0}) = {1}",
    "@p ld.global.u8": "if ({2}) std::memcpy(&{0}, {1}, 1)",
    "@p ld.global.u16": "if ({2}) std::memcpy(&{0}, {1}, 2)",
    "@p ld.global.u32": "if ({2}) std::memcpy(&{0}, {1}, 4)",
    "@p ld.global.v2.u32": "if ({3}) std::memcpy(&{0}, {2}, 4), std::memcpy(&{1}, (char*)({2}) + 4, 4)",
    "@p ld.global.v4.u32": "if ({5}) std::memcpy(&{0}, {4}, 16)",
    "cp.async.ca.shared.global": "copy_to_shared({0}, {1}, {2}, {3})",
    "cp.async.cg.shared.global": "copy_to_shared({0}, {1}, 16, {2})",
    "cp.async.commit_group": "(void)0",
    "cp.async.wait_group": "(void)0",
    "%%cluster_ctarank": "{0} = rank_in_cluster()",
    "mapa.shared::cluster.u32": "{0} = address_of_rank({1}, {2})",
    "barrier.cluster.arrive": "(void)0",
    "barrier.cluster.wait": "wait_for_cluster()",
    "mbarrier.init": "arrival_at({0}) = {{0, 1, 0}}",
    "mbarrier.arrive.expect_tx": "expect({0}, {1})",
    "st.async.weak.shared::cluster": "send_to({0}, {1}, {2}, {3}, {4}, {5})",
    "mbarrier.try_wait": "{0} = has_phase_ended({1}, {2})",
    "ld.relaxed.gpu.global.u32": "std::memcpy(&{0}, {1}, 4)",
    "ld.relaxed.gpu.global.u16": "std::memcpy(&{0}, {1}, 2)",
    "ld.relaxed.gpu.global.v2.u32": "std::memcpy(&{0}, {2}, 8)",
    "ld.relaxed.gpu.global.v4.u32": "std::memcpy(&{0}, {4}, 16)",
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16": "words = load_transposed({4})",
    "max.f16x2": "{0} = larger_halves({0}, {1})",
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32": "multiply_bf16(sum, a, b0, b1)",
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32": "multiply_f16(sum, a, b0, b1)",
    "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32": "multiply_tf32(sum, a, b0, b1)",
    "wgmma.mma_async": "multiply_by_warpgroup(&sum[0][0], ROWS / 8, a, description, adds, DTYPE)",
    "wgmma.fence": "(void)0",
    "wgmma.commit_group": "(void)0",
    "wgmma.wait_group": "(void)0",
    "fence.proxy.async": "(void)0",
    "bar.sync": "wait_with_others({0}, {1})",
    "ld.shared.v4.u32": "load_from_shared({4}, {0}, {1}, {2}, {3})",
    "st.shared.v4.u32": "store_to_shared({0}, {1}, {2}, {3}, {4})",
    "prefetch.global.L2": "(void)0",
    "st.relaxed.gpu.global.u32": "*(unsigned*)({0}) = {1}",
    "st.relaxed.gpu.global.v2.u32": "((unsigned*)({0}))[0] = {1}, ((unsigned*)({0}))[1] = {2}",
}
_ENTRY = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\(const (\w+) p\)')
_RUN = """
#ifndef SPLIT
#define SPLIT 1
#endif
#if DISTRIBUTED
constexpr int CLUSTER = BLOCKS;
#else
constexpr int CLUSTER = SPLIT;
#endif
static const {struct}* given;
static void enter() {{ {entry}(*given); }}
extern "C" bool run(const {struct}* arguments, unsigned x, unsigned y, unsigned z, int threads, int bytes, int slow) {{
    given = arguments;
    return run_grid({{x, y, z}}, threads, bytes, {together} / CLUSTER * CLUSTER, CLUSTER, slow, enter);
}}
"""


class _Flag:
    """The flag of a kernel that gave up waiting."""

    def __init__(self):
        self._word = ctypes.c_int32(0)
        self.address = ctypes.addressof(self._word)

    def is_set(self):
        return self._word.value != 0


class SourcesOnCpu:
    """What compiles and launches in place of NVRTC and the driver.

    Attributes:
        launched: The names of the kernels that were launched.
        compiled: The names of the sources that were compiled, with their macros.
        slow: The number of a block that is slower than others, among those that run together; -1 for none.
    """

    def __init__(self):
        self.launched = []
        self.slow = -1
        self._asked = {}

    def compile(self, source, architecture, macros, code=None):
        asked = source, tuple(macros.items()), " ".join(code.text.splitlines()) if code else ""
        name = hashlib.sha256(repr(asked).encode()).digest()
        self._asked[name] = asked
        return name

    @property
    def compiled(self):
        return {(source.name, macros) for source, macros, _ in self._asked.values()}

    def prepared(self, *given):
        return functools.partial(self.launch, *given)

    def launch(self, binary, entry, shape, arguments, device):
        self.launched.append(entry)
        grid, flag = shape.grid, failure.flag(None)
        given = ctypes.byref(arguments), *grid, shape.threads, shape.shared_bytes, self.slow
        assert _built(*self._asked[binary], entry)(*given)
        assert not flag.is_set()


@functools.cache
def _fibers():
    return compiled_object(f'{_PRELUDE}#include "{_HERE / "fibers.cpp"}"\n', _OPTIONS_OF_FIBERS)


@functools.cache
def _built(source, macros, code, entry):
    headers = rewritten(source.parent, _for_fibers)
    struct = dict(_ENTRY.findall(source.read_text()))[entry]
    # The blocks of other sources do not wait for each other.
    together = _MOST_BLOCKS if "STACKED" in dict(macros) else 1
    run = _RUN.format(entry=entry, struct=struct, together=together)
    text = [f"#define CELL_CODE {code}\n", (headers / source.name).read_text(), run]
    options = (*_OPTIONS, *uninitialised_as_pattern())
    common = precompiled(_PRELUDE, options)
    found = compile_cpp("".join(text), headers, common, options, macros, [_fibers()]).run
    found.restype = ctypes.c_bool
    return found


def _for_fibers(text):
    text = in_cpp(text, _STATEMENTS).replace(_DYNAMIC, "float4* const shared = (float4*)shared_memory();")
    return _STATIC.sub(_of_each_block, text)


def _of_each_block(found):
    kind, name, size = found[1], found[2], found[3] or ""
    every = f"static {kind} {name}_of[{_MOST_BLOCKS}]{size};"
    return f"{every} {kind} (&{name}){size} = {name}_of[current->number];"


def launch_on_cpu(monkeypatch, device):
    """Run every launch on the CPU, with the tilings of a device; return what launches."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    emulate(monkeypatch)
    sources, flag = SourcesOnCpu(), _Flag()
    for name, real in _REAL.items():
        monkeypatch.setattr(launches, name, real)
    monkeypatch.setattr(failure, "flag", lambda index: flag)
    monkeypatch.setattr(failure, "raise_if_given_up", lambda index: None)
    monkeypatch.setattr(driver, "launch", sources.launch)
    monkeypatch.setattr(driver, "prepared", sources.prepared)
    monkeypatch.setattr(toolchain, "compile_source", sources.compile)
    monkeypatch.setattr(Device, "probe", classmethod(lambda cls, asked: device))
    for remembered in (
        compiled.launch_of,
        auxiliary.copying_code,
        auxiliary._sorting_code,
        auxiliary._activating_code,
        half_products._code_of_rows,
        half_products._code_of_columns,
        half_products._code_of_results,
    ):
        remembered.cache_clear()
    return sources
