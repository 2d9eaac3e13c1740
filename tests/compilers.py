"""What the installed NVRTC and Triton can do, which tests of kernels depend on."""

import functools
import importlib.metadata
import importlib.util
import os
import sys

import numpy


@functools.cache
def nvrtc_version():
    """Return the major and minor version of NVRTC: PyTorch's if it has loaded one, such as 12.4 with PyTorch 2.6."""
    import torch  # noqa: F401  loads it
    from cuda.bindings import nvrtc

    return nvrtc.nvrtcVersion()[1:]


@functools.cache
def knows(architecture):
    """Return whether NVRTC compiles for an architecture, such as "sm_120"; True without NVRTC."""
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return True
    nvrtc_version()
    from cuda.bindings import nvrtc

    return int(architecture.removeprefix("sm_")) in nvrtc.nvrtcGetSupportedArchs()[1]


@functools.cache
def interprets():
    """Return whether Triton's interpreter runs; up to 3.6 it fails with NumPy 2.4, which converts fewer arrays."""
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        return int(numpy.ones(1, numpy.int32)) == 1
    except TypeError:
        return False


def runs_triton():
    """Return whether programs in Triton's language run, on a GPU or in the interpreter."""
    import torch

    return interprets() or (torch.cuda.is_available() and importlib.util.find_spec("triton") is not None)


def device_of_programs():
    """Return the device on which a file of tests runs programs in Triton's language, as a parameter of its tests.

    Without a GPU the interpreter runs them, which has to be asked for before Triton loads. Where it cannot, the file is
    skipped.
    """
    import pytest
    import torch

    if torch.cuda.is_available():
        pytest.importorskip("triton")
        return pytest.param("cuda", marks=pytest.mark.gpu)
    if interprets() and "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        reason = "Triton is loaded without its interpreter, or the interpreter does not know this NumPy"
        pytest.skip(reason, allow_module_level=True)
    return "cpu"


@functools.cache
def triton_version():
    """Return the major and minor version of Triton."""
    return tuple(int(part) for part in importlib.metadata.version("triton").split(".")[:2])
