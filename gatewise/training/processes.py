"""The processes that train together, one a device; a single process is the same with one."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import distributed, nn

from gatewise.contract.errors import ArgumentError, sentence


@dataclasses.dataclass(frozen=True, slots=True)
class Processes:
    """This process among its fellows.

    Attributes:
        rank: Its number, from 0.
        count: How many there are.
        device: Its device.
    """

    rank: int
    count: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and reports."""
        return self.rank == 0

    def parallel(self, model: nn.Module) -> nn.Module:
        """Wrap a model so that its gradients are averaged over the processes; alone, return it as it is."""
        if self.count == 1:
            return model
        devices = [self.device] if self.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)

    def summed(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor over the processes."""
        if self.count > 1:
            distributed.all_reduce(values)
        return values

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set in any process; every process must ask at the same step."""
        return bool(self.summed(torch.tensor(float(flag), device=self.device))) if self.count > 1 else flag

    def gathered(self, value: Any) -> list[Any]:
        """Return the values of all processes in the first one, an empty list in the others."""
        if self.count == 1:
            return [value]
        values = [None] * self.count if self.first else None
        distributed.gather_object(value, values)
        return values or []

    def told(self, value: Any) -> Any:
        """Return the first process's value in all of them."""
        if self.count == 1:
            return value
        values = [value]
        distributed.broadcast_object_list(values, device=self.device)
        return values[0]

    def wait(self) -> None:
        """Wait until every process is here."""
        if self.count > 1:
            self.any(False)


@contextlib.contextmanager
def join_processes(device: str | None = None) -> Iterator[Processes]:
    """Join the processes that torchrun started, or be the only one.

    Args:
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``; None takes a GPU if there is one, and among several processes each
            its own.

    Yields:
        This process.

    Raises:
        ArgumentError: The device does not exist here.
    """
    count, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    chosen = _device(device, local)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if count == 1:
        yield Processes(0, 1, chosen)
        return
    distributed.init_process_group(
        "nccl" if chosen.type == "cuda" else "gloo", device_id=chosen if chosen.type == "cuda" else None
    )
    try:
        yield Processes(rank, count, chosen)
    finally:
        distributed.destroy_process_group()


def _device(name: str | None, local_rank: int) -> torch.device:
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
                    "Start fewer processes.",
                )
            )
    return device
