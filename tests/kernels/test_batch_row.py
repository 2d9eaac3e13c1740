"""A sequence in a batch has the same result as alone, within the error budget."""

import itertools

import pytest
import torch

from gatewise import testing
from gatewise.contract.problem import Problem
from tests.pairwise import each_value

BATCH = Problem(7, 5, 3, 31, num_layers=2, bidirectional=True, needs_grad=True)


@pytest.mark.parametrize(
    ("dtype", "row"), each_value([*itertools.product([torch.float32, torch.float64], [0, 3])]), ids=str
)
def test_a_row_alone(kernel, row, dtype, device, admitted):
    batch = admitted(BATCH.replace(dtype=dtype))
    alone = admitted(batch.replace(batch=1))
    inputs = testing.make_inputs(batch, device)
    gradients = testing.make_gradients(batch, inputs)
    together, found = testing.run_kernel(kernel, batch, inputs, gradients)

    def only(tensor):
        return tensor[:, row : row + 1].contiguous()

    one = inputs._replace(x=only(inputs.x), h0=only(inputs.h0), c0=only(inputs.c0))
    above = type(gradients)(*(only(gradient) for gradient in gradients))
    exact = testing.named(alone, *testing.oracle(alone, one, above))
    allowed = testing.budgets(alone, one, above, exact, device)
    result, own = testing.run_kernel(kernel, alone, one, above)
    pairs = {
        "y": (together.y, result.y),
        "h_n": (together.h_n, result.h_n),
        "c_n": (together.c_n, result.c_n),
        "dx": (found.x, own.x),
        "dh0": (found.h0, own.h0),
        "dc0": (found.c0, own.c0),
    }
    for name, (in_batch, by_itself) in pairs.items():
        assert testing.relative_error(only(in_batch), by_itself) <= allowed[name], name
