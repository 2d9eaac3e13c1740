"""Reading the parallel text of a recipe's section `[data]`, and making batches."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from gatewise.cli.nmt_recipe import PairOptions
from gatewise.cli.option_names import naming
from gatewise.contract.errors import ArgumentError, CorpusError, sentence
from gatewise.data import (
    FilterReport,
    PairBatches,
    PairFilter,
    ParallelText,
    SentenceVocabulary,
    build_vocabularies,
    divide_parallel,
    encode_all,
    filter_pairs,
    load_vocabularies,
    phrases,
    read_parallel,
    vocabularies_to_json,
)
from gatewise.training import RunFolder
from gatewise.training.processes import Processes

SPLITS = ("train", "valid", "test")
_NAMES = {"train": "training", "valid": "validation", "test": "test"}
_AT_ONCE = 4096
"""The number of sentences that are hashed at once, which takes far less time than one by one."""

_ANY = PairFilter(longest=2**31, ratio=0)


@dataclasses.dataclass(frozen=True, slots=True)
class PairMaterial:
    """The parallel text of a run.

    Attributes:
        name: The source of the text.
        parts: The pairs of each part, after filtering.
        reports: The numbers of pairs that were left out of each part, by reason.
        source: The vocabulary of the sentences.
        target: The vocabulary of the translations.
        batches: The batches of this process.
        digest: A hash of the training tokens.
    """

    name: str
    parts: dict[str, ParallelText]
    reports: dict[str, FilterReport]
    source: SentenceVocabulary
    target: SentenceVocabulary
    batches: dict[str, PairBatches]
    digest: str


def pair_material(options: PairOptions, seed: int, folder: RunFolder, processes: Processes) -> PairMaterial:
    """Read the text that a recipe names, build vocabularies or load those of a resumed run, filter, and make batches.

    Raises:
        ArgumentError: Only some of the files are given.
        CorpusError: A file cannot be used for training, or the filter leaves nothing of it.
        DataError: A pair of validation or test is too long for any batch.
        CheckpointError: The vocabularies of the run to resume are missing or damaged.
    """
    name, texts = _texts(options)
    source, target = _vocabularies(options, texts["train"], folder, processes)
    parts, reports, batches, digest = {}, {}, {}, ""
    for split in SPLITS:
        training, text = split == "train", texts[split]
        sides = encode_all(source, text.source), encode_all(target, text.target)
        rows, reports[split] = filter_pairs(*sides, options.rule if training else _ANY)
        if not rows:
            raise CorpusError(
                f"no pair of {text.name} can be used for {_NAMES[split]}: {reports[split]}. Look at the files, or "
                "raise `longest` and `ratio`."
            )
        parts[split] = text.select(rows)
        kept = [sides[0][row] for row in rows], [sides[1][row] for row in rows]
        batches[split] = PairBatches(
            *kept,
            options.batch_tokens if training else options.evaluation_batch_tokens,
            device=processes.device,
            rank=processes.rank,
            processes=processes.count,
            shuffle=training,
            seed=seed,
            name=f"the {_NAMES[split]} pairs",
        )
        if training:
            digest = _digest([*kept[0], *kept[1]])
    return PairMaterial(name, parts, reports, source, target, batches, digest)


def _digest(sentences: Sequence[torch.Tensor]) -> str:
    """Return a hash of tokens: of four bytes for each token, and of a line break after each sentence."""
    digest = hashlib.sha256()
    for first in range(0, len(sentences), _AT_ONCE):
        these = sentences[first : first + _AT_ONCE]
        tokens = torch.cat(list(these)).to(torch.int32).numpy()
        text = np.full(tokens.nbytes + len(these), ord("\n"), dtype=np.uint8)
        # The bytes of a sentence come after the line breaks of the sentences before it.
        breaks = np.repeat(np.arange(len(these)), [4 * each.numel() for each in these])
        text[np.arange(tokens.nbytes) + breaks] = tokens.view(np.uint8)
        digest.update(text.tobytes())
    return digest.hexdigest()[:16]


def _texts(options: PairOptions) -> tuple[str, dict[str, ParallelText]]:
    keys = [f"{split}_{side}" for split in SPLITS for side in ("source", "target")]
    files = {key: getattr(options, key) for key in keys}
    given = [key for key in keys if files[key]]
    if options.folder:
        if given:
            advice = "The folder holds all six files."
            raise ArgumentError(sentence("folder", f"given without `{', '.join(given)}`", repr(options.folder), advice))
        languages = {"source": options.source_language, "target": options.target_language}
        parts = {key: key.split("_") for key in keys}
        files = {key: str(Path(options.folder, f"{split}.{languages[side]}")) for key, (split, side) in parts.items()}
        given = keys
    if not given:
        with naming({"source": "source_language", "target": "target_language", "count": "phrases"}):
            pairs = phrases(options.source_language, options.target_language, options.phrases, options.division_seed)
    elif given == keys:
        texts = {split: read_parallel(files[f"{split}_source"], files[f"{split}_target"]) for split in SPLITS}
        return texts["train"].name, texts
    elif given == keys[:2]:
        pairs = read_parallel(files["train_source"], files["train_target"])
    else:
        advice = "Give the two training files, which are then split, or all six."
        missing = ", ".join(key for key in keys if not files[key])
        raise ArgumentError(
            sentence(", ".join(given), "given together with the other files", f"no `{missing}`", advice)
        )
    parts = divide_parallel(pairs, options.shares, options.division_seed)
    return pairs.name, dict(zip(SPLITS, parts, strict=True))


def _vocabularies(
    options: PairOptions, train: ParallelText, folder: RunFolder, processes: Processes
) -> tuple[SentenceVocabulary, SentenceVocabulary]:
    """Build the vocabularies in the first process and send them to the others; a resumed run keeps its vocabularies."""
    document = ""
    if processes.first:
        if folder.checkpoint.exists():
            document = folder.saved_tokenizer(load_vocabularies)
        else:
            kind, size = options.tokens, options.vocabulary_size or None
            document = vocabularies_to_json(*build_vocabularies(kind, train, size, options.vocabulary))
    return load_vocabularies(processes.broadcast(document))
