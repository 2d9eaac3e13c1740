"""The CUDA sources compile for every supported architecture, without a GPU, and take what they are planned to take."""

import dataclasses
import functools
import itertools
import re

import pytest
import torch

pytest.importorskip("cuda.core", reason="needs the extra `cuda`: pip install 'gatewise[cuda]'")

from gatewise.cells import GRU, LSTM, SLSTM, LayerNormLSTM, Regularised
from gatewise.contract.device import Device
from gatewise.derivation.device import device_code
from gatewise.derivation.row import row_code
from gatewise.kernels.cuda import toolchain
from gatewise.kernels.persistent.launches import SOURCES
from gatewise.kernels.persistent.sizes.cell_size import cell_size_of
from gatewise.kernels.persistent.sizes.step import code_of, has_fused_passes, macros_of
from gatewise.kernels.persistent.sizes.tiling_choice import stacked_tiling, tiling
from tests.compilers import nvrtc_version
from tests.kernels.cell_code import FUSED
from tests.pairwise import each_value, exhaustive, exhaustive_unless, pairwise

ARCHITECTURES = {"sm_80": "a100", "sm_86": "a10", "sm_89": "l4", "sm_90": "h200", "sm_100": "b200", "sm_120": "h200"}


@functools.cache
def compiled(name, architecture, cut, *, float16=False, ragged=False, resets=False, cell=LSTM()):  # noqa: B008
    dtype = torch.float32 if cut.value_bytes == 4 else torch.float16 if float16 else torch.bfloat16
    pause = {} if cut.distributed or cut.warpgroups or cut.stacked else {"PAUSE": 900}
    # As in calls with gradients of batches that are no multiple of 8.
    plain = cut.distributed or cut.warpgroups or cut.one_row or (name == "backward" and cut.value_bytes == 4)
    rows = {} if plain or cut.hidden <= 256 else {"INTERLEAVED": 1, "SKIPPED_BEYOND": int(not ragged)}
    macros = {"SIZE": cut.hidden - 1, **pause, **rows, **cut.macros(dtype, ragged, resets=resets)}
    return toolchain.compile_afresh(SOURCES / f"{name}.cu", architecture, macros, device_code(cell))


# `make test` compiles two cells for these; of the other cells it compiles the sources of `stepwise`.
OF_TWO_CELLS = ["sm_80", "sm_90", "sm_100", "sm_120"]


# No source asks for an architecture: what differs is how a device cuts the matrices.
@pytest.mark.parametrize(
    ("name", "architecture", "value_bytes", "ragged", "resets", "cell"),
    [
        *each_value(
            pairwise(["forward", "backward"], OF_TWO_CELLS, [2, 4], [False, True], [False, True], FUSED[:2]), most=2
        ),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in pairwise(["forward", "backward"], [*ARCHITECTURES], [2, 4], [False, True], [False, True], FUSED)
        ),
    ],
    ids=str,
)
def test_compiles(name, architecture, value_bytes, ragged, resets, cell):
    device = Device.named(ARCHITECTURES[architecture])
    if architecture == "sm_120":
        device = device.replace(capability=(12, 0))
    float16 = architecture in ("sm_86", "sm_90") and value_bytes == 2
    cut = tiling(72, 20, 2, device, name == "backward", value_bytes)
    binary, taken = compiled(name, architecture, cut, float16=float16, ragged=ragged, resets=resets, cell=cell)
    assert binary[:4] == b"\x7fELF"
    assert taken.registers <= 255
    assert taken.spilled_bytes == 0


@pytest.mark.parametrize(
    ("batch", "rows", "cell", "float16"),
    [
        (160, 24, FUSED[1], True),
        pytest.param(250, 32, FUSED[0], False, marks=pytest.mark.exhaustive),
        pytest.param(500, 64, FUSED[0], True, marks=pytest.mark.exhaustive),
    ],
)
def test_products_by_warpgroups_spill_next_to_nothing(batch, rows, cell, float16):
    cut = tiling(512, batch, 1, Device.named("h200"), False, 2)
    assert (cut.warpgroups, cut.rows) == (True, rows)
    _, taken = compiled("forward", "sm_90a", cut, float16=float16, cell=cell)
    assert taken.registers >= cut.weight_registers
    assert taken.spilled_bytes <= 16  # a few addresses that are used once


@pytest.mark.exhaustive
@pytest.mark.parametrize(("batch", "rows"), [(160, 24), (500, 64)])
def test_products_by_warpgroups_compile_with_resets(batch, rows):
    cut = tiling(512, batch, 1, Device.named("h200"), False, 2)
    assert (cut.warpgroups, cut.rows) == (True, rows)
    binary, _ = compiled("forward", "sm_90a", cut, ragged=True, resets=True)
    assert binary[:4] == b"\x7fELF"


