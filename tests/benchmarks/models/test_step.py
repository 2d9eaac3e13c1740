"""The steps of the benchmark of models: each option of a model takes part in its training."""

import dataclasses
import functools

import pytest
import torch

from gatewise.benchmarks.models.agreement import batches
from gatewise.benchmarks.models.cases import TINY_CASES
from gatewise.benchmarks.models.step import InferenceStep, TrainingStep
from gatewise.benchmarks.models.ways import Way

CPU = torch.device("cpu")
SGD = functools.partial(torch.optim.SGD, lr=1.0)
STILL = functools.partial(torch.optim.SGD, lr=0.0)
FLOOD = dataclasses.replace(TINY_CASES[0], optimizer=SGD)
BONITO = dataclasses.replace(TINY_CASES[2], optimizer=SGD)  # whose sizes PyTorch computes in float16 on a CPU


def step_of(workload, count=2, **options):
    data = batches(workload, 0, count, CPU)
    return TrainingStep(workload, Way("before").model(workload, 0, CPU), data, **options)


def weights_after(workload):
    step = step_of(workload)
    before = [weight.detach().clone() for weight in step.model.parameters()]
    step()
    return [weight.detach() - own for weight, own in zip(step.model.parameters(), before, strict=True)]


@pytest.mark.parametrize("clip_norm", [0.01, 0.02])
def test_the_gradient_is_clipped(clip_norm):
    change = weights_after(dataclasses.replace(FLOOD, clip_norm=clip_norm))
    assert torch.cat([each.flatten() for each in change]).norm() == pytest.approx(clip_norm, rel=1e-3)


def test_the_optimizer_is_that_of_the_model():
    assert not any(change.any() for change in weights_after(dataclasses.replace(FLOOD, optimizer=STILL)))


def test_batches_are_taken_in_turn_and_gradients_are_freed():
    step = step_of(dataclasses.replace(FLOOD, optimizer=STILL))
    losses = [float(step()) for _ in range(4)]
    assert losses[:2] == losses[2:]
    assert losses[0] != losses[1]
    assert all(weight.grad is None for weight in step.model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    workload = dataclasses.replace(BONITO, autocast=dtype)
    model, data = Way("before").model(workload, 0, CPU), batches(workload, 0, 1, CPU)
    assert InferenceStep(workload, model, data)().dtype == dtype
    assert InferenceStep(dataclasses.replace(workload, autocast=None), model, data)().dtype == torch.float32
    assert workload.settings["precision"] == f"{str(dtype)[6:]} autocast"


def test_float16_losses_are_scaled():
    seen = []
    for dtype in (torch.float16, None):
        step = step_of(dataclasses.replace(BONITO, autocast=dtype))
        step.model.head.weight.register_hook(lambda gradient: seen.append(float(gradient[-1].norm())))
        step()
    assert seen[0] == pytest.approx(65536 * seen[1], rel=0.05)


def test_inference_is_without_dropout_and_gradients():
    workload = TINY_CASES[1]
    assert workload.program.dropout
    step = InferenceStep(workload, Way("before").model(workload, 0, CPU), batches(workload, 0, 1, CPU))
    first, second = step(), step()
    assert torch.equal(first, second)
    assert not first.requires_grad


@pytest.mark.gpu
@pytest.mark.parametrize("workload", [each for each in TINY_CASES if each.capturable], ids=lambda each: each.name)
def test_a_replay_trains(workload):
    from gatewise.selection.timing import captured

    device = torch.device("cuda")
    model = Way("one line", accelerated=True).model(workload, 0, device)
    replay = captured(TrainingStep(workload, model, batches(workload, 0, 1, device), capturable=True))
    before = [weight.detach().clone() for weight in model.parameters()]
    replay()
    assert any(not torch.equal(weight, own) for weight, own in zip(model.parameters(), before, strict=True))
