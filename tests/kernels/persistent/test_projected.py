"""Projection as algebra: with the two launches replaced by plain loops, every result and gradient is the oracle's."""

import pytest
import torch

from gatewise import testing
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.saved import Needs, Result
from gatewise.kernels import stack
from gatewise.kernels.persistent import layer as plain
from gatewise.kernels.persistent import operands, products, projected
from gatewise.kernels.persistent.criteria import CRITERIA
from gatewise.kernels.persistent.kernel import persistent
from gatewise.kernels.persistent.tokens import Tokens
from tests.kernels.persistent.emulation import write_operands


def steps_of(direction, time, batch, lengths):
    """Of each step of a direction: which rows are there."""
    lengths = torch.full((batch,), time) if lengths is None else lengths
    order = range(time) if direction == 0 else reversed(range(time))
    return [(t, (t < lengths).unsqueeze(1)) for t in order]


def looped_forward(problem, layer, first):
    (time, batch, _), directions, size = layer.x.shape, len(layer.weights), problem.hidden_size
    gates = torch.zeros(directions, time, batch, 4 * size, dtype=layer.x.dtype)
    for share, own in zip(gates, layer.weights, strict=True):
        share.copy_(layer.x @ own.w_ih.t() + (0 if own.b_ih is None else own.b_ih + own.b_hh))
    products.add_to_first_steps(gates, first, layer.lengths)
    m, cells = torch.zeros(time, batch, directions * size, dtype=layer.x.dtype), torch.zeros_like(gates[..., :size])
    h_n, c_n = layer.h0.clone(), layer.c0.clone()
    for direction, own in enumerate(layer.weights):
        for t, there in steps_of(direction, time, batch, layer.lengths):
            i, f, g, o = (gates[direction, t] + h_n[direction] @ own.w_hh.t()).chunk(4, -1)
            i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
            gates[direction, t] = torch.cat([i, f, g, o], -1)
            c = f * c_n[direction] + i * g
            h_n[direction] = torch.where(there, o * c.tanh(), h_n[direction])
            c_n[direction] = torch.where(there, c, c_n[direction])
            cells[direction, t] = c_n[direction]
            m[t, :, direction * size : (direction + 1) * size] = torch.where(there, h_n[direction], 0)
    return Result(m, h_n, c_n, (gates, cells))


def looped_gate_gradients(problem, layer, kept, above, scratch):
    (gates, cells), size = kept, problem.hidden_size
    _, time, batch, _ = gates.shape
    sums, dh0, dc0 = torch.zeros_like(gates), torch.zeros_like(layer.c0), torch.zeros_like(layer.c0)
    for direction, own in enumerate(layer.weights):
        dh, dc = dh0[direction], dc0[direction]
        if above.h_n is not None:
            dh, dc = above.h_n[direction].clone(), above.c_n[direction].clone()
        steps = steps_of(direction, time, batch, layer.lengths)
        for index in reversed(range(time)):
            t, there = steps[index]
            i, f, g, o = gates[direction, t].chunk(4, -1)
            begins = there if index == 0 else there & ~steps[index - 1][1]
            before = torch.where(begins, layer.c0[direction], cells[direction, steps[index - 1][0]])
            total = dh if above.y is None else dh + above.y[t, :, direction * size : (direction + 1) * size]
            squashed = cells[direction, t].tanh()
            d = dc + total * o * (1 - squashed**2)
            found = [d * g * i * (1 - i), d * before * f * (1 - f), d * i * (1 - g**2), total * squashed * o * (1 - o)]
            sums[direction, t] = torch.where(there, torch.cat(found, -1), 0)
            dh = torch.where(there, sums[direction, t] @ own.w_hh, dh)
            dc = torch.where(there, d * f, dc)
        dh0[direction], dc0[direction] = dh, dc
    return plain.GateGradients(sums, sums.sum((1, 2)), dh0, dc0, Tokens(time, batch, by_row=False))


@pytest.mark.parametrize("layout", [Layout.DENSE, Layout.HOST_LENGTHS], ids=str)
@pytest.mark.parametrize("options", [{}, {"bidirectional": True, "num_layers": 2}, {"bias": False}], ids=str)
def test_projection_is_the_oracles(monkeypatch, layout, options):
    monkeypatch.setattr(plain, "forward", looped_forward)
    monkeypatch.setattr(plain, "gate_gradients", looped_gate_gradients)
    monkeypatch.setattr(operands, "write", write_operands)
    problem = Problem(7, 5, 8, 16, 8, dtype=torch.float64, layout=layout, needs_grad=True, **options)
    inputs = testing.make_inputs(problem)
    gradients = testing.make_gradients(problem, inputs)
    result = stack.forward(problem, inputs, projected.forward)
    found = stack.backward(problem, inputs, result, gradients, Needs(), projected.backward)
    exact = testing.named(problem, *testing.oracle(problem, inputs, gradients))
    for name, value in testing.named(problem, result, found).items():
        assert testing.relative_error(value, exact[name]) < 1e-12, name


def test_projection_is_stated():
    problem = Problem(20, 8, 64, 256, 64, dtype=torch.bfloat16, needs_grad=True)
    device = Device.named("h200")
    assert [criterion.check(problem, device) for criterion in persistent.criteria()].count(None) == len(CRITERIA)
    (refusal,) = [found for own in CRITERIA if (found := own.check(problem.replace(lean=True), device)) is not None]
    assert "proj_size is 64" in str(refusal)
    assert [spec.shape for spec in persistent.kept(problem, device)] == [
        (1, 20, 8, 1024),
        (1, 20, 8, 256),
        (20, 8, 256),
    ]
    plain_work = persistent.work(problem.replace(proj_size=0), device)
    assert persistent.work(problem, device).launches > plain_work.launches