def of_sizes(usual, cases, every=None, most=None):
    """Return cases of which `make test` runs each value with the usual sizes, or some, and no other size."""
    cases = [*cases]
    own = [case for case in cases if not usual.isdisjoint(each for each in case if type(each) is tuple)]
    own = each_value(own, most=most)
    return exhaustive_unless([case.values for case in own if not case.marks], every or cases)


def shapes(*sizes, usual, most=None):
    """Return all passes of two cells, of which `make test` compiles each or some, with the usual sizes."""
    given = [*sizes], ["forward", "backward"], FUSED[:2]
    return of_sizes(usual, pairwise(*given), [*itertools.product(*given)], most)


@pytest.mark.parametrize(
    ("size", "name", "cell"),
    shapes((256, 64), (512, 64), (1024, 16), (1500, 20), (1, 1), usual={(256, 64), (1, 1)}),
    ids=str,
)
def test_next_to_nothing_spills(size, name, cell):
    """What may spill are a few addresses that are used once."""
    cut = tiling(*size, 1, Device.named("h200"), name == "backward")
    _, taken = compiled(name, "sm_90", cut, cell=cell)
    assert taken.registers >= cut.weight_registers  # the weights are in registers
    assert taken.spilled_bytes <= 24  # 20 with NVRTC 13.0, at 1500 units backward; 16 with 13.5


@pytest.mark.parametrize(
    ("size", "name", "cell"),
    shapes((256, 64), (512, 8), (1024, 16), (1024, 64), (1150, 80), usual={(256, 64)}, most=1),
    ids=str,
)
def test_next_to_nothing_spills_in_float32(size, name, cell):
    cut = tiling(*size, 1, Device.named("h200"), name == "backward", 4)
    _, taken = compiled(name, "sm_90", cut, cell=cell)
    assert taken.registers >= cut.weight_registers
    assert taken.spilled_bytes <= 24  # 20 at 1150 units backward for a GRU


@pytest.mark.parametrize(
    ("name", "size", "value_bytes", "exact"),
    of_sizes(
        {(256, 64)},
        pairwise(
            ["forward", "backward"], [(256, 64), (512, 64), (1024, 1), (1024, 64), (1500, 20)], [2, 4], [False, True]
        ),
        most=1,
    ),
    ids=str,
)
def test_next_to_nothing_spills_with_resets(name, size, value_bytes, exact):
    cut = tiling(*size, 1, Device.named("h200"), name == "backward", value_bytes, exact and value_bytes == 4)
    if cut is None:
        pytest.skip("the weights do not fit")
    binary, taken = compiled(name, "sm_90", cut, ragged=exact, resets=True)
    assert taken.registers >= cut.weight_registers
    assert taken.spilled_bytes <= 28
    if size == (256, 64):
        assert compiled(name, "sm_90", cut, ragged=exact)[0] != binary


def compiled_with_masks(name, architecture, cut, cell, **options):
    dtype = torch.float32 if cut.value_bytes == 4 else torch.bfloat16
    macros = {"SIZE": cut.hidden, "PAUSE": 250, "MOST_BYTES": 15000, **cut.macros(dtype, **options), **macros_of(cell)}
    file = name if has_fused_passes(cell) else f"row_{name}"
    return toolchain.compile_afresh(SOURCES / f"{file}.cu", architecture, macros, code_of(cell))


def with_masks(cell, **options):
    zoneout = (0.1, *[0.2] * len(cell.states))
    return Regularised(cell, **(options or {"recurrent_dropout": 0.3, "zoneout": zoneout, "candidate_dropout": 0.25}))


@pytest.mark.parametrize(
    ("name", "architecture", "value_bytes", "ragged", "cell"),
    each_value(
        pairwise(
            ["forward", "backward"],
            ["sm_80", "sm_90", "sm_100"],
            [2, 4],
            [False, True],
            [with_masks(cell) for cell in (LSTM(), GRU(), SLSTM(), LayerNormLSTM())],
        ),
        most=2,
    ),
    ids=str,
)
def test_compiles_with_masks(name, architecture, value_bytes, ragged, cell):
    device, size = Device.named(ARCHITECTURES[architecture]), cell_size_of(cell, backward=name == "backward")
    cut = tiling(72, 20, 2, device, name == "backward", value_bytes, cell_size=size, masked=True)
    assert cut is not None
    _, taken = compiled_with_masks(name, architecture, cut, cell, ragged=ragged, resets=ragged)
    assert taken.registers <= 255
    assert taken.spilled_bytes == 0


