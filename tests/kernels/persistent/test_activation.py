"""The source that makes gates of gate sums; what it computes is in the tests of lean passes on a device."""

import pytest

from gatewise.derivation.device import device_code
from gatewise.kernels.cuda import toolchain
from gatewise.kernels.persistent.launches import SOURCES
from tests.kernels.cell_code import FUSED
from tests.pairwise import pairwise

ARCHITECTURES = ["sm_80", "sm_90", "sm_100", "sm_120"]
SIZES = (1, 8), (31, 32), (1024, 1024)


NUMBERS = (0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 1, 1)


@pytest.mark.parametrize(
    ("architecture", "sizes", "numbers", "cell"), pairwise(ARCHITECTURES, SIZES, NUMBERS, FUSED), ids=str
)
def test_compiles_without_spills(architecture, sizes, numbers, cell):
    (size, hidden), (float16, float32, exact) = sizes, numbers
    pytest.importorskip("cuda.core")
    macros = {"SIZE": size, "HIDDEN": hidden, "FLOAT16": float16, "FLOAT32": float32, "EXACT": exact}
    _, taken = toolchain.compile_afresh(SOURCES / "activate.cu", architecture, macros, device_code(cell))
    assert taken.spilled_bytes == 0
