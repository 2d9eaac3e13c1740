"""The kernel `stepwise`: one matrix product of the library and one element-wise CUDA kernel for every time step."""

from gatewise.kernels.stepwise.kernel import stepwise

__all__ = ["stepwise"]
