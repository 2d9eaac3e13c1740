"""The origin of the numbers in a report."""

from __future__ import annotations

from collections.abc import Sequence

from gatewise.benchmarks.record import Run
from gatewise.contract.decision import format_cudnn


def provenance(runs: Sequence[Run], *, in_turn: bool = True, sampled: bool = True) -> str:
    """Return a sentence or two with the devices, versions, dates and commits of runs.

    Args:
        runs: The runs of all records of a report, in any order; versions are those of the newest.
        in_turn: Whether the compared functions were sampled in turn, rather than one after the other.
        sampled: Whether the numbers are medians of samples, which a sentence then says.
    """
    runs = sorted(runs, key=lambda run: run.date)
    run = runs[-1]
    versions = [f"PyTorch {run.torch}", f"gatewise {run.gatewise}"]
    versions += [f"CUDA {run.cuda}"] if run.driver else []
    versions += [f"cuDNN {format_cudnn(run.cudnn)}"] if run.cudnn else []
    versions += [f"driver {run.driver}"] if run.driver else []
    commits = dict.fromkeys(
        f"{each.commit[:10]}{' with changes' if each.dirty else ''}" for each in runs if each.commit
    )
    devices = ", ".join(dict.fromkeys(each.device for each in runs))
    parts = [f"{devices}; {', '.join(versions)}", " to ".join(dict.fromkeys((runs[0].date[:10], run.date[:10])))]
    parts += [f"commit{'s' if len(commits) > 1 else ''} {', '.join(commits)}"] if commits else []
    medians = f" Medians of samples{' taken in turn' if in_turn else ''}."
    return f"{'; '.join(parts)}.{medians if sampled else ''}"


def commands(runs: Sequence[Run]) -> str:
    """Return the command lines of the runs as a Markdown list, oldest first."""
    return "\n".join(dict.fromkeys(f"- `{run.command}`" for run in sorted(runs, key=lambda run: run.date)))
