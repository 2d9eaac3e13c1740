"""Running settings: each several times, interleaved with others."""

from __future__ import annotations

import dataclasses
import random
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from gatewise.contract.errors import KernelRefused
from gatewise.kernels import ALL
from gatewise.testing.trials.call import Call, call_of, rounding_of
from gatewise.testing.trials.draw import DTYPES, draw, families, sizes
from gatewise.testing.trials.memory import fill_free_memory
from gatewise.testing.trials.setting import Setting
from gatewise.testing.trials.tensors import make, write_over
from gatewise.testing.trials.times import Times
from gatewise.testing.trials.verdict import Judge

_BESIDE_EACH_OTHER = 3
_CALLS_BEFORE_CHANGE = 2


class Wrong(AssertionError):
    """A call's result exceeds its error budget, or a call failed.

    Attributes:
        setting: The setting of the call.
        lines: A description of each error, one line each.
    """

    def __init__(self, setting: Setting, lines: Sequence[str]) -> None:
        super().__init__("\n  ".join([str(setting), *lines]))
        self.setting, self.lines = setting, list(lines)


class Refused(Exception):
    """The kernel that a setting names cannot run it, so that nothing was tested."""


class Outcome(NamedTuple):
    """The outcome of a setting.

    Attributes:
        setting: The setting.
        lines: A description of each error, one line each; empty if there is none.
        refused: Whether the named kernel refused the setting.
        unjudged: The number of tensors that could not be checked, because PyTorch's own error is infinite.
        seconds: The seconds that the setting took, for each of `times.PARTS`.
        selected_otherwise: Whether results are right only for the other choice of selections between nearly equal
            numbers; see `Budget.select_otherwise`.
    """

    setting: Setting
    lines: tuple[str, ...] = ()
    refused: bool = False
    unjudged: int = 0
    seconds: Mapping[str, float] = {}
    selected_otherwise: bool = False

    @property
    def kind(self) -> str:
        """The type of the error that a call raised; "wrong" for a wrong result, empty if there is none."""
        if not self.lines:
            return ""
        return "wrong" if self.lines[0].startswith("call ") else self.lines[0].partition(":")[0]


class _Trial:
    """The calls of one setting."""

    def __init__(self, setting: Setting, reference: str, times: Times) -> None:
        self.setting, self._reference, self._times = setting, reference, times
        with times.spent_on("inputs"):
            self._tensors, asked = make(setting)
        self._judge = Judge(setting, asked, reference)
        self._call: Call = call_of(setting, self._tensors)
        self._pending: list = []
        self.left = setting.calls

    @property
    def unjudged(self) -> int:
        """The number of tensors of the last call that could not be checked."""
        return self._judge.unjudged

    @property
    def selected_otherwise(self) -> bool:
        """Whether results are right only for the other choice of selections."""
        return self._judge.selected_otherwise

    def step(self) -> list[str]:
        """Run one call, or one pass of it; return descriptions of errors."""
        setting = self.setting
        if setting.changes and setting.calls - self.left == _CALLS_BEFORE_CHANGE:
            with self._times.spent_on("inputs"):
                others, asked = make(dataclasses.replace(setting, seed=setting.seed + 1))
                write_over(self._tensors, others)
            self._judge = Judge(setting, asked, self._reference)
        # The first call of a compiled layer compiles it.
        compiles = setting.mode == "compile" and self.left == setting.calls and not self._pending
        with rounding_of(setting), self._times.spent_on("compilation" if compiles else "calls"):
            fill_free_memory(torch.device(setting.device))
            if setting.together and len(self._pending) < self.left:
                self._pending.append(self._call.forward())
                return []
            self.left -= 1
            pending = self._pending.pop() if self._pending else self._call.forward()
            if self.left % 2:
                fill_free_memory(torch.device(setting.device))
            found = self._call.backward(pending)
        with self._times.spent_on("reference"):
            lines = self._judge.complaints(found)
        return [f"call {setting.calls - self.left}: {line}" for line in lines]


