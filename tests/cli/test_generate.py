"""`gatewise generate`: text from a trained model, and the errors of the command."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gatewise.training import read_tensors
from gatewise.training.checkpoint import write_tensors
from gatewise.training.loop import MODEL

OPTIONS = ("generate", "--checkpoint", "run", "--prompt", "the", "--length", 12, "--seed", 1)


def test_it_writes_as_much_as_asked_for_after_the_prompt(trained):
    text = trained(*OPTIONS, "--length", 30).out
    assert text.startswith("the ")
    assert len(text.split()) + text.count("\n") - 1 == 31
    assert "<unk>" not in text


def test_a_seed_repeats_and_none_does_not(trained):
    assert trained(*OPTIONS).out == trained(*OPTIONS).out
    without = OPTIONS[:-2]
    assert len({trained(*without, "--temperature", 2).out for _ in range(4)}) > 1


def test_every_option_changes_the_text(trained):
    plain = trained(*OPTIONS, "--temperature", 2).out
    changes = (
        ["--temperature", 0],
        ["--temperature", 2, "--top-k", 2],
        ["--temperature", 2, "--top-p", 0.1],
        ["--temperature", 2, "--seed", 2],
        ["--temperature", 2, "--length", 3],
        ["--temperature", 2, "--prompt", "owl"],
    )
    texts = [trained(*OPTIONS, *change).out for change in changes]
    assert plain not in texts


def test_a_file_is_as_good_as_its_folder(trained):
    assert trained(*OPTIONS, "--checkpoint", "run/model.safetensors").out == trained(*OPTIONS).out


def test_a_kernel_can_be_named(trained):
    assert trained(*OPTIONS, "--kernel", "eager", "--temperature", 0).out == trained(*OPTIONS, "--temperature", 0).out
    answer = trained(*OPTIONS, "--kernel", "cudnn")
    assert answer.status == 1
    assert "cudnn" in answer.err


def test_unknown_words_of_the_prompt_are_named(trained):
    answer = trained(*OPTIONS, "--prompt", "the zebra and <unk> saw the zebra and a gnu")
    assert answer.status == 0
    lacks = "the model's vocabulary lacks these words of the prompt, read as unknown: 'zebra', 'saw', 'a', 'gnu'"
    assert answer.err == f"warning: {lacks}\n"
    assert trained(*OPTIONS).err == ""


def test_unknown_characters_of_the_prompt_are_named(gatewise, small):
    assert gatewise("train", "lm", *small, "--tokens", "character", "--epochs", 1, "--output", "run").status == 0
    answer = gatewise(*OPTIONS, "--prompt", "the caf\u00e9")
    assert "these characters of the prompt, read as unknown: '\u00e9'" in answer.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--checkpoint", "absent"], "absent does not exist"),
        (["--checkpoint", "."], "has no model yet"),
        (["--checkpoint", "run/checkpoint.safetensors"], "holds a checkpoint, not a model"),
        (["--checkpoint", "run/recipe.toml"], "is truncated or not a safetensors file"),
        (["--checkpoint", "pickled.pt"], "is a pickle (torch.save)"),
        (["--prompt", ""], "`--prompt` must be at least one token"),
        (["--temperature", -1], "`--temperature` must be 0 or more"),
        (["--top-k", -3], "`--top-k` must be"),
        (["--top-p", 1.5], "`--top-p` must be in (0, 1]"),
    ],
)
def test_bad_input_is_refused(trained, words, message):
    torch.save({}, "pickled.pt")
    answer = trained(*OPTIONS, *words)
    assert answer.refused
    assert answer.err.startswith("error: ")
    assert message in answer.err


def test_a_model_whose_metadata_are_damaged_is_named(trained):
    tensors, facts = read_tensors(Path("run/model.safetensors"), MODEL)
    for change, message in (
        ({"tokenizer": {}}, "is not a language model: this is not a tokenizer that gatewise wrote: `kind` must be"),
        ({"tokenizer": {"kind": "byte"}}, "holds a vocabulary of 256 tokens for a model of"),
        ({"model": facts["model"] | {"hidden_size": 0}}, "is not a language model: `hidden_size` must be"),
        ({"model": facts["model"] | {"hidden_size": 9}}, "is of another model: "),
        ({"model": []}, "is not a language model: "),
    ):
        write_tensors(Path("wrong.safetensors"), tensors, MODEL, facts | change)
        answer = trained(*OPTIONS, "--checkpoint", "wrong.safetensors")
        assert answer.status == 1
        assert f"error: wrong.safetensors {message}" in " ".join(answer.err.split())
