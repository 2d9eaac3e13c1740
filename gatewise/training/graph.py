"""The training step as CUDA graphs, one for each shape of batch that repeats: captured once, replayed from then on."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gatewise.contract.capture import captured_graph, for_cuda_graph
from gatewise.training.carried import flatten, unflatten
from gatewise.training.processes import ALONE, Processes

WARMUPS = 3
"""Steps of one shape that run as usual before the capture, so that libraries, caches and moments are there."""

MOST_SHAPES = 64
"""Shapes that are captured, the first that repeat: those that are frequent. Others run step by step."""

TrainBatch = Callable[[Any, Any], tuple[torch.Tensor, Any]]
Work = Callable[[], None]
Capture = Callable[[Work], Work]
Signature = tuple[Any, ...]


def refusal(wanted: bool, processes: Processes) -> str:
    """Return why steps are not captured here, or nothing when they can be.

    Args:
        wanted: `TrainingOptions.cuda_graph`.
        processes: The processes that train together.
    """
    if processes.device.type != "cuda":
        return f"there are none on a {processes.device.type.upper()}"
    if not wanted:
        return "`cuda_graph` is off"
    return ""


def cuda_graph(work: Work, pool: Any = None, mode: str = "global") -> Work:
    """Record what a function would do on the current CUDA device, without doing it; return what does it.

    Args:
        work: What to record.
        pool: Memory that several graphs share, from `torch.cuda.graph_pool_handle`; None takes memory of its own.
        mode: As `capture_error_mode` of `torch.cuda.graph`.

    Raises:
        RuntimeError: The function does something that cannot be recorded, such as waiting for the device.
    """
    return captured_graph(work, pool=pool, mode=mode).replay


def cuda_graphs(processes: Processes = ALONE) -> Capture:
    """Return what records functions that never run at the same time, nor read what another one has left.

    They share one pool of memory, which grows to what the largest needs, not to the sum of all.

    Args:
        processes: Those that run the functions together.
    """
    # Among several, a thread of PyTorch's looks after their collectives meanwhile, which must not end a capture.
    mode = "global" if processes.count == 1 else "thread_local"
    return functools.partial(cuda_graph, pool=torch.cuda.graph_pool_handle(), mode=mode)


class ReplayedStep:
    """A step that is captured after a few batches of a shape and replayed for all further batches of that shape.

    A replay is one call for the CPU instead of hundreds, so that a step takes no longer than its kernels. The numbers
    are those of the step itself. Each shape that repeats is captured, up to `MOST_SHAPES`; batches of other shapes, and
    the first one, which has no state yet, run the step itself.

    A captured step repeats its device work and none of its Python: the model must do the same work for every batch of
    a shape.

    Several processes capture and replay at the same steps, as what they exchange within a graph must meet its like:
    their batches may have different shapes, and what counts as a shape here are those of all of them. They tell each
    other at every step, from host to host. What one of them cannot capture, none replays.

    Args:
        step: What is captured; what it writes must stay where it is.
        capture: Records a function and returns what repeats it, as `cuda_graphs` makes it.
        told: Called with a sentence once it is settled whether steps are replayed, and when shapes are left out.
        weights: What the step trains; after a replay they hold its gradients, as after the step itself.
        processes: Who takes the step together.

    Attributes:
        refusal: Why a shape could not be captured, after which none is tried; empty when all were, or none was tried.
    """

    def __init__(
        self,
        step: TrainBatch,
        capture: Capture,
        told: Callable[[str], None],
        weights: Sequence[torch.nn.Parameter] = (),
        processes: Processes = ALONE,
    ) -> None:
        self._step = step
        self._processes = processes
        self._gradients = _Gradients(weights)
        self._capture = capture
        self._told = told
        self.refusal = ""
        self._seen: dict[Signature, int] = {}
        self._recorded: dict[Signature, _Recorded] = {}

    @property
    def shapes(self) -> int:
        """How many shapes are replayed."""
        return len(self._recorded)

    def __call__(self, batch: Any, state: Any) -> tuple[torch.Tensor, Any]:
        """Train on a batch; loss and state that come from a replay are overwritten by the next one."""
        with for_cuda_graph(False):  # a replay has the bits of a step that is launched
            return self._train(batch, state)

    def close(self) -> None:
        """Forget all graphs: NCCL does not let go of processes while a graph holds what they exchange."""
        for recorded in self._recorded.values():
            recorded.close()
        self._recorded.clear()

    def _train(self, batch: Any, state: Any) -> tuple[torch.Tensor, Any]:
        leaves, shape = flatten(state)
        signature = self._together(_signature(batch, leaves, shape))
        if self._may_record(signature) and self._seen.get(signature, 0) >= WARMUPS:
            self._record(signature, batch, state)
        if signature in self._recorded:
            return self._recorded[signature].replay(batch, leaves)
        loss, after = self._step(batch, state)
        if self._may_record(signature) and not self._processes.any(_forms(after) != _forms(state)):
            self._seen[signature] = self._seen.get(signature, 0) + 1
        return loss, after

    def _together(self, own: Signature) -> Signature:
        """Return what stands for the signatures of all processes, the same in all of them."""
        if self._processes.count == 1:
            return own
        digest = hashlib.blake2b(repr(own).encode(), digest_size=7).digest()
        return self._processes.numbers(int.from_bytes(digest))

    def _may_record(self, signature: Signature) -> bool:
        return not self.refusal and signature not in self._recorded and len(self._recorded) < MOST_SHAPES

    def _record(self, signature: Signature, batch: Any, state: Any) -> None:
        recorded, reason = None, ""
        try:
            recorded = _Recorded(self._step, self._capture, batch, state, self._gradients)
        except RuntimeError as error:
            reason = _first_cause(error)
        if self._processes.any(recorded is None):
            self.refusal = _first_of(self._processes.shared(reason))
            if recorded is not None:
                recorded.close()
            if not self._recorded:
                self._gradients.forget()
            which = "steps of further shapes" if self._recorded else "steps"
            self._told(f"{which} are not captured as a CUDA graph: {self.refusal}")
            return
        assert recorded is not None
        self._recorded[signature] = recorded
        if len(self._recorded) == 1:
            self._told("steps are replayed as one CUDA graph")
        elif len(self._recorded) == MOST_SHAPES:
            self._told(f"{MOST_SHAPES} shapes of batches are replayed as CUDA graphs; others run step by step")


class _Gradients:
    """Where weights hold their gradients after a replay: in the same memory after all of them.

    The first recording made it; the others copy theirs there, so that not each of them has room for all gradients.
    """

    def __init__(self, weights: Sequence[torch.nn.Parameter]) -> None:
        self._weights = weights
        self._kept: dict[int, torch.Tensor] = {}

    def keep(self) -> list[torch.Tensor | None]:
        """Bring the gradients of a step that is recorded to their place; return them, weight by weight."""
        places: list[torch.Tensor | None] = []
        copied, made = [], []
        for number, weight in enumerate(self._weights):
            if weight.grad is None:
                places.append(None)
                continue
            place = self._kept.setdefault(number, weight.grad)
            if place is not weight.grad:
                copied.append(place)
                made.append(weight.grad)
                weight.grad = place
            places.append(place)
        if copied:
            torch._foreach_copy_(copied, made)
        return places

    def forget(self) -> None:
        """Let go of the memory, for which nothing was recorded."""
        self._kept.clear()

    def hold(self, places: list[torch.Tensor | None]) -> None:
        """Let the weights hold what `keep` returned."""
        for weight, gradient in zip(self._weights, places, strict=True):
            if weight.grad is not gradient:
                weight.grad = gradient


class _Recorded:
    """A captured step with the tensors that it reads and writes."""

    def __init__(
        self,
        step: TrainBatch,
        capture: Capture,
        batch: Any,
        state: Any,
        gradients: _Gradients,
    ) -> None:
        self._gradients = gradients
        self._places: list[torch.Tensor | None] = []
        leaves, shape = flatten(state)
        device = _device_of(batch)
        # What outlives a replay is made here, outside of the graph's own memory.
        parts = [torch.empty_like(tensor) for tensor in batch]
        kept = [torch.empty_like(leaf) for leaf in leaves]
        self._inputs = [*parts, *kept]
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._state = unflatten(dict(enumerate(kept)), shape)
        still_batch, still_state = type(batch)(*parts), self._state

        def work() -> None:
            loss, after = step(still_batch, still_state)
            self._loss.copy_(loss)
            _copy(flatten(after)[0], kept)
            self._places = gradients.keep()

        self._replay = capture(work)

    def close(self) -> None:
        """Forget the graph, also where an error's traceback still knows of this."""
        self._replay = _forgotten

    def replay(self, batch: Any, leaves: list[torch.Tensor]) -> tuple[torch.Tensor, Any]:
        """Train on a batch of the recorded shape, from a state of the recorded shape."""
        _copy([*batch, *leaves], self._inputs)
        self._replay()
        self._gradients.hold(self._places)
        return self._loss, self._state


