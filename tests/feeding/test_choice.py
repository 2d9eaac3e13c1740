"""The choice of a decoder kernel: refusals are data, a named kernel never falls back, the decision prints itself."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from test_decoder import Call, compare
from torch.utils._python_dispatch import TorchDispatchMode

import gatewise
from gatewise import feeding
from gatewise.contract.device import Device
from gatewise.contract.errors import KernelRefused
from gatewise.feeding import choice, decoder, kernel, memory
from gatewise.feeding.elementwise import Plain
from gatewise.feeding.elementwise_kernels import ElementwiseKernels
from gatewise.kernels.cuda.deep_products import widens
from tests.pairwise import each_value

H200, CPU = Device.named("h200"), Device.named("cpu")
PROBLEM = feeding.Problem(50, 50, 128, 512, 2, 512, 512, 512)
CRITERIA = [(each, criterion) for each in choice.ALL for criterion in each.criteria()]
VIEWS = {"t", "transpose", "select", "slice", "split", "unbind", "expand", "detach", "unsqueeze", "view", "alias"}


@pytest.mark.parametrize(("refusing", "criterion"), CRITERIA, ids=lambda each: getattr(each, "quantity", None))
def test_every_criterion_refuses_what_violates_it(refusing, criterion):
    assert criterion.check(PROBLEM, H200) is None
    problem, device = criterion.violation(PROBLEM, H200)
    verdict = choice.decide(problem, device).verdict(refusing.name)
    assert not verdict.accepted
    assert criterion.allowed in [refusal.allowed for refusal in verdict.refusals]
    assert verdict.refusals[0].actual not in verdict.refusals[0].allowed


@pytest.mark.parametrize(
    ("device", "problem"),
    each_value(
        [*itertools.product(Device.names(), [PROBLEM, PROBLEM.replace(features=0, needs_grad=False, recompute=True)])]
    ),
    ids=str,
)
def test_a_decision_fits_80_columns_and_names_every_kernel(device, problem):
    text = str(feeding.decide(problem, Device.named(device)))
    assert max(map(len, text.splitlines())) <= 80
    assert "decoder with input feeding" in text
    assert all(f" {name} " in text for name in feeding.kernel_names())


def test_launches_of_our_own_are_faster_than_operators_on_a_gpu_and_refused_on_a_cpu():
    assert feeding.decide(PROBLEM, H200).chosen == "fused"
    decision = feeding.decide(PROBLEM, CPU)
    assert decision.chosen == "eager"
    assert [str(one) for one in decision.verdict("fused").refusals] == ["device is cpu, allowed: a CUDA GPU"]


def test_a_named_kernel_never_falls_back():
    call = Call()
    with pytest.raises(KernelRefused, match=r"(?s)cannot be computed as asked.*device is cpu, allowed: a CUDA GPU"):
        call.run(kernel="fused")
    with pytest.raises(KernelRefused, match="`kernel` must be one of 'auto', 'fused', 'eager', got 'fastest'"):
        call.run(kernel="fastest")
    compare(call.results(call.run(kernel="eager")), call.results(call.plain()), 1e-9, 1e-10)


@pytest.mark.parametrize("name", ["cudnn", "persistent", "aten"])
def test_a_kernel_that_computes_no_decoder_is_refused_by_name(name, monkeypatch):
    call = Call()
    says = "chosen none ('{}' was {} and computes no decoder with input feeding)"
    with gatewise.use_kernel(name), pytest.raises(KernelRefused) as by_block:
        call.run()
    assert says.format(name, "named by `use_kernel`") in " ".join(str(by_block.value).split())
    monkeypatch.setenv("GATEWISE_KERNEL", name)
    with pytest.raises(KernelRefused) as by_environment:
        call.run()
    assert says.format(name, "named by GATEWISE_KERNEL") in " ".join(str(by_environment.value).split())
    with gatewise.use_kernel("eager"):
        assert call.run(kernel="auto").shape == call.dy.shape


def test_a_preference_counts_on_every_device():
    with gatewise.use_kernel("eager"):
        decision = feeding.decide(PROBLEM, H200)
    assert (decision.chosen, decision.reason) == ("eager", "named by `use_kernel`")
    assert feeding.decide(PROBLEM, H200, "fused").reason == "named by the argument `kernel`"


def test_the_choice_is_what_runs(monkeypatch):
    seen = []
    monkeypatch.setattr(decoder, "choose", lambda *given: seen.append(given) or kernel.eager)
    call = Call(torch.float32, dropout=0.5, norm=True)
    call.run(recompute=True, attention_kernel="recompute")
    [(problem, device, wanted)] = seen
    assert (device, wanted) == (Device.probe("cpu"), "auto")
    assert problem == feeding.Problem(
        7, 6, 5, 8, 2, 6, 8, 8, True, torch.float32, True, recompute=True, attention_kernel="recompute",
        allow_tf32=problem.allow_tf32,
    )  # fmt: skip


@pytest.mark.skipif(not widens(), reason="PyTorch 2.6 has no product of float16 with a float32 result")
def test_operands_are_float16_only_where_products_may_be_rounded():
    rounded = PROBLEM.replace(allow_tf32=True)
    assert kernel.fused.halves(rounded, H200)
    assert not kernel.eager.halves(rounded, H200)
    for other in (PROBLEM, *(rounded.replace(dtype=dtype) for dtype in (torch.bfloat16, torch.float64))):
        assert not kernel.fused.halves(other, H200)


def test_work_grows_with_what_is_asked():
    training, inference = (kernel.fused.work(PROBLEM.replace(needs_grad=each), H200) for each in (True, False))
    assert training.matmul_flops == 3 * inference.matmul_flops
    assert training.launches > 2 * inference.launches
    again = kernel.fused.work(PROBLEM.replace(recompute=True), H200)
    assert again.matmul_flops > training.matmul_flops
    assert memory.workspace_bytes(PROBLEM.replace(recompute=True)) > memory.workspace_bytes(PROBLEM) == 0


class Operators(TorchDispatchMode):
    """Counts operators that compute or copy."""

    count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += operator._schema.name.removeprefix("aten::") not in VIEWS
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("layers", [1, 3])
def test_stated_operators_are_those_that_run(layers):
    def counted(time):
        with Operators() as seen:
            Call(torch.float32, time=time, layers=layers, features=0).run().sum().backward()
        return seen.count

    problem = feeding.Problem(9, 6, 5, 8, layers, 6, 0, 8)
    stated = [kernel.eager.work(problem.replace(time=time), CPU).operators for time in (9, 4)]
    # Attention states its own; its operators do not grow with the number of layers.
    grown = (counted(9) - counted(4)) / 5
    alone = (stated[0] - stated[1]) / 5
    assert alone < grown < 1.5 * alone + 40


def test_both_kernels_have_the_operations_of_a_step():
    call = Call(torch.float32)
    options, inputs, _, parts = call.run().grad_fn.call
    assert isinstance(parts, Plain)
    operations = {name for name in vars(Plain) if not name.startswith("_")}
    assert operations == {name for name in vars(ElementwiseKernels) if not name.startswith("_")}
    assert dataclasses.is_dataclass(options)
    assert inputs.batch == 5
