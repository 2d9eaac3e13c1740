"""The results of operators share no memory with their arguments or with each other."""

import pytest
import torch

from gatewise.contract.unaliased import unaliased


def test_results_of_an_operator_have_storages_of_their_own():
    given, buffer = torch.ones(3), torch.arange(6.0)
    found = unaliased([buffer[:2], buffer[2:], given, buffer.view(2, 3)], [given, None])
    assert len({tensor.untyped_storage().data_ptr() for tensor in (given, *found)}) == 5
    torch.testing.assert_close(found, [buffer[:2], buffer[2:], given, buffer.view(2, 3)])
    with pytest.raises(RuntimeError, match="left out"):
        unaliased([None], [])
