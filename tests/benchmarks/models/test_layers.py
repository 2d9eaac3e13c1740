"""The layers alone: what is timed is what the step computes."""

import dataclasses

import pytest
import torch
from torch import nn

from gatewise.benchmarks.models import layers
from gatewise.benchmarks.models.agreement import batches
from gatewise.benchmarks.models.cases import TINY_CASES
from gatewise.benchmarks.models.step import InferenceStep, TrainingStep
from gatewise.benchmarks.models.ways import Way, ways

CPU = torch.device("cpu")
BY_NAME = {workload.name: dataclasses.replace(workload, autocast=None) for workload in TINY_CASES}


@pytest.mark.parametrize("name", BY_NAME)
def test_the_calls_made_again_have_the_gradients_of_the_step(name, monkeypatch):
    workload, data = BY_NAME[name], batches(BY_NAME[name], 0, 1, CPU)
    step = TrainingStep(workload, ways(workload)[-1].model(workload, 0, CPU).eval(), data)
    weights = {weight: weight.detach().clone() for weight in step.model.parameters()}
    calls = layers.recorded(step)
    with torch.no_grad():
        for weight, value in weights.items():  # as before the update
            weight.copy_(value)
    step.loss().backward()
    expected = {
        weight: weight.grad
        for layer in step.model.modules()
        if isinstance(layer, nn.LSTM)
        for weight in layer.parameters()
    }
    found, grad = {}, torch.autograd.grad

    def recording(ends, inputs, above):
        gradients = grad(ends, inputs, above)
        for tensor, gradient in zip(inputs, gradients, strict=True):
            if tensor in expected:
                found[tensor] = found.get(tensor, 0) + gradient
        return gradients

    monkeypatch.setattr(torch.autograd, "grad", recording)
    layers.repeated(calls, workload, CPU)()
    assert found.keys() == expected.keys()
    for weight, gradient in expected.items():
        torch.testing.assert_close(found[weight], gradient)


@pytest.mark.parametrize(("name", "way", "count"), [("ppo-tiny", 0, 12), ("ppo-tiny", 2, 1), ("tts-tiny", 0, 4)])
def test_every_call_of_a_step_is_recorded(name, way, count):
    workload = BY_NAME[name]
    step = TrainingStep(workload, ways(workload)[way].model(workload, 0, CPU), batches(workload, 0, 1, CPU))
    calls = layers.recorded(step)
    assert len(calls) == count
    assert all(call.trained for call in calls)
    assert len(layers.recorded(step)) == count  # no hook is left


def test_inference_has_no_backward_pass(monkeypatch):
    workload = BY_NAME["tts-tiny"]
    step = InferenceStep(workload, Way("before").model(workload, 0, CPU), batches(workload, 0, 1, CPU))
    calls = layers.recorded(step)
    assert not any(call.trained for call in calls)
    monkeypatch.setattr(torch.autograd, "grad", None)
    layers.repeated(calls, workload, CPU)()


def test_the_kernels_of_the_calls():
    workload = BY_NAME["ppo-tiny"]
    for way, expected in zip(ways(workload), [(), ("aten",), ("eager",)], strict=True):
        step = TrainingStep(workload, way.model(workload, 0, CPU), batches(workload, 0, 1, CPU))
        assert layers.kernels_of(layers.recorded(step), workload, CPU) == expected
