"""The training step of a translation model on batches of one shape."""

from __future__ import annotations

import torch

from gatewise.contract.device import Device
from gatewise.models import Seq2Seq
from gatewise.planning.choose import Shape, Step
from gatewise.planning.translation.attention import attention
from gatewise.planning.translation.decoder import decoder
from gatewise.planning.translation.embedding import embedding
from gatewise.planning.translation.lstm import lstm
from gatewise.planning.translation.output import output
from gatewise.planning.translation.setting import Setting, parameter_bytes
from gatewise.planning.way import Part, Way
from gatewise.training.options import TrainingOptions
from gatewise.training.precision import arithmetic
from gatewise.training.processes import LARGE_BYTES

CUBLAS = "cuBLAS"
CUBLAS_BYTES = 64 << 20
"""The memory that cuBLAS takes permanently from PyTorch's allocator on a GPU: 32 MiB at the first product of each pair
of thread and stream. There are two such pairs: a step is captured on a stream of its own, and autograd may have a
thread of its own (measured with the latter on an H200 with PyTorch 2.11; GPUs before Hopper take less)."""


def training_step(
    model: Seq2Seq, shape: Shape, training: TrainingOptions, device: Device, *, processes: int = 1, text_bytes: int = 0
) -> Step:
    """Return the training step of a model on batches of one shape.

    Args:
        model: The model, which may be on the device "meta".
        shape: The shape of the batch in this process.
        training: The training options, of which precision, optimizer and weight averaging matter.
        device: The device of the training.
        processes: The number of processes; several processes copy their small gradients to exchange them.
        text_bytes: The size in bytes of the training text on the device.

    Raises:
        KernelRefused: The kernel that the model names cannot run the batch.
    """
    dtype = torch.bfloat16 if training.precision == "bfloat16" else torch.float32
    with arithmetic(training.precision):
        captured = training.cuda_graph and device.kind == "cuda"
        setting = Setting(model, shape, dtype, device, captured)
        parts = _parts(setting)
    return Step(shape, _at_rest(model, training, device, processes, text_bytes), parts)


def _parts(setting: Setting) -> tuple[Part, ...]:
    model, shape = setting.model, setting.shape
    shared = model.target_embedding.weight
    layers = [
        lstm(f"encoder {place}", layer, shape.source, setting, lengths=True, dropped=rate)  # type: ignore[arg-type]
        for place, (layer, rate) in enumerate(
            zip(model.encoder, (0.0, *[model.layer_dropout.p] * (len(model.encoder) - 1)), strict=True), 1
        )
    ]
    tied_source = model.source_embedding.weight is shared
    return (
        embedding("source", model.source_embedding, shape.source, setting, counted=tied_source),
        *layers,
        _start(setting),
        embedding("target", model.target_embedding, shape.target, setting, counted=model.output.weight is shared),
        decoder(setting),
        attention(setting),
        output(setting),
    )


def _start(setting: Setting) -> Part:
    model = setting.model
    states = setting.shape.batch * 2 * model.decoder_layers * model.hidden_size * setting.dtype.itemsize
    casts = setting.cast_bytes(*model.start.parameters())
    way = Way("start", "the encoder's final state", kept=2 * states + casts, backward_scratch=2 * states + casts)
    return Part("start", (way,), parameter_bytes(model.start))


def _at_rest(
    model: Seq2Seq, training: TrainingOptions, device: Device, processes: int, text_bytes: int
) -> tuple[tuple[str, int], ...]:
    weights = parameter_bytes(model)
    moments = {"adam": 2, "adamw": 2, "sgd": int(training.momentum > 0)}[training.optimizer]
    copies = {"none": 0, "last": training.average_last - 1}.get(training.average, 1)
    small = sum(each.nbytes for each in model.parameters() if each.nbytes < LARGE_BYTES)
    items = (
        ("weights", weights),
        ("moments", moments * weights),
        ("averages", copies * weights),
        ("gradients that processes exchange", small * (processes > 1)),
        ("training text", text_bytes),
        (CUBLAS, CUBLAS_BYTES * (device.kind == "cuda")),
    )
    return tuple((name, count) for name, count in items if count)
