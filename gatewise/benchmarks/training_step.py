"""One training step of the language model, which the benchmark checks and times."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gatewise.benchmarks.cases import LanguageModelCase
from gatewise.benchmarks.precision import Precision
from gatewise.benchmarks.rivals import LanguageModel, LayerState, Loop, Way, torch_lstm
from gatewise.data import Window
from gatewise.models.softmax import token_losses
from gatewise.training.graph import WARMUPS, Capture, ReplayedStep, cuda_graph
from gatewise.training.optimizers import build_optimizer, clipped_update
from gatewise.training.options import TrainingOptions
from gatewise.training.step import Step


class TrainingStep:
    """Forward, loss, backward, clipping and update on the next batch, all of which is timed.

    The loss is summed over time and averaged over the batch, as is usual for this model; the optimizer is SGD with
    learning rate 1 after clipping the gradient's norm. The detached state is carried from batch to batch. Nothing
    synchronises with the GPU.

    A plain loop clips with `torch.nn.utils.clip_grad_norm_` and updates with `torch.optim.SGD`, both in the versions
    with few launches. The other loops use the step of `gatewise.training`, as `gatewise train` does, eager or replayed
    as a CUDA graph.

    Args:
        model: The model, on its device and in its dtype.
        batches: The tokens and the next tokens, on the model's device; used in turn.
        case: The sizes and the clipping norm.
        precision: The precision of the forward pass.
        loop: The training loop.
        capture: A function that captures the work of a step and returns its replay.
    """

    def __init__(
        self,
        model: LanguageModel,
        batches: Sequence[Window],
        case: LanguageModelCase,
        precision: Precision,
        loop: Loop = Loop.PLAIN,
        capture: Capture = cuda_graph,
    ) -> None:
        self.model = model
        self._batches = itertools.cycle(batches)
        self._case = case
        self._precision = precision
        self._loop = loop
        self._parameters = list(model.parameters())
        self._device = self._parameters[0].device
        if loop is Loop.PLAIN:
            on_gpu = self._device.type == "cuda"
            self._optimizer = torch.optim.SGD(self._parameters, lr=1.0, fused=on_gpu, foreach=not on_gpu)
        else:
            options = TrainingOptions(optimizer="sgd", learning_rate=1.0, momentum=0.0)
            self._optimizer = build_optimizer(self._parameters, options)
        arithmetic = "bfloat16" if precision.autocast else "float32"
        step = Step(_Loss(model, case.batch, loop), self._optimizer, case.clip_norm, arithmetic, self._device)
        self._train = ReplayedStep(step, capture, lambda sentence: None) if loop is Loop.GRAPH else step
        shape = (case.num_layers, case.batch, case.hidden_size)
        zeros = torch.zeros(shape, device=self._device, dtype=self._parameters[0].dtype)
        self._state: LayerState = (zeros, zeros)

    @property
    def refusal(self) -> str:
        """The reason why the step was not captured; empty if it was, or has not been tried."""
        return self._train.refusal if isinstance(self._train, ReplayedStep) else ""

    def warm_up(self) -> None:
        """Allocate all memory that is kept, such as libraries' workspaces, and run the steps before the capture."""
        for _ in range(WARMUPS if self._loop is Loop.GRAPH else 1):
            self()
        self._optimizer.zero_grad(set_to_none=True)

    def __call__(self) -> Tensor:
        """Train on the next batch and return its loss before the update, which the next replay overwrites.

        Gradients are freed at the end, so that several models fit in memory.
        """
        if self._loop is Loop.PLAIN:
            loss = self.losses().sum().div(self._case.batch)
            loss.backward()
            loss = loss.detach()
            self.update()
        else:
            loss, self._state = self._train(next(self._batches), self._state)
        if self._loop is not Loop.GRAPH:
            self._optimizer.zero_grad(set_to_none=True)
        return loss

    def losses(self) -> Tensor:
        """Run the model on the next batch and return the loss of every token [T*B]."""
        batch = next(self._batches)
        with self._precision.autocasting(self._device):
            losses, state = _losses(self.model, batch, self._state, self._loop)
        self._state = (state[0].detach(), state[1].detach())
        return losses

    def update(self) -> None:
        """Clip the gradient and update the weights."""
        if self._loop is Loop.PLAIN:
            nn.utils.clip_grad_norm_(self._parameters, self._case.clip_norm, foreach=True)
            self._optimizer.step()
        else:
            clipped_update(self._optimizer, self._case.clip_norm)


class _Loss(nn.Module):
    """The loss of the model in the form that `gatewise.training` takes."""

    def __init__(self, model: LanguageModel, batch: int, loop: Loop) -> None:
        super().__init__()
        self.model = model
        self.batch = batch
        self.loop = loop

    def forward(self, batch: Window, state: Any) -> tuple[Tensor, Any]:
        losses, state = _losses(self.model, batch, state, self.loop)
        return losses.sum() / self.batch, state


def _losses(model: LanguageModel, batch: Window, state: LayerState, loop: Loop) -> tuple[Tensor, LayerState]:
    hidden, state = model(batch.inputs, state)
    decoder, targets = model.decoder, batch.targets.flatten()
    if loop is not Loop.PLAIN:
        return token_losses(hidden, decoder.weight, decoder.bias, targets), state
    scores = decoder(hidden)
    numbers = torch.float64 if scores.dtype == torch.float64 else torch.float32
    return functional.cross_entropy(scores.to(numbers), targets, reduction="none"), state


def new_model(
    way: Way,
    case: LanguageModelCase,
    vocabulary: int,
    precision: Precision,
    device: torch.device,
    *,
    dropout: float,
    start: Sequence[Tensor] | None = None,
) -> LanguageModel:
    """Create the model with one implementation of its recurrent layer.

    Args:
        way: The implementation of the recurrent layer.
        case: The sizes.
        vocabulary: V, the number of words.
        precision: The precision, with the dtype.
        device: The device.
        dropout: The dropout probability.
        start: The initial weights, in the order of `parameters()`; None for those of the modules.
    """
    with torch.device(device):
        model = LanguageModel(case, vocabulary, way, dropout)
    model = model.to(precision.dtype)
    if start is not None:
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), start, strict=True):
                parameter.copy_(value)
    return model.train()


def starting_weights(case: LanguageModelCase, vocabulary: int, device: torch.device, seed: int) -> list[Tensor]:
    """Draw the initial weights of every way, uniformly distributed, float32."""
    generator = torch.Generator(device).manual_seed(seed)
    scale = case.initial_scale
    return [
        torch.empty(shape, device=device).uniform_(-scale, scale, generator=generator)
        for shape in parameter_shapes(case, vocabulary).values()
    ]


def parameter_shapes(case: LanguageModelCase, vocabulary: int) -> dict[str, torch.Size]:
    """Return the shape of every parameter by name, in the order of `parameters()`, with PyTorch's LSTM names."""
    with torch.device("meta"):
        model = LanguageModel(case, vocabulary, Way("nn.LSTM", torch_lstm), 0.0)
    return {name.removeprefix("layer."): parameter.shape for name, parameter in model.named_parameters()}
