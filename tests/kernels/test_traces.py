"""The names of operators and GPU kernels that identify each kernel in a profile."""

import itertools
from pathlib import Path

import pytest

import gatewise.kernels
from gatewise.kernels import ALL

CUDA_SOURCES = "".join(path.read_text() for path in Path(gatewise.kernels.__file__).parent.rglob("*.cu"))


@pytest.mark.parametrize("kernel", ALL, ids=lambda kernel: kernel.name)
def test_each_kernel_has_names_for_both_passes_that_can_occur(kernel):
    assert kernel.traces.forward
    assert kernel.traces.backward
    for name in kernel.traces.forward | kernel.traces.backward:
        # Operators of PyTorch, nodes of autograd, entry points of the library's CUDA sources, names for profilers.
        own = f"{name}(" in CUDA_SOURCES or name.startswith("gatewise::")
        assert own or name.startswith("aten::") or name.endswith("Backward0"), name


@pytest.mark.parametrize("passing", ["forward", "backward"])
def test_no_two_kernels_share_a_name(passing):
    for one, other in itertools.combinations(ALL, 2):
        assert not getattr(one.traces, passing) & getattr(other.traces, passing), f"{one.name} and {other.name}"
