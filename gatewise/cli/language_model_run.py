"""A run of `gatewise train lm`: text, model, training, score, sample."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import shlex
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.markup import escape
from torch import nn

from gatewise.cli.failures import print_warning
from gatewise.cli.kernel_builds import LayerCall, kernels_ahead, layer_builds, lookup_builds
from gatewise.cli.launch import Task
from gatewise.cli.recipe import PYTHON_TOPICS, Recipe, SampleOptions, TextOptions, to_toml
from gatewise.cli.reference import loss_on_test_data, reference_of
from gatewise.cli.run_report import (
    check_divergence,
    compare,
    decide,
    field,
    introduce,
    measurements,
    note_unlearned,
    steps_in_all,
    watching,
)
from gatewise.cli.saved_model import build_model, load_model, model_facts, sizes_of
from gatewise.contract.decision import Decision
from gatewise.contract.device import Device
from gatewise.contract.errors import ArgumentError, sentence
from gatewise.data import (
    Corpus,
    Tokenizer,
    TokenStream,
    build_tokenizer,
    corpus_from_file,
    corpus_from_files,
    load_tokenizer,
    python_topics,
    stream_text,
    unigram_perplexity,
)
from gatewise.data.tokenizers import unknown_parts
from gatewise.files import write_bytes
from gatewise.models import LanguageModel, generate
from gatewise.models.chunked_softmax import softmax_launches
from gatewise.models.decoding import check_sampling
from gatewise.training import RunFolder, fit, perplexity
from gatewise.training.curves import plot_curves
from gatewise.training.json_values import to_json
from gatewise.training.loop import Outcome
from gatewise.training.processes import Processes
from gatewise.training.run_folder import bytes_of_run

if TYPE_CHECKING:
    from gatewise.kernels.persistent.launches.builds import Compilation

_SPLITS = ("train", "valid", "test")
_SHOWN = 8
"""The largest number of unknown words or characters in a warning."""


@dataclasses.dataclass(frozen=True, slots=True)
class Material:
    """The text of a run.

    Attributes:
        corpus: The text.
        tokenizer: The tokenizer.
        tokens: The token numbers of each part, int64 [N] on the CPU.
        streams: The tokens on the device, in the columns of this process.
    """

    corpus: Corpus
    tokenizer: Tokenizer
    tokens: dict[str, torch.Tensor]
    streams: dict[str, TokenStream]


def train_language_model(recipe: Recipe, folder: RunFolder, processes: Processes, console: Console) -> Outcome:
    """Train as the recipe says, or resume the run in the folder; then compute the scores and generate a sample.

    Args:
        recipe: The recipe.
        folder: The folder of the run; if it contains a checkpoint, the run is resumed.
        processes: The processes of the distributed training.
        console: The console for the report; silent in all processes but the first.

    Returns:
        The outcome of the training.
    """
    _check(recipe, processes)
    if processes.first:
        folder.prepare(0)
    material = _material(recipe, folder, processes)
    if not material.tokenizer.encode(recipe.sample.prompt).numel():  # now rather than after the training
        got = repr(recipe.sample.prompt)
        raise ArgumentError(sentence("prompt", "a text of at least one token", got, "The sample begins with it."))
    sizes = sizes_of(recipe.model, len(material.tokenizer))
    torch.manual_seed(recipe.training.seed)
    model = build_model(sizes, processes.device)
    torch.manual_seed(recipe.training.seed + 1 + processes.rank)
    decision = _decision(recipe, material, model, processes)
    if processes.first:
        folder.prepare(bytes_of_run(model, recipe.training))
        write_bytes(folder.recipe, to_toml(recipe).encode())  # first, because no run can be resumed without it
        write_bytes(folder.tokenizer, material.tokenizer.to_json().encode())
    _describe(console, recipe, material, model, processes, folder, decision)
    outcome = _train(model, material, sizes, recipe, folder, processes, console, decision)
    if outcome.interrupted:
        return outcome
    processes.barrier()
    begun = time.perf_counter()
    best, _ = load_model(folder.path, processes.device)
    reference, facts = reference_of("lm", best, decision, folder, processes), model_facts(sizes, material.tokenizer)
    streams, options = material.streams, recipe.training
    test_loss = loss_on_test_data(best, streams["test"], options, folder, processes, reference, facts)
    if processes.first:
        seconds = outcome.seconds + time.perf_counter() - begun
        _finish(console, recipe, folder, outcome, best, material, test_loss, seconds, processes)
    return outcome


def sample(console: Console, model: LanguageModel, tokenizer: Tokenizer, options: SampleOptions, seed: int) -> None:
    """Generate text and print it, starting with the prompt; warn of what the model does not know in the prompt.

    Raises:
        ArgumentError: The prompt has no tokens.
    """
    if unknown := unknown_parts(tokenizer, options.prompt):
        listed = ", ".join(map(repr, unknown[:_SHOWN])) + (", ..." if len(unknown) > _SHOWN else "")
        print_warning(f"the model's vocabulary lacks these {tokenizer.unit} of the prompt, read as unknown: {listed}")
    prompt = tokenizer.encode(options.prompt)
    drawn = generate(
        model,
        prompt,
        temperature=options.temperature,
        top_k=options.top_k or None,
        top_p=options.top_p if options.top_p < 1 else None,
        forbidden=() if tokenizer.unknown is None else (tokenizer.unknown,),
        generator=torch.Generator().manual_seed(seed),
    )
    for piece in stream_text(tokenizer, itertools.chain(prompt.tolist(), itertools.islice(drawn, options.length))):
        console.out(piece, end="", highlight=False)
    console.out("")


LANGUAGE_MODEL = Task(
    "lm",
    Recipe(),
    train_language_model,
    "text",
    ("source", "train", "valid", "test"),
    (PYTHON_TOPICS,),
    files=("tokenizer",),
    advice="Lower `--batch-size`, `--window`, `--hidden-size` or `--vocabulary-size`.",
)


def _check(recipe: Recipe, processes: Processes) -> None:
    options = recipe.sample
    check_sampling(options.temperature, options.top_k or None, options.top_p)
    if recipe.text.batch_size % processes.count:
        advice = "Every process gets the same number of columns."
        expectation = f"a multiple of the {processes.count} processes"
        raise ArgumentError(sentence("batch_size", expectation, recipe.text.batch_size, advice))


def _material(recipe: Recipe, folder: RunFolder, processes: Processes) -> Material:
    text = recipe.text
    corpus = _corpus(text)
    tokenizer = _tokenizer(text, corpus, folder, processes)
    tokens = {split: tokenizer.encode(getattr(corpus, split)) for split in _SPLITS}
    streams = {}
    for split in _SPLITS:
        window, columns = _window(text, split, processes)
        if split != "train":  # an evaluation may be shorter than a window
            window = max(1, min(window, len(tokens[split]) // columns - 1))
        streams[split] = TokenStream(
            tokens[split],
            columns,
            window,
            device=processes.device,
            rank=processes.rank,
            processes=processes.count,
            rotate=text.rotate and split == "train",
            jitter=text.jitter if split == "train" else 0.0,
            seed=recipe.training.seed,
            name=f"the {_long(split)} text",
            options=("batch_size" if split == "train" else "evaluation_batch_size", "window"),
        )
    return Material(corpus, tokenizer, tokens, streams)


def _corpus(text: TextOptions) -> Corpus:
    files = {split: getattr(text, split) for split in _SPLITS}
    if all(files.values()):
        return corpus_from_files(**files)
    if any(files.values()):
        given = ", ".join(split for split in _SPLITS if files[split])
        advice = "Or give one file by `--text`; it will be split."
        raise ArgumentError(sentence("train, valid, test", "three files", f"only `{given}`", advice))
    return python_topics() if text.source == PYTHON_TOPICS else corpus_from_file(text.source, text.shares)


def _tokenizer(text: TextOptions, corpus: Corpus, folder: RunFolder, processes: Processes) -> Tokenizer:
    """Build the tokenizer in the first process and send it to the others; a resumed run keeps its tokenizer."""
    document = ""
    if processes.first:
        if folder.checkpoint.exists():
            document = folder.saved_tokenizer(load_tokenizer)
        else:
            document = build_tokenizer(text.tokens, corpus.train, text.vocabulary_size or None).to_json()
    return load_tokenizer(processes.broadcast(document))


def _decision(recipe: Recipe, material: Material, model: LanguageModel, processes: Processes) -> Decision:
    """Return the decision about the kernel that trains the model."""
    largest = max(_calls(recipe, material, model, processes, "train"), key=lambda call: _weights(call.layer))
    return decide(largest.layer, largest.shape, recipe.training.precision)


def _calls(
    recipe: Recipe, material: Material, model: LanguageModel, processes: Processes, split: str
) -> list[LayerCall]:
    """Return the calls of LSTM layers for one window of a text in this process."""
    time, columns = _window(recipe.text, split, processes)
    time, columns = min(time, material.streams[split].steps), columns // processes.count
    return [LayerCall(layer, (time, columns, layer.input_size), training=split == "train") for layer in model.layers]


def _builds(
    recipe: Recipe, material: Material, model: LanguageModel, processes: Processes, device: Device
) -> Iterator[Compilation]:
    """Yield the kernels that training and its evaluations launch."""
    precision, (vocabulary, size) = recipe.training.precision, model.output.weight.shape
    for training in (True, False):
        if precision == "bfloat16" and device.triton:  # see `mean_token_loss`
            yield from softmax_launches(vocabulary, size, torch.bfloat16, gradient=training)
        calls = _calls(recipe, material, model, processes, "train" if training else "valid")
        yield from layer_builds(calls, precision, device)
    yield from lookup_builds([model.embedding], processes, device)


def _window(text: TextOptions, split: str, processes: Processes) -> tuple[int, int]:
    """Return the number of time steps and of columns over all processes in the windows of a text."""
    if split == "train":
        return text.window, text.batch_size
    return text.evaluation_window or text.window, max(text.evaluation_batch_size, processes.count)


def _weights(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _train(
    model: LanguageModel,
    material: Material,
    sizes: dict[str, Any],
    recipe: Recipe,
    folder: RunFolder,
    processes: Processes,
    console: Console,
    decision: Decision,
) -> Outcome:
    identity = {
        **{name: size for name, size in sizes.items() if name != "kernel"},
        "training text": hashlib.sha256(material.tokens["train"].numpy().tobytes()).hexdigest()[:16],
    }
    epochs, unit = recipe.training.epochs, material.tokenizer.unit
    with (
        kernels_ahead(lambda device: _builds(recipe, material, model, processes, device), processes.device),
        watching(console, folder, processes, epochs, unit) as observers,
    ):
        return fit(
            model,
            material.streams["train"],
            material.streams["valid"],
            recipe.training,
            folder,
            processes,
            identity=identity,
            model_facts=model_facts(sizes, material.tokenizer),
            observers=observers,
            reference=reference_of("lm", model, decision, folder, processes),
        )


def _describe(
    console: Console,
    recipe: Recipe,
    material: Material,
    model: LanguageModel,
    processes: Processes,
    folder: RunFolder,
    decision: Decision,
) -> None:
    corpus, tokenizer = material.corpus, material.tokenizer
    characters = sum(len(getattr(corpus, split)) for split in _SPLITS)
    parts = ", ".join(f"{split} {len(material.tokens[split]):,}" for split in _SPLITS)
    options = recipe.model
    tied = ", tied softmax" if options.tied else ""
    projected = f" after a projection to {options.embedding_size}" if model.narrowed is not None else ""
    different = len({layer.hidden_size for layer in model.layers}) > 1
    sizes = "-".join(str(layer.hidden_size) for layer in model.layers)
    layers = sizes if different else f"{options.num_layers} x {options.hidden_size}"
    shape = f"{layers} LSTM{tied}{projected}"
    columns = recipe.text.batch_size // processes.count
    lines = {
        "text": f"{corpus.name}, {characters:,} characters",
        "tokens": f"{len(tokenizer):,} different {tokenizer.unit}; {parts}",
        "model": f"{shape}, {_weights(model):,} weights",
        "steps": steps_in_all(recipe.training, len(material.streams["train"])),
        "folder": str(folder.path),
        "workers": f"{processes.count} processes, {columns} columns each" if processes.count > 1 else "",
    }
    introduce(console, recipe, lines, decision)


def _finish(
    console: Console,
    recipe: Recipe,
    folder: RunFolder,
    outcome: Outcome,
    model: LanguageModel,
    material: Material,
    test_loss: float,
    seconds: float,
    processes: Processes,
) -> None:
    best = min(outcome.history, key=lambda evaluation: evaluation.valid_loss)
    valid, test = perplexity(best.valid_loss), perplexity(test_loss)
    unigram = unigram_perplexity(material.tokens["valid"])
    result = {
        "valid_perplexity": valid,
        "test_perplexity": test,
        "unigram_perplexity": unigram,
        "share_of_unigram": valid / unigram,
        **measurements("lm", outcome, seconds, recipe.training.epochs, processes),
    }
    write_bytes(folder.result, to_json(result, indent=2).encode() + b"\n")
    check_divergence(outcome, recipe.training)
    plot_curves(folder.curves, outcome.history, material.tokenizer.unit, unigram)
    console.print()
    field(console, "valid", f"perplexity {valid:,.2f} (epoch {best.epoch:g})")
    field(console, "test", f"perplexity {test:,.2f}, after {seconds / 60:.2f} minutes of training and evaluation")
    field(console, "unigram", f"perplexity {unigram:,.2f}; the model's is {compared(valid, unigram)}")
    limits = ("valid_perplexity", "test_perplexity", "share_of_unigram")
    compare(console, recipe.expect, result, at_most=limits)
    unlearned = "the model is no better than the frequencies of tokens" if valid >= unigram else ""
    note_unlearned(console, outcome, recipe.training, unlearned)
    field(console, "curves", escape(str(folder.curves)))
    console.print()
    sample(console, model, material.tokenizer, recipe.sample, recipe.training.seed)
    console.print()
    command = shlex.join(["gatewise", "generate", "--checkpoint", str(folder.path), "--prompt", recipe.sample.prompt])
    console.print(f"[dim]Generate more:[/dim] {escape(command)}", highlight=False, soft_wrap=True)


def compared(perplexity: float, baseline: float) -> str:
    """Return how many times lower or higher than a baseline a perplexity is."""
    ratio = baseline / perplexity
    if f"{max(ratio, 1 / ratio):.1f}" == "1.0":
        return "about the same"
    return f"{ratio:,.1f} times lower" if ratio > 1 else f"{1 / ratio:,.1f} times higher"


def _long(split: str) -> str:
    return {"train": "training", "valid": "validation", "test": "test"}[split]
