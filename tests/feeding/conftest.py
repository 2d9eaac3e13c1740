"""Fixtures that run the CUDA kernels of the decoder on the CPU."""

import shutil

import pytest
from emulation import emulate

from gatewise.feeding import backward_loop, elementwise_kernels, fused_attention, kernel


class ElementwiseKernelsOnCpu(elementwise_kernels.ElementwiseKernels):
    def _launch(self, entry, arguments, grid=None):
        count = elementwise_kernels.THREADS
        blocks, threads = grid or (-(-arguments.batch * self._threads_of_a_row // count), count)
        together = grid is not None
        emulate(elementwise_kernels.SOURCE, self._macros, entry, arguments, blocks, threads, together=together)


class FusedAttentionOnCpu(fused_attention.FusedAttention):
    def _launch(self, entry, arguments):
        setattr(arguments, "from", self._source)
        blocks, threads = self._shape.grid[0], self._shape.threads
        emulate(fused_attention.SOURCE, self._macros, entry, arguments, blocks, threads, together=True)


@pytest.fixture
def compiler():
    if shutil.which("g++") is None:
        pytest.skip("needs g++")


@pytest.fixture
def launches_on_cpu(monkeypatch, compiler):
    def parts(self, options, inputs):
        found = inputs.embedded
        return ElementwiseKernelsOnCpu(
            inputs.batch, inputs.units, inputs.query_size, found.dtype, options.halves, found.device
        )

    monkeypatch.setattr(type(kernel.eager), "parts", parts)
    # Products are cut as on a GPU, too.
    monkeypatch.setattr(backward_loop, "_planes", lambda inputs, depth: 4 if depth % 4 == 0 else 1)


@pytest.fixture
def at_once_on_cpu(compiler):
    return FusedAttentionOnCpu
