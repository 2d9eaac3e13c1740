"""Attention and its surrounding operations in one launch agree with separate operations, emulated on the CPU."""

from __future__ import annotations

import pytest
import torch
from test_decoder import Call

from gatewise import attention
from gatewise.attention.call import Result
from gatewise.contract.device import Device
from gatewise.feeding import decoder, fused_attention
from gatewise.feeding.attention_part import Places
from gatewise.feeding.call import Options, Weights
from gatewise.feeding.elementwise import Plain, Planes
from gatewise.feeding.separate_attention import SeparateAttention
from tests.pairwise import exhaustive

CASES = {
    "small": {"units": 8, "features": 8},
    "several positions a warp": {"source": 45, "batch": 2, "units": 16, "features": 24},
    "several rounds": {"source": 150, "batch": 2, "units": 16, "features": 8},
    "several pieces": {"source": 5, "batch": 2, "units": 136, "features": 264},
    "odd offsets": {"units": 10, "features": 6},
    "dropout": {"dropout": 0.4},
    "one position": {"source": 1, "batch": 1},
}


def both(options, dtype, halves=False):
    """Return both implementations on the same numbers, each with its tensors, and the inputs of the call."""
    call = Call(dtype, **options)
    torch.manual_seed(3)
    made = Options("additive", "reference", dtype, needs_grad=True, halves=halves)
    time, batch, units = call.dy.shape
    masks = decoder._drawn(call.dropout, call.dy.shape, call.dy.detach()), ()
    read = tuple(each.detach() for each in (call.embedded, *call.state, call.keys, call.values))
    weights = Weights.of([None if each is None else each.detach() for each in call.weights.flat()])
    inputs = decoder._packed(made, call.lengths, masks, read, weights)
    size = inputs.query_size
    joined = torch.randn(time, batch, 2 * size + units, dtype=torch.float64).to(dtype)
    ways = []
    for _ in range(2):
        own = joined.clone()
        steps = attention.new_steps(
            time, inputs.keys, inputs.values, inputs.lengths,
            queries=own[..., :size], kernel="reference", **inputs.score_parameters(),
        )  # fmt: skip
        outputs = torch.full((time, batch, units), torch.nan, dtype=dtype)
        fed = outputs.to(made.operand) if halves else outputs
        ways.append((steps, Places(own[..., size : size + units], outputs, fed, own[..., size + units :])))
    return inputs, ways


def compared(at_once, options, dtype, tolerance, halves=False):
    inputs, ((steps, places), (other, others)) = both(options, dtype, halves)
    apart = SeparateAttention(inputs, steps, places, Plain())
    scores = torch.full((*steps.contexts.shape[:2], len(inputs.keys)), torch.nan)
    kept = scores, torch.full(steps.contexts.shape[:2], torch.nan)
    other = attention.Steps(other.kernel, other.problem, other.inputs, Result(other.contexts, None, kept))
    ours = at_once(inputs, other, others, halves=halves)
    time, batch, units = places.outputs.shape
    dy = torch.randn(time, batch, units, dtype=torch.float64).to(dtype)
    later = Planes(torch.randn(4, batch, 2 * units, dtype=torch.float64).to(dtype)[..., :units],
                   torch.rand(batch).to(dtype) if halves else None)  # fmt: skip
    for step in range(time):
        apart.forward(step)
        ours.forward(step)
    torch.testing.assert_close(other.contexts, steps.contexts, **tolerance)
    torch.testing.assert_close(others.outputs, places.outputs, **tolerance)
    torch.testing.assert_close(others.fed, places.fed, **tolerance)
    for step in reversed(range(time)):
        for way in (apart, ours):
            way.backward(step, dy[step] if step else None, None if step == time - 1 else later)
    torch.testing.assert_close(others.states, places.states, **tolerance)
    torch.testing.assert_close(others.dqueries, places.dqueries, **tolerance)
    assert places.dqueries.abs().max() > 0.01 or len(inputs.keys) == 1
    return inputs, kept


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_float32_agrees_with_separate_operations(options, at_once_on_cpu):
    inputs, (scores, normaliser) = compared(
        at_once_on_cpu, {"time": 2} | options, torch.float32, {"rtol": 1e-4, "atol": 1e-5}
    )
    there = torch.arange(len(inputs.keys)) < inputs.lengths[:, None]
    shares = torch.where(there, (scores - normaliser[..., None]).exp(), 0)
    torch.testing.assert_close(shares.sum(-1), torch.ones_like(normaliser))
    assert not scores[there.expand_as(scores)].isnan().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, *exhaustive(torch.float16)], ids=str)
