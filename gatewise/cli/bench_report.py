"""`gatewise bench report`: a report, a plot and a table for a page, from the newest records."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gatewise.benchmarks import language_model, record, report
from gatewise.benchmarks.publication import publication
from gatewise.cli.bench_quality import defaults_of_recipes
from gatewise.cli.bench_run import Results
from gatewise.files import refuse_overwriting, write_text


def bench_report(
    benchmark: Annotated[
        str,
        typer.Argument(
            help="lm, lstm, gru, cells, nmt, models, attention, scale or quality; lm_quick and so on for --quick runs."
        ),
    ] = language_model.BENCHMARK,
    into: Annotated[
        Path | None, typer.Option(help="A page, such as README.md, into whose marked block the summary is written.")
    ] = None,
    device: Annotated[str, typer.Option(help="Part of a device's name, such as h200. Default: any.")] = "",
    plot: Annotated[
        Path | None,
        typer.Option(
            help="The plot's file without its suffix, shown in the page. Default: a file in the folder of --reports."
        ),
    ] = None,
    results: Results = record.RESULTS,
    reports: Annotated[Path, typer.Option(help="Folder of the generated reports.")] = record.REPORTS,
) -> None:
    """Write the report, the plot and a page's table from the newest records of a benchmark."""
    page = reports / f"{benchmark}.md"
    refuse_overwriting({"--into": into}, {"--reports": page})
    shown = publication(benchmark, results, device, defaults_of_recipes())
    console = Console()
    reports.mkdir(parents=True, exist_ok=True)
    write_text(page, shown.report)
    console.print(f"Wrote {page}")
    content = shown.summary
    if shown.draw is not None:
        files = shown.draw(plot or reports / benchmark)
        console.print(f"Drew {' and '.join(map(str, files))}")
        if plot is not None and into is not None:
            link = Path(os.path.relpath(files[-1], into.parent)).as_posix()
            content = f"![{shown.caption}]({link})\n\n{content}"
    if into is not None:
        changed = report.fill_block(into, benchmark, content)
        console.print(f"{'Updated' if changed else 'No change in'} the block of {into}")
