"""`make_graphed_step` trains like the step itself; in these tests a stand-in takes the place of CUDA graphs."""

from __future__ import annotations

import copy
import gc
import random
import warnings
import weakref

import numpy as np
import pytest
import torch
import torch.nn.utils.prune
from torch import nn

import gatewise
from gatewise.nn import graphed_step
from gatewise.nn.graphed_step import LATER_WARMUPS, WARMUPS, GraphedStep
from gatewise.nn.step_reads import StepReads
from tests.logged import logged
from tests.nn.step_stand_in import Captures, Model, step_of


def made(optimizer="sgd", **options):
    """Return a model, its optimizer and its step."""
    torch.manual_seed(0)
    model = gatewise.accelerate(Model(nn.LSTM(3, 5)), verbose=False)
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    optimizer = kinds[optimizer](model.parameters(), **({"lr": 0.1} | options))
    return model, optimizer, step_of(model, optimizer)


def graphed(model, optimizer, step):
    captures = Captures([model], [optimizer])
    return GraphedStep(step, [model], [optimizer], captures), captures


def batches(count, time=4, batch=2):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(time, batch, 3, generator=generator), torch.randn(time, batch, 2, generator=generator))
        for _ in range(count)
    ]


def trained(step, given):
    losses, state = [], None
    torch.manual_seed(2)
    for x, target in given:
        found = step(x, target, state)
        losses.append(found["loss"].item())
        state = tuple(each.detach() for each in found["state"])
    return losses


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [("sgd", {}), ("sgd", {"momentum": 0.9}), ("adam", {}), ("sgd", {"lr": torch.tensor(0.1), "fused": True})],
    ids=str,
)
def test_replays_train_like_the_step(optimizer, options):
    given = batches(10)
    plain = made(optimizer, **options)
    expected = trained(plain[2], given)
    model, other, step = made(optimizer, **options)
    run, captures = graphed(model, other, step)
    assert trained(run, given) == expected
    assert captures.captures == run.graphs == 1
    assert captures.replays >= len(given) - 2 * WARMUPS  # the first calls, without a state, are of another kind
    assert run.refusal == ""
    for name, value in model.state_dict().items():
        assert torch.equal(value, plain[0].state_dict()[name]), name


def test_shapes_have_graphs_of_their_own():
    long, short, once = batches(8), batches(3, time=2), batches(1, time=3)
    given = [*long[:6], short[0], short[1], *once, long[6], short[2], long[7]]
    plain = made()
    expected = trained_without_state(plain[2], given)
    run, captures = graphed(*made())
    with logged() as messages:
        assert trained_without_state(run, given) == expected
    assert captures.captures == 2
    assert captures.replays == (8 - WARMUPS) + (3 - LATER_WARMUPS)
    assert messages == [f"Captured a training step as CUDA graph {number}" for number in (1, 2)]


def trained_without_state(step, given):
    torch.manual_seed(2)
    return [step(x, target)["loss"].item() for x, target in given]


def test_results_are_copies_without_gradients():
    model, optimizer, step = made()
    run, captures = graphed(model, optimizer, step)
    found = [run(x, target) for x, target in batches(WARMUPS + 2)]
    assert captures.replays == 2
    for each in found:
        assert not each["loss"].requires_grad
        assert not each["state"][0].requires_grad
    addresses = {each["loss"].data_ptr() for each in found}
    assert len(addresses) == len(found)
    assert all(weight.grad is None for weight in model.parameters())
    assert run.__name__ == "step"


def test_gradients_of_an_earlier_backward_pass_are_not_added():
    losses = []
    for use in (False, True):
        model, optimizer, step = made()
        run = graphed(model, optimizer, step)[0] if use else step
        own = []
        for x, target in batches(WARMUPS + 3):
            if use:
                model(x)[0].sum().backward()
                model.calls -= 1
            torch.manual_seed(0)
            own.append(run(x, target)["loss"].item())
        losses.append(own)
    assert losses[0] == losses[1]


def in_evaluation(model, optimizer):
    model.dropout.eval()


def with_another_dropout(model, optimizer):
    model.dropout.p = 0.1


def frozen(model, optimizer):
    model.head.weight.requires_grad_(False)


def with_other_memory(model, optimizer):
    model.head.weight.data = model.head.weight.data.clone()


def with_another_buffer(model, optimizer):
    model.calls = model.calls.clone()


def with_another_rate(model, optimizer):
    optimizer.param_groups[0]["lr"] = 0.05


