"""The cache of compiled kernels, and the error if the compiler is not installed."""

import ctypes
import locale
import sys
import types

import pytest
import torch

from gatewise.cells import GRU, LSTM
from gatewise.contract.device import Device
from gatewise.contract.errors import MissingExtra
from gatewise.derivation.device import device_code
from gatewise.kernels.cuda import formats, toolchain
from gatewise.kernels.persistent.launches import SOURCES
from gatewise.kernels.persistent.sizes.tiling_choice import tiling

MACROS = {"SIZE": 8, **tiling(8, 1, 1, Device.named("h200"), False).macros(torch.bfloat16, ragged=False)}
FORWARD, CODE = SOURCES / "forward.cu", device_code(LSTM())


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("GATEWISE_CACHE", str(tmp_path))
    return tmp_path / "kernels"


def test_the_second_call_reads_what_the_first_compiled(folder, monkeypatch):
    pytest.importorskip("cuda.core")
    first = toolchain.compile_source(FORWARD, "sm_90", MACROS, CODE)
    assert [path.read_bytes() for path in folder.iterdir()] == [first]
    monkeypatch.setattr(toolchain, "compile_afresh", lambda *arguments: pytest.fail("compiled again"))
    assert toolchain.compile_source(FORWARD, "sm_90", MACROS, CODE) == first


@pytest.fixture
def compiled_at_once(monkeypatch):
    """Compile nothing: what is stored is any code."""
    monkeypatch.setattr(toolchain, "compile_afresh", lambda *arguments: (b"code", None))


def test_macros_architecture_and_cell_are_part_of_the_key(folder, compiled_at_once):
    toolchain.compile_source(FORWARD, "sm_90", MACROS, CODE)
    toolchain.compile_source(FORWARD, "sm_80", MACROS, CODE)
    toolchain.compile_source(FORWARD, "sm_90", MACROS | formats.macros(torch.float16), CODE)
    toolchain.compile_source(FORWARD, "sm_90", MACROS, device_code(GRU()))
    assert len(list(folder.iterdir())) == 4


def test_code_of_the_compiler_of_another_pytorch_is_not_used(folder, monkeypatch):
    def compile_afresh(*arguments):
        return torch.version.cuda.encode(), None

    monkeypatch.setattr(toolchain, "compile_afresh", compile_afresh)
    for version in ("12.4", "13.0", "12.4"):
        monkeypatch.setattr(torch.version, "cuda", version)
        toolchain._compiler_version.cache_clear()
        assert toolchain.compile_source(FORWARD, "sm_90", MACROS, CODE) == version.encode()
    toolchain._compiler_version.cache_clear()
    assert len(list(folder.iterdir())) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="calls functions of glibc")
def test_a_compilation_leaves_the_locale_of_its_caller(monkeypatch):
    libc = ctypes.CDLL(None)
    libc.newlocale.restype = libc.uselocale.restype = ctypes.c_void_p
    libc.newlocale.argtypes, libc.uselocale.argtypes = (
        [ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p],
        [ctypes.c_void_p],
    )

    class Program:
        """Does to the locale what NVRTC 12.4 does."""

        def __init__(self, *arguments):
            libc.uselocale(libc.newlocale(1 << locale.LC_CTYPE, b"C", None))

        def compile(self, kind, logs):
            self.__init__()
            return types.SimpleNamespace(code=b"code")

    core = types.SimpleNamespace(ProgramOptions=lambda **options: None, Program=Program)
    monkeypatch.setattr(toolchain, "_core", lambda: core)
    monkeypatch.setattr(toolchain, "_resources", lambda log: None)
    before = libc.uselocale(None)
    assert toolchain.compile_afresh(FORWARD, "sm_90", MACROS, CODE) == (b"code", None)
    assert libc.uselocale(None) == before


def test_a_folder_that_cannot_be_written_costs_only_the_cache(compiled_at_once, monkeypatch, tmp_path):
    occupied = tmp_path / "file"
    occupied.write_text("")
    monkeypatch.setenv("GATEWISE_CACHE", str(occupied))
    assert toolchain.compile_source(FORWARD, "sm_90", MACROS, CODE) == b"code"


def test_the_error_for_a_missing_compiler_has_the_command(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    monkeypatch.setitem(sys.modules, "cuda.core.experimental", None)
    with pytest.raises(MissingExtra, match=r"pip install 'gatewise\[cuda\]'"):
        toolchain.compile_source(FORWARD, "sm_90", MACROS, CODE)
