"""`gatewise explain nmt`: the memory plan for the training of a translation model, and the largest batch that fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

import torch
import typer

from gatewise.cli.nmt_recipe import TranslationRecipe
from gatewise.cli.option_names import naming
from gatewise.cli.recipe import overridden, parse_settings, read_recipe
from gatewise.cli.recipe_files import recipe_path
from gatewise.cli.recipe_options import recipe_options
from gatewise.contract.decision import format_bytes, format_seconds
from gatewise.contract.device import Device
from gatewise.contract.errors import ArgumentError, sentence
from gatewise.contract.ranges import COUNT
from gatewise.data.sentences import BEGINNING, END, PADDING
from gatewise.models import Seq2Seq
from gatewise.planning import Batching, Plan, Planner, Shape
from gatewise.planning.way import Way
from gatewise.training.json_values import to_json

_BATCH, _MODEL, _WHERE = "Batch", "Model", "Where"
_SIZES = ("embedding_size", "hidden_size", "encoder_layers", "decoder_layers")
_FORM = ("score", "input_feeding", "dropout", "tied", "kernel", "attention_kernel")


@recipe_options(
    TranslationRecipe(), *(f"model.{name}" for name in (*_SIZES, *_FORM)), "training.precision", "memory_budget"
)
def explain_nmt(
    *,
    recipe: Annotated[
        str | None,
        typer.Option(metavar="FILE|NAME", help="A recipe of gatewise train nmt.", rich_help_panel=_MODEL),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any key of a recipe.", rich_help_panel=_MODEL),
    ] = None,
    vocabularies: Annotated[
        str | None,
        typer.Option(metavar="V,V", help="Sizes of both vocabularies; default: the recipe's.", rich_help_panel=_MODEL),
    ] = None,
    given: Mapping[str, Any],
    lengths: Annotated[
        str, typer.Option(metavar="S,T", help="Tokens of the longest pair.", rich_help_panel=_BATCH)
    ] = "50,50",
    batch: Annotated[int, typer.Option(min=1, help="Pairs of sentences.", rich_help_panel=_BATCH)] = 128,
    gpu: Annotated[
        str | None,
        typer.Option(
            help=f"A GPU by name: {', '.join(Device.names()[:-1])}. Default: this machine's, or its CPU.",
            rich_help_panel=_WHERE,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.", rich_help_panel=_WHERE)] = False,
) -> None:
    """Show how a translation model would be trained within a memory budget. Nothing runs.

    \b
    Examples:
      gatewise explain nmt --hidden-size 512 --embedding-size 512 --gpu h200
      gatewise explain nmt --recipe phrases --batch 30
      gatewise explain nmt --lengths 100,100 --batch 256 --memory-budget 8GB
    """  # noqa: D301 - \b keeps the lines of the examples apart
    asked = TranslationRecipe()
    if recipe is not None:
        asked = read_recipe(recipe_path("nmt", recipe), asked)
    asked = overridden(overridden(asked, given), parse_settings(settings or []))
    # Including the tokens for padding, beginning and end.
    most = asked.data.vocabulary_size + len({PADDING, BEGINNING, END}) if asked.data.vocabulary_size else 8000
    source_size, target_size = (most, most) if vocabularies is None else _pair("--vocabularies", vocabularies)
    source, target = _pair("--lengths", lengths)
    model = Seq2Seq(source_size, target_size, **dataclasses.asdict(asked.model), device="meta")
    with naming({"device": "--gpu"}):
        device = Device.named(gpu) if gpu else Device.probe("cuda" if torch.cuda.is_available() else "cpu")
    planner = Planner(model, asked.training, device)
    batching = Batching("batch", batch, lambda rows: [Shape(source, target, rows)])
    plan = planner.plan(batching, asked.memory_budget)
    largest = planner.largest(batching, asked.memory_budget)
    typer.echo(to_json(_as_data(plan, largest), indent=2) if as_json else _as_text(plan, largest, device))


def _pair(option: str, text: str) -> tuple[int, int]:
    parts = text.split(",")
    if len(parts) != 2 or not all(part.strip().isdecimal() and int(part) for part in parts):
        raise ArgumentError(sentence(option, "two positive integers", repr(text), f"For example {option} 50,60."))
    first, second = (int(part) for part in parts)
    for size in (first, second):
        COUNT.check(option, size)
    return first, second


def _as_text(plan: Plan, largest: int, device: Device) -> str:
    lines = [str(plan), "", f"device       {device.name}"]
    if plan.budget is not None:
        lines.append(f"largest      {largest:,} pairs of this length in {format_bytes(plan.budget)}")
    lines += ["", "other ways, predicted", f"  {'part':<9}  {'kept':>9}  {'workspace':>9}  {'time':>8}  how"]
    for part in plan.choice.step.parts:
        offered = [way for way in _unlike(part.ways) if len(part.ways) > 1]
        for way in offered:
            mark = "*" if way.detail == plan.way(part.name).detail else " "
            room = max(way.forward_scratch, way.backward_scratch)
            sizes = f"{format_bytes(way.kept):>9}  {format_bytes(room):>9}"
            time = format_seconds(way.seconds) if way.seconds else "-"
            lines.append(f"{mark} {part.name:<9}  {sizes}  {time:>8}  {way.detail}")
    return "\n".join([*lines, *(f"\n{way.decision}" for way in plan.choice.ways if way.decision is not None)])


def _unlike(ways: tuple[Way, ...]) -> list[Way]:
    """Return the ways without duplicates, which have the same memory and time for this shape."""
    return list({way.detail: way for way in ways}.values())


def _as_data(plan: Plan, largest: int) -> dict[str, Any]:
    choice = plan.choice
    return {
        "shape": choice.step.shape._asdict(),
        "budget": plan.budget,
        "peak": choice.peak._asdict(),
        "at_rest": dict(choice.step.at_rest),
        "parts": [
            {
                "part": part.name,
                "gradients": part.gradients,
                "chosen": way.detail,
                "ways": [
                    {
                        "way": each.detail,
                        "keeps": each.kept,
                        "works_in": max(each.forward_scratch, each.backward_scratch),
                        "seconds": each.seconds,
                    }
                    for each in _unlike(part.ways)
                ],
            }
            for part, way in zip(choice.step.parts, choice.ways, strict=True)
        ],
        "decisions": {
            part.name: {"chosen": way.decision.chosen, "reason": way.decision.reason, "text": str(way.decision)}
            for part, way in zip(choice.step.parts, choice.ways, strict=True)
            if way.decision is not None
        },
        "largest_batch": largest,
    }
