"""Options of the commands of `gatewise train` that are not part of a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RUN = "Run"

Recipe = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        metavar="FILE|NAME",
        help="A complete run: a TOML file, or a name that gatewise recipes lists; other options override it.",
        rich_help_panel=RUN,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any key of a recipe; repeatable.", rich_help_panel=RUN),
]
Output = Annotated[
    Path | None, typer.Option(help="Folder of the run; default: a new one, runs/NAME.", rich_help_panel=RUN)
]
Resume = Annotated[bool, typer.Option("--resume", help="Resume the run in the folder.", rich_help_panel=RUN)]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the run in the folder.", rich_help_panel=RUN)]
Device = Annotated[
    str | None,
    typer.Option(
        help="cpu, cuda or cuda:N; default: a GPU if there is one, a separate one for each process.",
        rich_help_panel=RUN,
    ),
]
