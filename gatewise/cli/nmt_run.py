"""A run of `gatewise train nmt`: parallel text, model, training, scores, translations."""

from __future__ import annotations

import dataclasses
import itertools
import shlex
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from rich.console import Console
from rich.markup import escape

from gatewise.cli.kernel_builds import kernels_ahead, lookup_builds
from gatewise.cli.launch import Task
from gatewise.cli.nmt_alignment import alignment_words
from gatewise.cli.nmt_builds import TranslationCalls, translation_builds
from gatewise.cli.nmt_data import SPLITS, PairMaterial, pair_material
from gatewise.cli.nmt_memory import plan_memory
from gatewise.cli.nmt_recipe import TranslationRecipe
from gatewise.cli.nmt_scores import TranslationScorer, metrics
from gatewise.cli.recipe import to_toml
from gatewise.cli.reference import loss_on_test_data, reference_of
from gatewise.cli.run_report import (
    check_divergence,
    compare,
    decide,
    field,
    introduce,
    measurements,
    note_unlearned,
    print_early_stop,
    steps_in_all,
    watching,
)
from gatewise.cli.saved_translator import (
    Translator,
    build_translation_model,
    load_translator,
    translation_facts,
    translation_sizes,
)
from gatewise.contract.decision import Decision
from gatewise.contract.device import Device
from gatewise.contract.errors import ArgumentError, sentence
from gatewise.files import write_bytes
from gatewise.models import Search, Seq2Seq, Translation
from gatewise.nn import LSTM
from gatewise.training import RunFolder, fit, perplexity
from gatewise.training.checkpoint import write_tensors
from gatewise.training.curves import plot_curves
from gatewise.training.history import PERPLEXITY
from gatewise.training.json_values import to_json
from gatewise.training.loop import MODEL, Outcome
from gatewise.training.precision import arithmetic, autocast
from gatewise.training.processes import Processes
from gatewise.training.run_folder import bytes_of_run
from gatewise.training.snapshot import weights_of

if TYPE_CHECKING:
    from gatewise.kernels.persistent.launches.builds import Compilation

_UNIT = "tokens"
_MEASURE = dataclasses.replace(PERPLEXITY, digits=3, score="BLEU")


def train_translation(recipe: TranslationRecipe, folder: RunFolder, processes: Processes, console: Console) -> Outcome:
    """Train as the recipe says, or resume the run in the folder; then compute the scores and translate examples.

    Args:
        recipe: The recipe.
        folder: The folder of the run; if it contains a checkpoint, the run is resumed.
        processes: The processes of the distributed training.
        console: The console for the report; silent in all processes but the first.

    Returns:
        The outcome of the training.

    Raises:
        MissingExtra: sacrebleu is not installed.
    """
    metrics()  # a missing package is an error now rather than after the first epoch
    if recipe.model.tied == "all" and recipe.data.vocabulary != "joint":
        advice = "Add `--vocabulary joint`, or use `--tied target`."
        raise ArgumentError(sentence("tied", "none or target for separate vocabularies", "'all'", advice))
    if processes.first:
        folder.prepare(0)
    material = pair_material(recipe.data, recipe.training.seed, folder, processes)
    sizes = translation_sizes(recipe.model, material.source, material.target)
    torch.manual_seed(recipe.training.seed)
    model = build_translation_model(sizes, processes.device)
    torch.manual_seed(recipe.training.seed + 1 + processes.rank)
    decision = _decision(recipe, material, model, processes)
    plan = plan_memory(recipe, material, model, processes)
    facts = translation_facts(sizes, material.source, material.target)
    if processes.first:
        folder.prepare(bytes_of_run(model, recipe.training))
        write_bytes(folder.recipe, to_toml(recipe).encode())  # first, because no run can be resumed without it
        write_bytes(folder.tokenizer, to_json(facts["vocabularies"]).encode())
    _describe(console, recipe, material, model, processes, folder, decision)
    console.print(f"{escape(str(plan))}\n", soft_wrap=True)
    outcome = _train(model, material, sizes, facts, recipe, folder, processes, console, decision)
    if processes.first:
        write_tensors(folder.last, weights_of(model), MODEL, facts)
    if outcome.interrupted:
        return outcome
    processes.barrier()
    begun = time.perf_counter()
    best = load_translator(folder.path, processes.device)
    reference, batches = reference_of("nmt", best.model, decision, folder, processes), material.batches["test"]
    test_loss = loss_on_test_data(best.model, batches, recipe.training, folder, processes, reference, facts)
    options = recipe.translation
    search = best.search(options.beam_size, options.length_penalty)
    with console.status("translating the test set"):
        found = _translated(best, material, "test", search, recipe, processes)
    if processes.first:
        seconds = time.perf_counter() - begun
        _finish(console, recipe, folder, outcome, best, material, test_loss, found, seconds, processes)
    return outcome


