"""The CUDA sources compile for every supported architecture, without a GPU, and without register spills."""

import functools

import pytest
import torch

pytest.importorskip("cuda.core", reason="needs the extra `cuda`: pip install 'gatewise[cuda]'")

from gatewise.cells import GRU, LSTM, RNN, SHIPPED, SLSTM, LayerNormLSTM, Regularised
from gatewise.derivation.device import device_code
from gatewise.derivation.row import row_code
from gatewise.derivation.trace import is_pointwise
from gatewise.kernels.cuda import toolchain
from gatewise.kernels.cuda.formats import NUMBERS
from gatewise.kernels.stepwise import single_form, single_training
from gatewise.kernels.stepwise.launch import SOURCES, macros_of, row_macros
from gatewise.kernels.stepwise.product_layout import ProductLayout
from gatewise.kernels.stepwise.single_criteria import TILED_UNITS
from tests.kernels.cell_code import FUSED, ROWS
from tests.kernels.stepwise.test_single_on_cpu import Many
from tests.pairwise import each_value, pairwise

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
MASKED = [Regularised(LSTM(), 0.3, (0.2, 0.1), 0.25), Regularised(LayerNormLSTM(), 0.3)]
COLUMNS = {dtype: ProductLayout(column_major=dtype in (torch.float16, torch.float32)) for dtype in NUMBERS}


@functools.cache
def compiled(name, architecture, dtype, layout, width, table=0, cell=LSTM(), resets=False):  # noqa: B008
    macros = dict(macros_of(dtype, width, 32, layout, resets=resets)) | {"TABLE": table}
    return toolchain.compile_afresh(SOURCES / f"{name}.cu", architecture, macros, device_code(cell))


# The sources depend on the architecture only through whether it is 9.0 or later, and on the dtype only in conversions.
@pytest.mark.parametrize(
    ("name", "architecture", "dtype", "cell"),
    each_value(pairwise(["forward", "backward", "projection"], ARCHITECTURES, [*NUMBERS], FUSED), most=3),
    ids=str,
)
def test_compiles(name, architecture, dtype, cell):
    layout = ProductLayout() if name == "projection" else COLUMNS[dtype]
    binary, taken = compiled(name, architecture, dtype, layout, 16 // dtype.itemsize, cell=cell)
    assert binary[:4] == b"\x7fELF"
    assert taken.spilled_bytes == 0
    assert taken.registers <= 128


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_the_kernels_for_capture_are_in_the_same_source(name):
    binary, taken = compiled(name, "sm_90", torch.bfloat16, ProductLayout(), 8, table=1)
    for entry in ("enter", "advance", "step"):
        assert f"{entry}_{name}".encode() in binary
    assert taken.spilled_bytes == 0


def test_layouts_and_widths_are_compiled_separately():
    plain, _ = compiled("forward", "sm_90", torch.bfloat16, ProductLayout(), 8)
    assert compiled("forward", "sm_90", torch.bfloat16, ProductLayout(column_major=True), 8)[0] != plain
    assert compiled("forward", "sm_90", torch.bfloat16, ProductLayout(), 1)[0] != plain


@pytest.mark.parametrize(
    ("name", "table", "dtype", "cell"),
    [
        *each_value(pairwise(["forward", "backward"], [0, 1], [*NUMBERS], FUSED[:2]), (0, 1), most=3),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in pairwise(["forward", "backward"], [0, 1], [*NUMBERS], FUSED[2:])
        ),
    ],
    ids=str,
)
def test_resets_are_compiled_separately(name, table, dtype, cell):
    given = name, "sm_90", dtype, COLUMNS[dtype], 16 // dtype.itemsize, table, cell
    binary, taken = compiled(*given, resets=True)
    assert taken.spilled_bytes == 0
    assert len(binary) > len(compiled(*given)[0])


