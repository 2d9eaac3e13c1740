"""One training step of the language model: what a benchmark times and what it checks."""

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
    """Forward, loss, backward, clip and update on the next batch: the whole of it is timed.

    The loss is the classic one, summed over time and averaged over the batch; the optimizer is SGD at rate 1 after
    clipping the gradient's norm. The state is carried from batch to batch without its history. Nothing waits for the
    GPU.

    A plain loop clips with `torch.nn.utils.clip_grad_norm_` and updates with `torch.optim.SGD`, both in the versions
    that need few launches. The others are the step of `gatewise.training`, which `gatewise train` runs too, as it is or
    replayed as a CUDA graph.

    Args:
        model: Already on its device and in its dtype.
        batches: Tokens and their successors, on the model's device; used in turn.
        case: Its sizes and clipping norm.
        precision: In which the forward pass runs.
        loop: How the step around the model runs.
        capture: Records the work of a step and returns what repeats it.
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
        """Why the step was not captured as a graph; empty when it was, or was not to be."""
        return self._train.refusal if isinstance(self._train, ReplayedStep) else ""

    def settle(self) -> None:
        """Make what stays for good, such as libraries' workspaces, and come to where a graph is captured next."""
        for _ in range(WARMUPS if self._loop is Loop.GRAPH else 1):
            self()
        self._optimizer.zero_grad(set_to_none=True)

    def __call__(self) -> Tensor:
        """Train on the next batch and return its loss before the update, which a replay's next call overwrites.

        Gradients are freed at the end, so that models beside each other fit.
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
        """Clip the gradient and change the weights by it."""
        if self._loop is Loop.PLAIN:
            nn.utils.clip_grad_norm_(self._parameters, self._case.clip_norm, foreach=True)
            self._optimizer.step()
        else:
            clipped_update(self._optimizer, self._case.clip_norm)


class _Loss(nn.Module):
    """The classic loss as `gatewise.training` takes it."""

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
    """Make the model with its recurrent layer computed one way.

    Args:
        way: The recurrent layer.
        case: The sizes.
        vocabulary: V, words.
        precision: Gives the dtype.
        device: Where it lives.
        dropout: Probability.
        start: Weights to start from, in the order of `parameters()`; None to keep what the modules start with.
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
    """Draw the weights that every way starts from, uniform as in the classic recipe, float32."""
    generator = torch.Generator(device).manual_seed(seed)
    scale = case.initial_scale
    return [
        torch.empty(shape, device=device).uniform_(-scale, scale, generator=generator)
        for shape in parameter_shapes(case, vocabulary).values()
    ]


def parameter_shapes(case: LanguageModelCase, vocabulary: int) -> dict[str, torch.Size]:
    """Return the shape of every parameter by name, in the order of `parameters()`, the LSTM's by torch's names."""
    with torch.device("meta"):
        model = LanguageModel(case, vocabulary, Way("nn.LSTM", torch_lstm), 0.0)
    return {name.removeprefix("layer."): parameter.shape for name, parameter in model.named_parameters()}
