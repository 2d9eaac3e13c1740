"""The processes of a distributed training, one per device; without torchrun, a single process."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import distributed

from gatewise.contract.data_parallel import MULTIPROCESSORS
from gatewise.contract.errors import ArgumentError, sentence
from gatewise.training.attempt import rendezvous
from gatewise.training.failure_channel import notifying_failures

LARGE_BYTES = 1 << 20
"""The size from which on tensors are averaged one by one; smaller tensors are combined into one collective."""


Finish = Callable[[], None]
"""A function that waits for the result of a collective, and puts it where it belongs."""

_LIMIT_OF_NCCL = "NCCL_MAX_CTAS"
"""The environment variable by which NCCL is limited to a number of thread blocks, one for a multiprocessor."""


@dataclasses.dataclass(frozen=True, slots=True)
class Processes:
    """This process in the process group.

    Attributes:
        rank: The rank of this process, from 0.
        count: The number of processes (world size).
        device: The device of this process.
        machines: The number of agents of torchrun (``--nnodes``), usually one on each machine.
    """

    rank: int
    count: int
    device: torch.device
    machines: int = 1

    @property
    def nccl_multiprocessors(self) -> int:
        """The largest number of multiprocessors that a collective of NCCL takes on a GPU; 0 without NCCL."""
        return int(os.environ.get(_LIMIT_OF_NCCL, MULTIPROCESSORS)) if self.device.type == "cuda" else 0

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and reports."""
        return self.rank == 0

    @property
    def launcher(self) -> str:
        """The beginning of a command line that starts as many processes; empty for one process.

        The options for several machines are a placeholder: they name the rendezvous, and each machine may have its own
        number of processes, which torchrun does not tell the processes of the others.
        """
        if self.count == 1:
            return ""
        if self.machines > 1:
            return "torchrun <the same options on each machine as before> -m "
        return f"torchrun --nproc-per-node {self.count} -m "

    @torch.no_grad()
    def broadcast_tensors(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite tensors with those of the first process; all pass the same shapes in the same order."""
        if self.count == 1:
            return
        for tensor in tensors:
            whole = tensor.detach().contiguous()
            distributed.broadcast(whole, 0)
            if whole.data_ptr() != tensor.data_ptr():
                tensor.copy_(whole)

    @torch.no_grad()
    def start_average(self, tensors: Sequence[torch.Tensor], *, bfloat16: bool = False) -> Finish:
        """Begin to overwrite tensors with their means over the processes, and return a function that ends it.

        The means (all-reduce) are bitwise equal in all processes. On a GPU, what waits for them is the current stream
        and not the host, so that a CUDA graph can capture both.

        Args:
            tensors: Floating-point tensors; all processes pass the same shapes in the same order. Nothing else may
                write them until the means are there.
            bfloat16: Whether numbers of more than 16 bits are divided by the number of processes, rounded to bfloat16
                and added in it.
        """
        if self.count == 1:
            return _nothing
        small: dict[torch.dtype, list[torch.Tensor]] = {}
        finish = []
        for tensor in tensors:
            if tensor.nbytes >= LARGE_BYTES and tensor.is_contiguous():
                finish.append(self._start_average(tensor, bfloat16))
            else:
                small.setdefault(tensor.dtype, []).append(tensor)
        finish += [self._start_together(together, bfloat16) for together in small.values()]

        def finish_all() -> None:
            for each in finish:
                each()

        return finish_all

    def _start_together(self, tensors: list[torch.Tensor], bfloat16: bool) -> Finish:
        row = torch.cat([tensor.reshape(-1) for tensor in tensors])
        finish_row = self._start_average(row, bfloat16)

        def finish() -> None:
            finish_row()
            pieces = row.split([tensor.numel() for tensor in tensors])
            shaped = [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]
            torch._foreach_copy_(tensors, shaped)

        return finish

    def _start_average(self, tensor: torch.Tensor, bfloat16: bool) -> Finish:
        rounded = None
        if bfloat16 and tensor.element_size() > 2:
            rounded = torch.div(tensor, self.count, out=torch.empty_like(tensor, dtype=torch.bfloat16))
            work = distributed.all_reduce(rounded, async_op=True)
        elif tensor.is_cuda:
            work = distributed.all_reduce(tensor, distributed.ReduceOp.AVG, async_op=True)
        else:  # gloo can only add
            work = distributed.all_reduce(tensor, async_op=True)

        def finish() -> None:
            assert work is not None  # there is a process group of which this process is a member
            work.wait()
            if rounded is not None:
                tensor.copy_(rounded)
            elif not tensor.is_cuda:
                tensor.div_(self.count)

        return finish

    def start_all_gather(self, tensor: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
        """Begin to gather a tensor of each process (all-gather).

        Args:
            tensor: The contiguous tensor of this process; all processes pass the same shape and dtype.

        Returns:
            A function that waits for the tensors of all processes and returns them by rank. On a GPU, the current
            stream waits, and not the host.
        """
        if self.count == 1:
            return lambda: [tensor]
        tensors = [torch.empty_like(tensor) for _ in range(self.count)]
        work = distributed.all_gather(tensors, tensor, async_op=True)

        def finish() -> list[torch.Tensor]:
            assert work is not None  # there is a process group of which this process is a member
            work.wait()
            return tensors

        return finish

    def start_all_gather_into(self, tensors: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> Finish:
        """Begin to gather a part of each tensor from each process, and return a function that waits for all.

        It is one collective for all tensors (a coalesced all-gather): in a CUDA graph each has a branch of its own.

        Args:
            tensors: The memory for the parts of all processes, by rank, contiguous [processes, N, ...].
            parts: The part of this process for each tensor, contiguous [N, ...]. It may be the place for it in that
                memory, and nothing may write it until all have been gathered.
        """
        if self.count == 1:
            for tensor, part in zip(tensors, parts, strict=True):
                if tensor.data_ptr() != part.data_ptr():
                    tensor[0].copy_(part)
            return _nothing
        with distributed._coalescing_manager(async_ops=True) as together:
            for tensor, part in zip(tensors, parts, strict=True):
                distributed.all_gather_into_tensor(tensor.flatten(0, 1), part)
        return together.wait

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor over the processes."""
        if self.count > 1:
            distributed.all_reduce(values)
        return values

    def all_gather_number(self, own: int) -> tuple[int, ...]:
        """Return the numbers of all processes, by rank; all processes must call it in the same step.

        The processes synchronise with each other, but not with their devices.
        """
        if self.count == 1:
            return (own,)
        found = torch.zeros(self.count, dtype=torch.int64, device="cpu")
        found[self.rank] = own
        distributed.all_reduce(found)
        return tuple(found.tolist())

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set in any process; all processes must call it in the same step."""
        return any(self.all_gather_number(int(flag)))

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, by rank."""
        if self.count == 1:
            return [value]
        values = [None] * self.count
        distributed.all_gather_object(values, value)
        return values

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes in the first process, an empty list in the others."""
        if self.count == 1:
            return [value]
        values = [None] * self.count if self.first else None
        distributed.gather_object(value, values)
        return values or []

    def broadcast(self, value: Any) -> Any:
        """Return the first process's value in all processes."""
        if self.count == 1:
            return value
        values = [value]
        distributed.broadcast_object_list(values)
        return values[0]

    def barrier(self) -> None:
        """Wait until all processes have called this."""
        self.any(False)


def _nothing() -> None:
    """Wait for nothing."""


ALONE = Processes(0, 1, torch.device("cpu"))
"""A single process; the device makes no difference."""


@contextlib.contextmanager
def join_processes(device: str | None = None) -> Iterator[Processes]:
    """Join the process group that torchrun started; without torchrun, this is the only process.

    Args:
        device: ``"cpu"``, ``"cuda"``, or ``"cuda:1"`` for a single process; None for a GPU if there is one. With
            several processes, each uses its own GPU.

    Yields:
        This process.

    Raises:
        ArgumentError: The device does not exist, or is a single GPU for several processes.
        ProcessFailed: Another process failed or was killed; the reason has already been printed. A process that does
            not leave the block within `failure_channel.GRACE_SECONDS` after that is ended with status 1.
    """
    count, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    chosen = _device(device, local, several=count > 1)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if count == 1:
        yield Processes(0, 1, chosen)
        return
    # Values on the host use a CPU backend, so that no process waits for a GPU.
    if chosen.type == "cuda":
        _limit_nccl()
        distributed.init_process_group("cpu:gloo,cuda:nccl", device_id=chosen, **rendezvous())
    else:
        distributed.init_process_group("gloo", **rendezvous())
    processes = Processes(rank, count, chosen, int(os.environ.get("GROUP_WORLD_SIZE", "1")))
    try:
        release, abort = functools.partial(_release, chosen), functools.partial(_abort, chosen)
        with notifying_failures(rank, count, processes.broadcast, release, abort):
            yield processes
    finally:
        _leave()


def _limit_nccl() -> None:
    """Limit the multiprocessors that NCCL takes beside the kernels of a step, unless the user has done so.

    Raises:
        ArgumentError: The user's limit is no positive integer.
    """
    given = os.environ.setdefault(_LIMIT_OF_NCCL, str(MULTIPROCESSORS))
    if not given.isdecimal() or not int(given):
        advice = f"Unset it for {MULTIPROCESSORS}."
        raise ArgumentError(sentence(_LIMIT_OF_NCCL, "a number of multiprocessors from 1 on", repr(given), advice))


def _leave() -> None:
    """Destroy the process group."""
    group = distributed.group.WORLD
    if group is not None and not hasattr(group, "shutdown"):
        # PyTorch 2.6 ends gloo's threads when it frees the group, and then keeps the GIL, for which the thread of the
        # last collective may be waiting. There, a reference that is never given back keeps the group until the process
        # ends.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    distributed.destroy_process_group()


def _abort(device: torch.device) -> None:
    """Leave the process group without synchronising, which would wait for processes that wait for this one."""
    group = distributed.group.WORLD
    if group is None:
        return
    if not hasattr(group, "abort"):  # PyTorch 2.6, of whose backends only NCCL's would synchronise
        _release(device)
        return
    with contextlib.suppress(RuntimeError):
        group.abort()


def _release(device: torch.device) -> None:
    """Abort collectives on a GPU that wait for a missing process; those on the host end by themselves."""
    if device.type == "cuda" and distributed.group.WORLD is not None:
        with contextlib.suppress(RuntimeError):
            distributed.group.WORLD._get_backend(device).abort()


def _device(name: str | None, local_rank: int, *, several: bool) -> torch.device:
    available = torch.cuda.is_available()
    if name is None:
        name = "cuda" if available else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ArgumentError(sentence("device", "cpu, cuda or cuda:N", repr(name))) from None
    if device.type not in ("cpu", "cuda"):
        raise ArgumentError(sentence("device", "cpu, cuda or cuda:N", repr(name)))
    if device.type == "cuda":
        if several and device.index is not None:
            wanted = "cpu or cuda for several processes"
            raise ArgumentError(
                sentence("device", wanted, repr(name), "Leave the number out: each process uses its own GPU.")
            )
        if not available:
            raise ArgumentError(
                sentence("device", "one that this machine has", repr(name), "No GPU was found; use cpu.")
            )
        device = torch.device("cuda", local_rank if device.index is None else device.index)
        if device.index >= torch.cuda.device_count():
            raise ArgumentError(
                sentence(
                    "device",
                    f"one of the {torch.cuda.device_count()} GPUs here",
                    repr(str(device)),
                    "Start fewer processes." if several else "",
                )
            )
    return device
