"""Training steps as CUDA graphs, one for each repeated shape of batches, captured once and then replayed."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from gatewise.contract.capture import captured_graph, first_cause, for_cuda_graph
from gatewise.training.carried import flatten, unflatten
from gatewise.training.processes import ALONE, Processes

WARMUPS = 3
"""The number of steps of the first shape before its capture, which initialise libraries and optimizer moments, too."""

LATER_WARMUPS = 1
"""The number of steps of each further shape before its capture, which load its kernels and fill the caches of calls.

A capture could not load them, and the kernels that it records are those that this step has run.
"""

MOST_SHAPES = 64
"""The largest number of captured shapes; steps of further shapes run without a CUDA graph."""

TrainBatch = Callable[[Any, Any], tuple[torch.Tensor, Any]]
Work = Callable[[], None]
Capture = Callable[[Work], Work]
Signature = tuple[Any, ...]


def refusal(wanted: bool, processes: Processes) -> str:
    """Return the reason why steps cannot be captured; empty if they can.

    Args:
        wanted: The option `TrainingOptions.cuda_graph`.
        processes: The processes of the distributed training.
    """
    if processes.device.type != "cuda":
        return f"there are none on a {processes.device.type.upper()}"
    if not wanted:
        return "`cuda_graph` is off"
    return ""


def cuda_graph(work: Work, pool: Any = None, mode: str = "global") -> Work:
    """Capture a function on the current CUDA device without executing its work, and return a function that replays it.

    Args:
        work: The function to capture.
        pool: The memory pool from `torch.cuda.graph_pool_handle` that several graphs share; None for a separate pool.
        mode: The argument `capture_error_mode` of `torch.cuda.graph`.

    Raises:
        RuntimeError: The function does something that cannot be captured, such as synchronising with the device.
    """
    return captured_graph(work, pool=pool, mode=mode).replay


def cuda_graphs(processes: Processes = ALONE) -> Capture:
    """Return a function that captures functions which run one at a time and do not read each other's results.

    Their graphs share one memory pool, whose size is that of the largest graph, not the sum of all.

    Args:
        processes: The processes that run the functions together.
    """
    # With several processes, PyTorch's watchdog thread calls CUDA functions meanwhile, which must not end the capture.
    mode = "global" if processes.count == 1 else "thread_local"
    return functools.partial(cuda_graph, pool=torch.cuda.graph_pool_handle(), mode=mode)


class ReplayedStep:
    """A training step that is captured after a few batches of a shape, and replayed for further batches of that shape.

    A replay is one call for the CPU instead of hundreds, so that a step takes no longer than its kernels. The results
    are the same as without a CUDA graph. Each repeated shape is captured, up to `MOST_SHAPES` shapes: the first one at
    its fourth batch, the others at their second. Batches of other shapes, and the first batch, which has no state yet,
    run without a graph.

    A replay repeats the device work of the captured step, but none of its Python code: the model must do the same work
    for every batch of a shape.

    Several processes capture and replay in the same steps, because a collective inside a graph must be matched by the
    same collective in the graphs of the other processes. Their batches may have different shapes, so a shape here means
    the shapes of all processes' batches, which they exchange at every step between their hosts. If one process cannot
    capture a shape, no process replays it.

    Args:
        step: The step to capture; it must always write to the same tensors.
        capture: A function that captures a function and returns the replay, as `cuda_graphs` returns it.
        notify: A function that is called with a sentence when steps are or are not replayed, and when shapes are left
            out.
        weights: The weights that the step trains; after a replay they have gradients, as after the step itself.
        processes: The processes of the distributed training.
        expect: A function that is called before each step, or its capture, with a value that is equal for equal shapes
            of all processes' batches and states.

    Attributes:
        refusal: The reason why a shape could not be captured, after which no other is tried; empty otherwise.
    """

    def __init__(
        self,
        step: TrainBatch,
        capture: Capture,
        notify: Callable[[str], None],
        weights: Sequence[torch.nn.Parameter] = (),
        processes: Processes = ALONE,
        expect: Callable[[Hashable], None] | None = None,
    ) -> None:
        self._step = step
        self._expect = expect
        self._processes = processes
        self._gradients = _Gradients(weights)
        self._capture = capture
        self._notify = notify
        self.refusal = ""
        self._seen: dict[Signature, int] = {}
        self._recorded: dict[Signature, _Recorded] = {}

    @property
    def shapes(self) -> int:
        """The number of captured shapes."""
        return len(self._recorded)

    def __call__(self, batch: Any, state: Any) -> tuple[torch.Tensor, Any]:
        """Train on a batch; the next replay overwrites the returned loss and state."""
        with for_cuda_graph(False):  # so that a replay returns the same bits as a step without a graph
            return self._train(batch, state)

    def close(self) -> None:
        """Release all graphs: NCCL cannot leave a process group while a graph contains its collectives."""
        for recorded in self._recorded.values():
            recorded.close()
        self._recorded.clear()

    def _train(self, batch: Any, state: Any) -> tuple[torch.Tensor, Any]:
        leaves, shape = flatten(state)
        signature = self._together(_signature(batch, leaves, shape))
        if self._expect is not None:
            self._expect(signature)
        if self._may_record(signature) and self._seen.get(signature, 0) >= self._warmups:
            self._record(signature, batch, state)
        if signature in self._recorded:
            return self._recorded[signature].replay(batch, leaves)
        loss, after = self._step(batch, state)
        if self._may_record(signature) and not self._processes.any(_forms(after) != _forms(state)):
            self._seen[signature] = self._seen.get(signature, 0) + 1
        return loss, after

    @property
    def _warmups(self) -> int:
        return LATER_WARMUPS if self._recorded else WARMUPS

    def _together(self, own: Signature) -> Signature:
        """Return one value for the signatures of all processes, the same in all of them."""
        if self._processes.count == 1:
            return own
        digest = hashlib.blake2b(repr(own).encode(), digest_size=7).digest()
        return self._processes.all_gather_number(int.from_bytes(digest))

    def _may_record(self, signature: Signature) -> bool:
        return not self.refusal and signature not in self._recorded and len(self._recorded) < MOST_SHAPES

    def _record(self, signature: Signature, batch: Any, state: Any) -> None:
        recorded, reason = None, ""
        try:
            recorded = _Recorded(self._step, self._capture, batch, state, self._gradients)
        except RuntimeError as error:
            reason = first_cause(error)
        if self._processes.any(recorded is None):
            self.refusal = _first_of(self._processes.all_gather(reason))
            if recorded is not None:
                recorded.close()
            if not self._recorded:
                self._gradients.forget()
            which = "steps of further shapes" if self._recorded else "steps"
            self._notify(f"{which} are not captured as a CUDA graph: {self.refusal}")
            return
        assert recorded is not None
        self._recorded[signature] = recorded
        if len(self._recorded) == 1:
            self._notify("steps are replayed as one CUDA graph")
        elif len(self._recorded) == MOST_SHAPES:
            self._notify(f"{MOST_SHAPES} shapes of batches are replayed as CUDA graphs; others run without one")


class _Gradients:
    """The memory in which weights have their gradients after a replay, which is the same for all graphs.

    The first captured step allocates it; the others copy their gradients there, instead of one copy for each graph.
    """

    def __init__(self, weights: Sequence[torch.nn.Parameter]) -> None:
        self._weights = weights
        self._kept: dict[int, torch.Tensor] = {}

    def keep(self) -> list[torch.Tensor | None]:
        """Copy the gradients of a captured step to their memory; return them in the order of the weights."""
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
        """Release the memory, if no step was captured."""
        self._kept.clear()

    def hold(self, places: list[torch.Tensor | None]) -> None:
        """Set the gradients of the weights to the tensors that `keep` returned."""
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
        # Tensors that outlive a replay are allocated outside of the graph's memory pool.
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
        """Release the graph, even if the traceback of an error refers to this object."""
        self._replay = _forgotten

    def replay(self, batch: Any, leaves: list[torch.Tensor]) -> tuple[torch.Tensor, Any]:
        """Train on a batch and a state that have the captured shapes."""
        _copy([*batch, *leaves], self._inputs)
        self._replay()
        self._gradients.hold(self._places)
        return self._loss, self._state


def _forgotten() -> None:
    raise RuntimeError("the graph of this step was closed")


def _first_of(reasons: Sequence[str]) -> str:
    """Return the first reason, and its process if there are several."""
    rank, reason = next((rank, reason) for rank, reason in enumerate(reasons) if reason)
    return f"{reason} (process {rank})" if len(reasons) > 1 else reason


def _device_of(batch: Any) -> torch.device:
    """Return the device of a batch.

    Raises:
        RuntimeError: The batch is not a named tuple of tensors on one device, so that it cannot be copied for a replay.
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
    """Copy each source to its target, as if all sources were read first."""
    written = {target.untyped_storage().data_ptr() for target in targets}
    pairs = [(target, source) for target, source in zip(targets, sources, strict=True) if target is not source]
    apart = [each.clone() if each.untyped_storage().data_ptr() in written else each for _, each in pairs]
    # One by one: PyTorch's kernel for several tensors uses only one multiprocessor for a small tensor.
    for (target, _), source in zip(pairs, apart, strict=True):
        target.copy_(source)
