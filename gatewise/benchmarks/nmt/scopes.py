"""The parts of a training step as named ranges of PyTorch's profiler, and the assignment of allocations to them.

Inside the context `scoped`, each function of `_SCOPES` runs in the range of its part. An allocation belongs to the
innermost range around it. Allocations in the backward pass of a `torch.autograd.Function` belong to the range in which
it was called, unless another range is around them; allocations by autograd's own operators belong to no part.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch._C._profiler import _ExtraFields_Allocation, _ExtraFields_TorchOp, _ProfilerEvent
from torch.profiler import ProfilerActivity, profile, record_function

from gatewise import attention, feeding, nn
from gatewise.benchmarks.nmt.parts import ATTENTION, BACKWARD, LSTM, OTHER, OUTPUT
from gatewise.benchmarks.nmt.rival import PlainSeq2Seq
from gatewise.benchmarks.nmt.rival_attention import AdditiveAttention
from gatewise.models import Seq2Seq, seq2seq

# The part, the object with the functions, and their names.
_SCOPES: tuple[tuple[str, object, tuple[str, ...]], ...] = (
    (ATTENTION, nn.Attention, ("forward", "keys")),
    (ATTENTION, AdditiveAttention, ("forward", "keys")),
    # The decoder's loop calls these in each step of both passes.
    (ATTENTION, attention, ("new_steps", "attend_step", "new_gathering", "query_gradient_step", "source_gradients")),
    (LSTM, feeding, ("attended_outputs",)),
    (LSTM, nn.LSTM, ("forward",)),
    (LSTM, torch.nn.LSTM, ("forward",)),
    (LSTM, torch.nn.LSTMCell, ("forward",)),
    (OUTPUT, seq2seq, ("weighted_token_loss",)),
    (OUTPUT, PlainSeq2Seq, ("loss",)),
    # All other work of the models.
    (OTHER, Seq2Seq, ("loss",)),
    (OTHER, PlainSeq2Seq, ("forward",)),
)
_PREFIX = "gatewise.benchmarks part "
_BACKWARD_NODE = "Backward"  # the suffix of the backward node of a `torch.autograd.Function`

Applied = Mapping[tuple[str, int], str]
"""The parts by the name of an operator and the sequence number of its autograd node."""


class Allocation(NamedTuple):
    """An action of the allocator.

    Attributes:
        address: The address of the memory.
        size: The number of bytes; negative for a release.
        part: The part of an allocation.
    """

    address: int
    size: int
    part: str


def allocations(step: Callable[[], object], device: torch.device) -> list[Allocation]:
    """Run a step inside `scoped`, and return its allocations and releases on a device, in order."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recording, scoped():
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    assert recording.profiler is not None
    assert recording.profiler.kineto_results is not None
    return allocations_of(recording.profiler.kineto_results.experimental_event_tree(), device)


@contextlib.contextmanager
def scoped() -> Iterator[None]:
    """Run the functions of each part in the range of the part."""
    with contextlib.ExitStack() as before:
        for part, owner, names in _SCOPES:
            for name in names:
                function = vars(owner)[name]
                before.callback(setattr, owner, name, function)
                setattr(owner, name, _within(part, function))
        yield


def _within(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inside(*given: Any, **options: Any) -> Any:
        with record_function(_PREFIX + part):
            return function(*given, **options)

    return inside


def allocations_of(roots: Iterable[_ProfilerEvent], device: torch.device) -> list[Allocation]:
    """Return the allocations on a device in a profile, in order.

    Args:
        roots: The top-level events of the profile.
        device: The device; without an index, the current one.
    """
    roots = list(roots)
    applied: dict[tuple[str, int], str] = {}
    for event, part in _with_parts(roots, {}):
        _, details = event.typed
        if isinstance(details, _ExtraFields_TorchOp):
            applied[event.name, details.sequence_number] = part
    index = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index
    found: list[tuple[int, Allocation]] = []
    for event, part in _with_parts(roots, applied):
        _, details = event.typed
        if isinstance(details, _ExtraFields_Allocation):
            where, address = details.device, details.ptr
            if (where.type, where.index) == (device.type, index) and address is not None:
                found.append((event.start_time_ns, Allocation(address, details.alloc_size, part)))
    # A backward pass in another thread has its own tree of events.
    return [allocation for _, allocation in sorted(found, key=lambda each: each[0])]


def _with_parts(roots: Iterable[_ProfilerEvent], applied: Applied) -> Iterator[tuple[_ProfilerEvent, str]]:
    """Yield every event with the part to which it belongs; the events of a thread are in order."""
    waiting = [(root, BACKWARD) for root in roots][::-1]
    while waiting:
        event, part = waiting.pop()
        _, details = event.typed
        if event.name.startswith(_PREFIX):
            part = event.name.removeprefix(_PREFIX)
        elif isinstance(details, _ExtraFields_TorchOp) and event.name.endswith(_BACKWARD_NODE):
            part = applied.get((event.name.removesuffix(_BACKWARD_NODE), details.sequence_number), part)
        yield event, part
        waiting += [(child, part) for child in reversed(event.children)]
