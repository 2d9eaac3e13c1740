"""Options that the commands of `gatewise train` share, so that they read the same in each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RUN, MODEL, TRAINING = "Run", "Model", "Training"

Recipe = Annotated[
    Path | None,
    typer.Option("--recipe", help="TOML file with a complete run; other options override it.", rich_help_panel=RUN),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any key of a recipe; repeatable.", rich_help_panel=RUN),
]
Output = Annotated[
    Path | None, typer.Option(help="Folder of the run; default: a new one, runs/NAME.", rich_help_panel=RUN)
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.", rich_help_panel=RUN)]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the run in the folder.", rich_help_panel=RUN)]
Device = Annotated[
    str | None,
    typer.Option(
        help="cpu, cuda or cuda:N; default: a GPU if there is one, to each process its own.", rich_help_panel=RUN
    ),
]
Threads = Annotated[
    int | None, typer.Option(min=0, help="CPU threads, default 1; 0: as PyTorch does.", rich_help_panel=RUN)
]

MemoryBudget = Annotated[
    str | None, typer.Option(metavar="SIZE", help="8GB, 7.5GiB, ...; default: auto.", rich_help_panel=TRAINING)
]
Kernel = Annotated[str | None, typer.Option(help="auto, or a kernel by name.", rich_help_panel=MODEL)]

Patience = Annotated[int | None, typer.Option(help="Epochs without improvement; 0: all.", rich_help_panel=TRAINING)]
Optimizer = Annotated[str | None, typer.Option(help="sgd, adam or adamw.", rich_help_panel=TRAINING)]
LearningRate = Annotated[float | None, typer.Option(help="Largest rate.", rich_help_panel=TRAINING)]
Schedule = Annotated[str | None, typer.Option(help="constant, cosine or plateau.", rich_help_panel=TRAINING)]
Clip = Annotated[float | None, typer.Option(help="Gradient norm; 0: off.", rich_help_panel=TRAINING)]
Precision = Annotated[str | None, typer.Option(help="float32, tf32 or bfloat16.", rich_help_panel=TRAINING)]
CudaGraph = Annotated[
    bool | None,
    typer.Option("--cuda-graph/--no-cuda-graph", help="One CUDA graph a step; default.", rich_help_panel=TRAINING),
]
