"""The values of a call."""

from __future__ import annotations

import pytest
import torch

import gatewise
from gatewise.benchmarks.cells.call import draw, layer_of
from gatewise.benchmarks.cells.cases import TINY, chosen_cells, measured_cells
from gatewise.cells import Cell

CPU = torch.device("cpu")


@pytest.mark.parametrize("cell", measured_cells(), ids=lambda cell: cell.name)
def test_values_are_exact_in_all_formats_and_the_same_each_time(cell: Cell) -> None:
    call, again = draw(cell, TINY[0], CPU), draw(cell, TINY[0], CPU)
    assert set(call.weights) == {name for name, _ in layer_of(cell, 8).named_parameters()}
    one, other = ((each.x, *each.states, *each.weights.values()) for each in (call, again))
    for tensor, same in zip(one, other, strict=True):
        assert torch.equal(tensor, same)
        assert torch.equal(tensor.to(torch.bfloat16).to(torch.float16), tensor)
        assert tensor.isfinite().all()
    assert len(call.states) == len(call.dstates) == 1 + len(cell.states)


def test_drawing_leaves_the_random_numbers_of_the_program_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    draw(*chosen_cells(["peephole_lstm"]), TINY[0], CPU)
    assert torch.equal(torch.rand(3), expected)


def test_parameters_of_a_cell_are_near_their_initial_values_and_not_at_them() -> None:
    found = draw(*chosen_cells(["peephole_lstm"]), TINY[0], CPU).weights["p_i_l0"]
    assert found.shape == (8,)
    assert 0 < found.abs().max() <= 8**-0.5


def test_states_are_those_that_the_cell_can_have() -> None:
    _, _, n, m = draw(*chosen_cells(["slstm"]), TINY[0], CPU).states
    assert (n > 0).all()
    assert m.isfinite().all()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("lstm", gatewise.LSTM),
        ("gru", gatewise.GRU),
        ("rnn_relu", gatewise.RNN),
        ("mgu", gatewise.Recurrent),
        ("own_lstm", gatewise.Recurrent),
    ],
)
def test_layers_are_those_that_users_create(name: str, kind: type) -> None:
    (cell,) = chosen_cells([name])
    layer = layer_of(cell, 4)
    assert type(layer) is kind
    assert gatewise.explain(layer, (2, 3, 4)).problem.cell == cell