@pytest.mark.parametrize(
    ("name", "architecture", "dtype", "cell", "table"),
    each_value(pairwise(["row_forward", "row_backward"], ARCHITECTURES, [*NUMBERS], [*ROWS, *MASKED], [0, 1]), most=3),
    ids=str,
)
def test_rows_compile(name, architecture, dtype, cell, table):
    macros = dict(row_macros(dtype, 256, 1)) | {"TABLE": table}
    binary, taken = toolchain.compile_afresh(SOURCES / f"{name}.cu", architecture, macros, row_code(cell))
    assert binary[:4] == b"\x7fELF"
    assert taken.spilled_bytes == 0
    for entry in ("enter", "advance") if table else ():
        assert f"{entry}_{name}".encode() in binary


@pytest.mark.parametrize(
    ("architecture", "dtype", "cell", "rows", "warps", "narrow"),
    each_value(
        pairwise(ARCHITECTURES, [*NUMBERS], [*filter(is_pointwise, SHIPPED)], (1, 2, 4, 8), (1, 2, 4), (False, True)),
        most=4,
    ),
    ids=str,
)
def test_single_steps_compile(architecture, dtype, cell, rows, warps, narrow):
    widest = 16 // dtype.itemsize
    macros = single_form.Form(1 if narrow else widest, widest, 1, rows, warps).macros(dtype)
    binary, taken = toolchain.compile_afresh(SOURCES / "single.cu", architecture, macros, row_code(cell))
    assert b"single_step" in binary
    assert b"single_call" in binary
    # For compute capability 10.0, the compiler spills a word of a step that keeps its sums, outside of all loops.
    assert taken.spilled_bytes <= 4
    assert taken.registers <= 224


@pytest.mark.parametrize(
    ("architecture", "dtype", "cell", "rows", "warps"),
    each_value(
        pairwise(
            ("sm_80", "sm_90", "sm_120"),
            (torch.bfloat16, torch.float16),
            (LSTM(), GRU(), RNN("relu"), SLSTM()),
            (8, 16, 32, 64),
            (1, 8),
        ),
        most=2,
    ),
    ids=str,
)
def test_single_steps_on_tensor_cores_compile(architecture, dtype, cell, rows, warps):
    form = single_form.Form(8, 8, TILED_UNITS, rows, max(warps, rows // 8))
    binary, taken = toolchain.compile_afresh(SOURCES / "single.cu", architecture, form.macros(dtype), row_code(cell))
    assert b"single_step" in binary
    assert b"single_call" in binary
    # A loop that is not unrolled spills less, and mostly takes more time: benchmarks/results/single_steps.jsonl.
    assert taken.spilled_bytes <= 16
    assert taken.registers <= 168


@pytest.mark.parametrize(
    ("architecture", "dtype", "cell", "rows", "wide", "narrow"),
    each_value(
        pairwise(
            ARCHITECTURES,
            [*NUMBERS],
            [cell for cell in SHIPPED if is_pointwise(cell)],
            (1, 2, 8),
            (False, True),
            (False, True),
        ),
        most=4,
    ),
    ids=str,
)
def test_backward_passes_of_single_steps_compile(architecture, dtype, cell, rows, wide, narrow):
    widths = (1 if narrow else 16 // dtype.itemsize,) * 2
    macros = single_training.macros(cell, dtype, widths, rows, wide=wide)
    binary, taken = toolchain.compile_afresh(SOURCES / "single_backward.cu", architecture, macros, row_code(cell))
    assert b"single_adjoint" in binary
    assert b"single_products" in binary
    assert taken.spilled_bytes == 0
    assert taken.registers <= 168


@pytest.mark.parametrize(
    ("dtype", "sums", "rows"),
    [(torch.bfloat16, 28, 16), pytest.param(torch.float64, 25, 8, marks=pytest.mark.exhaustive)],
    ids=str,
)
def test_backward_passes_of_cells_with_many_sums_compile(dtype, sums, rows):
    cell = Many(sums)
    macros = single_training.macros(cell, dtype, (16 // dtype.itemsize,) * 2, rows, wide=False)
    assert macros["LANES_OF_UNIT"] < rows
    binary, _ = toolchain.compile_afresh(SOURCES / "single_backward.cu", "sm_90", macros, row_code(cell))
    assert b"single_adjoint" in binary
