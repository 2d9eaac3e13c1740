"""Predicted peak memory, compared with that of calls on an H200 (PyTorch 2.11, cuDNN 9.19)."""

import pytest
import torch

from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.kernels.aten.kernel import aten
from gatewise.kernels.cudnn.kernel import cudnn
from gatewise.kernels.persistent.kernel import persistent
from gatewise.kernels.persistent.sizes import memory
from gatewise.kernels.stepwise.kernel import stepwise
from gatewise.selection import cost

H200 = Device.named("h200")
TAGGER = Problem(40, 64, 256, 256, num_layers=2, bidirectional=True, dtype=torch.bfloat16)
SPEECH = Problem(500, 64, 256, 256, dtype=torch.bfloat16)
MEASURED = [
    # kernel, problem, planes [T, B, D*H] at the peak beside inputs, weights, outputs and gradients
    (persistent, SPEECH.replace(needs_grad=True), 10.00),
    (persistent, SPEECH, 4.00),
    (persistent, SPEECH.replace(needs_grad=True, layout=Layout.DEVICE_LENGTHS), 11.00),
    (persistent, TAGGER.replace(needs_grad=True), 16.64),
    (persistent, TAGGER, 5.00),
    (persistent, TAGGER.replace(needs_grad=True, layout=Layout.DEVICE_LENGTHS), 17.51),
    (persistent, Problem(35, 20, 650, 650, num_layers=2, allow_tf32=True, needs_grad=True), 19.12),
    (cudnn, Problem(50, 512, 1024, 1024, dtype=torch.bfloat16, needs_grad=True), 11.70),
    (cudnn, Problem(50, 512, 1024, 1024, dtype=torch.bfloat16), 6.68),
    (cudnn, Problem(100, 64, 2048, 2048, dtype=torch.bfloat16, needs_grad=True), 13.99),
    (cudnn, Problem(35, 20, 1500, 1500, num_layers=2, allow_tf32=True, needs_grad=True), 55.85),
    (cudnn, Problem(70, 80, 1150, 1150, num_layers=3, allow_tf32=True), 12.37),
    # Of stepwise, with what its recordings hold between calls.
    (stepwise, Problem(35, 20, 1500, 1500, num_layers=2, allow_tf32=True, needs_grad=True), 21.17),
    (stepwise, Problem(100, 64, 2048, 2048, dtype=torch.bfloat16), 5.43),
    (stepwise, Problem(50, 128, 512, 512, num_layers=2, bidirectional=True), 5.60),
    (stepwise, Problem(70, 80, 1150, 1150, num_layers=3), 6.02),
    (aten, Problem(1, 64, 512, 512, dtype=torch.bfloat16), 11.0),
]


@pytest.mark.parametrize(
    ("kernel", "problem", "planes"), MEASURED, ids=lambda value: getattr(value, "name", str(value))
)
def test_is_within_a_tenth(kernel, problem, planes):
    states = 2 * problem.num_layers * problem.num_directions * problem.batch * problem.hidden_size
    tokens = problem.time * problem.batch
    owned = tokens * problem.output_size + states
    if problem.needs_grad:
        owned += problem.parameter_count + tokens * problem.input_size + states
    measured = (owned + planes * tokens * problem.output_size) * problem.element_bytes
    assert 0.9 <= cost.peak_bytes(kernel, problem, H200) / measured <= 1.1


@pytest.mark.parametrize(
    "problem",
    [
        Problem(100, 64, 512, 512),
        Problem(35, 20, 1500, 1500, num_layers=2, allow_tf32=True),
        TAGGER.replace(dtype=torch.float16, hidden_size=1024),
        TAGGER,
    ],
    ids=str,
)
def test_lean_passes_are_held_to_what_nn_lstm_takes(problem):
    problem = problem.replace(needs_grad=True)
    stated = cudnn.workspace_bytes(problem, H200) + sum(spec.nbytes for spec in cudnn.kept(problem, H200))
    copied = 2 * problem.parameter_count if problem.dtype == torch.bfloat16 else 0
    assert memory._of_nn_lstm(problem) == stated + copied
