"""What is compiled ahead for a decoder with input feeding is what its calls launch."""

from __future__ import annotations

import pytest
import torch
from test_fused_attention import both

from gatewise.attention.fused import launch as launch_module
from gatewise.contract.device import Device
from gatewise.contract.triton_kernels import TritonLaunch
from gatewise.feeding import Problem, builds, elementwise_kernels, fused_attention

H200 = Device.named("h200")
SIZES = {"time": 7, "source": 9, "layers": 2, "embedding_size": 64, "layer_norm": False, "needs_grad": True}


def problem(**changes):
    sizes = {"batch": 24, "units": 128, "features": 128, "value_size": 128, "dtype": torch.bfloat16}
    return Problem(**SIZES | sizes | {"dropout": True, "allow_tf32": False, "attention_kernel": "fused"} | changes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("batch", "units"), [(1, 8), (24, 128), (400, 512), (3, 136)])
def test_the_elementwise_operations_are_compiled_for_the_sizes_of_the_call(monkeypatch, dtype, batch, units):
    found = builds.compilations(problem(batch=batch, units=units, features=units, dtype=dtype), H200)
    monkeypatch.setattr(Device, "probe", classmethod(lambda cls, device: H200))
    device = torch.device("cuda", 0)
    launched = elementwise_kernels.ElementwiseKernels(batch, units, units, dtype, False, device)
    assert (found[0].file, found[0].macros) == (elementwise_kernels.SOURCE, launched._macros)


@pytest.mark.parametrize("sizes", [{"units": 8, "features": 8}, {"units": 136, "features": 264}, {"units": 16}])
def test_attention_is_compiled_for_the_sizes_of_the_call(sizes):
    inputs, _ = both(sizes, torch.float32)
    assert inputs.keys.is_contiguous()
    call = problem(
        batch=inputs.batch,
        units=inputs.units,
        features=inputs.query_size,
        value_size=inputs.values.shape[2],
        source=len(inputs.keys),
        dtype=torch.float32,
    )
    _, attention, *_ = builds.compilations(call, H200)
    assert attention.file == fused_attention.SOURCE
    assert attention.macros == fused_attention.macros_of(inputs, torch.float32, halves=False)


def test_operators_of_pytorch_need_no_compilation():
    assert builds.compilations(problem(attention_kernel="auto"), Device.named("cpu")) == []


def test_a_compilation_reads_the_cache(monkeypatch):
    compiled = []
    monkeypatch.setattr(builds.toolchain, "compile_source", lambda *given: compiled.append(given) or b"code")
    first, *_ = builds.compilations(problem(), H200)
    assert first.compile() == b"code"
    (given,) = compiled
    assert given[:3] == (elementwise_kernels.SOURCE, "sm_90", dict(first.macros))
    assert first.source == builds.compilations(problem(time=3, source=5), H200)[0].source


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, ["short_gradient", "input_gradient", "parameter_gradient"]),
        ({"source": 70}, ["score_gradient", "value_gradient", "input_gradient", "parameter_gradient"]),
        ({"layer_norm": True}, ["step", "step_gradient", "short_gradient", "input_gradient", "parameter_gradient"]),
        ({"layer_norm": True, "needs_grad": False}, ["step"]),
        ({"features": 0, "needs_grad": False}, ["step"]),
        ({"needs_grad": False}, []),
        ({"attention_kernel": "recompute"}, []),
    ],
    ids=str,
)
def test_the_triton_kernels_of_attention_are_compiled(changes, names):
    found = builds.compilations(problem(**changes), H200)
    launches = [each for each in found if isinstance(each, TritonLaunch)]
    assert {launch_module._function(f"{name}_program") for name in names} == {each.function for each in launches}
