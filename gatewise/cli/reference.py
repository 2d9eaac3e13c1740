"""The reference kernels, on which training repeats a step that was not finite; they consist of PyTorch operators."""

from __future__ import annotations

import contextlib
import math
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from gatewise.attention.reference import reference as plain_attention
from gatewise.contract.decision import Decision
from gatewise.models.softmax import plain_softmax
from gatewise.nn import LSTM
from gatewise.nn.attention import Attention
from gatewise.selection import use_kernel
from gatewise.selection.reference import REFERENCE
from gatewise.training import Batches, RunFolder, TrainingOptions, evaluate
from gatewise.training.fault import Inquiry
from gatewise.training.processes import Processes
from gatewise.training.reference import Reference
from gatewise.training.validation import evaluation_error


@contextlib.contextmanager
def on_reference(model: nn.Module) -> Iterator[None]:
    """Run a model on the reference kernels in the block, including layers that name another kernel."""
    layers = [layer for layer in model.modules() if isinstance(layer, LSTM | Attention)]
    named = [layer.kernel for layer in layers]
    for layer in layers:
        layer.kernel = REFERENCE.name if isinstance(layer, LSTM) else plain_attention.name
    try:
        with use_kernel(REFERENCE.name), plain_softmax():
            yield
    finally:
        for layer, kernel in zip(layers, named, strict=True):
            layer.kernel = kernel


def reference_of(task: str, model: nn.Module, decision: Decision, folder: RunFolder, processes: Processes) -> Reference:
    """Return the reference on which `gatewise.training.fit` repeats a step that was not finite.

    Args:
        task: The command under `gatewise train`.
        model: The model that is trained.
        decision: The decision for its longest sequences.
        folder: The folder of the run.
        processes: The processes of the distributed training.
    """
    able = sorted((each for each in decision.verdicts if each.accepted), key=lambda each: each.seconds or 0.0)
    other = next((each.kernel for each in able if each.kernel != decision.chosen), REFERENCE.name)
    beside = f" with the attention and softmax on {decision.device.name}" if decision.device.kind != "cpu" else ""
    return Reference(
        context=lambda: on_reference(model),
        name=f"the reference kernel {REFERENCE.name}",
        running=f"the kernel {decision.chosen}{beside}",
        advice=(
            f"Repeat the step by:\n  gatewise replay {shlex.quote(str(folder.fault))}\n"
            f"Resume from the checkpoint with another kernel by:\n"
            f"  {processes.launcher}gatewise train {task} --output {shlex.quote(str(folder.path))} --resume"
            f" --kernel {other}"
        ),
        facts={"command": f"train {task}", "kernel": decision.chosen, "decision": str(decision)},
    )


def loss_on_test_data(
    model: nn.Module,
    batches: Batches,
    options: TrainingOptions,
    folder: RunFolder,
    processes: Processes,
    reference: Reference,
    facts: Mapping[str, Any],
) -> float:
    """Return the loss of a trained model on the test data.

    Args:
        model: The model with the best weights.
        batches: The test data.
        options: The options of its training.
        folder: The folder of the run.
        processes: The processes that evaluate together.
        reference: The result of `reference_of`.
        facts: The metadata in the model file.

    Raises:
        NotFinite: The loss is not finite; the error says why.
    """
    loss = evaluate(model, batches, processes, options.precision)
    if not math.isfinite(loss):
        inquiry = Inquiry(model, processes, options, reference, folder.fault, {"model": facts})
        kept = f"It was {loss}. The weights are in {folder.model}."
        raise evaluation_error(inquiry, batches, "the test loss", kept)
    return loss
