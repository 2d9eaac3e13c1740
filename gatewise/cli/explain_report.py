"""The report of `gatewise explain` about a call, as text of 80 columns and as data."""

from __future__ import annotations

import textwrap
from typing import Any

from gatewise.contract.criterion import Refusal
from gatewise.contract.decision import Decision, Verdict, format_bytes, format_seconds, wrapped
from gatewise.contract.problem import Layout
from gatewise.contract.pytorch import pytorch_layer
from gatewise.kernels.cudnn.criteria import why_not_persistent
from gatewise.selection.advice import LARGEST_BATCH, Advice, memory
from gatewise.selection.pytorch import decide_as_pytorch

_NOTABLY = 1.05  # smaller ratios are within the error of the predictions


def as_text(decision: Decision, suggestions: tuple[Advice, ...], batch: int) -> str:
    """Return the report about a call, as text.

    Args:
        decision: The decision.
        suggestions: The changes that would help.
        batch: The largest batch that fits; 0 if there is none.
    """
    lines = [
        str(decision),
        "",
        f"torch.nn.{pytorch_layer(decision.problem.cell).name} would run",
        *_pytorch_lines(decision),
    ]
    lines += ["", "memory, predicted", *_memory_lines(decision, batch)]
    lines += ["", "what would help, predicted", *_advice_lines(decision, suggestions)]
    return "\n".join(lines)


def as_data(decision: Decision, suggestions: tuple[Advice, ...], batch: int) -> dict[str, Any]:
    """Return the report about a call, as JSON values.

    Args:
        decision: The decision.
        suggestions: The changes that would help.
        batch: The largest batch that fits; 0 if there is none.
    """
    runs, unmet = _of_pytorch(decision)
    needed = memory(decision)
    return {
        "problem": str(decision.problem),
        "device": decision.device.name,
        "chosen": decision.chosen,
        "reason": decision.reason,
        "kernels": [_verdict_data(found) for found in decision.verdicts],
        "pytorch": {
            **_verdict_data(runs),
            "not_persistent": {name: [_refusal_data(one) for one in refusals] for name, refusals in unmet.items()},
        },
        "memory": {
            "weights": needed and needed.weights,
            "inputs": needed and needed.inputs,
            "peak": needed and needed.peak,
            "total": needed and needed.total,
            "largest_batch": batch,
        },
        "advice": [
            {
                "changes": [change.text for change in advice.changes],
                "gain": None if advice.gain == float("inf") else advice.gain,
                "kernel": advice.decision.chosen,
                "seconds": advice.decision.verdict(advice.decision.chosen or "").seconds,
            }
            for advice in suggestions
        ],
    }


def _of_pytorch(decision: Decision) -> tuple[Verdict, dict[str, tuple[Refusal, ...]]]:
    """Return the kernel that PyTorch's layer would run, and the unmet criteria of cuDNN's persistent algorithms."""
    own = decide_as_pytorch(decision.problem, decision.device)
    unmet = why_not_persistent(own.problem, own.device) if own.chosen == "cudnn" else {}
    return own.verdict(own.chosen or ""), unmet


def _pytorch_lines(decision: Decision) -> list[str]:
    runs, unmet = _of_pytorch(decision)
    packed = " (packed)" if decision.problem.layout is not Layout.DENSE else ""
    ours = decision.verdict(decision.chosen) if decision.chosen else None
    ratio = runs.seconds / ours.seconds if ours and ours.seconds and runs.seconds else 1.0
    longer = f", {ratio:.2g} times as long as {decision.chosen}" if ratio > _NOTABLY else ""
    lines = wrapped("  ", f"{runs.kernel}{packed}: {runs.algorithm}, {format_seconds(runs.seconds)} predicted{longer}")
    for algorithm, refusals in unmet.items():
        lines.append(f"  not {algorithm}, because")
        for refusal in refusals:
            lines += wrapped("    - ", str(refusal))
    return lines


def _memory_lines(decision: Decision, batch: int) -> list[str]:
    needed, device = memory(decision), decision.device
    if needed is None:
        return ["  none: nothing would run"]
    parts = f"weights {format_bytes(needed.weights)}, inputs {format_bytes(needed.inputs)}"
    lines = wrapped("  ", f"{parts}, at the peak {format_bytes(needed.peak)} more: {format_bytes(needed.total)}")
    if device.memory_bytes:
        whole = f"{format_bytes(device.memory_bytes)} (in 90 % of it, this layer alone)"
        found = f"{batch:,}{' or more' if batch == LARGEST_BATCH else ''}" if batch else "none"
        lines += wrapped("  ", f"largest batch that fits in {whole}: {found}")
    return lines


def _advice_lines(decision: Decision, suggestions: tuple[Advice, ...]) -> list[str]:
    if not suggestions:
        effect = "gains 5 % or more" if decision.chosen else "makes the kernel run"
        return [f"  no similar shape, dtype, layout or way of calling {effect}"]
    width = min(40, max(len(str(advice)) for advice in suggestions))
    lines = []
    for advice in suggestions:
        verdict_there = advice.decision.verdict(advice.decision.chosen or "")
        figures = f"{_gain(advice, decision)}  {verdict_there.kernel}, {format_seconds(verdict_there.seconds)}"
        first, *rest = textwrap.wrap(str(advice), width)
        lines.append(f"  {first:<{width}}  {figures}")
        lines += [f"  {line}" for line in rest]
    return lines


def _gain(advice: Advice, decision: Decision) -> str:
    if advice.gain == float("inf"):
        return f"{'runs':<10}"
    unit = "seq/s" if advice.decision.problem.batch != decision.problem.batch else "speed"
    return f"{advice.gain:>5.3g}x {unit}"


def _verdict_data(found: Verdict) -> dict[str, Any]:
    return {
        "kernel": found.kernel,
        "accepted": found.accepted,
        "algorithm": found.algorithm,
        "seconds": found.seconds,
        "measured": found.measured,
        "peak_bytes": found.peak_bytes,
        "refusals": [_refusal_data(refusal) for refusal in found.refusals],
    }


def _refusal_data(refusal: Refusal) -> dict[str, str]:
    return {
        "quantity": refusal.quantity,
        "actual": refusal.actual,
        "allowed": refusal.allowed,
        "advice": refusal.advice,
    }
