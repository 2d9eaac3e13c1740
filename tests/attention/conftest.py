"""Without a GPU, Triton's interpreter runs the fused kernel, on the CPU; it has to be asked for before Triton loads."""

import os

import pytest
import torch

from tests.compilers import interprets

if interprets() and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param
