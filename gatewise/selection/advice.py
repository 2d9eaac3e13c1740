"""Advice on faster calls and on the largest batch: a small search over problems similar to the given one.

Everything here is predicted: nothing runs, and the result depends only on the problem and the device.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch

from gatewise.contract.decision import Decision
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.selection.choose import decide_by_prediction
from gatewise.selection.preference import AUTO

_WORTH_SAYING = 1.05  # smaller gains are within the error of the predictions
_ALIKE = 1.02  # among gains that differ by less, the change that is tried first is named
_USABLE = 0.9  # of the device's memory; the rest is for the CUDA context, fragmentation and libraries
LARGEST_BATCH = 1 << 24  # larger ones are not looked for
_ALIGNED = 8  # kernels are as fast for all multiples of it, and slower for other batches

_SHORT = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_NARROWER = {
    torch.float64: (torch.float32,),
    torch.float32: (torch.bfloat16, torch.float16),
    torch.bfloat16: (torch.float16,),
    torch.float16: (torch.bfloat16,),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """One difference between a call and a similar one.

    Attributes:
        quantity: The quantity that changes: "batch", "hidden_size", "dtype", "replay", ...
        text: The change as it is printed: "B 20 -> 24".
        problem: The fields of the problem that change, with their new values.
        device: The fields of the device that change, with their new values.
    """

    quantity: str
    text: str
    problem: tuple[tuple[str, object], ...] = ()
    device: tuple[tuple[str, object], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Advice:
    """A change of a call that is predicted to make it faster.

    Attributes:
        changes: The changes, to be made together.
        decision: The decision for the changed call.
        gain: The number of sequences per second, relative to the original call; infinite if the named kernel refused
            the original call.
    """

    changes: tuple[Change, ...]
    decision: Decision
    gain: float

    @property
    def quantities(self) -> frozenset[str]:
        """The quantities that change."""
        return frozenset(change.quantity for change in self.changes)

    def __str__(self) -> str:
        """Return the changes as text: "B 20 -> 24, fp32 -> bf16"."""
        return ", ".join(change.text for change in self.changes)


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """The predicted memory of a call, in bytes.

    Attributes:
        weights: The size of the parameters.
        inputs: The size of x and of the initial states.
        peak: The peak of all other memory: outputs, tensors kept for the backward pass, workspace, gradients.
    """

    weights: int
    inputs: int
    peak: int

    @property
    def total(self) -> int:
        """The sum of all sizes."""
        return self.weights + self.inputs + self.peak


def advise(problem: Problem, device: Device, kernel: str = AUTO) -> tuple[Advice, ...]:
    """Return the changes of shape, dtype, layout or of the way of calling with the largest predicted gains.

    The search tries sizes rounded to multiples that suit the hardware, narrower dtypes, other layouts, the replay of
    the call in a CUDA graph, the installation of a missing package, and combinations of these. The gain of a larger
    batch is that in sequences per second; the gain of a smaller hidden size must exceed the reduction of the work.

    Args:
        problem: The description of the call.
        device: The device of the call.
        kernel: The name of the kernel that must run, or "auto".

    Returns:
        The single changes with a gain, the largest gain first; then at most two combinations of changes that have no
        gain, or a much smaller one, alone.
    """
    if problem.time * problem.batch == 0:
        return ()
    now = _seconds_a_sequence(decide_by_prediction(problem, device, kernel), problem)
    changes = list(_changes(problem, device))
    singles = _tried(((change,) for change in changes), problem, device, kernel, now)
    best = sorted(_best_of_each(singles), key=_by_gain)
    leading = [found.changes[0] for found in best]
    together = itertools.chain(
        (pair for pair in itertools.combinations(leading, 2) if _go_together(*pair)),
        _all_aligned(changes, problem),
    )
    # A combination is reported only if its parts alone gain much less.
    tried, combined = list(singles), []
    for found in _tried(together, problem, device, kernel, now):
        if found.gain > 1.1 * max((one.gain for one in tried if one.quantities < found.quantities), default=1.0):
            combined.append(found)
        tried.append(found)
    return (*best, *sorted(_best_of_each(combined), key=_by_gain)[:2])


def memory(decision: Decision) -> Memory | None:
    """Return the predicted memory of the chosen kernel; None if no kernel was chosen."""
    return None if decision.chosen is None else _memory_with(decision, decision.chosen)


def _memory_with(decision: Decision, kernel: str) -> Memory:
    problem = decision.problem
    states = problem.num_layers * problem.num_directions * problem.batch * (problem.state_size + problem.hidden_size)
    return Memory(
        weights=problem.parameter_count * problem.element_bytes,
        inputs=(problem.time * problem.batch * problem.input_size + states) * problem.element_bytes,
        peak=decision.verdict(kernel).peak_bytes or 0,
    )


def largest_batch(problem: Problem, device: Device, kernel: str = AUTO) -> int:
    """Return the largest batch up to which every batch fits on the device, with the kernel that would be chosen for it.

    The memory of a call falls where another kernel becomes the fastest for a larger batch, or for one that is no
    multiple of 8. So some batches above the returned one may fit, and the next one does not. Batches below it are all
    tried up to 32, and from there on in steps of a sixteenth, for multiples of 8 and for others; or it is known that
    they fit because every kernel would.

    At most 90 % of the device's memory is used, and only this layer is counted: other layers and the optimizer's state
    are not.

    Args:
        problem: The description of the call; its batch does not matter.
        device: The device of the call.
        kernel: The name of the kernel that must run, or "auto".

    Returns:
        The batch size, at most 2^24; 0 if not even one sequence fits, or if the memory size of the device is unknown.
    """
    room = _USABLE * device.memory_bytes

    @functools.cache
    def decision(batch: int) -> Decision:
        return decide_by_prediction(problem.replace(batch=batch), device, kernel)

    def fits(batch: int) -> bool:
        sizes = {batch, batch - batch % _ALIGNED, batch - batch % _ALIGNED - 1}
        found = [memory(decision(size)) for size in sizes if size > 0]
        return all(each is not None and each.total <= room for each in found)

    def fits_surely(batch: int) -> bool:
        found = decision(batch)
        kernels = [each.kernel for each in found.verdicts if each.accepted and kernel in (AUTO, each.kernel)]
        return bool(kernels) and all(_memory_with(found, each).total <= room for each in kernels)

    low, high = 0, 1
    while high <= LARGEST_BATCH and fits_surely(high):
        low, high = high, 2 * high
    high = low + 1
    while low < LARGEST_BATCH and fits(high):
        low, high = high, high + max(1, high // 16)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return min(low, LARGEST_BATCH)


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
        # A smaller layer takes less time because it does less work; that alone is no gain.
        less_work = (problem.matmul_flops / problem.batch) / (changed.matmul_flops / changed.batch)
        if gain >= _WORTH_SAYING * max(1.0, less_work):
            found.append(Advice(tuple(changes), decision, gain))
    return found


def _best_of_each(found: Sequence[Advice]) -> list[Advice]:
    # The best change of each kind; for larger batches also the smallest change.
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
    replayable = not problem.captured and not problem.traced and problem.layout in (Layout.DENSE, Layout.DEVICE_LENGTHS)
    if device.kind == "cuda" and replayable:
        how = "gatewise.make_graphed_step" if problem.needs_grad else "in a CUDA graph"
        yield Change("replay", how, (("captured", True), ("announced", True)))
    if device.kind == "cuda" and not device.compiles:
        yield Change("packages", "pip install 'gatewise[cuda]'", device=(("compiles", True),))


def _go_together(one: Change, other: Change) -> bool:
    # A graph cannot read lengths on the CPU.
    return one.quantity != other.quantity and {one.quantity, other.quantity} != {"layout", "replay"}


def _resized(quantity: str, letter: str, before: int, after: int, largest: int) -> Iterator[Change]:
    if 0 < after <= largest and after != before:
        yield Change(quantity, f"{letter} {before} -> {after}", ((quantity, after),))


def _all_aligned(changes: Sequence[Change], problem: Problem) -> Iterator[tuple[Change, ...]]:
    # Kernels of libraries with several conditions need all of them met: round up all sizes together.
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
