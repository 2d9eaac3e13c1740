"""Training of a case on every kernel."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing.spawn import ProcessRaisedException

from gatewise.benchmarks.trajectories.cases import Case
from gatewise.benchmarks.trajectories.layers import RIVAL
from gatewise.benchmarks.trajectories.train import train
from gatewise.benchmarks.trajectories.verdict import SEEDS, smoothed, verdict
from gatewise.contract.errors import KernelRefused


def run_case(case: Case, kinds: Sequence[str], steps: int, device: torch.device) -> list[dict[str, Any]]:
    """Train a case with nn.LSTM from several seeds, then on each kernel, and return a row for each kernel.

    Args:
        case: The model and how it is trained.
        kinds: The names of kernels, "auto" or "lean".
        steps: The number of steps.
        device: The device.

    Returns:
        Rows with the case, the kind, the losses of windows, the distance as `Verdict.worst`, what is wrong, and
        whether the kernel refuses the case.
    """
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
        theirs = [train(case, RIVAL, seed, steps, device) for seed in range(SEEDS)]
        rows = [_row(case, RIVAL, theirs[0], 0.0)]
        for kind in kinds:
            try:
                # With dropout, a seed gives different masks on each kernel.
                ours = [train(case, kind, seed, steps, device) for seed in range(SEEDS if case.dropout else 1)]
            except (KernelRefused, ProcessRaisedException) as error:
                if not _is_refusal(error):
                    raise
                rows.append(_row(case, kind, [], None, _first_line(error), refused=True))
                continue
            found = verdict(ours, theirs)
            rows.append(_row(case, kind, ours[0], found.worst if math.isfinite(found.worst) else None, found.note))
    return rows


def _row(
    case: Case, kind: str, losses: Sequence[float], worst: float | None, note: str = "", *, refused: bool = False
) -> dict[str, Any]:
    windows = [round(loss, 5) if math.isfinite(loss) else None for loss in smoothed(losses)]
    worst = None if worst is None else round(worst, 3)
    return {"case": case.name, "kind": kind, "worst": worst, "note": note, "refused": refused, "losses": windows}


def _is_refusal(error: Exception) -> bool:
    # Errors of other processes arrive as text.
    return isinstance(error, KernelRefused) or "errors.KernelRefused" in str(error)


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if "allowed" in line), str(error).splitlines()[0]).strip()
