"""The decoder's loop on a GPU, in every dtype, launched and as a CUDA graph."""

import types

import pytest
import torch
from test_decoder import CASES, Call, compare

from gatewise.contract.device import Device
from gatewise.feeding import decoder, elementwise_kernels, fused_attention
from gatewise.training.precision import arithmetic

pytestmark = pytest.mark.gpu

KERNELS = ["reference", "recompute", "fused"]


def on_gpu(call):
    """Move a call's tensors to the GPU, as leaves."""

    def moved(found):
        if found is None:
            return None
        if isinstance(found, torch.Tensor):
            return found.detach().cuda().requires_grad_(found.requires_grad)
        parts = [moved(each) for each in found]
        return type(found)(*parts) if hasattr(found, "_fields") else type(found)(parts)

    for name, value in vars(call).items():
        if isinstance(value, (torch.Tensor, tuple)):
            setattr(call, name, moved(value))
    return call


def on_cpu(results):
    return {name: each.double().cpu() for name, each in results.items()}


def without_dropout(options):
    # The random masks of a GPU differ from those of a CPU.
    return {name: value for name, value in options.items() if "dropout" not in name}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_float64_agrees_with_the_cpu(options, recompute):
    options = without_dropout(options)
    exact, ours = Call(**options), on_gpu(Call(**options))
    found = on_cpu(ours.results(ours.run(recompute=recompute)))
    compare(found, exact.results(exact.plain()), 1e-9, 1e-10)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_float32_is_exact(options, kernel):
    options = without_dropout(options)
    exact, ours, plain = Call(**options), on_gpu(Call(torch.float32, **options)), on_gpu(Call(torch.float32, **options))
    wanted = exact.results(exact.plain())
    with arithmetic("float32"):
        found = on_cpu(ours.results(ours.run(attention_kernel=kernel)))
        theirs = on_cpu(plain.results(plain.plain()))
    for name, expected in wanted.items():
        budget = 4 * (theirs[name] - expected).norm() + 3e-6 * expected.norm()
        assert (found[name] - expected).norm() <= budget, name


LARGE = {"time": 9, "batch": 40, "source": 21, "units": 64, "embedding": 24, "features": 64, "value_size": 64}


@pytest.mark.parametrize("source", [21, 150])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_attention_in_one_launch_agrees_with_separate_operations(dtype, source, monkeypatch):
    call = on_gpu(Call(dtype, **LARGE | {"source": source}))
    with arithmetic("float32"):
        found = on_cpu(call.results(call.run(attention_kernel="fused")))
        monkeypatch.setattr(fused_attention, "possible", lambda *_, **__: False)
        wanted = on_cpu(call.results(call.run(attention_kernel="fused")))
    budget = {torch.float32: 1e-5, torch.float16: 0.02, torch.bfloat16: 0.1}[dtype]
    for name, expected in wanted.items():
        assert (found[name] - expected).norm() <= budget * expected.norm(), name


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dropout", [{}, {"dropout": 0.3, "layer_dropout": 0.3, "layers": 3}], ids=["", "dropout"])
@pytest.mark.parametrize("precision", ["tf32", "bfloat16"])
def test_rounded_products_have_the_errors_of_the_plain_program(precision, dropout, recompute):
    options = LARGE | dropout
    exact, ours = on_gpu(Call(torch.float64, **options)), on_gpu(Call(torch.float32, **options))
    wanted = on_cpu(exact.results(exact.plain()))
    with arithmetic(precision), torch.autocast("cuda", torch.bfloat16, enabled=precision == "bfloat16"):
        plain, found = ours.plain(), ours.run(recompute=recompute)
    with arithmetic(precision):
        theirs, found = on_cpu(ours.results(plain)), on_cpu(ours.results(found))
    for name, expected in wanted.items():
        budget = 2 * (theirs[name] - expected).norm() + 0.002 * expected.norm()
        assert (found[name] - expected).norm() <= budget, name


def test_operands_are_float16_only_where_products_may_be_rounded():
    def halves(dtype):
        options, *_ = on_gpu(Call(dtype, **LARGE)).run().grad_fn.call
        return options.halves

    with arithmetic("tf32"):
        assert [halves(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64)] == [True, False, False]
    with arithmetic("float32"):
        assert not halves(torch.float32)


def test_a_replayed_graph_agrees_with_launches():
    call = on_gpu(Call(torch.float32, **LARGE))
    first = {name: each.clone() for name, each in call.results(call.run()).items()}
    graph, leaves = torch.cuda.CUDAGraph(), call.leaves
    with torch.cuda.graph(graph):
        outputs = call.run(seeded=False)
        gradients = torch.autograd.grad(outputs, list(leaves.values()), call.dy)
    for each in (outputs, *gradients):
        each.detach().fill_(torch.nan)
    graph.replay()
    found = {"outputs": outputs.detach()} | dict(zip(leaves, gradients, strict=True))
    compare(found, first, 1e-6, 1e-6)


def test_a_device_without_compiler_computes_in_plain_torch(monkeypatch):
    call = on_gpu(Call(torch.float64, **LARGE))
    wanted = call.results(call.run())
    bare = Device.probe(call.embedded.device).replace(compiles=False)
    monkeypatch.setattr(decoder, "Device", types.SimpleNamespace(probe=lambda device: bare))
    monkeypatch.setattr(elementwise_kernels.ElementwiseKernels, "_launch", lambda *_: pytest.fail("launched"))
    compare(call.results(call.run()), wanted, 1e-9, 1e-10)
