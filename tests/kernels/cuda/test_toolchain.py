"""The cache of compiled kernels, and the error if the compiler is not installed."""

import sys

import pytest
import torch

from gatewise.cells import GRU, LSTM
from gatewise.contract.device import Device
from gatewise.contract.errors import MissingExtra
from gatewise.derivation.device import device_code
from gatewise.kernels.cuda import formats, toolchain
from gatewise.kernels.persistent.launches import SOURCES
from gatewise.kernels.persistent.sizes.tilings import tiling

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


def test_macros_architecture_and_cell_are_part_of_the_key(folder):
    pytest.importorskip("cuda.core")
    toolchain.compile_source(FORWARD, "sm_90", MACROS, CODE)
    toolchain.compile_source(FORWARD, "sm_80", MACROS, CODE)
    toolchain.compile_source(FORWARD, "sm_90", MACROS | formats.macros(torch.float16), CODE)
    toolchain.compile_source(FORWARD, "sm_90", MACROS, device_code(GRU()))
    assert len(list(folder.iterdir())) == 4


def test_a_folder_that_cannot_be_written_costs_only_the_cache(monkeypatch, tmp_path):
    pytest.importorskip("cuda.core")
    occupied = tmp_path / "file"
    occupied.write_text("")
    monkeypatch.setenv("GATEWISE_CACHE", str(occupied))
    assert toolchain.compile_source(FORWARD, "sm_90", MACROS, CODE)


def test_the_error_for_a_missing_compiler_has_the_command(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    monkeypatch.setitem(sys.modules, "cuda.core.experimental", None)
    with pytest.raises(MissingExtra, match=r"pip install 'gatewise\[cuda\]'"):
        toolchain.compile_source(FORWARD, "sm_90", MACROS, CODE)
