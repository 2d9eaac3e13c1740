"""The kernels that a run of `gatewise train nmt` launches: in training, in evaluations, and in greedy translations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from gatewise.attention import Problem, explain
from gatewise.attention.fused.builds import launches
from gatewise.cli.kernel_builds import LayerCall, layer_builds
from gatewise.contract.device import Device
from gatewise.contract.triton_kernels import TritonLaunch
from gatewise.models import Seq2Seq
from gatewise.models.chunked_softmax import softmax_launches
from gatewise.nn import LSTM, LSTMCell
from gatewise.planning import Shape
from gatewise.planning.translation.attention import problem_of
from gatewise.planning.translation.decoder import sizes_of
from gatewise.planning.translation.setting import Setting
from gatewise.training.precision import arithmetic

if TYPE_CHECKING:
    from gatewise.kernels.persistent.launches.builds import Compilation

Shapes = Sequence[tuple[int, int]]
"""Shapes of batches as (padded length, pairs)."""


class TranslationCalls(NamedTuple):
    """The batches of a run.

    Attributes:
        model: The model.
        training: The shapes of the training batches, the most frequent first.
        evaluation: The shapes of the validation batches.
        search: The shapes of the batches that greedy search translates.
    """

    model: Seq2Seq
    training: Shapes
    evaluation: Shapes = ()
    search: Shapes = ()


def translation_builds(calls: TranslationCalls, precision: str, device: Device) -> Iterator[Compilation]:
    """Yield the kernels that the batches launch, those of training first.

    Args:
        calls: The batches.
        precision: The precision, as in `TrainingOptions`.
        device: The device.
    """
    model, dtype = calls.model, torch.bfloat16 if precision == "bfloat16" else torch.float32
    for shapes, training in ((calls.training, True), (calls.evaluation, False)):
        settings = [Setting(model, Shape(steps, steps, rows), dtype, device) for steps, rows in shapes]
        with arithmetic(precision):
            found = [each for setting in settings for each in _around_layers(setting, training)]
        yield from found
        yield from layer_builds(layer_calls(model, shapes, training=training), precision, device)
    with arithmetic(precision):
        steps = [each for shape in calls.search for each in _attention_of_step(model, shape, dtype, device)]
    yield from steps
    yield from layer_builds(_search_calls(model, calls.search), precision, device)


def layer_calls(model: Seq2Seq, shapes: Iterable[tuple[int, int]], *, training: bool = True) -> Iterator[LayerCall]:
    """Yield the calls of a model's LSTM layers for batches of the given shapes (padded length, pairs)."""
    for steps, rows in shapes:
        for layer in cast("Iterable[LSTM]", model.encoder):
            yield LayerCall(layer, (steps, rows, layer.input_size), lengths=True, training=training)
        if isinstance(model.decoder, LSTM):  # not with input feeding
            yield LayerCall(model.decoder, (steps, rows, model.decoder.input_size), training=training)


def _around_layers(setting: Setting, training: bool) -> Iterator[Compilation]:
    """Yield the kernels of a batch other than those of its LSTM layers."""
    model, device = setting.model, setting.device
    if model.input_feeding:
        # Imported with the toolchain for CUDA.
        from gatewise.feeding.builds import compilations

        changes = {"attention_kernel": model.attention.kernel, "recompute": model.recompute_gates}
        yield from compilations(sizes_of(setting).replace(**changes, needs_grad=training), device)
    else:
        yield from _attention(model, problem_of(setting).replace(needs_grad=training), device)
    if device.triton:
        number = torch.float16 if setting.rounds_float32 else setting.dtype
        smoothing = model.label_smoothing if training else 0.0
        vocabulary, size = model.output.weight.shape
        yield from softmax_launches(vocabulary, size, number, smoothing, gradient=training)


def _attention_of_step(
    model: Seq2Seq, shape: tuple[int, int], dtype: torch.dtype, device: Device
) -> Iterator[TritonLaunch]:
    steps, rows = shape
    problem = problem_of(Setting(model, Shape(steps, 1, rows), dtype, device))
    yield from _attention(model, problem.replace(needs_grad=False), device, need_weights=True)


def _attention(
    model: Seq2Seq, problem: Problem, device: Device, *, need_weights: bool = False
) -> Iterator[TritonLaunch]:
    if explain(problem, device, model.attention.kernel).chosen == "fused":
        yield from launches(problem, need_weights=need_weights)


def _search_calls(model: Seq2Seq, shapes: Shapes) -> Iterator[LayerCall]:
    """Yield the calls of layers in greedy search: the encoder's, and those of a decoder step."""
    for steps, rows in shapes:
        for layer in cast("Iterable[LSTM]", model.encoder):
            yield LayerCall(layer, (steps, rows, layer.input_size), lengths=True, training=False)
    layers = [model.decoder] if isinstance(model.decoder, LSTM) else [*cast("Iterable[LSTMCell]", model.decoder)]
    for layer in layers:
        # A cell computes a step as a layer of its sizes does.
        alike = layer if isinstance(layer, LSTM) else LSTM(layer.input_size, layer.hidden_size, device="meta")
        for _, rows in shapes:
            yield LayerCall(alike, (1, rows, alike.input_size), training=False)
