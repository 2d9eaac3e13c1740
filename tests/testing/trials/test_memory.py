"""Inputs have NaN before and after them in memory, in every form."""

import pytest
import torch

from gatewise.testing.trials.memory import laid_out, walled


@pytest.mark.parametrize("odd", [False, True])
def test_memory_before_and_after_a_tensor_is_nan(odd):
    value = torch.randn(3, 5)
    copy = walled(value, odd=odd)
    assert torch.equal(copy, value)
    first = copy.storage_offset()
    memory = value.new_empty(0).set_(copy.untyped_storage())
    assert memory[:first].isnan().all()
    assert memory[first + 15 :].isnan().all()
    assert first > 1000
    assert len(memory) - first - 15 > 1000


def test_odd_memory_begins_at_an_odd_number_of_values():
    assert walled(torch.randn(4), odd=True).storage_offset() % 2 == 1


@pytest.mark.parametrize("form", ["dense", "by row", "gaps", "every other step"])
def test_a_form_keeps_the_values(form):
    value = torch.randn(4, 3, 5)
    found = laid_out(value, form)
    assert torch.equal(found, value)
    assert found.is_contiguous() == (form == "dense")


def test_one_row_is_the_first_for_all_rows():
    value = torch.randn(4, 3, 5)
    found = laid_out(value, "one row")
    assert torch.equal(found, value[:, :1].expand(4, 3, 5))
    assert found.stride(1) == 0
