"""CUDA C++ for the C++ compiler of the machine: the qualifiers and functions of CUDA, and inline assembly as C++."""

import re

from gatewise.kernels.cuda.toolchain import SHARED

PRELUDE = """
#include <cmath>
#include <cstdlib>
#include <cstring>
using std::tanh; using std::exp;
struct Index { unsigned x, y, z; };
static Index blockIdx, threadIdx, blockDim;
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
inline float __uint_as_float(unsigned bits) { float x; std::memcpy(&x, &bits, 4); return x; }
inline unsigned __float_as_uint(float x) { unsigned bits; std::memcpy(&bits, &x, 4); return bits; }
inline unsigned short half_bits(float x) {
    _Float16 h = x;
    unsigned short bits;
    std::memcpy(&bits, &h, 2);
    return std::isnan(x) ? 0x7fff : bits;
}
inline float of_half(unsigned short bits) { _Float16 h; std::memcpy(&h, &bits, 2); return h; }
inline unsigned short brain_bits(float x) {
    const unsigned bits = __float_as_uint(x);
    return std::isnan(x) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
"""

# The results of instructions as C++; of instructions in neither table, the process ends.
_RESULTS = {
    "cvt.rn.f16.f32": "half_bits({0})",
    "cvt.rn.bf16.f32": "brain_bits({0})",
    "cvt.f32.f16": "of_half({0})",
    "cvt.rn.f16x2.f32": "(unsigned)half_bits({0}) << 16 | half_bits({1})",
    "cvt.rn.bf16x2.f32": "(unsigned)brain_bits({0}) << 16 | brain_bits({1})",
    "cvt.rna.tf32.f32": "(__float_as_uint({0}) + 0x1000u) & 0xffffe000u",
    "tanh.approx.f32": "std::tanh({0})",
    "ex2.approx.ftz.f32": "std::exp2({0})",
    "rcp.approx.ftz.f32": "1 / ({0})",
}
# Instructions without one result, as statements with the operands. The functions are those of persistent/fibers.cpp.
_STATEMENTS = {
    "@p ld.global.v4.u32": "if ({5}) std::memcpy(&{0}, {4}, 16)",
    "cp.async.ca.shared.global": "copy_to_shared({0}, {1}, {2}, {3})",
    "cp.async.cg.shared.global": "copy_to_shared({0}, {1}, 16, {2})",
    "cp.async.commit_group": "(void)0",
    "cp.async.wait_group": "(void)0",
    "ld.relaxed.gpu.global.u32": "std::memcpy(&{0}, {1}, 4)",
    "ld.relaxed.gpu.global.u16": "std::memcpy(&{0}, {1}, 2)",
    "ld.relaxed.gpu.global.v2.u32": "std::memcpy(&{0}, {2}, 8)",
    "ld.relaxed.gpu.global.v4.u32": "std::memcpy(&{0}, {4}, 16)",
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16": "words = load_transposed({4})",
    "max.f16x2": "{0} = larger_halves({0}, {1})",
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32": "multiply_bf16(sum, a, b0, b1)",
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32": "multiply_f16(sum, a, b0, b1)",
    "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32": "multiply_tf32(sum, a, b0, b1)",
    "prefetch.global.L2": "(void)0",
    "st.relaxed.gpu.global.u32": "*(unsigned*)({0}) = {1}",
    "st.relaxed.gpu.global.v2.u32": "((unsigned*)({0}))[0] = {1}, ((unsigned*)({0}))[1] = {2}",
}
_ASSEMBLY = re.compile(r"\basm(?: volatile)?\(")
_OPERAND = re.compile(r'"[=+]?[a-z]"\(')


def in_cpp(text):
    """Return CUDA C++ with its inline assembly written in C++."""
    parts, place = [], 0
    for found in _ASSEMBLY.finditer(text):
        end = _closing(text, found.end())
        parts += [text[place : found.start()], _statement(text[found.end() : end])]
        place = end + 1  # what follows is the semicolon
    return "".join([*parts, text[place:]])


def write_sources(source, folder):
    """Write a source and all headers that it may include to a folder, as C++; return the text of the source."""
    for path in (*source.parent.glob("*.cu*"), *SHARED.glob("*.cuh")):
        (folder / path.name).write_text(in_cpp(path.read_text()))
    return (folder / source.name).read_text()


def _statement(assembly):
    operands = []
    for found in _OPERAND.finditer(assembly):
        operands.append(assembly[found.end() : _closing(assembly, found.end())])
    if assembly.startswith('""'):
        return "(void)0"
    template, _, _ = assembly.partition(";")
    instruction = "".join(template.strip().strip('"').split()[:1])
    if instruction in _RESULTS:
        return f"{operands[0]} = {_RESULTS[instruction].format(*operands[1:])}"
    statement = next((text for name, text in _STATEMENTS.items() if name in assembly), "std::abort()")
    return statement.format(*operands)


def _closing(text, start):
    """Return the index of the parenthesis that closes the one before `start`."""
    depth, quoted = 1, False
    for index in range(start, len(text)):
        character = text[index]
        if character == '"' and text[index - 1] != "\\":
            quoted = not quoted
        elif not quoted:
            depth += {"(": 1, ")": -1}.get(character, 0)
        if depth == 0:
            return index
    raise ValueError(f"the parenthesis at {start} is not closed")
