"""Compile CUDA C++ with NVRTC, and cache the results on disk.

This needs the extra `cuda`, but no GPU: `compile_source` compiles for any architecture on any machine.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import io
import logging
import re
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch

from gatewise.contract.cache import cache_folder
from gatewise.contract.errors import CheckpointError, MissingExtra
from gatewise.derivation.device import DeviceCode
from gatewise.files import write_bytes

_log = logging.getLogger(__name__)
SHARED = Path(__file__).parent
"""The folder with the headers that the sources of several kernels include."""


class Resources(NamedTuple):
    """The resources of a compiled kernel, as reported by ptxas: registers, spilled bytes and stack bytes per thread."""

    registers: int
    spilled_bytes: int
    stack_bytes: int


def compile_source(source: Path, architecture: str, macros: Mapping[str, int], code: DeviceCode | None = None) -> bytes:
    """Return the machine code of a source file for an architecture, from the cache if possible.

    Args:
        source: A file of CUDA C++; the headers that it includes are in its folder or in `SHARED`.
        architecture: The architecture in NVRTC's notation, such as "sm_90".
        macros: The macros to define, which serve as template parameters.
        code: The generated code of a cell, which the source includes as CELL_CODE; None if it does not.

    Raises:
        MissingExtra: `cuda-core` is not installed.
    """
    fingerprint = _fingerprint(source, architecture, tuple(macros.items()), code.key if code else "")
    path = cache_folder() / "kernels" / f"{source.stem}-{architecture}-{fingerprint}.cubin"
    with _turns().setdefault(path, threading.Lock()):  # another thread may be compiling the same code
        try:
            return path.read_bytes()
        except OSError:
            binary, _ = compile_afresh(source, architecture, macros, code)
        _store(path, binary)
    return binary


def compile_afresh(
    source: Path, architecture: str, macros: Mapping[str, int], code: DeviceCode | None = None
) -> tuple[bytes, Resources]:
    """Compile a source file without the cache; return the machine code and the resources of the kernel.

    The log has an INFO line about each compilation, whose record has its time as `seconds`.
    """
    began = time.perf_counter()
    core = _core()
    options = core.ProgramOptions(
        arch=architecture,
        std="c++17",
        include_path=[str(source.parent), str(SHARED)],
        define_macro=[(macro, str(value)) for macro, value in macros.items()],
        ptxas_options=["-v"],
    )
    log = io.StringIO()
    # NVRTC of CUDA 12 leaves the locale "C" to its thread, in which `open` would then read and write ASCII.
    with ThreadPoolExecutor(1, thread_name_prefix="gatewise-compiler") as compiler:
        program = compiler.submit(core.Program, source_text(source, code), "c++", options).result()
        binary = compiler.submit(program.compile, "cubin", logs=log).result().code
    seconds = time.perf_counter() - began
    _log.info("Compiled %s for %s in %.2f s", source.name, architecture, seconds, extra={"seconds": seconds})
    return binary, _resources(log.getvalue())


def source_text(source: Path, code: DeviceCode | None) -> str:
    """Return the text of a source file, preceded by the definition of CELL_CODE if there is code of a cell."""
    if code is None:
        return source.read_text()
    definition = " ".join(code.text.splitlines())
    return f"#define CELL_CODE {definition}\n#line 1\n{source.read_text()}"


_importing = threading.Lock()


def _core() -> ModuleType:
    # A thread that imports the package while another one does can get it before it has its classes.
    with _importing:
        try:
            import cuda.core as core

            if not hasattr(core, "Program"):
                # The module of the classes before cuda-core 1.0.
                import cuda.core.experimental as core  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise MissingExtra.for_package("cuda-core", "Compiling CUDA kernels", "cuda") from error
        return core


@functools.cache
def _turns() -> dict[Path, threading.Lock]:
    """Return the lock of each file of machine code, so that one thread compiles it and the others read it."""
    return {}


def _fingerprint(source: Path, architecture: str, macros: tuple[tuple[str, int], ...], code: str) -> str:
    headers = _digest(source.parent), _digest(SHARED)
    text = repr((source.stem, architecture, sorted(macros), headers, code, _compiler_version()))
    return hashlib.sha256(text.encode()).hexdigest()[:24]


@functools.cache
def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.cu*")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


@functools.cache
def _compiler_version() -> str:
    """Return the versions of NVRTC's package and of PyTorch's CUDA, which loads its own NVRTC if it has one."""
    try:
        version = importlib.metadata.version("nvidia-cuda-nvrtc")
    except importlib.metadata.PackageNotFoundError:
        version = "system"
    return f"{version}, {torch.version.cuda}"


def _store(path: Path, binary: bytes) -> None:
    # The file is written under another name and renamed, so that other processes never read a partial file. If the
    # folder is not writable, the next process compiles again; this call does not fail.
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, binary)
    except (OSError, CheckpointError):
        return


def _resources(log: str) -> Resources:
    def figure(pattern: str) -> int:
        found = re.search(pattern, log)
        return int(found.group(1)) if found else 0

    return Resources(
        figure(r"Used (\d+) registers"), figure(r"(\d+) bytes spill stores"), figure(r"(\d+) bytes stack frame")
    )