def with_loaded_moments(model, optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def with_another_class(model, optimizer):
    gatewise.restore(model, verbose=False)


def with_a_hook(model, optimizer):
    model.head.register_forward_hook(lambda module, given, found: 2 * found)


def with_another_tuple(model, optimizer):
    model.sizes = (3, (4.0, None))


def with_another_forward(model, optimizer):
    model.head.forward = lambda x: 2 * x[..., :2]


CHANGES = [
    (in_evaluation, "the class or an attribute of a module"),
    (with_another_dropout, "the class or an attribute of a module"),
    (frozen, "memory of parameters"),
    (with_other_memory, "memory of parameters"),
    (with_another_buffer, "memory of parameters"),
    (with_another_rate, "hyperparameters"),
    (with_loaded_moments, "an optimizer's state, its memory or a number in it"),
    (with_another_class, "the class or an attribute of a module"),
    (with_a_hook, "the class or an attribute of a module"),
    (with_another_tuple, "the class or an attribute of a module"),
    (with_another_forward, "the class or an attribute of a module"),
]


@pytest.mark.parametrize(("change", "words"), CHANGES, ids=lambda each: getattr(each, "__name__", ""))
def test_a_graph_is_not_replayed_after_a_change_of_what_the_step_reads(change, words):
    model, optimizer, step = made(momentum=0.9)
    run, captures = graphed(model, optimizer, step)
    given = batches(12)
    for x, target in given[:6]:
        run(x, target)
    before = captures.replays
    assert before > 0
    kinds = [run._last]
    change(model, optimizer)
    run(*given[6])
    assert captures.replays == before
    assert words in run._last.difference(kinds[0])
    for x, target in given[7:]:
        run(x, target)
    assert captures.captures == 2
    assert captures.replays > before


def test_a_graph_is_not_replayed_after_a_change_of_a_module_in_torchscript():
    model, optimizer, step = made()
    model.dropout = torch.jit.script(model.dropout)
    run, captures = graphed(model, optimizer, step)
    for x, target in batches(WARMUPS + 1):
        run(x, target)
    assert captures.replays == 1
    model.dropout.eval()
    run(*batches(1)[0])
    assert captures.replays == 1


def test_a_parameter_of_the_optimizer_alone_is_one_of_the_step():
    model = made()[0]
    scale = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)

    def step(x):
        loss = (model(x)[0] * scale).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    run, captures = graphed(model, optimizer, step)
    for x, _ in batches(WARMUPS + 1):
        run(x)
    assert captures.replays == 1
    assert scale.grad is None
    scale.data = torch.full((), 2.0)
    run(batches(1)[0][0])
    assert captures.replays == 1
    run(batches(1)[0][0])
    assert (captures.captures, captures.replays) == (2, 2)


class Counting(torch.optim.Optimizer):
    """Gradient descent with rates that fall, by a counter of Python in its state."""

    @torch.no_grad()
    def step(self):
        for weight in (each for group in self.param_groups for each in group["params"] if each.grad is not None):
            state = self.state[weight]
            state["step"] = state.get("step", 0) + 1
            weight.add_(weight.grad, alpha=-0.1 / state["step"])


def test_steps_of_an_optimizer_that_counts_in_python_are_refused(monkeypatch):
    monkeypatch.setattr(graphed_step, "MOST_KINDS", 5)
    model = made()[0]
    optimizer = Counting(model.parameters(), {})
    run, captures = graphed(model, optimizer, step_of(model, optimizer))
    with pytest.warns(UserWarning, match="differ in an optimizer's state, its memory or a number in it"):
        trained_without_state(run, batches(7))
    assert captures.captures == 0


