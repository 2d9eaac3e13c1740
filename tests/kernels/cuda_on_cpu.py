"""CUDA C++ for the C++ compiler of the machine: the qualifiers and functions of CUDA, and inline assembly as C++."""

import ctypes
import functools
import re
import subprocess
import tempfile
import types
from pathlib import Path

from gatewise.kernels.cuda.toolchain import SHARED

PRELUDE = """
#include <cmath>
#include <cstdlib>
#include <cstring>
using std::tanh; using std::exp; using std::sqrt;
struct Index { unsigned x, y, z; };
inline Index blockIdx, threadIdx, blockDim;
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
inline float __uint_as_float(unsigned bits) { float x; std::memcpy(&x, &bits, 4); return x; }
inline unsigned __float_as_uint(float x) { unsigned bits; std::memcpy(&bits, &x, 4); return bits; }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
template <class Number> void atomicAdd(Number* to, Number value) { *to += value; }
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

# The results of instructions as C++; others end the process.
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
COMMON = '#include "common.h"\n'
_GCC = ("g++", "-fPIC", "-std=c++17")

_ASSEMBLY = re.compile(r"\basm(?: volatile)?\(")
_OPERAND = re.compile(r'"[=+]?[a-z]"\(')


def in_cpp(text, statements=types.MappingProxyType({})):
    """Return CUDA C++ with its inline assembly written in C++.

    `statements` has more instructions, or parts of assembly that name them, as statements with their operands.
    """
    parts, place = [], 0
    for found in _ASSEMBLY.finditer(text):
        end = _closing(text, found.end())
        parts += [text[place : found.start()], _statement(text[found.end() : end], statements)]
        place = end + 1  # what follows is the semicolon
    return "".join([*parts, text[place:]])


def write_sources(source, folder, statements=types.MappingProxyType({})):
    """Write a source and all headers that it may include to a folder, as by `in_cpp`; return the text of the source."""
    for path in (*source.parent.glob("*.cu*"), *SHARED.glob("*.cuh")):
        (folder / path.name).write_text(in_cpp(path.read_text(), statements))
    return (folder / source.name).read_text()


@functools.cache
def precompiled(text, options=()):
    """Write C++ to a header and compile it, once for all sources that begin with `COMMON`; return its folder.

    Options are those of the sources, except for macros that the header does not have.
    """
    folder = Path(tempfile.mkdtemp())
    header = folder / "common.h"
    header.write_text(text)
    subprocess.run([*_GCC, *options, "-x", "c++-header", header, "-o", f"{header}.gch"], check=True)
    return folder


def compiled_object(text, common, options):
    """Compile C++ that begins with `COMMON` for libraries; return the path of the object file."""
    path = Path(tempfile.mkdtemp()) / "object.cpp"
    path.write_text(text)
    subprocess.run([*_GCC, *options, f"-I{common}", "-c", path, "-o", path.with_suffix(".o")], check=True)
    return path.with_suffix(".o")


def compile_cpp(text, folder, common, options, objects=()):
    """Compile C++ that begins with `COMMON`, and load it with object files; the folder is that of its headers."""
    (folder / "kernel.cpp").write_text(text)
    command = [*_GCC, *options, f"-I{common}", f"-I{folder}", "-shared", "-o", folder / "kernel.so"]
    subprocess.run([*command, folder / "kernel.cpp", *objects], check=True)
    return ctypes.CDLL(str(folder / "kernel.so"))


def _statement(assembly, statements):
    operands = []
    for found in _OPERAND.finditer(assembly):
        operands.append(assembly[found.end() : _closing(assembly, found.end())])
    template, _, _ = assembly.partition(";")
    instruction = "".join(template.strip().strip('"').split()[:1])
    if instruction in _RESULTS:
        return f"{operands[0]} = {_RESULTS[instruction].format(*operands[1:])}"
    found = (statement for name, statement in statements.items() if name in assembly)
    return next(found, "std::abort()").format(*operands)


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
