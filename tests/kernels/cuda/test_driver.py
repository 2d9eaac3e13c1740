"""Calls of the CUDA driver: what they are given, and their errors, which name what was rejected."""

import ctypes
import enum
import types

import pytest
import torch

from gatewise.contract.errors import DeviceError
from gatewise.kernels.cuda import driver


class Status(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1


@pytest.mark.parametrize(
    ("entry", "subject"), [("step_forward", "the kernel `step_forward`"), ("a memset", "a memset")]
)
def test_an_error_names_what_was_rejected(entry, subject):
    with pytest.raises(DeviceError, match=f"rejected {subject}: CUDA_ERROR_INVALID_VALUE"):
        driver._check((Status.CUDA_ERROR_INVALID_VALUE,), entry)


def test_the_result_of_a_call_is_returned():
    assert driver._check((Status.CUDA_SUCCESS, "graph"), "a graph") == "graph"
    assert driver._check((Status.CUDA_SUCCESS,), "a graph") is None


class Numbers(ctypes.Structure):
    _fields_ = [("first", ctypes.c_int), ("second", ctypes.c_int)]


def test_a_prepared_launch_reads_its_struct_and_the_current_stream_in_every_call(monkeypatch):
    launched, current, status = [], [7], [Status.CUDA_SUCCESS]

    def kernel_launch(configuration, function, parameters, extra):
        # As the driver does: an array of pointers to arguments, of which there is one.
        pointer = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))[0]
        given = ctypes.cast(pointer, ctypes.POINTER(Numbers))[0]
        launched.append((configuration, function, given.first, given.second, extra))
        return (status[0],)

    monkeypatch.setattr(driver, "_driver", lambda: types.SimpleNamespace(cuLaunchKernelEx=kernel_launch))
    monkeypatch.setattr(driver, "ensure_context", lambda index: None)
    monkeypatch.setattr(driver, "_function", lambda binary, entry, shared, index: (binary, entry, shared, index))
    monkeypatch.setattr(driver, "_configuration", lambda shape, stream: (shape, stream))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: current[index - 3], raising=False)
    shape = driver.Shape((2, 1, 1), 64, 16, cooperative=False)
    numbers = Numbers(1, 2)
    issue = driver.prepared(b"code", "step", shape, numbers, torch.device("cuda", 3))
    issue()
    numbers.second = 5
    issue()
    current[0] = 8
    issue()
    function = b"code", "step", 16, 3
    expected = [((shape, 7), function, 1, 2, 0), ((shape, 7), function, 1, 5, 0), ((shape, 8), function, 1, 5, 0)]
    assert launched == expected
    status[0] = Status.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(DeviceError, match="rejected the kernel `step`: CUDA_ERROR_INVALID_VALUE"):
        issue()
