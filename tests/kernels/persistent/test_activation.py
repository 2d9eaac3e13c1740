"""The source that makes gates of gate sums; what it computes is in the tests of lean passes on a device."""

import pytest
import torch

from gatewise.derivation.device import device_code
from gatewise.kernels.cuda import toolchain
from gatewise.kernels.persistent.launches import SOURCES
from gatewise.kernels.persistent.launches.auxiliary import activating_macros
from tests.kernels.cell_code import FUSED
from tests.pairwise import each_value, pairwise

ARCHITECTURES = ["sm_80", "sm_90", "sm_100", "sm_120"]
SIZES = 1, 31, 1024
NUMBERS = (torch.bfloat16, False), (torch.float16, False), (torch.float32, False), (torch.float32, True)


@pytest.mark.parametrize(
    ("architecture", "size", "number", "cell"),
    each_value(pairwise(ARCHITECTURES, SIZES, NUMBERS, FUSED), most=3),
    ids=str,
)
def test_compiles_without_spills(architecture, size, number, cell):
    pytest.importorskip("cuda.core")
    macros = activating_macros(size, *number)
    _, taken = toolchain.compile_afresh(SOURCES / "activate.cu", architecture, macros, device_code(cell))
    assert taken.spilled_bytes == 0
