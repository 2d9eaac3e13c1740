"""A summary for pages, a report and a plot from the newest records of any benchmark."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gatewise.benchmarks import attention, attention_report, language_model, quality, quality_picture, record, report
from gatewise.benchmarks.cells import picture as cell_picture
from gatewise.benchmarks.cells import record as cell_record
from gatewise.benchmarks.cells import report as cell_report
from gatewise.benchmarks.lstm import picture
from gatewise.benchmarks.lstm import record as lstm_record
from gatewise.benchmarks.lstm import report as lstm_report
from gatewise.benchmarks.models import picture as model_picture
from gatewise.benchmarks.models import record as model_record
from gatewise.benchmarks.models import report as model_report
from gatewise.benchmarks.models.cases import CASES, TINY_CASES
from gatewise.benchmarks.nmt import picture as nmt_picture
from gatewise.benchmarks.nmt import record as nmt_record
from gatewise.benchmarks.nmt import report as nmt_report
from gatewise.benchmarks.scale import picture as scale_picture
from gatewise.benchmarks.scale import report as scale_report
from gatewise.benchmarks.scale import run as scale_run
from gatewise.contract.errors import ArgumentError, sentence


@dataclasses.dataclass(frozen=True, slots=True)
class Publication:
    """The newest records of a benchmark, as they are published.

    Attributes:
        summary: The summary in Markdown, for the marked block of a page.
        report: The report in Markdown, with all rows.
        caption: The caption of the plot.
        draw: A function that plots to files with the given name without suffix and returns them; None if no row was
            measured.
    """

    summary: str
    report: str
    caption: str
    draw: Callable[[Path], list[Path]] | None


def publication(
    benchmark: str, folder: Path, device: str = "", recipes: Mapping[str, Mapping[str, Any]] | None = None
) -> Publication:
    """Return the newest records of a benchmark, as they are published.

    Args:
        benchmark: The name of the benchmark, which is that of its file.
        folder: The folder of the records.
        device: A part of the device's name; empty for any.
        recipes: The defaults of recipes by task; see `quality.newest`.

    Raises:
        ArgumentError: There is no such benchmark or file, a line is not a record, or no record is from such a device.
    """
    path = record.path_of(folder, benchmark)
    if benchmark in lstm_record.BENCHMARKS:
        rival = lstm_record.rival_of(lstm_record.BENCHMARKS[benchmark])
        layers = lstm_record.newest(record.read_lines(path, lstm_record.LayerRecord), device)
        return Publication(
            lstm_report.markdown(layers),
            lstm_report.report(layers),
            f"One training step: how many times as fast as torch.{rival}, by size",
            (lambda prefix: picture.draw(layers, prefix)) if picture.drawable(layers) else None,
        )
    if benchmark in (cell_record.BENCHMARK, cell_record.QUICK_BENCHMARK):
        cells = cell_record.newest(record.read_lines(path, cell_record.CellRecord), device)
        return Publication(
            cell_report.markdown(cells),
            cell_report.report(cells),
            "One training step of a layer of each cell: how many times as fast as what PyTorch offers",
            (lambda prefix: cell_picture.draw(cells, prefix)) if cell_picture.drawable(cells) else None,
        )
    if benchmark in (nmt_record.BENCHMARK, nmt_record.QUICK_BENCHMARK):
        trained = nmt_record.newest(record.read_lines(path, nmt_record.TranslationRecord), device)
        return Publication(
            nmt_report.markdown(trained),
            nmt_report.report(trained),
            "Memory of a training step by part, and samples a second by batch, of plain PyTorch and of gatewise",
            (lambda prefix: nmt_picture.draw(trained, prefix)) if nmt_picture.drawable(trained) else None,
        )
    if benchmark in (model_record.BENCHMARK, model_record.QUICK_BENCHMARK):
        cases = CASES if benchmark == model_record.BENCHMARK else TINY_CASES
        models = model_record.newest(record.read_lines(path, model_record.ModelRecord), cases, device)
        return Publication(
            model_report.markdown(models),
            model_report.report(models),
            "Training steps of models as people write them: time before and after, and the LSTM's share of it",
            (lambda prefix: model_picture.draw(models, prefix)) if model_picture.drawable(models) else None,
        )
    if benchmark in (attention.BENCHMARK, attention.QUICK_BENCHMARK):
        passes = record.newest(record.read_lines(path, attention.AttentionRecord), device)  # type: ignore[arg-type]
        table = attention_report.markdown(passes)  # type: ignore[arg-type]
        return Publication(table, table, "", None)
    if benchmark in (scale_run.BENCHMARK, scale_run.QUICK_BENCHMARK):
        scaled = scale_report.newest(record.read(path), device)
        return Publication(
            scale_report.markdown(scaled),
            scale_report.report(scaled),
            "Training on several processes: how many times as fast as on one",
            (lambda prefix: scale_picture.draw(scaled, prefix)) if scale_picture.drawable(scaled) else None,
        )
    if benchmark == quality.BENCHMARK:
        runs = quality.newest(record.read_lines(path, quality.QualityRecord), device, recipes)
        caption = "Scores on validation data by minutes of training, of each recipe and seed"
        curves = functools.partial(quality_picture.draw, runs)
        return Publication(quality.markdown(runs), quality.report(runs), caption, curves)
    if benchmark not in (language_model.BENCHMARK, language_model.QUICK_BENCHMARK):
        advice = "Add _quick for --quick runs."
        raise ArgumentError(
            sentence(
                "benchmark", "lm, lstm, gru, cells, nmt, models, attention, scale or quality", repr(benchmark), advice
            )
        )
    rows = record.newest(record.read(path), device)

    def draw(prefix: Path) -> list[Path]:
        file = prefix.with_name(f"{prefix.name}.svg")
        report.plot(rows, file)
        return [file]

    measured = any(row.words_per_second for row in rows)
    caption = "Words a second, by way and precision"
    return Publication(report.markdown(rows), report.report(rows), caption, draw if measured else None)