TRANSLATION = Task(
    "nmt",
    TranslationRecipe(),
    train_translation,
    "data",
    ("folder", *(f"{split}_{side}" for split in SPLITS for side in ("source", "target"))),
    (),
    files=("tokenizer", "last", "translations"),
    advice="Reduce `--batch-tokens`, `--memory-budget`, `--hidden-size` or `--set evaluation_batch_tokens=N`.",
)


def _decision(recipe: TranslationRecipe, material: PairMaterial, model: Seq2Seq, processes: Processes) -> Decision:
    """Return the decision about the kernel of the encoder."""
    longest = material.batches["train"].longest_source
    rows = max(1, recipe.data.batch_tokens // (longest * processes.count))
    shape = (longest, rows, recipe.model.embedding_size)
    return decide(cast("LSTM", model.encoder[0]), shape, recipe.training.precision, lengths=True)


def _train(
    model: Seq2Seq,
    material: PairMaterial,
    sizes: dict[str, Any],
    facts: dict[str, Any],
    recipe: TranslationRecipe,
    folder: RunFolder,
    processes: Processes,
    console: Console,
    decision: Decision,
) -> Outcome:
    identity = {
        **{name: size for name, size in sizes.items() if name not in ("kernel", "attention_kernel")},
        "training text": material.digest,
    }
    precision = recipe.training.precision

    def builds(device: Device) -> Iterator[Compilation]:
        train, valid = (material.batches[split].shapes_by_count() for split in ("train", "valid"))
        translator = Translator(model, material.source, material.target)
        sentences = _own_share(material, "valid", processes, recipe.translation.valid_sentences or None)
        searched = translator.shapes(sentences, recipe.data.evaluation_batch_tokens)
        yield from translation_builds(TranslationCalls(model, train, valid, searched), precision, device)
        yield from lookup_builds([model.source_embedding, model.target_embedding], processes, device)

    with (
        kernels_ahead(builds, processes.device),
        watching(console, folder, processes, recipe.training.epochs, _UNIT, _MEASURE) as observers,
    ):
        return fit(
            model,
            material.batches["train"],
            material.batches["valid"],
            recipe.training,
            folder,
            processes,
            identity=identity,
            model_facts=facts,
            observers=observers,
            reference=reference_of("nmt", model, decision, folder, processes),
            score=_score(model, material, recipe, processes),
        )


def _score(
    model: Seq2Seq, material: PairMaterial, recipe: TranslationRecipe, processes: Processes
) -> Callable[[], dict[str, float]]:
    """Return a function that scores greedy translations of validation sentences, alike in all processes."""
    translator = Translator(model, material.source, material.target)
    most = recipe.translation.valid_sentences or None
    references = material.parts["valid"].target[:most]
    scorer = TranslationScorer(references, recipe.data.target_language) if processes.first else None

    def score() -> dict[str, float]:
        found = _translated(translator, material, "valid", translator.search(), recipe, processes, most)
        return processes.broadcast(scorer([translator.text(each) for each in found]).figures() if scorer else {})

    return score


def _translated(
    translator: Translator,
    material: PairMaterial,
    split: str,
    search: Search,
    recipe: TranslationRecipe,
    processes: Processes,
    most: int | None = None,
) -> list[Translation]:
    """Return the best translation of each sentence in the first process; every process translates its share."""
    own = _own_share(material, split, processes, most)
    precision = recipe.training.precision
    with arithmetic(precision), autocast(precision, processes.device):
        found = translator.translate(own, search, recipe.data.evaluation_batch_tokens) if own else []
    shares = processes.gather([each[0] for each in found])
    # Sentence n was translated by process n modulo the number of processes.
    return [each for turn in itertools.zip_longest(*shares) for each in turn if each is not None]


def _own_share(material: PairMaterial, split: str, processes: Processes, most: int | None) -> tuple[str, ...]:
    """Return those of the first sentences of a part that this process translates."""
    return material.parts[split].source[:most][processes.rank :: processes.count]


def _describe(
    console: Console,
    recipe: TranslationRecipe,
    material: PairMaterial,
    model: Seq2Seq,
    processes: Processes,
    folder: RunFolder,
    decision: Decision,
) -> None:
    options, batches = recipe.model, material.batches["train"]
    counts = ", ".join(f"{split} {len(material.parts[split]):,}" for split in SPLITS)
    left_out = [f"{split}: {report}" for split, report in material.reports.items() if report.kept < report.pairs]
    joint = material.source is material.target
    sizes = f"{len(material.source):,}" if joint else f"{len(material.source):,} and {len(material.target):,}"
    layers = f"{options.encoder_layers} + {options.decoder_layers} layers of {options.hidden_size}"
    feeding = ", input feeding" if options.input_feeding else ""
    weights = sum(parameter.numel() for parameter in model.parameters())
    lines = {
        "pairs": f"{material.name}: {counts}",
        "filter": "; ".join(left_out),
        "batches": f"{len(batches):,} an epoch in {batches.shapes} shapes, {batches.padding:.1%} of them padding",
        "steps": steps_in_all(recipe.training, len(batches)),
        "tokens": f"{sizes} different {material.source.unit}{', joint' if joint else ''}",
        "model": f"{layers}, {options.score} attention{feeding}, {weights:,} weights",
        "folder": str(folder.path),
        "workers": f"{processes.count} processes share each batch" if processes.count > 1 else "",
    }
    introduce(console, recipe, lines, decision)


def _finish(
    console: Console,
    recipe: TranslationRecipe,
    folder: RunFolder,
    outcome: Outcome,
    translator: Translator,
    material: PairMaterial,
    test_loss: float,
    found: list[Translation],
    seconds: float,
    processes: Processes,
) -> None:
    best = [evaluation for evaluation in outcome.history if evaluation.best][-1]
    translations = [translator.text(each) for each in found]
    test = TranslationScorer(material.parts["test"].target, recipe.data.target_language)(translations)
    result = {
        "valid_perplexity": perplexity(best.valid_loss),
        **{f"valid_{name.lower()}": value for name, value in best.scores.items()},
        "test_perplexity": perplexity(test_loss),
        **{f"test_{name.lower()}": value for name, value in test.figures().items()},
        "bleu_signature": test.bleu_signature,
        "chrf_signature": test.chrf_signature,
        **measurements("nmt", outcome, outcome.seconds + seconds, recipe.training.epochs, processes, _MEASURE),
    }
    write_bytes(folder.result, to_json(result, indent=2).encode() + b"\n")
    check_divergence(outcome, recipe.training)
    write_bytes(folder.translations, "".join(f"{each}\n" for each in translations).encode())
    plot_curves(folder.curves, outcome.history, _UNIT, measure=_MEASURE)
    console.print()
    print_early_stop(console, outcome, recipe.training)
    for name, loss, scores in (("valid", best.valid_loss, best.scores), ("test", test_loss, test.figures())):
        figures = f"BLEU {scores['BLEU']:.2f}, chrF {scores['chrF']:.2f}, {scores['exact']:.1%} exactly right"
        where = f" (epoch {best.epoch:g})" if name == "valid" else ""
        field(console, name, f"{figures}, perplexity {perplexity(loss):.3f}{where}")
    field(console, "BLEU", escape(test.bleu_signature))
    field(console, "chrF", escape(test.chrf_signature))
    compare(console, recipe.expect, result, at_least=("test_bleu", "test_exact"))
    empty = sum(not each.strip() for each in translations)
    unlearned = (
        f"{empty:,} of the {len(found):,} translations of the test set are empty" if 2 * empty > len(found) else ""
    )
    note_unlearned(console, outcome, recipe.training, unlearned)
    field(console, "files", escape(f"{folder.curves}, test.translated, {folder.model.name}, {folder.last.name}"))
    _show_examples(console, recipe, translator, material, found)
    command = shlex.join(["gatewise", "translate", "--checkpoint", str(folder.path)])
    console.print(f"\n[dim]Translate more:[/dim] echo '...' | {escape(command)}", highlight=False, soft_wrap=True)


def _show_examples(
    console: Console,
    recipe: TranslationRecipe,
    translator: Translator,
    material: PairMaterial,
    found: list[Translation],
) -> None:
    """Print some test sentences with their translations and alignments."""
    test = material.parts["test"]
    for row in range(min(recipe.translation.examples, len(found))):
        translation = found[row]
        text = translator.text(translation)
        source = translator.source.pieces(translator.source.encode(test.source[row]).tolist())
        words = alignment_words(source, translator.target.pieces(translation.tokens), translation.attention)
        console.print(f"\n[bold]{escape(test.source[row])}[/bold]", highlight=False)
        wrong = "" if text == test.target[row] else f"  [dim](reference: {escape(test.target[row])})[/dim]"
        console.print(f"{escape(text)}{wrong}", highlight=False)
        console.print(f"  [dim]{escape('   '.join(words))}[/dim]", highlight=False)
