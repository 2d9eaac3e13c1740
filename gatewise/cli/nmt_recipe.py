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
    """The parallel text and how it is tokenised, filtered and batched: section `[data]`.

    Attributes:
        folder: The folder with all six files, named by part and language: train.de, train.en, valid.de and so on; an
            alternative to the next six keys.
        train_source: The path of the training sentences, one per line; empty for localised phrases generated with
            Babel.
        train_target: The path of their translations.
        valid_source: The path of the validation sentences; without the four files of validation and test, the training
            pairs are split by `shares`.
        valid_target: The path of their translations.
        test_source: The path of the test sentences.
        test_target: The path of their translations.
        source_language: The language of the sentences, such as ``"de"``; generated phrases are in this language.
        target_language: The language of the translations; BLEU splits Chinese, Japanese and Korean in their own way.
        phrases: The number of generated phrases, if no files are given.
        shares: The fractions of the pairs, drawn at random, for training, validation and test.
        division_seed: The seed of the random split, and of the phrases.
        tokens: The kind of tokens: ``"bpe"``, ``"word"``, ``"character"`` or ``"byte"``.
        vocabulary: ``"separate"`` for one vocabulary per language, or ``"joint"``.
        vocabulary_size: The largest vocabulary, of each language if they are separate; 0 keeps every word or character,
            and means 2,000 for bpe.
        longest: The largest number of tokens in a training sentence or its translation; longer pairs are left out.
        ratio: The largest ratio of the numbers of tokens in a training pair; other pairs are left out. 0 for no limit.
        batch_tokens: The largest number of tokens in a batch in either language, padding included, over all processes.
        evaluation_batch_tokens: The same limit for validation and test.
    """

    folder: Annotated[
        str, Option("A folder with train, valid and test .de and .en files.", name="--data", metavar="FOLDER")
    ] = ""
    train_source: Annotated[str, Option("Sentences, one per line, UTF-8.", metavar="FILE")] = ""
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
    vocabulary_size: Annotated[
        int, COUNT_OR_NONE, Option("Largest vocabulary of a language; 0: no limit, or 2,000 for bpe.")
    ] = 600
    longest: Annotated[int, COUNT, Option("Most tokens in a training sentence.")] = 100
    ratio: Annotated[float, AMOUNT, Option("Largest ratio of the lengths of a pair; 0: any.")] = 9.0
    batch_tokens: Annotated[int, COUNT, Option("Most tokens in a batch, in either language.")] = 500
    evaluation_batch_tokens: Annotated[int, COUNT] = 4000

    def __post_init__(self) -> None:
        """Check the values."""
        if self.vocabulary not in VOCABULARIES:
            raise ArgumentError(sentence("vocabulary", f"one of {', '.join(VOCABULARIES)}", repr(self.vocabulary)))
        check_ranges(self)
        PairFilter(longest=self.longest, ratio=self.ratio)

    @property
    def rule(self) -> PairFilter:
        """The filter for training pairs."""
        return PairFilter(longest=self.longest, ratio=self.ratio)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Seq2SeqOptions:
    """The arguments of `gatewise.models.Seq2Seq`: `[model]`.

    Attributes:
        embedding_size: The number of features of embeddings.
        hidden_size: The number of hidden units of a layer; even.
        encoder_layers: The number of LSTM layers of the encoder; the first is bidirectional.
        decoder_layers: The number of LSTM layers of the decoder.
        score: The attention score: ``"additive"``, ``"dot"`` or ``"general"``.
        attention_size: The number of features of the additive score; 0 for `hidden_size`.
        attention_layer_norm: Whether the additive score has a layer norm.
        input_feeding: Whether each decoder step reads the attentional output of the previous step.
        dropout: The dropout probability of embeddings, and before the softmax.
        layer_dropout: The dropout probability between LSTM layers.
        word_dropout: The probability of dropping all embeddings of a token in a batch.
        weight_dropout: The probability of dropping an element of a recurrent matrix; requires no input feeding.
        tied: The embeddings that share the weights of the softmax: ``"none"``, ``"target"``, or ``"all"`` for both.
        label_smoothing: The probability that is spread over all tokens in the training targets.
        kernel: The kernel of the LSTMs; ``"auto"`` chooses the fastest.
        attention_kernel: The kernel of the attention; ``"auto"`` chooses the fastest.
    """

    embedding_size: Annotated[int, SIZE, Option("The size of embeddings.")] = 128
    hidden_size: Annotated[int, SIZE, Option("Hidden units of a layer.")] = 128
    encoder_layers: Annotated[int, LAYERS, Option("LSTM layers of the encoder.")] = 1
    decoder_layers: Annotated[int, LAYERS, Option("LSTM layers of the decoder.")] = 1
    score: Annotated[str, Option("Attention score: additive, dot or general.")] = "additive"
    attention_size: Annotated[int, COUNT_OR_NONE] = 0
    attention_layer_norm: bool = False
    input_feeding: Annotated[bool, Option("Feed the attentional output to the next step.")] = True
    dropout: Annotated[float, PROBABILITY, Option("Both dropout probabilities.", also=("layer_dropout",))] = 0.1
    layer_dropout: Annotated[float, PROBABILITY] = 0.1
    word_dropout: Annotated[float, PROBABILITY] = 0.0
    weight_dropout: Annotated[float, PROBABILITY] = 0.0
    tied: Annotated[str, Option("Embeddings tied to the softmax: none, target or all.")] = "none"
    label_smoothing: Annotated[float, PROBABILITY, Option("Label smoothing.")] = 0.0
    kernel: Annotated[str, Option("auto, or the name of a kernel.")] = "auto"
    attention_kernel: Annotated[str, Option("auto, or the name of an attention kernel.")] = "auto"

    def __post_init__(self) -> None:
        """Check the values."""
        check_ranges(self)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TranslationOptions:
    """The search for translations, and the examples that are printed: section `[translation]`.

    Attributes:
        beam_size: The beam size for the test set and the examples; validation is greedy.
        length_penalty: The length penalty; see `gatewise.models.Search`.
        valid_sentences: The number of validation sentences that are translated at each evaluation; 0 for all.
        examples: The number of test sentences that are printed at the end, with their alignments.
    """

    beam_size: Annotated[int, COUNT, Option("Beam size for the test set.", panel="Run")] = 5
    length_penalty: Annotated[float, LENGTH_PENALTY] = 1.0
    valid_sentences: Annotated[int, COUNT_OR_NONE] = 500
    examples: Annotated[int, COUNT_OR_NONE] = 3

    def __post_init__(self) -> None:
        """Check the values."""
        check_ranges(self)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TranslationExpectation:
    """The expected results: section `[expect]`. Scores are compared and printed at the end; the rest is information.

    Attributes:
        test_bleu: The least BLEU on the test set; 0 for no expectation.
        test_exact: The least fraction of test sentences whose translation equals the reference; 0 for no expectation.
        minutes: The duration on the device named in `on`; 0 for no expectation.
        on: The name of the device for `minutes`.
    """

    test_bleu: Annotated[float, AMOUNT] = 0.0
    test_exact: Annotated[float, AMOUNT] = 0.0
    minutes: Annotated[float, AMOUNT] = 0.0
    on: str = ""

    def __post_init__(self) -> None:
        """Check the values."""
        check_ranges(self)


