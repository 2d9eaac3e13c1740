"""From CUDA C++ in the package to machine code: NVRTC, and a cache on disk.

Needs the extra `cuda`, and no GPU: `compile_source` works anywhere, for any architecture.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import io
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from gatewise.contract.cache import cache_folder
from gatewise.contract.errors import CheckpointError, MissingExtra
from gatewise.derivation.device import DeviceCode
from gatewise.files import write_bytes

SHARED = Path(__file__).parent
"""Where the headers lie that sources of several packages include."""


class Resources(NamedTuple):
    """What one instance of a kernel takes, as the assembler reports it."""

    registers: int
    spilled_bytes: int
    stack_bytes: int


def compile_source(source: Path, architecture: str, macros: Mapping[str, int], code: DeviceCode | None = None) -> bytes:
    """Return the machine code of a source for an architecture, from the cache where it is there.

    Args:
        source: File of CUDA C++; what it includes lies beside it, or in `SHARED`.
        architecture: As NVRTC names it: "sm_90".
        macros: The template parameters of the source.
        code: The code of the cell, which the source names CELL_CODE; None if it needs none.

    Raises:
        MissingExtra: `cuda-core` is not installed.
    """
    fingerprint = _fingerprint(source, architecture, tuple(macros.items()), code.key if code else "")
    path = cache_folder() / "kernels" / f"{source.stem}-{architecture}-{fingerprint}.cubin"
    try:
        return path.read_bytes()
    except OSError:
        binary, _ = compile_afresh(source, architecture, macros, code)
    _store(path, binary)
    return binary


def compile_afresh(
    source: Path, architecture: str, macros: Mapping[str, int], code: DeviceCode | None = None
) -> tuple[bytes, Resources]:
    """Compile without the cache; also return what the kernel takes."""
    core = _core()
    options = core.ProgramOptions(
        arch=architecture,
        std="c++17",
        include_path=[str(source.parent), str(SHARED)],
        define_macro=[(macro, str(value)) for macro, value in macros.items()],
        ptxas_options=["-v"],
    )
    log = io.StringIO()
    program = core.Program(source_text(source, code), "c++", options)
    binary = program.compile("cubin", logs=log).code
    return binary, _resources(log.getvalue())


def source_text(source: Path, code: DeviceCode | None) -> str:
    """Return the text of a source with the definition of CELL_CODE before it."""
    if code is None:
        return source.read_text()
    definition = " ".join(code.text.splitlines())
    return f"#define CELL_CODE {definition}\n#line 1\n{source.read_text()}"


def _core() -> ModuleType:
    try:
        import cuda.core as core

        if not hasattr(core, "Program"):
            # Before cuda-core 1.0 its classes were here.
            import cuda.core.experimental as core  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingExtra.for_package("cuda-core", "Compiling CUDA kernels", "cuda") from error
    return core


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
    try:
        return importlib.metadata.version("nvidia-cuda-nvrtc")
    except importlib.metadata.PackageNotFoundError:
        return "system"


def _store(path: Path, binary: bytes) -> None:
    # Written aside and moved, so that another process never reads half a file. A folder that cannot be written costs a
    # compilation in the next process, not this call.
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
