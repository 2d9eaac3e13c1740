"""The source that makes gates of gate sums; what it computes is in the tests of lean passes on a device."""

import pytest

from gatewise.kernels.cuda import toolchain
from gatewise.kernels.persistent.launch import SOURCES

ARCHITECTURES = ["sm_80", "sm_90", "sm_100", "sm_120"]


@pytest.mark.parametrize(("float16", "float32", "exact"), [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 1, 1)])
@pytest.mark.parametrize(("size", "hidden"), [(1, 8), (31, 32), (1024, 1024)])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiles_without_spills(architecture, size, hidden, float16, float32, exact):
    pytest.importorskip("cuda.core")
    macros = {"SIZE": size, "HIDDEN": hidden, "FLOAT16": float16, "FLOAT32": float32, "EXACT": exact}
    _, taken = toolchain.compile_afresh(SOURCES / "activate.cu", architecture, macros)
    assert taken.spilled_bytes == 0
