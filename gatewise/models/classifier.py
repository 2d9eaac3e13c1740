"""A stacked, bidirectional LSTM for sequence classification and regression."""

from __future__ import annotations

import numbers
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gatewise.contract.errors import ArgumentError, ShapeError, sentence
from gatewise.contract.ranges import PROBABILITY
from gatewise.models.arguments import TOKEN_ERRORS, check_lengths_of, check_sizes, check_targets
from gatewise.nn import LSTM

POOLINGS = ("mean", "last", "max")


class SequenceClassifier(nn.Module):
    r"""Predicts the scores of classes, or a number, for a whole sequence.

        h_1 ... h_T = LSTM((x - input_mean) / input_scale)        with dropout between the layers
        p = pooled(h_1 ... h_T)                                    over the sequence's own steps
        classes:  p(class) = softmax(W dropout(p) + b)
        a number: y = target_mean + target_scale (W dropout(p) + b)

    Args:
        input_size: The number of features of a step, F.
        classes: The number of classes, C; 0 predicts a number.
        hidden_size: The number of units of each LSTM layer and direction, H.
        num_layers: The number of LSTM layers, L.
        bidirectional: Whether to run the LSTM in both directions; the number of directions D is then 2.
        pooling: The representation of the sequence [D*H]: ``"mean"`` or ``"max"`` of the last layer's outputs over the
            sequence's steps, or ``"last"``, its state after reading the whole sequence in each direction.
        dropout: The dropout probability of the pooled units, in training mode.
        layer_dropout: The dropout probability between two LSTM layers, in training mode.
        kernel: The kernel of the LSTM; ``"auto"`` lets gatewise choose.
        device: The device of the parameters.

    The buffers `input_mean`, `input_scale` [F], `target_mean` and `target_scale` [] are initialised to 0 and 1; see
    `standardize`. A sequence of length 0 is pooled to zeros.

    Raises:
        ArgumentError: A size is not positive, `classes` is 1, a probability is outside [0, 1), or the pooling is
            unknown.
    """

    input_mean: torch.Tensor
    input_scale: torch.Tensor
    target_mean: torch.Tensor
    target_scale: torch.Tensor

    def __init__(
        self,
        input_size: int,
        classes: int,
        hidden_size: int,
        num_layers: int = 2,
        *,
        bidirectional: bool = True,
        pooling: str = "mean",
        dropout: float = 0.0,
        layer_dropout: float = 0.0,
        kernel: str = "auto",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_sizes({"input_size": input_size, "hidden_size": hidden_size, "num_layers": num_layers})
        if not isinstance(classes, numbers.Integral) or classes < 0 or classes == 1:
            raise ArgumentError(sentence("classes", "at least 2, or 0 to predict a number", repr(classes)))
        PROBABILITY.check("dropout", dropout)
        PROBABILITY.check("layer_dropout", layer_dropout)
        _check_pooling(pooling)
        self.classes = classes
        self.pooling = pooling
        between = layer_dropout if num_layers > 1 else 0.0
        self.lstm = LSTM(
            input_size,
            hidden_size,
            num_layers,
            dropout=between,
            bidirectional=bidirectional,
            kernel=kernel,
            device=device,
        )
        self.output_dropout = nn.Dropout(dropout)
        self.output = nn.Linear(hidden_size * (1 + bidirectional), classes or 1, device=device)
        self.register_buffer("input_mean", torch.zeros(input_size, device=device))
        self.register_buffer("input_scale", torch.ones(input_size, device=device))
        self.register_buffer("target_mean", torch.zeros((), device=device))
        self.register_buffer("target_scale", torch.ones((), device=device))

    @torch.no_grad()
    def standardize(self, inputs: torch.Tensor, targets: torch.Tensor | None = None) -> None:
        """Set the buffers so that features, and numbers to predict, have mean 0 and standard deviation 1 in the model.

        Args:
            inputs: The steps of the training sequences [N, F]; a constant feature keeps the scale 1.
            targets: The numbers to predict [N]; None leaves `target_mean` and `target_scale` unchanged.

        Raises:
            ArgumentError: A number is infinite or NaN.
            ShapeError: They are no tensors of these shapes, or there is not one step or number.
        """
        expectations = f"a tensor of steps [N, F] with F = {len(self.input_mean)}", "a tensor of numbers [N]"
        given = {
            "inputs": (inputs, self.input_mean, self.input_scale),
            "targets": (targets, self.target_mean, self.target_scale),
        }
        found = []
        for (name, (values, mean, scale)), expectation in zip(given.items(), expectations, strict=True):
            if values is None and name == "targets":
                continue
            if not isinstance(values, torch.Tensor) or values.shape[1:] != mean.shape or not len(values):
                got = list(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
                raise ShapeError(sentence(name, f"{expectation}, N at least 1", got))
            deviation, average = torch.std_mean(values.double(), 0, correction=0)
            if not deviation.isfinite().all():
                raise ArgumentError(sentence(name, "finite numbers", "infinity or NaN"))
            found.append((mean, average, scale, deviation.where(deviation > 0, 1.0)))
        for mean, average, scale, deviation in found:
            mean.copy_(average)
            scale.copy_(deviation)

    def forward(self, inputs: torch.Tensor, lengths: torch.Tensor | None = None) -> torch.Tensor:
        """Predict the scores or the number of every sequence.

        Args:
            inputs: The features [T, B, F].
            lengths: The length of each sequence, int64 [B]; None means that all have T steps.

        Returns:
            The scores of the classes [B, C] before the softmax, or the predicted numbers [B].
        """
        answer = self._answer(inputs, lengths)
        return answer if self.classes else torch.addcmul(self.target_mean, answer.squeeze(-1), self.target_scale)

    def loss(self, batch: Any, state: None = None) -> tuple[torch.Tensor, None]:
        """Return the mean loss over sequences, and no state.

        Args:
            batch: An object with `inputs` [T, B, F], `lengths` [B] or None, and `targets` [B]: int64 classes or
                float32 numbers.
            state: Always None; batches of sequences are independent.

        Returns:
            The cross-entropy in nats, or the squared error in units of `target_scale`.
        """
        answer = self._answer(batch.inputs, batch.lengths)
        if not len(answer):
            advice = "The mean loss of no sequences is not a number."
            raise ShapeError(
                sentence("inputs", "of at least one sequence, [T, B, F]", list(batch.inputs.shape), advice)
            )
        if self.classes:
            try:
                return functional.cross_entropy(answer, batch.targets), None
            except TOKEN_ERRORS as error:
                check_targets(batch.targets, answer.shape[:1], self.classes, error)
                raise
        if not isinstance(batch.targets, torch.Tensor):
            advice = "torch.as_tensor makes one of an array or a list."
            raise ArgumentError(sentence("targets", "a tensor of numbers", type(batch.targets).__name__, advice))
        if batch.targets.shape != answer.shape[:1]:  # otherwise it would be broadcast
            expectation = f"one number for each sequence, {list(answer.shape[:1])}"
            raise ShapeError(sentence("targets", expectation, list(batch.targets.shape)))
        wanted = (batch.targets - self.target_mean) / self.target_scale
        return functional.mse_loss(answer.squeeze(-1).float(), wanted), None

    def _answer(self, inputs: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor:
        if lengths is not None:
            check_lengths_of("lengths", lengths)
        features = len(self.input_mean)
        if not isinstance(inputs, torch.Tensor) or not inputs.dim() or inputs.shape[-1] != features:
            got = list(inputs.shape) if isinstance(inputs, torch.Tensor) else type(inputs).__name__
            raise ShapeError(sentence("inputs", f"a tensor [T, B, F] of F = {features} features", got))
        if not inputs.shape[0]:
            raise ShapeError(sentence("inputs", "of at least one step, [T, B, F]", list(inputs.shape)))
        hidden, (last, _) = self.lstm((inputs - self.input_mean) / self.input_scale, lengths=lengths)
        return self.output(self.output_dropout(self._pooled(hidden, last, lengths)))

    def _pooled(self, hidden: torch.Tensor, last: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor:
        _check_pooling(self.pooling)  # an attribute, which programs may set
        if self.pooling == "last":
            return torch.cat(tuple(last[-(1 + self.lstm.bidirectional) :]), dim=-1)
        if lengths is None:
            return hidden.mean(0) if self.pooling == "mean" else hidden.amax(0)
        if self.pooling == "mean":  # outputs beyond the length are zero
            return hidden.sum(0) / lengths.clamp(min=1)[:, None]
        behind = torch.arange(len(hidden), device=hidden.device)[:, None] >= lengths
        behind[0] = False  # keeps the zero output at step 0 of a sequence of length 0
        return hidden.masked_fill(behind[:, :, None], -torch.inf).amax(0)


def _check_pooling(pooling: object) -> None:
    if pooling not in POOLINGS:
        raise ArgumentError(sentence("pooling", f"one of {', '.join(POOLINGS)}", repr(pooling)))
