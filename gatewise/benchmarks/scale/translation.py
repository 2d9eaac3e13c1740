"""Training of translation with attention, as `gatewise train nmt` does it or as it is written in plain PyTorch."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from gatewise.benchmarks.nmt import sentences
from gatewise.benchmarks.nmt.cases import IWSLT, TranslationCase
from gatewise.benchmarks.nmt.planned import apply_plan, training_options
from gatewise.benchmarks.nmt.rival import PlainSeq2Seq, PlainStep, plain_optimizer
from gatewise.benchmarks.nmt.ways import seq2seq, starting_weights, with_distinct_attention
from gatewise.benchmarks.precision import Precision
from gatewise.benchmarks.scale.step import data_parallel, replayed_if_possible
from gatewise.benchmarks.scale.ways import Way, Ways
from gatewise.data import PairBatch
from gatewise.training.graph import TrainBatch
from gatewise.training.optimizers import build_optimizer
from gatewise.training.processes import Processes
from gatewise.training.step import MeanLoss, Step

# "small" has the sizes of `gatewise train nmt` without options, "large" is the first case of `gatewise bench nmt`.
TRANSLATIONS = {
    "small": TranslationCase(
        "phrases-25-25-20",
        25,
        25,
        20,
        source_size=600,
        target_size=600,
        embedding_size=128,
        hidden_size=128,
        encoder_layers=1,
        decoder_layers=1,
        dropout=0.1,
        learning_rate=4e-3,
    ),
    "large": IWSLT,
}

# Small enough for a CPU and for tests: all code runs, but the times mean nothing.
QUICK_TRANSLATION = TranslationCase(
    "quick-6-5-4",
    6,
    5,
    4,
    source_size=300,
    target_size=400,
    embedding_size=8,
    hidden_size=8,
    dropout=0.1,
    learning_rate=1e-2,
)

WAYS = Ways(
    default=(
        Way("plain PyTorch, DDP", PlainSeq2Seq, parallel=True),
        Way("gatewise train nmt"),
        Way("gatewise train nmt, rows, bfloat16", rows=True, bfloat16=True),
    ),
    others=(
        Way("gatewise train nmt, rows", rows=True),
        Way("gatewise train nmt, whole gradients", factors=False),
        Way("gatewise train nmt, bfloat16", bfloat16=True),
    ),
)


@dataclasses.dataclass(frozen=True, slots=True)
class TranslationTraining:
    """The training of a translation model; see `gatewise.benchmarks.scale.training.Training`.

    Attributes:
        case: The sizes of the model and of the batch of each process.
    """

    model: ClassVar[str] = "nmt"
    ways: ClassVar[Ways] = WAYS
    case: TranslationCase

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """Return the training whose fields `dataclasses.asdict` returned."""
        return cls(TranslationCase(**fields["case"]))

    @property
    def name(self) -> str:
        """The name of the case."""
        return self.case.name

    @property
    def settings(self) -> dict[str, Any]:
        """All values that define the case, by name."""
        return {**dataclasses.asdict(self.case), "corpus": "generated sentences"}

    @property
    def words(self) -> int:
        """The number of target words in the batch of one process, with the end of each sentence."""
        return self.case.target * self.case.batch

    @property
    def dropout(self) -> float:
        """The dropout probability of the timed steps."""
        return self.case.dropout

    def with_batch(self, batch: int) -> Self:
        """Return the training of the same model with another batch in each process."""
        return dataclasses.replace(self, case=self.case.with_batch(batch))

    def starting_weights(self, device: torch.device, seed: int) -> dict[str, Tensor]:
        """Draw the initial weights, by the names of `gatewise.models.Seq2Seq`."""
        return with_distinct_attention(starting_weights(self.case, device, seed))

    def batches(self, count: int, device: torch.device, seed: int) -> list[PairBatch]:
        """Draw batches of generated sentence pairs, all of the lengths of the case; a seed gives the same again."""
        return sentences.draw(self.case, count, device, seed)

    def first_state(self, device: torch.device) -> None:
        """Return no state, because sentence pairs are independent."""

    @contextlib.contextmanager
    def step(
        self, way: Way, start: Mapping[str, Tensor], precision: Precision, processes: Processes, *, dropout: float
    ) -> Iterator[tuple[TrainBatch, nn.Module]]:
        """Yield a training step and its model; see `Training.step`.

        The optimizer is Adam. The model of `gatewise train nmt` has the memory plan that the command makes by default.
        """
        case, device = dataclasses.replace(self.case, dropout=dropout), processes.device
        if way.plain is not None:
            plain = way.plain(case).to(device).train()
            assert isinstance(plain, PlainSeq2Seq)
            plain.load(start)
            loss = data_parallel(plain, way, device) if processes.count > 1 else plain
            yield PlainStep(loss, plain_optimizer(plain, case), case.clip, precision.autocast), plain
            return
        model = seq2seq(case, device).train()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.copy_(start[name])
        apply_plan(model, case, precision, device, None, processes.count)
        options = training_options(case, precision)
        step = Step(
            MeanLoss(model),
            build_optimizer(model.parameters(), options),
            options.clip,
            options.precision,
            device,
            processes=processes,
            exchange_bfloat16=way.bfloat16,
            exchange_rows=way.rows,
            exchange_factors=way.factors,
        )
        with replayed_if_possible(step, model, processes) as train:
            yield train, model
