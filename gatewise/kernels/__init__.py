"""All kernels of the library, in the order in which the selection considers them."""

from gatewise.contract.kernel import Kernel
from gatewise.kernels.aten import aten
from gatewise.kernels.cudnn import cudnn
from gatewise.kernels.eager import eager
from gatewise.kernels.persistent import persistent
from gatewise.kernels.stepwise import stepwise

ALL: tuple[Kernel, ...] = (persistent, cudnn, stepwise, aten, eager)

__all__ = ["ALL"]
