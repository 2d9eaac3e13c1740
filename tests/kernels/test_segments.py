"""A sequence computed in segments with carried states equals the whole sequence, forward and backward."""

import torch

from gatewise import testing
from gatewise.contract.problem import Problem

WHOLE = Problem(9, 3, 5, 31, proj_size=0, num_layers=2, dtype=torch.float64, needs_grad=True)
CUT = 4


def test_segments_with_carried_state_equal_the_whole(kernel, device, admitted):
    whole = admitted(WHOLE)
    first, second = whole.replace(time=CUT), whole.replace(time=whole.time - CUT)
    inputs = testing.make_inputs(whole, device)
    gradients = testing.make_gradients(whole, inputs)
    expected, expected_gradients = testing.run_kernel(kernel, whole, inputs, gradients)

    start = inputs._replace(x=inputs.x[:CUT])
    begun, _ = testing.run_kernel(kernel, first, start)
    rest = inputs._replace(x=inputs.x[CUT:], h0=begun.h_n, c0=begun.c_n)
    ended, late = testing.run_kernel(kernel, second, rest, gradients._replace(y=gradients.y[CUT:]))
    carried = gradients._replace(y=gradients.y[:CUT], h_n=late.h0, c_n=late.c0)
    _, early = testing.run_kernel(kernel, first, start, carried)

    torch.testing.assert_close(torch.cat([begun.y, ended.y]), expected.y)
    torch.testing.assert_close(ended.h_n, expected.h_n)
    torch.testing.assert_close(ended.c_n, expected.c_n)
    torch.testing.assert_close(torch.cat([early.x, late.x]), expected_gradients.x)
    torch.testing.assert_close(early.h0, expected_gradients.h0)
    torch.testing.assert_close(early.c0, expected_gradients.c0)
    for one, other, total in zip(early.weights, late.weights, expected_gradients.weights, strict=True):
        torch.testing.assert_close(one + other, total)
