"""Training of the language model, as `gatewise train lm` does it or as it is written in plain PyTorch."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from gatewise.benchmarks import rivals
from gatewise.benchmarks.cases import LanguageModelCase
from gatewise.benchmarks.precision import Precision
from gatewise.benchmarks.scale.step import data_parallel, replayed_if_possible
from gatewise.benchmarks.scale.ways import Way, Ways
from gatewise.benchmarks.training_step import starting_weights
from gatewise.contract.data_parallel import for_data_parallel
from gatewise.data import Window
from gatewise.models import LanguageModel
from gatewise.nn import LSTM
from gatewise.training import TrainingOptions
from gatewise.training.graph import TrainBatch
from gatewise.training.optimizers import build_optimizer
from gatewise.training.processes import ALONE, Processes
from gatewise.training.step import MeanLoss, Step


def _gatewise_lstm(size: int, num_layers: int, dropout: float) -> nn.Module:
    return LSTM(size, size, num_layers, dropout=dropout)


WAYS = Ways(
    default=(
        Way("nn.LSTM, DDP", rivals.torch_lstm, parallel=True),
        Way("gatewise.LSTM, DDP", _gatewise_lstm, parallel=True),
        Way("gatewise train lm"),
    ),
    others=(
        Way("gatewise.LSTM, DDP, for_data_parallel", _gatewise_lstm, parallel=True, overlapped=True),
        Way("gatewise.LSTM, DDP static", _gatewise_lstm, parallel=True, static=True),
        Way("gatewise.LSTM, DDP static bfloat16", _gatewise_lstm, parallel=True, static=True, bfloat16=True),
        Way("train lm's step, DDP static", parallel=True, static=True),
        Way("gatewise train lm, rows", rows=True),
        Way("gatewise train lm, whole gradients", factors=False),
        Way("gatewise train lm, bfloat16", bfloat16=True),
        Way("gatewise train lm, rows, bfloat16", rows=True, bfloat16=True),
        Way("gatewise.LSTM, fully_shard", _gatewise_lstm, sharded=True),
    ),
)


@dataclasses.dataclass(frozen=True, slots=True)
class LanguageModelTraining:
    """The training of a language model; see `gatewise.benchmarks.scale.training.Training`.

    Attributes:
        case: The sizes of the model and of the batch of each process.
        vocabulary: V, the number of words.
    """

    model: ClassVar[str] = "lm"
    ways: ClassVar[Ways] = WAYS
    case: LanguageModelCase
    vocabulary: int

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """Return the training whose fields `dataclasses.asdict` returned."""
        return cls(LanguageModelCase(**fields["case"]), fields["vocabulary"])

    @property
    def name(self) -> str:
        """The name of the case."""
        return self.case.name

    @property
    def settings(self) -> dict[str, Any]:
        """All values that define the case, by name."""
        return {**dataclasses.asdict(self.case), "vocabulary": self.vocabulary, "corpus": "random tokens"}

    @property
    def words(self) -> int:
        """The number of words in the batch of one process."""
        return self.case.words

    @property
    def dropout(self) -> float:
        """The dropout probability of the timed steps."""
        return self.case.dropout

    def with_batch(self, batch: int) -> Self:
        """Return the training of the same model with another batch in each process."""
        return dataclasses.replace(self, case=dataclasses.replace(self.case, batch=batch))

    def starting_weights(self, device: torch.device, seed: int) -> list[Tensor]:
        """Draw the initial weights, in the order of `rivals.LanguageModel.parameters()`."""
        return starting_weights(self.case, self.vocabulary, device, seed)

    def batches(self, count: int, device: torch.device, seed: int) -> list[Window]:
        """Draw batches of random tokens; a seed gives the same batches again."""
        generator = torch.Generator().manual_seed(seed)
        shape = (count, self.case.time + 1, self.case.batch)
        tokens = torch.randint(self.vocabulary, shape, generator=generator).to(device)
        return [Window(each[:-1], each[1:]) for each in tokens]

    def first_state(self, device: torch.device) -> Any:
        """Return the state before the first batch."""
        zeros = torch.zeros(self.case.num_layers, self.case.batch, self.case.hidden_size, device=device)
        return zeros, zeros

    @contextlib.contextmanager
    def step(
        self, way: Way, start: Sequence[Tensor], precision: Precision, processes: Processes, *, dropout: float
    ) -> Iterator[tuple[TrainBatch, nn.Module]]:
        """Yield a training step and its model; see `Training.step`.

        The optimizer is SGD; the learning rate and the norm for clipping are those of a loss that is summed over time,
        as usual for this model.
        """
        rate, clip = float(self.case.time), self.case.clip_norm / self.case.time
        device = processes.device
        model, loss = self._created(way, device, dropout)
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), start, strict=True):
                parameter.copy_(value)
        model.train()
        if way.parallel and processes.count > 1:
            loss = data_parallel(loss, way, device)
        if way.sharded and processes.count > 1:
            from torch.distributed.fsdp import fully_shard  # most of a second of every `gatewise bench`

            for part in (*model.children(), model):
                fully_shard(part)
        if way.plain is not None:
            yield _plain_step(loss, rate, clip, precision, device), model
            return
        options = TrainingOptions(optimizer="sgd", learning_rate=rate, momentum=0.0)
        step = Step(
            loss,
            build_optimizer(model.parameters(), options),
            clip,
            "bfloat16" if precision.autocast else "float32",
            device,
            processes=ALONE if way.parallel else processes,
            exchange_bfloat16=way.bfloat16,
            exchange_rows=way.rows,
            exchange_factors=way.factors,
        )
        if way.parallel:
            # DistributedDataParallel can be captured only after eleven steps, on a stream of its own.
            yield step, model
            return
        with replayed_if_possible(step, model, processes) as train:
            yield train, model

    def _created(self, way: Way, device: torch.device, dropout: float) -> tuple[nn.Module, nn.Module]:
        """Return the model of a way, and a module that computes its mean loss."""
        with torch.device(device):
            if way.plain is not None:
                plain = rivals.LanguageModel(self.case, self.vocabulary, rivals.Way(way.name, way.plain), dropout)
                return plain, _PlainLoss(plain, way.overlapped)
            model = LanguageModel(
                self.vocabulary,
                self.case.hidden_size,
                self.case.hidden_size,
                self.case.num_layers,
                dropout=dropout,
                embedding_dropout=dropout,
                layer_dropout=dropout,
            )
            return model, MeanLoss(model)


class _PlainLoss(nn.Module):
    """The mean loss of the language model as it is usually written."""

    def __init__(self, model: rivals.LanguageModel, overlapped: bool) -> None:
        super().__init__()
        self.model = model
        self.overlapped = overlapped

    def forward(self, batch: Window, state: Any) -> tuple[Tensor, Any]:
        with for_data_parallel() if self.overlapped else contextlib.nullcontext():
            hidden, state = self.model(batch.inputs, state)
        return functional.cross_entropy(self.model.decoder(hidden).float(), batch.targets.flatten()), state


def _plain_step(loss_of: nn.Module, rate: float, clip: float, precision: Precision, device: torch.device) -> TrainBatch:
    weights = list(loss_of.parameters())
    # PyTorch's fused SGD takes no weights that are divided among processes.
    fused = device.type == "cuda" and not any(hasattr(weight, "full_tensor") for weight in weights)
    optimizer = torch.optim.SGD(weights, lr=rate, fused=fused, foreach=not fused)

    def step(batch: Window, state: Any) -> tuple[Tensor, Any]:
        optimizer.zero_grad(set_to_none=True)
        with precision.autocasting(device):
            loss, (h, c) = loss_of(batch, state)
        loss.backward()
        nn.utils.clip_grad_norm_(weights, clip, foreach=True)
        optimizer.step()
        return loss.detach(), (h.detach(), c.detach())

    return step