def test_16_bits_agree_with_separate_operations(dtype, at_once_on_cpu):
    tolerance = {"rtol": 0.05, "atol": 0.05 if dtype == torch.bfloat16 else 0.01}
    compared(at_once_on_cpu, {"time": 2, "source": 20}, dtype, tolerance)


def test_with_operands_in_float16(at_once_on_cpu):
    compared(at_once_on_cpu, {"time": 2, "dropout": 0.3}, torch.float32, {"rtol": 1e-2, "atol": 1e-2}, halves=True)


def test_a_sentence_without_source_gets_no_context(at_once_on_cpu):
    inputs, ((steps, places), _) = both({"time": 1}, torch.float32)
    inputs.lengths[1] = 0
    kept = torch.zeros(1, 5, 6), torch.zeros(1, 5)
    steps = attention.Steps(steps.kernel, steps.problem, steps.inputs, Result(steps.contexts, None, kept))
    ours = at_once_on_cpu(inputs, steps, places, halves=False)
    state = places.states[0, 1].clone()
    ours.forward(0)
    assert not steps.contexts[0, 1].any()
    torch.testing.assert_close(places.outputs[0, 1], state.tanh())
    ours.backward(0, torch.ones(5, 8), None)
    assert not places.dqueries[0, 1].any()
    assert places.dqueries.isfinite().all()


def test_the_kept_tensors_are_those_of_the_kernel_fused(at_once_on_cpu):
    inputs, ((_, places), _) = both({"time": 2, "source": 7, "features": 16, "units": 16}, torch.float32)
    if not Device.probe("cpu").triton:
        pytest.skip("needs Triton's interpreter: TRITON_INTERPRET=1")
    kept = []
    for _ in range(2):
        steps = attention.new_steps(
            2, inputs.keys, inputs.values, inputs.lengths,
            queries=torch.linspace(-2, 2, 2 * 5 * 16).view(2, 5, 16), kernel="fused", **inputs.score_parameters(),
        )  # fmt: skip
        kept.append(steps)
    theirs, ours = kept
    way = at_once_on_cpu(inputs, ours, places, halves=False)
    for step in range(2):
        attention.attend_step(theirs, step)
        way.forward(step)
    there = torch.arange(7) < inputs.lengths[:, None]
    scores, normaliser = (each.clone() for each in theirs.result.kept[:2])
    torch.testing.assert_close(ours.result.kept[0][:, there], scores[:, there], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.result.kept[1], normaliser, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.contexts, theirs.contexts, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "dtype", "fit"),
    [
        ({"units": 8, "features": 8}, torch.float16, True),
        ({"units": 8, "features": 3}, torch.float32, True),
        ({"units": 8, "features": 3}, torch.float16, False),
        ({"units": 10, "features": 6}, torch.float16, True),
        ({"units": 8, "features": 1032}, torch.float32, False),
        ({"units": 8, "features": 8, "source": 2049}, torch.float32, False),
    ],
)
def test_the_sizes_that_fit_depend_on_the_tensors_that_are_read(options, dtype, fit):
    inputs, _ = both({"time": 1, "batch": 1} | options, torch.float32)
    assert fused_attention.fits(inputs, dtype) == fit
