"""The `persistent` kernel: recurrent weights stay on the chip, and one launch computes a whole sequence."""

from gatewise.kernels.persistent.kernel import persistent

__all__ = ["persistent"]
