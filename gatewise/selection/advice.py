"""What would make a call faster, and how large it could be: a small search over neighbouring problems.

Everything here is predicted: nothing runs, and the answer is a pure function of problem and device.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch

from gatewise.contract.decision import Decision
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.selection.choose import decide_by_prediction
from gatewise.selection.preference import AUTO

_WORTH_SAYING = 1.05  # smaller gains are within what predictions miss
_ALIKE = 1.02  # of gains so near to each other the change that is tried first is named
_USABLE = 0.9  # of a device's memory; the rest goes to the CUDA context, the allocator's gaps and libraries
_LARGEST_BATCH = 1 << 24

_SHORT = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_NARROWER = {
    torch.float64: (torch.float32,),
    torch.float32: (torch.bfloat16, torch.float16),
    torch.bfloat16: (torch.float16,),
    torch.float16: (torch.bfloat16,),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """One difference between a call and a neighbouring one.

    Attributes:
        quantity: What changes: "batch", "hidden_size", "dtype", ...
        text: The change as it is shown: "B 20 -> 24".
        problem: Fields of the problem, and their new values.
        device: Fields of the device, and their new values.
    """

    quantity: str
    text: str
    problem: tuple[tuple[str, object], ...] = ()
    device: tuple[tuple[str, object], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Advice:
    """A neighbouring call that is predicted to be faster.

    Attributes:
        changes: What to change, all of it together.
        decision: The decision on the changed call.
        gain: Sequences per second against the call as it is; infinite where the named kernel refused that one.
    """

    changes: tuple[Change, ...]
    decision: Decision
    gain: float

    @property
    def quantities(self) -> frozenset[str]:
        """What changes."""
        return frozenset(change.quantity for change in self.changes)

    def __str__(self) -> str:
        """The changes: "B 20 -> 24, fp32 -> bf16"."""
        return ", ".join(change.text for change in self.changes)


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """Predicted memory of a call, in bytes.

    Attributes:
        weights: The parameters.
        inputs: x and the initial states.
        peak: What the call adds at its peak: outputs, what is kept for backward, workspace, gradients.
    """

    weights: int
    inputs: int
    peak: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.inputs + self.peak


def advise(problem: Problem, device: Device, kernel: str = AUTO) -> tuple[Advice, ...]:
    """Return the changes of shape, dtype or layout that are predicted to help most.

    Looked at are the neighbours of a problem: sizes rounded to what hardware likes, narrower dtypes, other layouts, a
    package that is missing, and some of these together. A larger batch counts by its sequences per second; a smaller
    hidden size must gain more than it gives up in work.

    Args:
        problem: The call.
        device: Where it runs.
        kernel: The kernel that is insisted on, or "auto".

    Returns:
        Changes that help alone, the best first; then at most two sets of changes that help only together, or much more.
    """
    if problem.time * problem.batch == 0:
        return ()
    now = _seconds_a_sequence(decide_by_prediction(problem, device, kernel), problem)
    changes = list(_changes(problem, device))
    singles = _tried(((change,) for change in changes), problem, device, kernel, now)
    best = sorted(_best_of_each(singles), key=_by_gain)
    leading = [found.changes[0] for found in best]
    together = itertools.chain(
        (pair for pair in itertools.combinations(leading, 2) if pair[0].quantity != pair[1].quantity),
        _all_aligned(changes, problem),
    )
    # Changes are worth naming together only where fewer kinds of them do much less.
    tried, combined = list(singles), []
    for found in _tried(together, problem, device, kernel, now):
        if found.gain > 1.1 * max((one.gain for one in tried if one.quantities < found.quantities), default=1.0):
            combined.append(found)
        tried.append(found)
    return (*best, *sorted(_best_of_each(combined), key=_by_gain)[:2])


def memory(decision: Decision) -> Memory | None:
    """Return the predicted memory of the kernel that was chosen; None when none was."""
    if decision.chosen is None:
        return None
    problem = decision.problem
    states = problem.num_layers * problem.num_directions * problem.batch * (problem.state_size + problem.hidden_size)
    return Memory(
        weights=problem.parameter_count * problem.element_bytes,
        inputs=(problem.time * problem.batch * problem.input_size + states) * problem.element_bytes,
        peak=decision.verdict(decision.chosen).peak_bytes or 0,
    )


def largest_batch(problem: Problem, device: Device, kernel: str = AUTO) -> int:
    """Return the largest batch whose predicted memory fits on the device, with the kernel that would be chosen there.

    90 % of the device's memory count as usable, for this layer alone: a model has other layers, and an optimizer's
    state.

    Args:
        problem: The call; its batch is where the search starts.
        device: Where it runs.
        kernel: The kernel that is insisted on, or "auto".

    Returns:
        The batch; 0 when not even one sequence fits, or the device's memory is unknown.
    """
    room = _USABLE * device.memory_bytes

    def fits(batch: int) -> bool:
        found = memory(decide_by_prediction(problem.replace(batch=batch), device, kernel))
        return found is not None and found.total <= room

    if not fits(1):
        return 0
    low, high = 1, max(2, problem.batch)
    while high < _LARGEST_BATCH and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _seconds_a_sequence(decision: Decision, problem: Problem) -> float:
    if decision.chosen is None:
        return float("inf")
    return (decision.verdict(decision.chosen).seconds or 0.0) / max(problem.batch, 1)


def _by_gain(advice: Advice) -> tuple[float, int]:
    return -advice.gain, len(advice.changes)


def _tried(
    candidates: Iterable[Sequence[Change]], problem: Problem, device: Device, kernel: str, now: float
) -> list[Advice]:
    found = []
    for changes in candidates:
        changed = problem.replace(**dict(field for change in changes for field in change.problem))
        there = device.replace(**dict(field for change in changes for field in change.device))
        decision = decide_by_prediction(changed, there, kernel)
        needed = memory(decision)
        if needed is None or (device.memory_bytes and needed.total > _USABLE * device.memory_bytes):
            continue
        gain = now / _seconds_a_sequence(decision, changed)
        # A smaller layer is faster by its smaller work alone; that is no advice.
        less_work = (problem.matmul_flops / problem.batch) / (changed.matmul_flops / changed.batch)
        if gain >= _WORTH_SAYING * max(1.0, less_work):
            found.append(Advice(tuple(changes), decision, gain))
    return found


def _best_of_each(found: Sequence[Advice]) -> list[Advice]:
    # Of every kind of change the best, and of larger batches the nearest as well.
    kinds: dict[frozenset[str], list[Advice]] = {}
    for advice in found:
        kinds.setdefault(advice.quantities, []).append(advice)
    best = []
    for kind, several in kinds.items():
        most = max(advice.gain for advice in several)
        first = next(advice for advice in several if advice.gain * _ALIKE >= most)
        best += [several[0], first] if kind == {"batch"} and several[0] is not first else [first]
    return best


def _changes(problem: Problem, device: Device) -> Iterator[Change]:
    for multiple in (8, 16, 32, 64):
        yield from _resized("batch", "B", problem.batch, _up(problem.batch, multiple), max(8, 2 * problem.batch))
    for multiple in (8, 32, 64, 128):
        largest = problem.hidden_size * 9 // 8
        yield from _resized("hidden_size", "H", problem.hidden_size, _up(problem.hidden_size, multiple), largest)
    below = range(problem.hidden_size - 1, max(problem.proj_size, problem.hidden_size * 7 // 8), -1)
    for size in (size for size in below if size % 32 == 0):
        yield from _resized("hidden_size", "H", problem.hidden_size, size, problem.hidden_size)
    for multiple in (8, 128):
        largest = max(8, problem.input_size * 5 // 4)
        yield from _resized("input_size", "I", problem.input_size, _up(problem.input_size, multiple), largest)
    for dtype in _NARROWER.get(problem.dtype, ()):
        text = f"{_SHORT[problem.dtype]} -> {_SHORT[dtype]}"
        allowed = device.kind == "cuda" and dtype == torch.float32
        yield Change("dtype", text, (("dtype", dtype), ("allow_tf32", allowed)))
    if device.kind == "cuda" and problem.dtype == torch.float32 and not problem.allow_tf32:
        yield Change("TF32", "torch.backends.cudnn.allow_tf32 = True", (("allow_tf32", True),))
    if problem.proj_size:
        yield Change("proj_size", f"P {problem.proj_size} -> 0", (("proj_size", 0),))
    if problem.layout is Layout.DEVICE_LENGTHS:
        yield Change("layout", "lengths.cpu() once a batch", (("layout", Layout.HOST_LENGTHS),))
    elif problem.layout is not Layout.DENSE and device.kind == "cuda":
        yield Change("layout", "lengths= on the GPU", (("layout", Layout.DEVICE_LENGTHS),))
    if device.kind == "cuda" and not device.compiles:
        yield Change("packages", "pip install 'gatewise[cuda]'", device=(("compiles", True),))


def _resized(quantity: str, letter: str, before: int, after: int, largest: int) -> Iterator[Change]:
    if 0 < after <= largest and after != before:
        yield Change(quantity, f"{letter} {before} -> {after}", ((quantity, after),))


def _all_aligned(changes: Sequence[Change], problem: Problem) -> Iterator[tuple[Change, ...]]:
    # Library kernels with a list of demands want all of them met at once: every size rounded up to what they like.
    largest: dict[str, Change] = {}
    for change in changes:
        name, value = change.problem[0] if change.problem else ("", 0)
        if name in ("hidden_size", "input_size") and isinstance(value, int):
            if value % 128 == 0 and value > getattr(problem, name):
                largest[name] = change
        elif name == "batch":
            largest.setdefault(name, change)
    dtypes = [(change,) for change in changes if change.quantity == "dtype"]
    for dtype in [(), *dtypes]:
        together = (*dtype, *largest.values())
        if len(together) > 1:
            yield together


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