_TRAINING = TrainingOptions(epochs=8, optimizer="adamw", learning_rate=4e-3, schedule="cosine", warmup_steps=100)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TranslationRecipe:
    """A complete training run.

    Attributes:
        name: The name of the run, and of its folder under `runs/`.
        description: A description in one line.
        threads: The number of CPU threads; 0 for PyTorch's default. The bits of a result depend on it. More than one
            thread pays off for large models only.
        memory_budget: The largest memory of a training step: a size such as ``"8GB"``, or ``"auto"``; see
            `gatewise.planning`.
        data: The section `[data]`; see `PairOptions`.
        model: The section `[model]`; see `Seq2SeqOptions`.
        training: The section `[training]`; see `gatewise.training.TrainingOptions`.
        translation: The section `[translation]`; see `TranslationOptions`.
        expect: The section `[expect]`; see `TranslationExpectation`.
    """

    name: Annotated[str, FOLDER_NAME] = "nmt"
    description: str = ""
    threads: Annotated[int, THREADS, Option("CPU threads; 0: PyTorch's default.")] = 1
    memory_budget: Annotated[
        str, Option("The memory of a step: 8GB, 7.5GiB, ...; or auto.", metavar="SIZE", panel="Training")
    ] = "auto"
    data: PairOptions = PairOptions()
    model: Seq2SeqOptions = Seq2SeqOptions()
    training: TrainingOptions = _TRAINING
    translation: TranslationOptions = TranslationOptions()
    expect: TranslationExpectation = TranslationExpectation()

    def __post_init__(self) -> None:
        """Check the values."""
        check_ranges(self)
        self.training.check_best_by("BLEU", "chrF")
