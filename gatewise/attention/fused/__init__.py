"""The `fused` kernel: Triton programs in which the feature map lives in registers alone.

`kernel.py` imports without Triton; `programs` does not, and is imported when a call runs.
"""

from gatewise.attention.fused.kernel import fused

__all__ = ["fused"]
