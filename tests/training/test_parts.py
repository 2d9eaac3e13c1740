"""The parts of the loop: schedules, averages, optimizers, carried states."""

from __future__ import annotations

import math

import pytest
import torch
from echo_model import echo_model
from torch import nn

from gatewise.training import TrainingOptions, perplexity
from gatewise.training.averaging import WeightAverage
from gatewise.training.carried import detach, flatten, indices_of, unflatten
from gatewise.training.optimizers import build_optimizer, clipped_update
from gatewise.training.precision import arithmetic
from gatewise.training.schedule import Schedule


def schedule(total=100, **options):
    options = TrainingOptions(learning_rate=2.0, **options)
    return Schedule(build_optimizer(echo_model().parameters(), options), options, total)


def test_cosine_goes_from_the_top_to_zero():
    rates = [schedule(schedule="cosine").rate(step) for step in (0, 50, 100)]
    assert rates == pytest.approx([2.0, 1.0, 0.0])


def test_warmup_rises_linearly_under_any_shape():
    for shape in ("constant", "cosine", "plateau"):
        subject = schedule(schedule=shape, warmup_steps=10)
        assert [subject.rate(step) for step in (0, 4, 9)] == pytest.approx([0.2, 1.0, 2.0])
    assert schedule(schedule="cosine", warmup_steps=20).rate(60) == pytest.approx(1.0)


@pytest.mark.parametrize("warmup", [0, 7])
def test_the_cosine_is_that_of_pytorch(warmup):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40 - warmup)
    if warmup:
        rising = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / warmup, total_iters=warmup - 1)
        theirs = torch.optim.lr_scheduler.SequentialLR(optimizer, [rising, theirs], [warmup])
    mine = schedule(total=40, schedule="cosine", warmup_steps=warmup)
    for step in range(40):
        assert mine.rate(step) == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()


def test_the_plateau_is_that_of_pytorch():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1, threshold=0)
    mine = schedule(schedule="plateau", plateau_factor=0.5, plateau_patience=1)
    for loss in torch.rand(60, generator=torch.Generator().manual_seed(0)).tolist():
        mine.evaluated(loss)
        theirs.step(loss)
        assert mine.rate(0) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-6)


def test_plateau_waits_for_its_patience_and_goes_on_after_a_restart():
    subject = schedule(schedule="plateau", plateau_factor=0.5, plateau_patience=1)
    rates = []
    for loss in (3.0, 2.0, 2.0, 2.5, 1.0, 1.0, 1.0):
        subject.evaluated(loss)
        again = schedule(schedule="plateau", plateau_factor=0.5, plateau_patience=1)
        again.restore(subject.facts())
        subject = again
        rates.append(subject.rate(0))
    assert rates == [2.0, 2.0, 2.0, 1.0, 1.0, 1.0, 0.5]


def test_the_schedule_reaches_every_group_of_the_optimizer():
    options = TrainingOptions(learning_rate=2.0, weight_decay=0.1)
    optimizer = build_optimizer(echo_model().parameters(), options)
    Schedule(optimizer, options, 100).prepare(50, 8)
    assert [group["lr"].item() for group in optimizer.param_groups] == pytest.approx([1.0, 1.0])


def test_the_rate_of_a_step_follows_the_size_of_its_batch():
    options = TrainingOptions(learning_rate=2.0, schedule="constant", rate_tokens=80)
    optimizer = build_optimizer(echo_model().parameters(), options)
    subject, rates = Schedule(optimizer, options, 100), []
    for tokens in (80, 40, 100, 40):
        subject.prepare(5, tokens)
        rates.append(optimizer.param_groups[0]["lr"].item())
    assert rates == pytest.approx([2.0, 1.0, 2.5, 1.0])
    assert subject.rate(5) == 2.0


def test_weight_decay_spares_biases_and_frozen_weights_are_left_out():
    model = echo_model()
    frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)
    optimizer = build_optimizer([*model.parameters(), frozen], TrainingOptions(weight_decay=0.1))
    decays = {id(each): group["weight_decay"] for group in optimizer.param_groups for each in group["params"]}
    assert decays == {id(each): 0.1 if each.ndim == 2 else 0.0 for each in model.parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("optimizer", "momentum", "decay"),
    [("sgd", 0.0, 0.0), ("sgd", 0.9, 0.0), ("sgd", 0.0, 0.01), ("adam", 0.9, 0.01), ("adamw", 0.9, 0.01)],
)
@pytest.mark.parametrize("clip", [0.0, 0.5, 1e9])
def test_updates_are_those_of_clipping_and_then_stepping(optimizer, momentum, decay, dtype, clip):
    options = TrainingOptions(optimizer=optimizer, learning_rate=0.1, momentum=momentum, beta2=0.99, weight_decay=decay)
    one, other = (
        [nn.Parameter(torch.linspace(-1, 1, 60, dtype=dtype).view(4, 15)), nn.Parameter(torch.zeros(3, dtype=dtype))]
        for _ in range(2)
    )
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    first = {"momentum": momentum} if optimizer == "sgd" else {"betas": (momentum, 0.99)}
    groups = [{"params": other[:1], "weight_decay": decay}, {"params": other[1:], "weight_decay": 0.0}]
    plain = kinds[optimizer](groups, lr=0.1, foreach=False, fused=False, **first)
    subject = build_optimizer(one, options)
    for step in range(3):
        for mine, theirs in zip(one, other, strict=True):
            gradient = torch.randn(mine.shape, generator=torch.Generator().manual_seed(step)).to(dtype)
            mine.grad, theirs.grad = gradient.clone(), gradient.clone()
        if clip:
            nn.utils.clip_grad_norm_(other, clip)
        plain.step()
        clipped_update(subject, clip)
    for mine, theirs in zip(one, other, strict=True):
        rounding = torch.finfo(torch.float32 if dtype == torch.float64 else dtype).eps  # the rate is float32
        torch.testing.assert_close(mine, theirs, rtol=8 * rounding, atol=8 * rounding)


