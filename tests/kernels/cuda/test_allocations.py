"""The bytes of tensors that exist at the same time, and code that runs dry in a thread of its own."""

import threading

import pytest
import torch
from torch.utils import _python_dispatch

from gatewise.contract.device import Device
from gatewise.kernels.cuda.allocations import Allocations, counting_scratch, run_dry


def test_counts_what_exists_at_the_same_time():
    given = torch.zeros(100)
    with Allocations() as allocations:
        first = given.new_empty(1000)  # 4000 bytes, in steps of 512
        assert (allocations.now, allocations.peak) == (4096, 4096)
        second = first * 2
        assert (allocations.now, allocations.peak) == (8192, 8192)
        view = second[10:20].view(2, 5)
        del second
        assert allocations.now == 8192  # the view still needs it
        del view
        assert (allocations.now, allocations.peak) == (4096, 8192)
        parts = first.sort()
        assert allocations.now == 4096 + 4096 + 8192
    del parts
    assert allocations.now == 4096
    given.new_empty(1000)
    assert allocations.peak == 4096 + 4096 + 8192  # only the block counts


def test_what_is_only_written_to_is_not_computed():
    ones, total = torch.ones(3), torch.zeros(3)
    with Allocations() as allocations:
        assert torch.add(ones, ones, out=total) is total
        assert total.mul_(2).add_(ones) is total
        total[0] = 5
        assert allocations.peak == 0
    assert total.tolist() == [0, 0, 0]


def test_other_threads_do_not_notice():
    """Flags of the process, which a `TorchDispatchMode` sets, would make a compiler in another thread do without."""
    with Allocations() as allocations:
        assert not _python_dispatch.is_in_torch_dispatch_mode()
        thread = threading.Thread(target=torch.zeros, args=(1000,))
        thread.start()
        thread.join()
    assert allocations.peak == 0


def test_a_dry_run_returns_and_raises():
    assert run_dry(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        run_dry(lambda: 1 / 0)
    with torch.no_grad():
        assert run_dry(torch.is_grad_enabled)  # modes belong to a thread


def test_a_counting_workspace_has_no_memory():
    device = Device.named("l4")
    scratch = counting_scratch(torch.bfloat16, device)
    with scratch.frame():
        large = scratch.new_empty(1 << 40)
    assert large.is_meta
    assert large.dtype == torch.bfloat16
    assert scratch.new_empty(2, 3).shape == (2, 3)
    assert scratch.needed == 2 << 40
    assert scratch.device is device
