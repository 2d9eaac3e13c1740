"""Workspace: the places of tensors in the buffer, and allocation beyond its end."""

import torch

from gatewise.kernels.cuda.scratch import Scratch

LIKE = torch.zeros(1, dtype=torch.float64)


def taken(scratch):
    first = scratch.new_empty(3, 5)
    with scratch.frame():
        inner = scratch.new_empty(7, dtype=torch.int16)
        with scratch.frame():
            deepest = scratch.new_empty((2, 2))
    after = scratch.new_empty(100)
    return first, inner, deepest, after


def test_the_memory_of_a_frame_is_reused():
    memory = torch.empty(4096, dtype=torch.uint8)
    first, inner, deepest, after = taken(Scratch(LIKE, memory))
    assert first.data_ptr() == memory.data_ptr()
    assert inner.data_ptr() == after.data_ptr() == first.data_ptr() + 512
    assert deepest.data_ptr() == inner.data_ptr() + 512
    assert [tensor.shape for tensor in (first, inner, deepest, after)] == [(3, 5), (7,), (2, 2), (100,)]
    assert [tensor.dtype for tensor in (first, inner, after)] == [torch.float64, torch.int16, torch.float64]


def test_the_same_requests_return_the_same_addresses():
    memory = torch.empty(4096, dtype=torch.uint8)
    places = [[tensor.data_ptr() for tensor in taken(Scratch(LIKE, memory))] for _ in range(2)]
    assert places[0] == places[1]


def test_the_needed_size_is_the_peak():
    scratch = Scratch(LIKE)
    taken(scratch)
    assert scratch.needed == 512 + 1024
    sufficient = torch.empty(scratch.needed, dtype=torch.uint8)
    end = sufficient.data_ptr() + sufficient.numel()
    assert all(sufficient.data_ptr() <= tensor.data_ptr() < end for tensor in taken(Scratch(LIKE, sufficient)))


def test_tensors_beyond_the_end_are_allocated_by_pytorch():
    memory = torch.empty(512, dtype=torch.uint8)
    scratch = Scratch(LIKE, memory)
    inside, beyond = scratch.new_empty(64), scratch.new_empty(1)
    assert inside.data_ptr() == memory.data_ptr()
    assert beyond.untyped_storage().data_ptr() != memory.data_ptr()
    assert scratch.needed == 1024
