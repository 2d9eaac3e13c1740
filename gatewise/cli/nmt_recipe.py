"""Recipes of `gatewise train nmt`."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from gatewise.cli.folder_name import FOLDER_NAME
from gatewise.contract.errors import ArgumentError, sentence
from gatewise.contract.option import Option
from gatewise.contract.ranges import (
    AMOUNT,
    COUNT,
    COUNT_OR_NONE,
    LAYERS,
    PROBABILITY,
    SEED,
    SIZE,
    THREADS,
    check_ranges,
)
from gatewise.data.corpus import SHARES
from gatewise.data.pair_filters import PairFilter
from gatewise.data.sentences import VOCABULARIES
from gatewise.models.search import LENGTH_PENALTY
from gatewise.training.options import TrainingOptions


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PairOptions:
    """Which parallel text, and how it is cut up: `[data]`.

    Attributes:
        folder: Folder with all six files, named by part and language: train.de, train.en, valid.de and so on; instead
            of the next six.
        train_source: Path of the training sentences, one a line; empty for localised phrases that Babel writes.
        train_target: Path of their translations.
        valid_source: Path of the validation sentences; without the four files of validation and test, the training
            pairs are divided by `shares`.
        valid_target: Path of their translations.
        test_source: Path of the test sentences.
        test_target: Path of their translations.
        source_language: Language of the sentences, such as ``"de"``; decides in which language phrases are.
        target_language: The same of the translations; BLEU splits Chinese, Japanese and Korean in their own way.
        phrases: How many phrases, when there are no files.
        shares: Fractions of the pairs, drawn at random, for training, validation and test.
        division_seed: Seed of that draw, and of the phrases.
        tokens: ``"bpe"``, ``"word"``, ``"character"`` or ``"byte"``.
        vocabulary: ``"separate"``, one for each side; or ``"joint"``.
        vocabulary_size: Largest vocabulary, of each side when they are separate; 0 keeps every word or character, and
            is 2,000 for bpe.
        longest: Training pairs with more tokens than this on a side are left out.
        ratio: Training pairs with more than this many times as many tokens on one side as on the other are left out; 0
            keeps all.
        batch_tokens: Most tokens in a batch on either side, padding included, over all processes.
        evaluation_batch_tokens: The same for validation and test.
    """

    folder: Annotated[
        str, Option("A folder with train, valid and test .de and .en files.", name="--data", metavar="FOLDER")
    ] = ""
    train_source: Annotated[str, Option("Sentences, one a line, UTF-8.", metavar="FILE")] = ""
    train_target: Annotated[str, Option("Their translations.", metavar="FILE")] = ""
    valid_source: Annotated[str, Option("Validation sentences.", metavar="FILE")] = ""
    valid_target: Annotated[str, Option("Their translations.", metavar="FILE")] = ""
    test_source: Annotated[str, Option("Test sentences.", metavar="FILE")] = ""
    test_target: Annotated[str, Option("Their translations.", metavar="FILE")] = ""
    source_language: Annotated[str, Option("The language of the sentences.", name="--from")] = "de"
    target_language: Annotated[str, Option("The language of their translations; phrases: iso too.", name="--to")] = "en"
    phrases: Annotated[int, COUNT] = 20_000
    shares: tuple[float, float, float] = SHARES
    division_seed: Annotated[int, SEED] = 0
    tokens: Annotated[str, Option("bpe, word, character or byte.")] = "bpe"
    vocabulary: Annotated[str, Option("separate or joint.")] = "separate"
    vocabulary_size: Annotated[int, COUNT_OR_NONE, Option("The largest vocabulary of a side; 0: all.")] = 600
    longest: Annotated[int, COUNT, Option("The most tokens of a training sentence.")] = 100
    ratio: Annotated[float, AMOUNT, Option("The most tokens for one of the other side; 0: any.")] = 9.0
    batch_tokens: Annotated[int, COUNT, Option("The most tokens in a batch, on either side.")] = 500
    evaluation_batch_tokens: Annotated[int, COUNT] = 4000

    def __post_init__(self) -> None:
        """Refuse what no pair could meet."""
        if self.vocabulary not in VOCABULARIES:
            raise ArgumentError(sentence("vocabulary", f"one of {', '.join(VOCABULARIES)}", repr(self.vocabulary)))
        check_ranges(self)
        PairFilter(longest=self.longest, ratio=self.ratio)

    @property
    def rule(self) -> PairFilter:
        """What training pairs must be."""
        return PairFilter(longest=self.longest, ratio=self.ratio)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Seq2SeqOptions:
    """The arguments of `gatewise.models.Seq2Seq`: `[model]`.

    Attributes:
        embedding_size: Size of a token's embedding.
        hidden_size: Units a layer; even.
        encoder_layers: LSTM layers that read; the first reads from both ends.
        decoder_layers: LSTM layers that write.
        score: How attention compares: ``"additive"``, ``"dot"`` or ``"general"``.
        attention_size: Features of the additive score; 0 takes `hidden_size`.
        attention_layer_norm: Whether the additive score is normalised.
        input_feeding: Whether each step reads what the step before attended to.
        dropout: Of embeddings, and before the softmax.
        layer_dropout: Between LSTM layers.
        tied: ``"none"``; ``"target"``, target embedding and softmax are one; ``"all"``, the source embedding too.
        label_smoothing: Share of the target that is spread over all tokens in training.
        kernel: Which kernel the LSTMs ask for; ``"auto"`` takes the fastest.
        attention_kernel: The same of attention.
    """

    embedding_size: Annotated[int, SIZE, Option("The size of embeddings.")] = 128
    hidden_size: Annotated[int, SIZE, Option("Units of a layer.")] = 128
    encoder_layers: Annotated[int, LAYERS, Option("LSTM layers that read.")] = 1
    decoder_layers: Annotated[int, LAYERS, Option("LSTM layers that write.")] = 1
    score: Annotated[str, Option("additive, dot or general.")] = "additive"
    attention_size: Annotated[int, COUNT_OR_NONE] = 0
    attention_layer_norm: bool = False
    input_feeding: Annotated[bool, Option("Read what the step before attended to.")] = True
    dropout: Annotated[float, PROBABILITY, Option("The two dropouts at once.", also=("layer_dropout",))] = 0.1
    layer_dropout: Annotated[float, PROBABILITY] = 0.1
    tied: Annotated[str, Option("none, target or all embeddings.")] = "none"
    label_smoothing: Annotated[float, PROBABILITY, Option("The share of the target spread over all tokens.")] = 0.0
    kernel: Annotated[str, Option("auto, or a kernel by name.")] = "auto"
    attention_kernel: Annotated[str, Option("auto, or a kernel of attention by name.")] = "auto"

    def __post_init__(self) -> None:
        """Refuse what is out of range, in a sentence."""
        check_ranges(self)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TranslationOptions:
    """How translations are looked for and shown: `[translation]`.

    Attributes:
        beam_size: Beams for the test set and the examples; validation takes the likeliest token at each step.
        length_penalty: See `gatewise.models.Search`.
        valid_sentences: Validation sentences that are translated at each evaluation; 0 translates all.
        examples: Test sentences that are printed at the end, with their alignments.
    """

    beam_size: Annotated[int, COUNT, Option("Beams for the test set.", panel="Run")] = 5
    length_penalty: Annotated[float, LENGTH_PENALTY] = 1.0
    valid_sentences: Annotated[int, COUNT_OR_NONE] = 500
    examples: Annotated[int, COUNT_OR_NONE] = 3

    def __post_init__(self) -> None:
        """Refuse what cannot be searched for."""
        check_ranges(self)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TranslationExpectation:
    """What the run should reach: `[expect]`. Scores are compared and printed at its end; the rest is for readers.

    Attributes:
        test_bleu: At least this on the test set; 0 expects nothing.
        test_exact: At least this share of test sentences translated exactly as written; 0 expects nothing.
        minutes: Duration on the device named in `on`; 0 says nothing.
        on: The device of `minutes`, in words.
    """

    test_bleu: Annotated[float, AMOUNT] = 0.0
    test_exact: Annotated[float, AMOUNT] = 0.0
    minutes: Annotated[float, AMOUNT] = 0.0
    on: str = ""

    def __post_init__(self) -> None:
        """Refuse what is out of range, in a sentence."""
        check_ranges(self)


_TRAINING = TrainingOptions(epochs=8, optimizer="adamw", learning_rate=4e-3, schedule="cosine", warmup_steps=100)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TranslationRecipe:
    """A complete run.

    Attributes:
        name: Also the name of its folder under `runs/`.
        description: One line.
        threads: CPU threads; 0 takes as many as PyTorch does. The bits of a result depend on it. More
            than one pays for large models only.
        memory_budget: What a training step may need: a size such as ``"8GB"``, or ``"auto"``; see `gatewise.planning`.
        data: See `PairOptions`.
        model: See `Seq2SeqOptions`.
        training: See `gatewise.training.TrainingOptions`.
        translation: See `TranslationOptions`.
        expect: See `TranslationExpectation`.
    """

    name: Annotated[str, FOLDER_NAME] = "nmt"
    description: str = ""
    threads: Annotated[int, THREADS, Option("CPU threads; 0: as many as PyTorch takes.")] = 1
    memory_budget: Annotated[
        str, Option("The memory of a step: 8GB, 7.5GiB, ...; or auto.", metavar="SIZE", panel="Training")
    ] = "auto"
    data: PairOptions = PairOptions()
    model: Seq2SeqOptions = Seq2SeqOptions()
    training: TrainingOptions = _TRAINING
    translation: TranslationOptions = TranslationOptions()
    expect: TranslationExpectation = TranslationExpectation()

    def __post_init__(self) -> None:
        """Refuse what is out of range, in a sentence."""
        check_ranges(self)
