"""The CUDA code of random cells, compiled for the CPU in double precision, compared with autograd."""

import pytest
import torch

from gatewise.cells.step import next_states
from gatewise.derivation.fused import carried_states
from gatewise.derivation.unit import unit_of
from gatewise.kernels.criteria import is_fused
from tests.derivation.random_cells import seeded
from tests.kernels.cell_code import ROW_UNITS, codes_of, row_codes

TOGETHER = 10  # cells that the C++ compiler compiles at once


def chunks(cells):
    """Number the chunks of cells, of which one is compiled by default."""
    marks = [() if number == 0 else pytest.mark.exhaustive for number in range(cells // TOGETHER)]
    return pytest.mark.parametrize("chunk", [pytest.param(number, marks=own) for number, own in enumerate(marks)])


def cells_of(chunk, **options):
    return seeded(range(chunk * TOGETHER, (chunk + 1) * TOGETHER), **options)


def normal(generator, *shape):
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def assert_same(found, expected, cell):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11, msg=lambda said: f"{said}\n{cell.source}")


def stated(cell, values, above):
    """Return the states after a step [1 + S, H] and the gradients of the values that it reads [N, H], by autograd."""
    leaves = [row.clone().requires_grad_() for row in values]
    names = [
        *cell.sums,
        *(("state", name) for name in carried_states(cell)),
        *(("p", name) for name in cell.parameters),
    ]
    by_name = dict(zip(names, leaves, strict=True))
    states = {name: by_name.get(("state", name), leaves[0].detach()) for name in ("h", *cell.states)}
    parameters = {name: by_name["p", name] for name in cell.parameters}
    hidden, others = next_states(cell, {name: by_name[name] for name in cell.sums}, states, parameters)
    after = torch.stack([hidden, *others])
    return after.detach(), torch.stack(torch.autograd.grad((after * above).sum(), leaves, materialize_grads=True))


@chunks(500)
def test_the_code_for_rows_agrees_with_autograd(chunk):
    cells, generator = cells_of(chunk), torch.Generator().manual_seed(chunk)
    for cell, code in zip(cells, row_codes(cells), strict=True):
        read = len(cell.sums) + len(carried_states(cell)) + len(cell.parameters)
        values, above = normal(generator, read, ROW_UNITS), normal(generator, 1 + len(cell.states), ROW_UNITS)
        after, gradients = code(values, above)
        expected_after, expected = stated(cell, values, above)
        assert_same(after, expected_after, cell)
        assert_same(gradients, expected, cell)


@chunks(200)
def test_the_code_for_units_agrees_with_autograd(chunk):
    cells, generator = cells_of(chunk, fused=True), torch.Generator().manual_seed(chunk)
    assert all(map(is_fused, cells))
    for cell, code in zip(cells, codes_of(cells), strict=True):
        names = len(cell.sums)
        sums, before = normal(generator, 4, ROW_UNITS), normal(generator, ROW_UNITS)
        dh, d = normal(generator, 2, ROW_UNITS)
        above = torch.stack([dh, d]) if cell.states else (dh + d)[None]
        expected_after, expected = stated(cell, torch.cat([sums[:names], before[None]]), above)
        kept, state, hidden = code.stepped(sums, before)
        assert_same(torch.stack([hidden, state]), expected_after[[0, -1]], cell)
        dsums, dbefore = code.adjoint(kept, state, before, dh, d)
        assert_same(torch.cat([dsums[:names], dbefore[None]]), expected, cell)
        assert not dsums[names:].any()
        unit = unit_of(cell)
        found, *states = unit.stepped(*sums[:names], before)
        for mine, theirs in zip((*found, *states), (*kept[:names], state, hidden), strict=True):
            assert_same(mine, theirs, cell)
        found, own = unit.adjoint(*found, state, before, dh, d)
        for mine, theirs in zip((*found, own), expected, strict=True):
            assert_same(torch.as_tensor(mine).expand(ROW_UNITS), theirs, cell)
