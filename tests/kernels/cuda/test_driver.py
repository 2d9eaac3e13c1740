"""The errors of the CUDA driver name the kernel or the operation that was rejected."""

import enum

import pytest

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
