"""Plans for translation models on a described GPU: choices, refusals and their numbers."""

from __future__ import annotations

import contextlib
import re

import pytest

from gatewise.contract.device import Device
from gatewise.contract.errors import ArgumentError, OutOfMemoryPredicted
from gatewise.models import Seq2Seq
from gatewise.planning import Batching, Planner, Shape, apply
from gatewise.planning.budget import CONTEXT_BYTES
from gatewise.planning.planner import extremes
from gatewise.training.options import TrainingOptions

H200 = Device.named("h200")
IWSLT = {"source_size": 7710, "target_size": 17_192, "embedding_size": 512, "hidden_size": 512}


def model(**options):
    return Seq2Seq(**(IWSLT | {"dropout": 0.2, "layer_dropout": 0.2} | options), device="meta")


def planner(device=H200, training=(), **options):
    defaults = {"precision": "tf32", "optimizer": "adam"}
    return Planner(model(**options), TrainingOptions(**(defaults | dict(training))), device)


def batches(size=128, length=50):
    return Batching("batch", size, lambda count: [Shape(length, length, count)])


def test_the_iwslt_model_fits_where_plain_pytorch_takes_over_three_times_as_much():
    assert planner().plan(batches(), "1.1GB").peak_bytes <= 1.1e9
    assert planner().plan(batches(length=100), "2.2GB").peak_bytes <= 2.2e9


@pytest.mark.parametrize("feeding", [True, False])
@pytest.mark.parametrize("budget", ["auto", "1.2GB", "2GB", "8GB"])
def test_a_plan_keeps_to_its_budget_and_says_what_it_does(feeding, budget):
    plan = planner(input_feeding=feeding).plan(batches(), budget)
    assert plan.budget is not None
    assert plan.peak_bytes <= plan.budget
    text = str(plan)
    assert max(map(len, text.splitlines())) <= 80
    for part in ("encoder 1", "decoder", "attention", "output", "at rest", "peak"):
        assert f"  {part} " in text
    assert "S 50, T 50, B 128" in text


def test_a_larger_budget_is_used():
    small, large = planner().plan(batches(), "1.1GB"), planner().plan(batches(), "8GB")
    assert small.choice.seconds > large.choice.seconds
    assert small.peak_bytes < large.peak_bytes


def test_auto_takes_the_least_memory_that_costs_nearly_nothing():
    auto, fastest = planner().plan(batches(), "auto"), planner().plan(batches(), "100GB")
    assert auto.peak_bytes < 0.95 * fastest.peak_bytes
    assert auto.choice.seconds <= 1.05 * fastest.choice.seconds


def refusal(budget, size=128, **options):
    with pytest.raises(OutOfMemoryPredicted) as caught:
        planner(**options).plan(batches(size), budget)
    return str(caught.value)