@pytest.mark.parametrize(
    ("name", "size", "value_bytes", "options"),
    of_sizes(
        {(256, 64)},
        pairwise(
            ["forward", "backward"],
            [(256, 64), (512, 64), (1024, 16), (1024, 64), (1500, 20)],
            [2, 4],
            [{"recurrent_dropout": 0.3}, {"candidate_dropout": 0.3}, {"zoneout": (0.1, 0.0)}],
        ),
    ),
    ids=str,
)
def test_next_to_nothing_spills_with_masks(name, size, value_bytes, options):
    cut = tiling(*size, 1, Device.named("h200"), name == "backward", value_bytes, masked=True)
    if cut is None:
        pytest.skip("the weights do not fit")
    _, taken = compiled_with_masks(name, "sm_90", cut, with_masks(LSTM(), **options), ragged=False)
    assert taken.registers >= cut.weight_registers
    if nvrtc_version() >= (13, 0):  # 56 with NVRTC 12.4, at 1500 units backward
        assert taken.spilled_bytes <= (60 if size == (1500, 20) else 24)


@pytest.mark.parametrize("cell", [GRU(), LayerNormLSTM()], ids=lambda cell: cell.name)
def test_cells_without_masks_are_compiled_without_them(cell):
    assert macros_of(cell) == {}
    mark = re.compile(r"masks\.of_cell|\.masks\[")  # of fused cells, and of those that are not
    assert not mark.search(code_of(cell).text)
    assert mark.search(code_of(with_masks(cell, candidate_dropout=0.25)).text)


@pytest.mark.parametrize(
    ("name", "size", "value_bytes", "resets"),
    of_sizes(
        {(256, 64)},
        pairwise(["forward", "backward"], [(128, 16), (256, 16), (256, 64), (512, 8)], [2, 4], [False, True]),
        most=1,
    ),
    ids=str,
)
def test_next_to_nothing_spills_with_two_layers(name, size, value_bytes, resets):
    hidden, batch = size
    cut = stacked_tiling(hidden, batch, Device.named("h200"), name == "backward", value_bytes)
    stacked, taken = compiled(name, "sm_90", cut, ragged=batch == 16, resets=resets)
    assert taken.registers >= cut.weight_registers
    assert taken.spilled_bytes <= 16
    if hidden == 128 and not resets:
        assert compiled(name, "sm_90", dataclasses.replace(cut, stacked=False), ragged=True)[0] != stacked


def test_ragged_and_dtype_are_different_code():
    cut = tiling(64, 8, 1, Device.named("h200"), False)
    plain, _ = compiled("forward", "sm_90", cut)
    assert compiled("forward", "sm_90", cut, ragged=True)[0] != plain
    assert compiled("forward", "sm_90", cut, float16=True)[0] != plain


@pytest.mark.parametrize("name", ["forward", *exhaustive("backward")])
def test_one_row_takes_no_tensor_cores(name):
    cut = tiling(512, 1, 1, Device.named("h200"), name == "backward", 4, True)
    by_itself, taken = compiled(name, "sm_90", cut)
    assert taken.registers >= cut.weight_registers
    assert taken.spilled_bytes == 0
    if name == "forward":
        assert compiled(name, "sm_90", dataclasses.replace(cut, one_row=False))[0] != by_itself


@pytest.mark.parametrize(("architecture", "word"), each_value(pairwise([*ARCHITECTURES], [2, 4, 8, 16])))
def test_fitting_compiles(architecture, word):
    _, taken = toolchain.compile_afresh(SOURCES / "fit.cu", architecture, {"BYTES": word, "HALVES": 0, "AT_ONCE": 4})
    assert taken.spilled_bytes == 0


@pytest.mark.parametrize(
    ("size", "name"),
    of_sizes({(128, 16)}, pairwise([(128, 16), (512, 64), (1024, 1)], ["forward", "backward"]), most=1),
    ids=str,
)
def test_next_to_nothing_spills_with_exact_products(size, name):
    cut = tiling(*size, 1, Device.named("h200"), name == "backward", 4, True)
    _, taken = compiled(name, "sm_90", cut)
    assert taken.registers >= cut.weight_registers
    assert taken.spilled_bytes <= 16


@pytest.mark.parametrize(
    ("name", "architecture", "value_bytes", "cell", "most"),
    each_value(
        pairwise(
            ["forward", "backward"], ["sm_80", "sm_90", "sm_100"], [2, 4], [LayerNormLSTM(), SLSTM()], [0, 1_000_000]
        ),
        most=2,
    ),
    ids=str,
)
def test_rows_compile(name, architecture, value_bytes, cell, most):
    size, device = cell_size_of(cell, backward=name == "backward"), Device.named(ARCHITECTURES[architecture])
    cut = tiling(72, 20, 2, device, name == "backward", value_bytes, cell_size=size)
    assert cut is not None
    dtype = torch.float32 if value_bytes == 4 else torch.bfloat16
    macros = {"SIZE": 71, "PAUSE": 250, "MOST_BYTES": most, **cut.macros(dtype, True, resets=True)}
    binary, taken = toolchain.compile_afresh(SOURCES / f"row_{name}.cu", architecture, macros, row_code(cell))
    assert binary[:4] == b"\x7fELF"
    assert taken.registers <= 255
    assert taken.spilled_bytes == 0
