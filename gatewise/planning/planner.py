"""The planner, which finds a memory plan for a model, batches and a budget, or the batch size that fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from gatewise.contract.decision import format_bytes
from gatewise.contract.device import Device
from gatewise.contract.errors import OutOfMemoryPredicted, sentence
from gatewise.models import Seq2Seq
from gatewise.planning.budget import AUTO, bytes_of
from gatewise.planning.choose import Choice, Shape, choices, least, within
from gatewise.planning.echo import NEARLY_FREE
from gatewise.planning.plan import Plan
from gatewise.planning.translation.step import training_step
from gatewise.training.options import TrainingOptions

_LARGEST = 1 << 24


@dataclasses.dataclass(frozen=True, slots=True)
class Batching:
    """The batches of a training run, described such that other batch sizes can be tried.

    Attributes:
        name: The name of the option for the batch size.
        size: The value of that option.
        shapes: A function that returns the shapes of the batches for a given size: those that occur, or the extreme
            ones among them.
        smallest: The smallest size for which there is a batch.
    """

    name: str
    size: int
    shapes: Callable[[int], Sequence[Shape]]
    smallest: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Planner:
    """Plans the training of a model on a device.

    Attributes:
        model: The model, which may be on the device "meta".
        training: The training options, of which precision, optimizer and weight averaging matter.
        device: The device of the training.
        processes: The number of processes.
        text_bytes: The size in bytes of the training text on the device.
    """

    model: Seq2Seq
    training: TrainingOptions
    device: Device
    processes: int = 1
    text_bytes: int = 0

    def plan(self, batching: Batching, budget: str = AUTO) -> Plan:
        """Return the fastest way to train within a memory budget.

        With "auto" the budget is the memory of the device, where CUDA graphs and eager steps count separately; and on
        a GPU, memory is also saved beyond the budget's need if that costs almost no time.

        Args:
            batching: The batches.
            budget: The budget; see `gatewise.planning.budget.bytes_of`.

        Raises:
            OutOfMemoryPredicted: No combination fits into the budget; the message has the smallest sufficient budget
                and the largest batch size that fits.
            ArgumentError: The budget is not valid.
            KernelRefused: The kernel that the model names cannot run a batch.
        """
        room = bytes_of(budget, self.device)
        found = self._choices(batching.size, batching)
        chosen = within(found, room, twice=self._twice(batching.size, batching, budget))
        if chosen is None:
            raise OutOfMemoryPredicted(self._refusal(found, batching, budget, room or 0))
        if budget == AUTO and self.device.kind == "cuda":
            cheap = [each for each in found if each.seconds <= (1 + NEARLY_FREE) * chosen.seconds]
            chosen = min(cheap, key=lambda each: each.peak.bytes)
        return Plan(chosen, room, budget, found[0].seconds)

    def largest(self, batching: Batching, budget: str = AUTO) -> int:
        """Return a batch size that fits into a budget, where one that is larger by at most 1/256 does not.

        That is the largest one, except that the memory of a plan falls by up to a few percent where other kernels
        become the fastest at a larger size: some sizes that are so much larger may fit, and some smaller ones may not.

        Args:
            batching: The batches; the search begins with their size.
            budget: The budget; see `gatewise.planning.budget.bytes_of`.

        Returns:
            The batch size; 0 if not even the smallest fits, or the memory size of the device is unknown.
        """
        room = bytes_of(budget, self.device)

        def fits(size: int) -> bool:
            return within(self._choices(size, batching), room, twice=self._twice(size, batching, budget)) is not None

        if room is None or not fits(batching.smallest):
            return 0
        low, high = batching.smallest, max(2 * batching.smallest, batching.size)
        while high < _LARGEST and fits(high):
            low, high = high, 2 * high
        # Three digits are enough: the predictions are no more accurate.
        while high - low > max(1, low // 256):
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def _choices(self, size: int, batching: Batching) -> list[Choice]:
        return choices(
            training_step(
                self.model, shape, self.training, self.device, processes=self.processes, text_bytes=self.text_bytes
            )
            for shape in extremes(batching.shapes(size))
        )

    def _twice(self, size: int, batching: Batching, budget: str) -> bool:
        """Return whether CUDA graphs and eager steps hold memory of their own, both of which the device must fit."""
        graphs = self.training.cuda_graph and self.device.kind == "cuda"
        return budget == AUTO and graphs and len(batching.shapes(size)) > 1

    def _refusal(self, found: Sequence[Choice], batching: Batching, budget: str, room: int) -> str:
        smallest, largest = least(found), self.largest(batching, budget)
        twice = self._twice(batching.size, batching, budget)
        needs = f"at least {_rounded_up(smallest.needs(twice=twice))} for these batches ({smallest.step.shape})"
        got = f"{format_bytes(room)} ({budget})"
        if largest:
            advice = f"Raise it, or lower `{batching.name}` from {batching.size:,} to {largest:,}, the most that fits."
        else:
            alone = least(self._choices(batching.smallest, batching)).peak.bytes
            remedy = "use a smaller model" if budget == AUTO else "raise the budget, or use a smaller model"
            advice = f"The smallest possible batch needs {_rounded_up(alone)}: {remedy}."
        return sentence("memory_budget", needs, got, advice)


def extremes(shapes: Iterable[Shape]) -> list[Shape]:
    """Return the shapes that may need most memory, and those whose size may make a kernel refuse."""
    shapes = list(shapes)
    measures: tuple[Callable[[Shape], int], ...] = (
        lambda shape: shape.source * shape.batch,
        lambda shape: shape.target * shape.batch,
        lambda shape: (shape.source + shape.target) * shape.batch,
        lambda shape: shape.source * shape.target * shape.batch,
        lambda shape: shape.batch,
        lambda shape: -shape.batch,
        lambda shape: -shape.target,
    )
    return sorted({max(shapes, key=measure) for measure in measures})


def _rounded_up(count: int) -> str:
    """Return a size as text, rounded up so that the printed size is sufficient."""
    unit = 1 << 20
    return format_bytes(-(-count // unit) * unit)
