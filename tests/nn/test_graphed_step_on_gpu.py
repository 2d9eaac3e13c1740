"""`make_graphed_step` on a GPU: the same bits as the step itself, and nothing stale after changes."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import gatewise
from gatewise.nn.graphed_step import WARMUPS
from tests.nn.step_stand_in import Model, step_of

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


def made(optimizer="sgd", dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = gatewise.accelerate(Model(nn.LSTM(24, 40, 2)), verbose=False).to(DEVICE, dtype)
    rate = torch.tensor(0.1 if optimizer == "sgd" else 0.01, device=DEVICE)
    kinds = {"sgd": (torch.optim.SGD, {"fused": True}), "adam": (torch.optim.Adam, {"fused": True, "capturable": True})}
    kind, own = kinds[optimizer]
    optimizer = kind(model.parameters(), **({"lr": rate} | own | options))
    return model, optimizer, step_of(model, optimizer)


def batches(count, time=7, batch=5, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)

    def tensor(features):
        return torch.randn(time, batch, features, generator=generator).to(DEVICE, dtype)

    return [(tensor(24), tensor(2)) for _ in range(count)]


def trained(step, given, between=lambda number: None):
    losses, state = [], None
    torch.manual_seed(2)
    with gatewise.for_cuda_graph():
        for number, (x, target) in enumerate(given):
            between(number)
            found = step(x, target, state)
            losses.append(found["loss"].detach().clone())
            state = tuple(each.detach() for each in found["state"])
    return torch.stack(losses).tolist()


def called(step):
    return [step(x, target)["loss"] for x, target in batches(6)]


CASES = [
    ("sgd", {}),
    ("sgd", {"momentum": 0.9}),
    ("adam", {}),
    ("adam", {"lr": 0.01}),
    ("sgd", {"lr": 0.1, "fused": False}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("optimizer", "options"), CASES, ids=str)
def test_replays_have_the_bits_of_the_step(optimizer, options, dtype):
    long, short = batches(30, dtype=dtype), batches(30, batch=3, dtype=dtype)
    plain = made(optimizer, dtype, **options)
    expected = trained(plain[2], long)
    model, other, step = made(optimizer, dtype, **options)
    run = gatewise.make_graphed_step(step, model, other)
    assert trained(run, long) == expected
    assert (run.graphs, run.refusal) == (1, "")
    for name, value in model.state_dict().items():
        assert torch.equal(value, plain[0].state_dict()[name]), name
    # A second shape, alternating with the first one, from the same memory pool.
    mixed = [each for pair in zip(short, long, strict=True) for each in pair]
    with gatewise.for_cuda_graph():
        for x, target in mixed:
            losses = []
            for each in (run, plain[2]):
                torch.manual_seed(3)
                losses.append(each(x, target)["loss"])
            assert losses[0].equal(losses[1].detach())
    assert run.graphs == 3  # with a state, and without one in two shapes


def test_a_schedule_of_a_tensor_is_followed_and_one_of_numbers_makes_graphs():
    for rate, graphs in ((torch.tensor(0.1, device=DEVICE), 1), (0.1, 3)):
        losses = []
        for use in (False, True):
            value = rate.clone() if isinstance(rate, torch.Tensor) else rate
            model, optimizer, step = made(lr=value)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 8, 0.3)
            run = gatewise.make_graphed_step(step, model, optimizer) if use else step
            losses.append(trained(run, batches(24), lambda number, own=schedule: own.step() if number else None))
        assert losses[0] == losses[1]
        assert run.graphs == graphs


def moved(model, optimizer):
    for weight in model.parameters():
        weight.data = weight.data.clone()


def loaded(model, optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def evaluated(model, optimizer):
    model.dropout.eval()


def frozen(model, optimizer):
    model.head.requires_grad_(False)


def dropped(model, optimizer):
    model.dropout.p = 0.7 if model.dropout.p < 0.5 else 0.1


@pytest.mark.parametrize("change", [moved, loaded, evaluated, frozen, dropped])
def test_nothing_is_stale_after_a_change(change):
    found = []
    for use in (False, True):
        model, optimizer, step = made(momentum=0.9)
        run = gatewise.make_graphed_step(step, model, optimizer) if use else step
        rubbish = []

        def between(number, model=model, optimizer=optimizer, rubbish=rubbish):
            if number in (10, 20):
                change(model, optimizer)
                # What was freed is used again, full of NaN.
                rubbish.extend(torch.full((40 * 160,), torch.nan, device=DEVICE) for _ in range(64))

        found.append((trained(run, batches(30), between), [*map(torch.clone, model.state_dict().values())]))
    assert run.graphs >= 2
    assert found[0][0] == found[1][0]
    for plain, own in zip(found[0][1], found[1][1], strict=True):
        assert torch.equal(plain, own)


def test_settings_and_kernels_of_other_calls_are_not_replayed():
    model, optimizer, step = made()
    run = gatewise.make_graphed_step(step, model, optimizer)
    given = batches(WARMUPS + 2)
    for x, target in given:
        run(x, target)
    assert run.graphs == 1
    for _ in range(2):
        with gatewise.use_kernel("eager"):
            run(*given[0])
    assert run.graphs == 2
    for _ in range(2):
        with torch.autocast("cuda", torch.bfloat16):
            run(*given[0])
    assert run.graphs == 3
    run(*given[0])
    assert (run.graphs, run.refusal) == (3, "")


def test_refusals_leave_the_step_and_the_next_capture_as_they_were():
    given = batches(8)
    expected = trained(made()[2], given)
    model, optimizer, step = made()

    def reads(x, target, state=None):
        found = step(x, target, state)
        assert found["loss"].item() > 0
        return found

    run = gatewise.make_graphed_step(reads, model, optimizer)
    with pytest.warns(UserWarning, match="steps are not captured as a CUDA graph, and run as they are: ") as warned:
        assert trained(run, given) == expected
    assert len(warned) == 1
    assert "captur" in run.refusal
    model, optimizer, step = made()
    again = gatewise.make_graphed_step(step, model, optimizer)
    assert trained(again, given) == expected
    assert again.graphs == 1


def test_an_error_of_the_program_in_a_capture_is_raised_and_the_next_call_works():
    given = batches(12)
    expected = trained(made()[2], given)
    model, optimizer, step = made()
    calls = []

    def fails(x, target, state=None):
        calls.append(x)
        if len(calls) == 5:
            raise KeyError("a part of a batch")
        return step(x, target, state)

    run = gatewise.make_graphed_step(fails, model, optimizer)

    def again(x, target, state=None):
        try:
            return run(x, target, state)
        except KeyError:
            return run(x, target, state)

    assert trained(again, given) == expected
    assert (run.graphs, run.refusal) == (1, "")
    assert len(calls) == 6


def test_a_step_that_writes_its_rate_is_refused():
    model, optimizer, step = made()

    def falls(x, target):
        found = step(x, target)
        optimizer.param_groups[0]["lr"].mul_(0.9)
        return found

    run = gatewise.make_graphed_step(falls, model, optimizer)
    with pytest.warns(UserWarning, match="the step changes a tensor in the hyperparameters"):
        called(run)
    assert run.graphs == 0
    rate = optimizer.param_groups[0]["lr"].item()
    assert rate == pytest.approx(0.1 * 0.9**6)


@pytest.mark.parametrize("where", ["cpu", "numpy"])
def test_a_step_that_draws_a_coin_on_the_cpu_is_refused(where):
    given, losses = batches(12), []
    for use in (False, True):
        model, optimizer, plain = made()  # with dropout, which is no obstacle

        def step(x, target, state=None, plain=plain):
            coin = torch.rand(()).item() if where == "cpu" else np.random.random()
            return plain(x, target if coin < 0.5 else -target, state)

        np.random.seed(0)
        run = gatewise.make_graphed_step(step, model, optimizer) if use else step
        with warnings.catch_warnings(record=True, action="always") as warned:
            losses.append(trained(run, given))
    assert losses[0] == losses[1]
    assert run.graphs == 0
    assert any("the step draws random numbers from" in str(each.message) for each in warned)
    assert "draws random numbers" in run.refusal


def test_a_coin_of_the_gpu_is_drawn_by_every_replay():
    model, optimizer, plain = made()

    def step(x, target):
        coin = torch.rand((), device=DEVICE)
        return plain(x, torch.where(coin < 0.5, target, -target)) | {"coin": coin}

    run = gatewise.make_graphed_step(step, model, optimizer)
    coins = {run(x, target)["coin"].item() for x, target in batches(20)}
    assert (run.graphs, run.refusal) == (1, "")
    assert len(coins) == 20


def test_adam_that_is_not_capturable_is_refused_with_pytorchs_reason():
    model, _, _ = made()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    run = gatewise.make_graphed_step(step_of(model, optimizer), model, optimizer)
    with pytest.warns(UserWarning, match="capturable"):
        losses = called(run)
    assert all(loss.isfinite() for loss in losses)


def test_free_memory_full_of_nan_and_calls_between_replays():
    model, optimizer, step = made("adam")
    plain = made("adam")
    run = gatewise.make_graphed_step(step, model, optimizer)
    given = batches(20)

    def between(number):
        torch.full((1 << 24,), torch.nan, device=DEVICE)
        with torch.no_grad(), torch.random.fork_rng([0]):
            model.eval()
            model(given[number][0])
            model.train()
            model.calls -= 1

    assert trained(run, given, between) == trained(plain[2], given)
    assert run.graphs == 1


@pytest.mark.parametrize("growth", [2.0, 1e30], ids=["finite", "overflowing"])
def test_gradient_scaling_inside_of_the_step(growth):
    found = []
    for use in (False, True):
        model, optimizer, _ = made("adam")
        scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**10, growth_factor=growth, growth_interval=4)

        def step(x, target, model=model, optimizer=optimizer, scaler=scaler):
            with torch.autocast(DEVICE, torch.float16):
                loss = (model(x)[0].float() - target).square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            return loss

        run = gatewise.make_graphed_step(step, model, optimizer) if use else step
        torch.manual_seed(2)
        with gatewise.for_cuda_graph():
            losses = [run(x, target).detach().item() for x, target in batches(20)]
            optimizer.zero_grad()
        found.append((losses, scaler.get_scale(), [*map(torch.clone, model.parameters())]))
    assert (run.graphs, run.refusal) == (1, "")
    assert found[0][:2] == found[1][:2]
    for plain, own in zip(found[0][2], found[1][2], strict=True):
        assert torch.equal(plain, own)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_model_on_another_device_than_the_current_one():
    found = []
    for use in (False, True):
        model, optimizer, step = made("adam", lr=torch.tensor(0.01, device="cuda:1"))
        model.to("cuda:1")
        run = gatewise.make_graphed_step(step, model, optimizer) if use else step
        given = [(x.to("cuda:1"), target.to("cuda:1")) for x, target in batches(12)]
        found.append(trained(run, given))
    assert (run.graphs, run.refusal) == (1, "")
    assert found[0] == found[1]
    assert torch.cuda.current_device() == 0
