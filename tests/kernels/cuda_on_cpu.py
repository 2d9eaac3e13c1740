"""CUDA C++ for the C++ compiler of the machine: the qualifiers and functions of CUDA, and inline assembly as C++."""

import atexit
import ctypes
import functools
import re
import shutil
import subprocess
import tempfile
import types
from pathlib import Path

from gatewise.kernels.cuda.toolchain import SHARED

# Of the header of mathematics, Bessel functions and the like would be half of what each compilation reads.
PRELUDE = """
#include <cstdlib>
#undef _GLIBCXX_USE_STD_SPEC_FUNCS
#define _GLIBCXX_USE_STD_SPEC_FUNCS 0
#include <cmath>
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
# What is static in an inline function would be one object for all libraries, of the size that it has in the first one.
_GCC = ("g++", "-fPIC", "-std=c++17", "-fno-gnu-unique")
# Linking the library of C++ would take longer than all else of linking; `loaded` makes its symbols known.
_LIBRARIES = ("-nodefaultlibs", "-lm", "-lgcc")

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


@functools.cache
def rewritten(folder, rewrite=in_cpp):
    """Write the sources of a folder and all headers that they may include as C++, once a process; return where."""
    written = _folder_of_process()
    for path in (*SHARED.glob("*.cuh"), *folder.glob("*.cu*")):  # of two of the same name, that of the folder stays
        (written / path.name).write_text(rewrite(path.read_text()))
    return written


@functools.cache
def precompiled(text, options=()):
    """Write C++ to a header and compile it, once for all sources that begin with `COMMON`; return its folder.

    Options are those of the sources.
    """
    folder = _folder_of_process()
    header = folder / "common.h"
    header.write_text(text)
    subprocess.run([*_GCC, *options, "-x", "c++-header", header, "-o", f"{header}.gch"], check=True)
    return folder


@functools.cache
def uninitialised_as_pattern():
    """Return the option with which variables that are read before they are written have senseless values.

    It is empty where the compiler, before GCC 12, does not know the option.
    """
    option = "-ftrivial-auto-var-init=pattern"
    command = [*_GCC, option, "-fsyntax-only", "-x", "c++", "/dev/null"]
    return () if subprocess.run(command, capture_output=True, check=False).returncode else (option,)


def compiled_object(text, options):
    """Compile C++ for libraries; return the path of the object file."""
    path = _folder_of_process() / "object.cpp"
    path.write_text(text)
    subprocess.run([*_GCC, *options, "-c", path, "-o", path.with_suffix(".o")], check=True)
    return path.with_suffix(".o")


def compile_cpp(text, headers, common, options, macros, objects=()):
    """Compile C++ after `COMMON` and macros, with the headers of a folder, and load it with object files.

    Macros of the command line would be defined in the common header, too. Where a name in it is one of theirs, as WIDTH
    is, the compiler would read the header again rather than what it was compiled to.
    """
    defined = "".join(f"#define {name} {value}\n" for name, value in macros)
    return loaded(f"{COMMON}{defined}{text}", [*_GCC, *options, f"-I{common}", f"-I{headers}"], objects)


def loaded(text, command, objects=()):
    """Compile C++ to a library with a command, and load it; nothing of it stays in the file system."""
    ctypes.CDLL("libstdc++.so.6", ctypes.RTLD_GLOBAL)
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "kernel.cpp"), Path(folder, "kernel.so")
        source.write_text(text)
        subprocess.run([*command, "-shared", "-o", library, source, *objects, *_LIBRARIES], check=True)
        return ctypes.CDLL(str(library))


def _folder_of_process():
    """Return a folder that is deleted when this process ends."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


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
