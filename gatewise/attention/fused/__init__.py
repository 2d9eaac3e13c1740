"""The kernel `fused`: Triton kernels that hold the feature map in registers only.

`kernel.py` imports without Triton; `programs` requires it, and is imported when a call runs.
"""

from gatewise.attention.fused.kernel import fused

__all__ = ["fused"]
