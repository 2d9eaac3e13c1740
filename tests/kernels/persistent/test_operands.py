"""What products over all steps read, and the order of rows: the sources compile; on a device, against plain loops."""

import itertools
import types

import pytest
import torch

from gatewise.kernels.cuda import toolchain
from gatewise.kernels.cuda.scratch import Scratch
from gatewise.kernels.persistent import launches
from gatewise.kernels.persistent.buffers import states_before
from gatewise.kernels.persistent.launches import SOURCES, Operand, Tokens
from tests.kernels.persistent.emulation import write_operands
from tests.pairwise import each_value

ARCHITECTURES = ["sm_80", "sm_90", "sm_120"]
TIME, BATCH = 7, 6
LENGTHS = [7, 0, 1, 4, 6, 9]  # the last one beyond what there is, which a caller is told elsewhere


SOURCES_AND_MACROS = [
    *(("operands", {"BYTES": n, "RESETS": n // 4 % 2, "HALVES": 0, "AT_ONCE": 8}) for n in (2, 4, 8, 16)),
    ("order", {"THREADS": 256}),
]


# No source asks for an architecture.
@pytest.mark.parametrize(
    ("architecture", "source"), each_value([*itertools.product(ARCHITECTURES, SOURCES_AND_MACROS)], most=3), ids=str
)
def test_compiles_without_spills(architecture, source):
    pytest.importorskip("cuda.core")
    name, macros = source
    _, taken = toolchain.compile_afresh(SOURCES / f"{name}.cu", architecture, macros)
    assert taken.spilled_bytes == 0


def test_states_before_a_step_are_those_of_the_step_before():
    y, first = torch.randn(3, 2, 8), torch.randn(2, 8)
    into = [torch.empty(6, 8) for _ in range(2)]
    wanted = [states_before(y, first, direction) for direction in range(2)]
    write_operands(wanted, into, Tokens(3, 2, by_row=False), None)
    assert torch.equal(into[0].view(3, 2, 8), torch.stack([first, y[0], y[1]]))
    assert torch.equal(into[1].view(3, 2, 8), torch.stack([y[1], y[2], first]))


@pytest.mark.gpu
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [1, 31, 40, 256])
@pytest.mark.parametrize(("start", "steps"), [(0, TIME), (2, 3), (4, 3)])
def test_operands_are_those_of_plain_loops(size, dtype, marked, ragged, by_row, start, steps):
    tokens = Tokens(steps, BATCH, by_row=by_row)
    x, y = torch.randn(TIME, BATCH, size, dtype=dtype), torch.randn(TIME, BATCH, 2 * size, dtype=dtype)
    first = torch.randn(2, BATCH, size, dtype=dtype)
    lengths = torch.tensor(LENGTHS) if ragged else None
    resets = torch.rand(TIME, BATCH) < 0.4 if marked else None

    def there_of(tensor):
        return None if tensor is None else tensor.to("cuda")

    def wanted(device):
        past = [
            states_before(y.to(device)[..., n * size : (n + 1) * size], first[n].to(device), n, start) for n in range(2)
        ]
        return [Operand(x.to(device), start=start), *past]

    there = wanted("cuda")
    found = [own.new(tokens, Scratch(there[0].source)).fill_(torch.nan) for own in there]
    launches.write_operands(there, found, tokens, there_of(lengths), there_of(resets))
    expected = [torch.empty(own.shape, dtype=dtype) for own in found]
    write_operands(wanted("cpu"), expected, tokens, lengths, resets)
    for own, other in zip(found, expected, strict=True):
        assert torch.equal(own.cpu(), other)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 255, 256, 257, 1000])
def test_rows_come_longest_first_and_otherwise_as_they_are(batch):
    lengths = torch.randint(0, 50, (batch,), device="cuda")

    launch = types.SimpleNamespace(tiling=types.SimpleNamespace(groups=2, together=1))
    order = launches.longest_first(launch, lengths, Scratch(lengths))
    assert torch.equal(order.long(), torch.argsort(lengths, descending=True, stable=True))
    launch.tiling.together = 2
    assert launches.longest_first(launch, lengths, Scratch(lengths)) is None