@pytest.mark.parametrize("clip", [0.0, 0.7])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_gradients_are_clipped_by_value_before_their_norm_is_taken(optimizer, clip):
    options = TrainingOptions(optimizer=optimizer, learning_rate=0.1, momentum=0.0)
    gradient = torch.tensor([0.1, -0.4, 3.0, -100.0])
    clipped = gradient.clamp(-0.5, 0.5)
    if clip:
        clipped *= clip / clipped.norm()
    one, other = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
    one.grad, other.grad = gradient, clipped
    clipped_update(build_optimizer([one], options), clip, clip_value=0.5)
    clipped_update(build_optimizer([other], options), 0.0)
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_gradient_that_is_not_a_number_is_not_hidden_by_clipping(momentum):
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.tensor([1.0, float("nan"), 1.0])
    clipped_update(build_optimizer([weight], TrainingOptions(optimizer="sgd", momentum=momentum)), 1.0)
    assert weight.isnan().all()


@pytest.mark.parametrize(("average", "decay"), [("tail", 1.0), ("ema", 0.75)])
def test_averages_are_what_their_formula_says(average, decay):
    weight = nn.Parameter(torch.zeros(3))
    subject = WeightAverage([weight], TrainingOptions(average=average, average_decay=0.75))
    subject.running = True
    expected = torch.zeros(3)
    for step in range(1, 9):
        with torch.no_grad():
            weight.copy_(torch.randn(3, generator=torch.Generator().manual_seed(step)))
        subject.update()
        expected += (weight.detach() - expected) * max(1 / step, 1 - decay)
    last = weight.detach().clone()
    with subject.in_place():
        assert torch.allclose(weight.detach(), expected)
    assert torch.equal(weight.detach(), last)


def test_the_tail_begins_when_validation_no_longer_improves():
    subject = WeightAverage([nn.Parameter(torch.zeros(1))], TrainingOptions(average="tail", average_patience=2))
    started = []
    for loss in (5.0, 4.0, 4.5, 3.9, 4.1, 4.2):
        subject.evaluated(loss)
        started.append(subject.running)
    assert started == [False, False, False, False, True, True]  # 4.1 is worse than 4.0, the best up to two before


def test_the_last_evaluations_are_averaged():
    weight = nn.Parameter(torch.zeros(3))
    subject = WeightAverage([weight], TrainingOptions(average="last", average_last=3))
    seen = []
    for step in range(1, 7):
        with torch.no_grad():
            weight.copy_(torch.randn(3, generator=torch.Generator().manual_seed(step)))
        subject.update()
        seen.append(weight.detach().clone())
        with subject.in_place():
            torch.testing.assert_close(weight.detach(), torch.stack(seen[-3:]).mean(0))
        assert torch.equal(weight.detach(), seen[-1])
        subject.evaluated(1.0)


def test_without_an_average_nothing_is_kept():
    subject = WeightAverage(echo_model().parameters(), TrainingOptions())
    subject.update()
    assert subject.values == []
    with subject.in_place():
        pass


def test_states_of_any_nesting_survive():
    a, b = torch.randn(2), torch.randn(3, requires_grad=True)
    for state in (None, a, (a, b), ((a, None), (b,)), ()):
        leaves, shape = flatten(state)
        again = unflatten(dict(enumerate(leaves)), shape)
        assert indices_of(shape) == list(range(len(leaves)))
        assert repr(again) == repr(state)
    assert not detach((b * 2,))[0].requires_grad


def test_tensor_float_32_is_allowed_only_where_asked():
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    for precision, allowed in (("float32", False), ("tf32", True), ("bfloat16", True)):
        with arithmetic(precision):
            assert (matmul.allow_tf32, cudnn.allow_tf32) == (allowed, allowed)
    assert (matmul.allow_tf32, cudnn.allow_tf32) == before


def test_perplexity_of_a_hopeless_loss_is_infinite():
    assert perplexity(0.0) == 1.0
    assert perplexity(1e6) == math.inf
