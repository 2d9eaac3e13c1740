"""NaN in one sequence appears in that step and the later steps of the same sequence, and nowhere else."""

import pytest
import torch

from gatewise import testing

ROW, STEP = 1, 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_nan_stays_in_its_row_and_its_future(kernel, dtype, device, admitted):
    problem = admitted(testing.CASES[0].problem(dtype=dtype))
    inputs = testing.make_inputs(problem, device)
    gradients = testing.make_gradients(problem, inputs)
    clean, clean_gradients = testing.run_kernel(kernel, problem, inputs, gradients)
    inputs.x[STEP, ROW, 0] = float("nan")
    result, found = testing.run_kernel(kernel, problem, inputs, gradients)
    others = [row for row in range(problem.batch) if row != ROW]
    assert result.y[STEP:, ROW].isnan().all()
    assert torch.equal(result.y[:STEP, ROW], clean.y[:STEP, ROW])
    for mine, theirs in ((result.y, clean.y), (result.h_n, clean.h_n), (result.c_n, clean.c_n)):
        assert torch.equal(mine[:, others], theirs[:, others])
    assert found.x[:, ROW].isnan().all()
    for mine, theirs in ((found.x, clean_gradients.x), (found.h0, clean_gradients.h0), (found.c0, clean_gradients.c0)):
        assert torch.equal(mine[:, others], theirs[:, others])
    assert found.weights[0].isnan().any()
