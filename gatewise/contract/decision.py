"""Which kernel runs a problem, and why: the value that `gatewise.explain` returns, printed in at most 80 columns."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable

from gatewise.contract.criterion import Refusal
from gatewise.contract.device import Device
from gatewise.contract.kernel import Work
from gatewise.contract.problem import Problem

_COLUMNS = 80


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """The refusals of one kernel, or its predicted time and memory.

    Attributes:
        kernel: The name of the kernel.
        summary: The description of the kernel, in one line.
        algorithm: The algorithm that the kernel would use for this problem; may be empty.
        refusals: All criteria that are not met; empty if the kernel can run the problem.
        work: The work of the call; None if the kernel refuses.
        seconds: The predicted (or measured) time of the call; None if the kernel refuses.
        memory: The function that predicts `peak_bytes`; None if the kernel refuses. It is called when the memory is
            asked for, as predictions of memory can take longer than those of times.
        measured: Whether `seconds` was measured on this device.
        known: Whether the prediction rests on calls of this kernel, in the same precision and pass, that were measured
            on this device; otherwise it is estimated from the properties of the device alone.
    """

    kernel: str
    summary: str
    algorithm: str = ""
    refusals: tuple[Refusal, ...] = ()
    work: Work | None = None
    seconds: float | None = None
    memory: Callable[[], int] | None = dataclasses.field(default=None, compare=False, repr=False)
    measured: bool = False
    known: bool = False

    @property
    def accepted(self) -> bool:
        """Whether the kernel can run the problem."""
        return not self.refusals

    @property
    def peak_bytes(self) -> int | None:
        """The predicted peak memory in addition to inputs and weights; None if the kernel refuses."""
        return None if self.memory is None else self.memory()


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """The verdicts of all kernels on one problem, and the kernel that runs.

    Attributes:
        problem: The problem.
        device: The device of the call.
        verdicts: The verdict of each kernel, in the order of `gatewise.kernel_names()`.
        chosen: The name of the kernel that runs; None if the named kernel refuses, if no kernel fits into the memory
            budget, or if a stream refuses to be captured in a CUDA graph.
        reason: The reason for the choice, in a few words.
        passed_over: The name of the kernel that would run without a memory budget; empty if the budget did not change
            the choice.
    """

    problem: Problem
    device: Device
    verdicts: tuple[Verdict, ...]
    chosen: str | None
    reason: str
    passed_over: str = ""

    def verdict(self, kernel: str) -> Verdict:
        """Return the verdict of one kernel."""
        return next(verdict for verdict in self.verdicts if verdict.kernel == kernel)

    @property
    def evidence(self) -> str:
        """What the times rest on, in a few words."""
        where = "GPU" if self.device.kind == "cuda" else "CPU"
        accepted = [verdict for verdict in self.verdicts if verdict.accepted]
        if accepted and all(verdict.measured for verdict in accepted):
            return f"measured on this {where}"
        guessed = [verdict.kernel for verdict in accepted if not (verdict.known or verdict.measured)]
        if len(guessed) == len(accepted):
            return f"estimated, not measured on this {where}"
        predicted = f"predicted from measured calls on this {where}"
        return predicted + (f"; {', '.join(guessed)}: estimated, not measured" if guessed else "")

    def __str__(self) -> str:
        """Return a report of at most 80 columns."""
        head = [
            *wrapped("problem  ", str(self.problem)),
            *wrapped("device   ", self._device_line()),
            *wrapped("chosen   ", f"{self.chosen or 'none'} ({self.reason})"),
            *wrapped("times    ", self.evidence),
        ]
        width = max(len(verdict.kernel) for verdict in self.verdicts)
        body = [line for verdict in self.verdicts for line in self._verdict_lines(verdict, width)]
        return "\n".join([*head, "", *body])

    def _device_line(self) -> str:
        device = self.device
        if device.kind == "cpu":
            return device.name
        cudnn = f", cuDNN {format_cudnn(device.cudnn_version)}" if device.cudnn_version else ", no cuDNN"
        return f"{device.name} ({device.architecture}, {device.multiprocessors} multiprocessors{cudnn})"

    def _verdict_lines(self, verdict: Verdict, width: int) -> list[str]:
        mark = "*" if verdict.kernel == self.chosen else " "
        lead = f"{mark} {verdict.kernel:<{width}}  "
        if not verdict.accepted:
            lines = wrapped(lead, f"refused  {verdict.summary}")
        else:
            how = "measured" if verdict.measured else "predicted"
            figures = f"{format_seconds(verdict.seconds)} {how}, {format_bytes(verdict.peak_bytes)}"
            lines = wrapped(lead, f"accepted  {figures}  {verdict.algorithm or verdict.summary}")
        indent = " " * (len(lead) + 2)
        for refusal in verdict.refusals:
            lines += textwrap.wrap(
                str(refusal), _COLUMNS, initial_indent=indent + "- ", subsequent_indent=indent + "  "
            )
        return lines


def format_cudnn(version: int) -> str:
    """Format cuDNN's version number: 91900 is 9.19.0, 8902 is 8.9.2."""
    scale = 10000 if version >= 90000 else 1000
    return f"{version // scale}.{version % scale // 100}.{version % 100}"


def format_seconds(seconds: float | None) -> str:
    """Format a time with three digits, in seconds, milliseconds or microseconds."""
    if seconds is None:
        return "?"
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def format_bytes(count: int | None) -> str:
    """Format a size with three digits, in the binary unit that fits."""
    if count is None:
        return "?"
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"


def wrapped(lead: str, text: str) -> list[str]:
    """Return the lines of a text behind a lead, of at most 80 columns; further lines are indented by its length."""
    return textwrap.wrap(text, _COLUMNS, initial_indent=lead, subsequent_indent=" " * len(lead))
