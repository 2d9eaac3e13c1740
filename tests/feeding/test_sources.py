"""The CUDA sources compile for every supported architecture, without a GPU."""

import pytest
import torch

pytest.importorskip("cuda.core", reason="needs the extra `cuda`: pip install 'gatewise[cuda]'")

from gatewise.derivation.device import device_code
from gatewise.feeding.elementwise import CELL
from gatewise.feeding.elementwise_kernels import SOURCE, macros_of, width_of
from gatewise.kernels.cuda import toolchain
from gatewise.kernels.cuda.formats import NUMBERS
from tests.pairwise import exhaustive_unless

CODE = device_code(CELL)

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")


# The sources depend on the architecture only through whether it is 9.0 or later, and on the dtype only in conversions.
KINDS = [(name, dtype) for number, name in enumerate(ARCHITECTURES) for dtype in [*NUMBERS][number % 2 :: 2]]
USUAL = [
    (name, dtype) for name, dtype in KINDS if (name, dtype) in {("sm_80", torch.bfloat16), ("sm_90", torch.float64)}
]


@pytest.mark.parametrize(("architecture", "dtype"), exhaustive_unless(USUAL, KINDS), ids=str)
def test_compiles(architecture, dtype):
    binary, taken = toolchain.compile_afresh(SOURCE, architecture, dict(macros_of(dtype, 16 // dtype.itemsize)), CODE)
    assert all(name in binary for name in (b"feeding_cell", b"feeding_cell_gradient", b"feeding_attended_gradient"))
    assert taken.registers <= 128


@pytest.mark.parametrize("width", [2, *(pytest.param(width, marks=pytest.mark.exhaustive) for width in (1, 4))])
def test_operands_in_float16_are_compiled_separately(width):
    both = [dict(macros_of(torch.float32, width, halves)) for halves in (False, True)]
    apart = {toolchain.compile_afresh(SOURCE, "sm_90", macros, CODE)[0] for macros in both}
    assert len(apart) == 2


@pytest.mark.parametrize(
    ("batch", "units", "alignment", "dtype", "expected"),
    [
        (128, 512, 512, torch.bfloat16, 2),
        (1024, 1024, 1024, torch.bfloat16, 8),
        (1024, 1024, 1024, torch.float32, 4),
        (1024, 1024, 33, torch.float32, 1),
        (1024, 31, 0, torch.bfloat16, 1),
        (1024, 1024, 0, torch.bfloat16, 8),
    ],
)
def test_width_leaves_enough_threads_and_fits_every_offset(batch, units, alignment, dtype, expected):
    assert width_of(batch, units, alignment, dtype, 132) == expected