def test_counters_on_the_cpu_of_a_model_elsewhere_are_found():
    model = nn.Linear(2, 2, device="meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reads = StepReads([model], [optimizer])
    optimizer.state[model.weight]["moments"] = torch.zeros(2, 2, device="meta")
    assert not reads.kept_on_cpu()
    optimizer.state[model.weight]["step"] = torch.zeros(())
    assert reads.kept_on_cpu() == "step"


def test_a_function_that_was_compared_is_kept_so_that_no_other_one_has_its_address():
    model = made()[0]
    model.activation = lambda x: x
    before = StepReads([model], []).kind([model], [*model.parameters()], [], None)
    first = weakref.ref(model.activation)
    model.activation = lambda x: -x
    gc.collect()
    assert first() is not None
    assert StepReads([model], []).kind([model], [*model.parameters()], [], None) != before


def test_groups_of_optimizers_may_hold_any_object():
    model = made()[0]
    optimizer = torch.optim.SGD([{"params": [*model.parameters()], "names": {"a"}, "notes": {"b": [1]}}], lr=0.1)
    run, captures = graphed(model, optimizer, step_of(model, optimizer))
    trained_without_state(run, batches(WARMUPS + 1))
    assert captures.replays == 1


def test_weights_that_the_first_call_creates():
    model, _, _ = made()
    model.head = nn.LazyLinear(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run, captures = graphed(model, optimizer, step_of(model, optimizer))
    trained_without_state(run, batches(WARMUPS + 2))
    assert captures.replays > 0


def carried(kind):
    """Return a model, its optimizer, and a step that carries its state from call to call."""
    model, optimizer, _ = made()
    state = None

    def step(x, target):
        nonlocal state
        y, found = model(x, model.state if kind == "attribute" else state)
        loss = (y - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        state = model.state = tuple(each.detach() for each in found)
        return {"loss": loss}

    model.state = None
    return model, optimizer, step


@pytest.mark.parametrize("kind", ["attribute", "variable"])
def test_a_state_that_the_step_carries_is_refused(kind):
    given = batches(WARMUPS + 4)
    expected = trained_without_state(carried(kind)[2], given)
    run, captures = graphed(*carried(kind))
    with pytest.warns(UserWarning, match="the step reads `state` of an earlier call"):
        assert trained_without_state(run, given) == expected
    assert captures.replays == 0


def test_a_tensor_that_the_step_replaces_by_arithmetic_is_refused_by_name():
    model, optimizer, step = made()
    model.count = torch.zeros(2)

    def counting(x, target):
        model.count = model.count + 1
        return step(x, target)

    run, captures = graphed(model, optimizer, counting)
    with pytest.warns(UserWarning, match="the step reads `count` of an earlier call"):
        trained_without_state(run, batches(WARMUPS + 2))
    assert captures.replays == 0
    assert model.count.tolist() == 2 * [WARMUPS + 2]


def test_tensors_that_the_step_writes_before_it_reads_them_may_stay_in_attributes():
    models = []
    for use in (False, True):
        model = made()[0]
        torch.nn.utils.prune.l1_unstructured(
            model.layer, "weight_hh_l0", 0.5
        )  # before each call a hook sets the weight
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = step_of(model, optimizer)
        run, captures = graphed(model, optimizer, step) if use else (step, None)
        trained_without_state(run, batches(WARMUPS + 4))
        models.append(model)
    assert captures.replays == 4
    for name, value in models[0].state_dict().items():
        assert torch.equal(value, models[1].state_dict()[name]), name


def test_a_graph_is_not_replayed_after_a_tensor_in_an_attribute_was_replaced(monkeypatch):
    monkeypatch.setattr(graphed_step, "MOST_KINDS", 2)
    model, optimizer, step = made()
    model.mask = torch.ones(2)
    run, captures = graphed(model, optimizer, step)
    trained_without_state(run, batches(WARMUPS + 1))
    for number in range(2):
        model.mask = torch.zeros(2)
        trained_without_state(run, batches(1))
        assert captures.captures == 2 + number
    model.mask = torch.zeros(2)
    with pytest.warns(UserWarning, match="tensors in attributes of modules, which are no buffers, are replaced"):
        trained_without_state(run, batches(1))


GLOBAL = np.random.RandomState()
COINS = ["in Python", "from PyTorch's generator of the CPU", "from NumPy's generator"]
COINS += [f"from `{name}`" for name in ("own", "generator", "numbers", "GLOBAL")]


def with_coin(where):
    """Return a model without dropout, its optimizer, and a step that draws a coin on the CPU."""
    model, optimizer, plain = made()
    model.dropout.p = 0.0
    own, generator, numbers = random.Random(0), torch.Generator().manual_seed(0), np.random.default_rng(0)
    random.seed(0)
    np.random.seed(0)
    GLOBAL.seed(0)
    coins = (
        random.random,
        lambda: torch.rand(()).item(),
        np.random.random,
        lambda: own.random(),
        lambda: torch.rand((), generator=generator).item(),
        lambda: numbers.random(),
        lambda: GLOBAL.random_sample(),
    )
    coin = dict(zip(COINS, coins, strict=True))[where]

    def step(x, target):
        return plain(x, target if coin() < 0.5 else -target)

    return model, optimizer, step


@pytest.mark.parametrize("where", COINS)
def test_a_step_that_draws_random_numbers_on_the_cpu_is_refused(where):
    given = batches(WARMUPS + 4)
    expected = trained_without_state(with_coin(where)[2], given)
    model, optimizer, step = with_coin(where)
    captures = Captures([model], [optimizer], restores_generator=False)
    run = GraphedStep(step, [model], [optimizer], captures)
    with pytest.warns(UserWarning, match=f"the step draws random numbers {where}, which replays would not do; draw"):
        assert trained_without_state(run, given) == expected
    assert captures.replays == 0


def test_random_numbers_that_are_drawn_outside_of_the_step_are_no_obstacle():
    model, optimizer, step = made()
    model.generator = random.SystemRandom()  # has no state
    run, captures = graphed(model, optimizer, step)
    for x, target in batches(WARMUPS + 2):
        run(x, target * random.choice([-1, 1]) * torch.rand(()))
    assert captures.replays == 2


def test_arguments_that_the_step_changes_in_place_are_changed_by_replays():
    model, optimizer, step = made()
    found = []

    def counted(x, target, count):
        count += 1
        return step(x, target)

    run, captures = graphed(model, optimizer, counted)
    count = torch.zeros(())
    for x, target in batches(WARMUPS + 3):
        run(x, target, count)
        found.append(count.item())
    assert found == list(range(1, WARMUPS + 4))
    assert captures.replays == 3


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_an_optimizer_whose_state_was_cleared_creates_it_in_a_call_of_its_own(optimizer):
    options = {"momentum": 0.9} if optimizer == "sgd" else {}
    losses = []
    for use in (False, True):
        model, other, step = made(optimizer, **options)
        run, captures = graphed(model, other, step) if use else (step, None)
        losses.append(trained_without_state(run, batches(WARMUPS + 2)))
        other.state.clear()
        losses[-1] += trained_without_state(run, batches(3))
    assert losses[0] == losses[1]
    assert run.refusal == ""
    assert captures.replays == 2 + 2


def test_what_a_failed_capture_has_put_into_modules_and_optimizers_is_taken_back():
    model, optimizer, step = made()
    model.state = torch.zeros(2)
    optimizer.state[model.head.weight]["step"] = torch.zeros(())

    def fails(x, target):
        found = step(x, target)
        if captures.captures:
            model.state = torch.full((2,), torch.nan)
            optimizer.state[model.head.weight]["step"] += 1
            raise ValueError("an error of the program")
        return found

    run, captures = graphed(model, optimizer, fails)
    state = model.state
    trained_without_state(run, batches(WARMUPS))
    with pytest.raises(ValueError, match="an error of the program"):
        run(*batches(1)[0])
    assert model.state is state
    assert optimizer.state[model.head.weight]["step"] == 0


def test_results_of_calls_as_they_are_are_copies_too():
    model, optimizer, step = made()

    def counted(x, target):
        step(x, target)
        return model.calls

    run, _ = graphed(model, optimizer, counted)
    assert [each.item() for each in [run(x, target) for x, target in batches(WARMUPS + 2)]] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "setting",
    [
        lambda: gatewise.use_kernel("eager"),
        lambda: torch.autocast("cuda", torch.bfloat16),
        lambda: torch.backends.cudnn.flags(enabled=False),
    ],
)
def test_a_graph_is_not_replayed_under_other_settings(setting):
    run, captures = graphed(*made())
    given = batches(WARMUPS + 3)
    for x, target in given[:-1]:
        run(x, target)
    before = captures.replays
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's, of autocast for a GPU that is not there
        with setting():
            run(*given[-1])
    assert captures.replays == before == 2


def test_arguments_that_are_no_tensors_tell_calls_apart():
    model, optimizer, _ = made()
    found = []

    def step(x, scale):
        found.append(scale)
        return (model(x)[0] * scale).sum()

    run, captures = graphed(model, optimizer, step)
    x = torch.ones(2, 2, 3)
    for scale in (1, 1.0, True) * (WARMUPS + 2):
        run(x, scale)
    assert captures.captures == 3
    assert [type(each) for each in found[:3]] == [int, float, bool]


def refusal_of(step, *arguments):
    """Call a step until it is refused, and return the reason."""
    run, captures = graphed(*made()[:2], step)
    for _ in range(WARMUPS):
        if not run.refusal:
            with warnings.catch_warnings(record=True) as warned:
                run(*arguments)
    if not run.refusal:
        with pytest.warns(UserWarning, match="as they are") as warned:
            run(*arguments)
    run(*arguments)
    assert captures.replays == 0
    (only,) = warned
    assert only.filename == __file__
    assert str(only.message) == f"steps are not captured as a CUDA graph, and run as they are: {run.refusal}"
    return run.refusal


def test_steps_that_cannot_be_captured_are_refused_with_the_reason():
    x = batches(1)[0][0]
    assert "the step returns 0.5, and replays can only return tensors" in refusal_of(lambda x: (x, 0.5), x)
    assert "requires gradients" in refusal_of(lambda x: x, x.clone().requires_grad_())
    assert "a tensor in the arguments is on meta, and the model is on cpu" in refusal_of(lambda x: x, x.to("meta"))
    assert "an argument is of type set" in refusal_of(lambda x, found: x, x, {1})
    assert "a tensor that is not dense" in refusal_of(lambda x: x.to_dense(), x.to_sparse())
    nested = torch.nested.nested_tensor([x[0], x[1, :1]], layout=torch.strided)
    assert "a tensor that is not dense" in refusal_of(lambda x: None, nested)
    assert "an argument is of type object" in refusal_of(lambda x, found: x, x, object())


def test_a_model_that_has_moved_to_another_device_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    run, captures = graphed(*made())
    run._device = torch.device("cuda", 1)  # of its first call
    with pytest.warns(UserWarning, match="a parameter has moved from cuda:1 to cpu"):
        trained_without_state(run, batches(WARMUPS + 1))
    assert captures.captures == 0


def test_the_reason_of_a_failed_capture_is_its_first_error():
    x = batches(1)[0][0]

    def fails(x):
        if fails.captured:
            raise RuntimeError("operation not permitted when stream is capturing")
        return x

    fails.captured = False
    run, _ = graphed(*made()[:2], fails)
    for _ in range(WARMUPS):
        run(x)
    fails.captured = True
    with pytest.warns(UserWarning, match="operation not permitted"), pytest.raises(RuntimeError, match="not permitted"):
        run(x)  # the capture fails, and so does the call itself
    fails.captured = False
    assert torch.equal(run(x), x)


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_a_step_that_changes_the_learning_rate_is_refused(rate):
    model, optimizer, step = made(lr=rate, fused=True)

    def scheduled(x, target):
        found = step(x, target)
        if captures.captures:
            optimizer.param_groups[0]["lr"] *= 0.5
        return found

    run, captures = graphed(model, optimizer, scheduled)
    with pytest.warns(UserWarning, match=r"the step changes .*hyperparameters of an optimizer, such as .* rate"):
        trained_without_state(run, batches(WARMUPS + 2))
    assert captures.captures == 1
    assert captures.replays == 0


def test_rates_that_are_numbers_and_change_in_every_step_are_refused_in_the_end(monkeypatch):
    monkeypatch.setattr(graphed_step, "MOST_KINDS", 4)
    model, optimizer, step = made()

    def falling(x, target):
        found = run(x, target)
        optimizer.param_groups[0]["lr"] *= 0.9
        return found

    run, captures = graphed(model, optimizer, step)
    with pytest.warns(UserWarning, match=r"more than 4 kinds of calls; .* differ in the hyperparameters .* no tensor"):
        trained_without_state(falling, batches(6))
    assert captures.captures == 0


def test_a_model_on_a_cpu_is_trained_as_it_is():
    given = batches(6)
    expected = trained(made()[2], given)
    model, optimizer, step = made()
    run = gatewise.make_graphed_step(step, model, optimizer)
    with pytest.warns(UserWarning, match="CUDA graphs need a GPU, and the model is on cpu") as warned:
        assert trained(run, given) == expected
    assert len(warned) == 1
    assert run.graphs == 0


def test_several_models_and_optimizers():
    first, second = (made() for _ in range(2))
    models, optimizers = (first[0], second[0]), (first[1], second[1])

    def step(x, target):
        return first[2](x, target)["loss"], second[2](x, target)["loss"]

    captures = Captures(models, optimizers)
    run = GraphedStep(step, models, optimizers, captures)
    for x, target in batches(WARMUPS + 1):
        run(x, target)
    assert captures.replays == 1
    second[0].head.eval()
    run(*batches(1)[0])
    assert captures.replays == 1


def test_wrong_arguments():
    model, optimizer, step = made()
    with pytest.raises(gatewise.ArgumentError, match="`step` must be a function, got None"):
        gatewise.make_graphed_step(None, model, optimizer)
    with pytest.raises(gatewise.ArgumentError, match=r"`model` must be a torch.nn.Module, or several, got .* SGD"):
        gatewise.make_graphed_step(step, optimizer, optimizer)
    with pytest.raises(gatewise.ArgumentError, match=r"`optimizer` must be an optimizer of torch.optim, or several"):
        gatewise.make_graphed_step(step, model, [model])
    with pytest.raises(gatewise.ArgumentError, match=r"`model` must be .* got none"):
        gatewise.make_graphed_step(step, [], optimizer)
    # A module that is iterable is one module.
    gatewise.make_graphed_step(step, nn.Sequential(model), [optimizer])
