"""Model files of language models: weights, sizes and tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from gatewise.cli.model_file import metadata_of, read_model_file
from gatewise.cli.recipe import ModelOptions
from gatewise.contract.errors import CheckpointError
from gatewise.data import Tokenizer, load_tokenizer
from gatewise.models import LanguageModel
from gatewise.training.snapshot import load_weights


def build_model(sizes: dict[str, Any], device: torch.device) -> LanguageModel:
    """Create a language model on the CPU, so that a seed gives the same weights for every device, and move it."""
    return LanguageModel(**sizes).to(device)


def sizes_of(options: ModelOptions, vocabulary_size: int) -> dict[str, Any]:
    """Return the arguments of `LanguageModel` for a recipe and a vocabulary."""
    return {"vocabulary_size": vocabulary_size} | {name: getattr(options, name) for name in ModelOptions.__slots__}


def model_facts(sizes: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the metadata of a model file."""
    return {"model": sizes, "tokenizer": json.loads(tokenizer.to_json())}


def load_model(path: Path, device: torch.device, kernel: str | None = None) -> tuple[LanguageModel, Tokenizer]:
    """Read a trained language model.

    Args:
        path: The folder of a run, or a model file.
        device: The device of the model.
        kernel: The kernel of the LSTM; None for the kernel that it was trained with.

    Raises:
        CheckpointError: There is no model, or the file is not one.
    """
    file, tensors, facts = read_model_file(path, "lm")
    with metadata_of(file, "a language model", "lm"):
        sizes, tokenizer = facts["model"], load_tokenizer(json.dumps(facts["tokenizer"]))
        if sizes["vocabulary_size"] != len(tokenizer):
            raise CheckpointError(
                f"{file} holds a vocabulary of {len(tokenizer):,} tokens for a model of {sizes['vocabulary_size']}. "
                "Take the model.safetensors of a run of gatewise train lm."
            )
        model = build_model(sizes | ({"kernel": kernel} if kernel else {}), device)
    load_weights(model, tensors, file)
    return model.eval(), tokenizer
