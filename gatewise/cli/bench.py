"""`gatewise bench`: run benchmarks, and write reports from their records."""

from __future__ import annotations

import typer

from gatewise.benchmarks.cases import GRU, LSTM
from gatewise.cli.bench_attention import bench_attention
from gatewise.cli.bench_cells import bench_cells
from gatewise.cli.bench_layer import bench_layer
from gatewise.cli.bench_lm import bench_language_model
from gatewise.cli.bench_models import bench_models
from gatewise.cli.bench_nmt import bench_translation
from gatewise.cli.bench_quality import bench_quality
from gatewise.cli.bench_report import bench_report
from gatewise.cli.bench_scale import bench_scale

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Run benchmarks, and write reports from their records."
)
app.command("lm")(bench_language_model)
for cell in (LSTM, GRU):
    app.command(cell)(bench_layer(cell))
app.command("cells")(bench_cells)
app.command("nmt")(bench_translation)
app.command("models")(bench_models)
app.command("attention")(bench_attention)
app.command("quality")(bench_quality)
app.command("scale")(bench_scale)
app.command("report")(bench_report)
