"""Model files of translation models: weights, sizes and both vocabularies."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from gatewise.cli.model_file import metadata_of, read_model_file
from gatewise.cli.nmt_recipe import Seq2SeqOptions
from gatewise.contract.errors import CheckpointError
from gatewise.data import SentenceVocabulary, load_vocabularies, vocabularies_to_json
from gatewise.data.sentences import BEGINNING, END, PADDING
from gatewise.models import Search, Seq2Seq, Translation, translate
from gatewise.models.greedy_search import GreedyGraphs
from gatewise.training.graph import cuda_graphs
from gatewise.training.snapshot import load_weights


@dataclasses.dataclass(frozen=True, slots=True)
class Translator:
    """A translation model with its vocabularies.

    Attributes:
        model: The model.
        source: The vocabulary of the sentences.
        target: The vocabulary of the translations.
        graphs: CUDA graphs of greedy steps, which `translate` may use and add to; None to use no graphs.
    """

    model: Seq2Seq
    source: SentenceVocabulary
    target: SentenceVocabulary
    graphs: GreedyGraphs | None = None

    def search(self, beam_size: int = 1, length_penalty: float = 1.0, n_best: int = 1) -> Search:
        """Return the search for translations with these vocabularies."""
        return Search(BEGINNING, END, (PADDING, BEGINNING), beam_size, length_penalty, n_best)

    def translate(self, sentences: Sequence[str], search: Search, batch_tokens: int = 4000) -> list[list[Translation]]:
        """Translate sentences, in batches of similar length.

        Args:
            sentences: The sentences, each with at least one token.
            search: The search; see the method `search`.
            batch_tokens: The largest number of source tokens in a batch, padding and beams included.

        Returns:
            The translations of each sentence, in the order of `sentences`.
        """
        encoded = self.source.encode_all(sentences)
        found: list[list[Translation]] = [[] for _ in encoded]
        device = self.model.output.bias.device
        was_training = self.model.training
        self.model.eval()
        for rows in _batches([len(each) for each in encoded], batch_tokens // search.beam_size):
            source = torch.nn.utils.rnn.pad_sequence([encoded[row] for row in rows], padding_value=PADDING).to(device)
            lengths = torch.tensor([len(encoded[row]) for row in rows], device=device)
            for row, each in zip(rows, translate(self.model, source, lengths, search, self.graphs), strict=True):
                found[row] = each
        self.model.train(was_training)
        return found

    def shapes(self, sentences: Sequence[str], batch_tokens: int) -> list[tuple[int, int]]:
        """Return the shapes of the batches in which greedy search translates sentences, as (tokens, sentences)."""
        lengths = [len(each) for each in self.source.encode_all(sentences)]
        return [(lengths[rows[0]], len(rows)) for rows in _batches(lengths, batch_tokens)]

    def text(self, translation: Translation) -> str:
        """Return a translation as text."""
        return self.target.decode(translation.tokens)


def _batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Yield the numbers of the sentences in each batch, the longest sentences first."""
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    while order:
        size = max(1, batch_tokens // lengths[order[0]])
        rows, order = order[:size], order[size:]
        yield rows


def build_translation_model(sizes: dict[str, Any], device: torch.device) -> Seq2Seq:
    """Create a model on the CPU, so that a seed gives the same weights for every device, and move it."""
    return Seq2Seq(**sizes).to(device)


def translation_sizes(
    options: Seq2SeqOptions, source: SentenceVocabulary, target: SentenceVocabulary
) -> dict[str, Any]:
    """Return the arguments of `Seq2Seq`."""
    return {"source_size": len(source), "target_size": len(target), "padding": PADDING} | dataclasses.asdict(options)


def translation_facts(sizes: dict[str, Any], source: SentenceVocabulary, target: SentenceVocabulary) -> dict[str, Any]:
    """Return the metadata of a model file."""
    return {"translation": sizes, "vocabularies": json.loads(vocabularies_to_json(source, target))}


def load_translator(path: Path, device: torch.device, kernel: str | None = None) -> Translator:
    """Read a trained translation model.

    Args:
        path: The folder of a run, or a model file.
        device: The device of the model.
        kernel: The kernel of the LSTMs; None for the kernel that they were trained with.

    Raises:
        CheckpointError: There is no model, the file is not one, or it lacks its vocabularies.
    """
    file, tensors, facts = read_model_file(path, "nmt")
    if "translation" in facts and "vocabularies" not in facts:
        raise CheckpointError(
            f"{file} lacks its vocabularies. Take the model.safetensors of a run of gatewise train nmt."
        )
    with metadata_of(file, "a translation model", "nmt"):
        sizes = facts["translation"] | ({"kernel": kernel} if kernel else {})
        source, target = load_vocabularies(json.dumps(facts["vocabularies"]))
        for side, vocabulary in (("source", source), ("target", target)):
            if sizes[f"{side}_size"] != len(vocabulary):
                raise CheckpointError(
                    f"{file} holds a {side} vocabulary of {len(vocabulary):,} tokens for a model of "
                    f"{sizes[f'{side}_size']}. Take the model.safetensors of a run of gatewise train nmt."
                )
        model = build_translation_model(sizes, device)
    load_weights(model, tensors, file)
    graphs = GreedyGraphs(model, cuda_graphs()) if device.type == "cuda" else None
    return Translator(model.eval(), source, target, graphs)