def trial(*settings: Setting, reference: str = "auto") -> None:
    """Run the calls of settings in turn and compare each with float64.

    Args:
        *settings: The settings.
        reference: The device of the float64 reference: "cpu", "gpu", or "auto" for the faster one.

    Raises:
        Wrong: A call's result exceeds its budget, or a call failed.
        Refused: A named kernel refused its setting.
    """
    for outcome in outcomes_of(settings, reference):
        if outcome.refused:
            raise Refused(str(outcome.setting))
        if outcome.lines:
            raise Wrong(outcome.setting, outcome.lines)


def outcomes_of(
    settings: Sequence[Setting], reference: str = "auto", at: Callable[[Setting], object] = lambda setting: None
) -> list[Outcome]:
    """Return the outcomes of settings whose calls are run in turn.

    Args:
        settings: The settings.
        reference: As in `trial`.
        at: A function that is called with a setting before its tensors are made, and before each of its calls.
    """
    times = [Times() for _ in settings]
    found: dict[int, Outcome] = {}
    running: dict[int, _Trial] = {}

    def tried(number: int, work: Callable[[], list[str]]) -> None:
        at(settings[number])
        try:
            lines = work()
        # Any exception of a call is a finding.
        except Exception as error:  # noqa: BLE001
            if _is_refusal(error):
                found[number] = Outcome(settings[number], refused=True)
            else:
                found[number] = Outcome(settings[number], (_said(error),))
        else:
            if lines:
                found[number] = Outcome(settings[number], tuple(lines))

    for number, setting in enumerate(settings):

        def begin(number: int = number, setting: Setting = setting) -> list[str]:
            running[number] = _Trial(setting, reference, times[number])
            return []

        tried(number, begin)
    while any(number not in found and own.left for number, own in running.items()):
        for number, own in running.items():
            if number not in found and own.left:
                tried(number, own.step)
    for number in running.keys() - found.keys():
        own = running[number]
        found[number] = Outcome(settings[number], unjudged=own.unjudged, selected_otherwise=own.selected_otherwise)
    return [found[number]._replace(seconds=dict(spent.seconds)) for number, spent in enumerate(times)]


def _said(error: BaseException) -> str:
    """Return type and text of an error, and of its first cause: ending a failed capture raises another error."""
    first = error
    while first.__context__ is not None:
        first = first.__context__
    said = f"{type(error).__name__}: {str(error)[:200]}"
    where = traceback.extract_tb(first.__traceback__)[-1] if first.__traceback__ else None
    place = f" at {where.filename}:{where.lineno}" if where else ""
    return said if first is error else f"{said} (first {type(first).__name__}: {str(first)[:200]}{place})"


def _is_refusal(error: BaseException) -> bool:
    # torch.compile wraps exceptions that are raised during tracing, and keeps only their text.
    return isinstance(error, KernelRefused) or "KernelRefused(" in str(error)


def trials(
    device: str,
    seed: int,
    seconds: float,
    most: int = 0,
    sizes_seed: int | None = None,
    *,
    reference: str = "auto",
    begun: Callable[[Sequence[Setting]], object] = lambda settings: None,
    at: Callable[[Setting], object] = lambda setting: None,
) -> Iterator[Outcome]:
    """Draw settings and run them, a few interleaved at a time, until the time is up.

    Args:
        device: "cpu" or "cuda".
        seed: The seed of the settings; the same seed gives the same settings, in the same order.
        seconds: The time after which no new settings are started.
        most: The number of settings after which no new ones are started; 0 for any number.
        sizes_seed: The seed of the sizes to draw from, and on a GPU of the families of settings that share compiled
            kernels; None means the seed of the settings.
        reference: As in `trial`.
        begun: A function that is called with settings before they are run.
        at: A function that is called with one of them before its tensors are made, and before each of its calls.
    """
    generator = random.Random(seed)
    kernels = [kernel.name for kernel in ALL]
    if device == "cpu":
        kernels = ["aten", "eager"]
    shared = seed if sizes_seed is None else sizes_seed
    drawn_from, own_families = sizes(shared, device), families(shared, device, kernels)
    end, tried = time.monotonic() + seconds, 0
    while time.monotonic() < end and (not most or tried < most):
        beside = []
        for _ in range(_BESIDE_EACH_OTHER):
            like = generator.choice(own_families) if own_families else None
            beside.append(draw(generator, device, kernels, DTYPES[device], drawn_from, like))
        begun(beside)
        for outcome in outcomes_of(beside, reference, at):
            tried += not outcome.refused
            yield outcome