@contextlib.contextmanager
def without_advice():
    """Do not look for the largest batch that fits, which takes nearly all of the time of an error."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Planner, "largest", lambda *given: 1)
        yield


def test_a_budget_that_cannot_be_met_says_the_least_that_can():
    message = refusal("0.8GB")
    found = re.fullmatch(
        r"`memory_budget` must be at least (\d+) MiB for these batches \(S 50, T 50, B 128\), got 763 MiB \(0\.8GB\)\. "
        r"Raise it, or lower `batch` from 128 to (\d+), the most that fits\.",
        message,
    )
    assert found, message
    least, largest = int(found[1]), int(found[2])
    assert planner().plan(batches(), f"{least}MiB").peak_bytes <= least << 20
    planner().plan(batches(largest), "0.8GB")
    with without_advice():
        refusal(f"{least - 1}MiB")
        refusal("0.8GB", size=largest + max(1, largest // 100))


def test_a_model_that_never_fits_is_said_not_to():
    message = refusal("100MB")
    assert "The smallest possible batch needs" in message
    assert message.endswith("raise the budget, or use a smaller model.")


# A budget that cannot be met is tested, too.
@pytest.mark.exhaustive
def test_a_device_that_is_too_small_is_a_budget_that_cannot_be_met():
    small = H200.replace(memory_bytes=2 << 30)
    planner(small).plan(batches())
    assert "(auto)" in refusal("auto", size=1000, device=small)


# It plans several times.
@pytest.mark.exhaustive
def test_graphs_of_several_shapes_have_memory_beside_launched_steps():
    several = Batching("batch", 128, lambda count: [Shape(50, 50, count), Shape(10, 10, count)])
    least = min(planner()._choices(128, several), key=lambda choice: choice.peak.bytes)
    at_rest = sum(count for _, count in least.step.at_rest)
    # Beyond the context the device has room for one and a half of what a step adds.
    room = least.peak.bytes + (least.peak.bytes - at_rest) // 2
    small = H200.replace(memory_bytes=int((room + CONTEXT_BYTES) / 0.9))
    planner(small).plan(batches())
    with pytest.raises(OutOfMemoryPredicted, match="at least"):
        planner(small).plan(several)
    planner(small, training={"cuda_graph": False}).plan(several)
    # A budget of the user's own is what PyTorch allocates at a time.
    planner(small).plan(several, f"{least.peak.bytes}")


def test_the_largest_batch_is_where_plans_end():
    room = "8GB"
    largest = planner().largest(batches(), room)
    planner().plan(batches(largest), room)
    with pytest.raises(OutOfMemoryPredicted), without_advice():
        planner().plan(batches(largest + max(1, largest // 100)), room)
    assert planner().largest(batches(), "100MB") == 0
    assert planner(Device("cpu", "invented")).largest(batches(), "auto") == 0


@pytest.mark.parametrize(
    ("changes", "training"),
    [
        ({"hidden_size": 256}, {}),
        ({"embedding_size": 256}, {}),
        ({"target_size": 8000}, {}),
        ({"source_size": 9000}, {}),
        ({"encoder_layers": 3}, {}),
        ({"decoder_layers": 3}, {}),
        ({"score": "dot"}, {}),
        ({"attention_layer_norm": True}, {}),
        ({"input_feeding": False}, {}),
        ({"dropout": 0.0}, {}),
        ({"layer_dropout": 0.0}, {}),
        ({"tied": "target"}, {}),
        ({"attention_kernel": "reference"}, {}),
        ({"kernel": "stepwise"}, {}),
        ({}, {"precision": "bfloat16"}),
        ({}, {"optimizer": "sgd", "momentum": 0.0}),
        ({}, {"optimizer": "sgd"}),
        ({}, {"average": "ema"}),
        ({}, {"average": "last"}),
    ],
)
def test_everything_that_takes_memory_is_in_the_prediction(changes, training):
    # At the end of the backward pass everything but the output layer's room counts.
    peak = lambda each: min(choice.peak.bytes for choice in each._choices(128, batches()))  # noqa: E731
    assert peak(planner(**changes, training=training)) != peak(planner())


def test_several_processes_and_the_text_take_memory_too():
    alone = planner()
    several = Planner(alone.model, alone.training, alone.device, processes=2)
    text = Planner(alone.model, alone.training, alone.device, text_bytes=10**8)
    sizes = [each.numel() * 4 for each in alone.model.parameters()]
    small = sum(size for size in sizes if size < 1 << 20)  # the others are exchanged where they are
    assert 0 < small < sum(sizes)
    for other, more in ((several, small), (text, 10**8)):
        assert min(choice.peak.bytes for choice in other._choices(128, batches())) == more + min(
            choice.peak.bytes for choice in alone._choices(128, batches())
        )


def test_a_kernel_that_was_named_is_the_only_one():
    plan = planner(attention_kernel="reference").plan(batches(32), "8GB")
    assert plan.way("attention").detail == "reference"
    plan = planner(kernel="stepwise").plan(batches(32), "8GB")
    assert plan.way("encoder 1").detail == "stepwise"


@pytest.mark.parametrize("feeding", [True, False])
def test_a_plan_is_applied_to_the_model(feeding):
    own = model(input_feeding=feeding)
    made = Planner(own, TrainingOptions(precision="tf32"), H200)
    found = made._choices(128, batches())
    plans = [
        made.plan(batches(), f"{choice.peak.bytes}")
        for choice in (min(found, key=lambda each: each.peak.bytes), found[0])
    ]
    seen = []
    for plan in plans:
        apply(plan, own)
        assert [layer.memory for layer in own.encoder] == [plan.way("encoder 1").name, plan.way("encoder 2").name]
        assert own.attention.kernel == plan.way("attention").name
        assert own.output_rows == int(plan.way("output").name)
        seen.append((own.output_rows, own.recompute_gates if feeding else own.decoder.memory))
    assert seen[0] != seen[1]


def test_shapes_that_matter_are_kept_and_no_others():
    shapes = [
        Shape(10, 10, 100),
        Shape(50, 20, 20),
        Shape(20, 50, 20),
        Shape(40, 40, 18),
        Shape(12, 11, 80),
        Shape(5, 3, 90),
    ]
    found = extremes([*shapes, Shape(11, 9, 70)])
    assert Shape(5, 3, 90) in found  # fewest steps: a kernel may refuse them
    assert Shape(10, 10, 100) in found
    assert Shape(11, 9, 70) not in found


@pytest.mark.parametrize("budget", ["", "many"])
def test_what_is_no_budget_is_refused_before_anything(budget):
    with pytest.raises(ArgumentError, match="memory_budget"):
        planner().plan(batches(), budget)


@pytest.mark.parametrize("device", [H200, Device.named("cpu"), Device.named("v100")])
def test_where_nothing_speaks_for_another_kernel_attention_stays_a_choice(device):
    plan = planner(device).plan(batches(16), "30GB")
    assert plan.way("attention").name == "auto"


def test_triton_s_interpreter_is_no_way_to_save_memory():
    cpu = Device.probe("cpu").replace(triton=True)

    def refused(device):
        with pytest.raises(OutOfMemoryPredicted) as caught:
            planner(device, {"precision": "float32"}, hidden_size=16, embedding_size=16).plan(batches(100, 30), "1MB")
        return str(caught.value)

    assert refused(cpu) == refused(cpu.replace(triton=False))