def _forgotten() -> None:
    raise RuntimeError("the graph of this step was closed")


def _first_of(reasons: Sequence[str]) -> str:
    """Return the first reason there is, and whose it is where there are several processes."""
    rank, reason = next((rank, reason) for rank, reason in enumerate(reasons) if reason)
    return f"{reason} (process {rank})" if len(reasons) > 1 else reason


def _first_cause(error: BaseException) -> str:
    """Return what went wrong first, in a line: ending a capture after an error is an error too."""
    while error.__context__ is not None:
        error = error.__context__
    return next(iter(str(error).splitlines()), type(error).__name__)


def _device_of(batch: Any) -> torch.device:
    """Return where a batch lies.

    Raises:
        RuntimeError: It is no named tuple of tensors on one device, so that it cannot be held still.
    """
    devices = {each.device if isinstance(each, torch.Tensor) else None for each in batch} if _named(batch) else {None}
    (device, *others) = devices
    if device is None or others:
        raise RuntimeError("a batch must be a named tuple of tensors on one device")
    return device


def _named(batch: Any) -> bool:
    return isinstance(batch, tuple) and hasattr(batch, "_fields")


def _form(part: Any) -> tuple[Any, ...]:
    return (part.shape, part.dtype, part.device) if isinstance(part, torch.Tensor) else (type(part),)


def _forms(state: Any) -> tuple[Any, ...]:
    leaves, shape = flatten(state)
    return (*map(_form, leaves), repr(shape))


def _signature(batch: Any, leaves: list[torch.Tensor], shape: Any) -> Signature:
    parts = batch if _named(batch) else ()
    return (type(batch), *map(_form, parts), *map(_form, leaves), repr(shape))


def _copy(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    """Copy each source into its target, as if all were read before any is written."""
    written = {target.untyped_storage().data_ptr() for target in targets}
    pairs = [(target, source) for target, source in zip(targets, sources, strict=True) if target is not source]
    apart = [each.clone() if each.untyped_storage().data_ptr() in written else each for _, each in pairs]
    # One by one: PyTorch's kernel for several tensors gives a small one a single multiprocessor.
    for (target, _), source in zip(pairs, apart, strict=True):
        target.copy_(source)
