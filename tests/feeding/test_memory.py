"""The tensors that the decoder keeps have the predicted size."""

from __future__ import annotations

import weakref

import pytest
import torch
from test_decoder import SIZES, Call

from gatewise import feeding
from gatewise.contract.device import Device
from gatewise.kernels.cuda.deep_products import widens

OPTIONS = {
    "default": {},
    "dot": {"features": 0},
    "norm, dropout": {"norm": True, "dropout": 0.3, "layer_dropout": 0.3, "layers": 3},
}


@pytest.mark.parametrize("kernel", ["reference", "recompute"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_call_keeps_the_predicted_tensors(options, recompute, kernel):
    call, given = Call(torch.float32, **options), SIZES | options
    sizes = feeding.Problem(
        given["time"],
        given["source"],
        given["batch"],
        given["units"],
        given["layers"],
        given["embedding"],
        given["features"],
        given["value_size"],
        bool(given.get("norm")),
        dropout="dropout" in given,
        layer_dropout="layer_dropout" in given,
    )
    problem = sizes.replace(recompute=recompute, attention_kernel=kernel)
    stated = feeding.kept(problem, Device.probe("cpu"))
    outputs = call.run(recompute=recompute, attention_kernel=kernel)
    _, inputs, kept, _ = outputs.grad_fn.call
    masks = [each.mask for each in (inputs.dropout, *inputs.between) if each is not None]
    found = {
        "operands": kept.operands,
        "gates": kept.gates,
        "cells": kept.cells,
        "queries": [kept.joined],
        "contexts": [kept.steps.contexts[0]],
        "attention": kept.steps.result.kept,
        "values": [inputs.values],
        "masks": masks,
        "outputs": [],
        "source": [],
        "weights": [
            *(each for layer in inputs.layers for each in layer),
            inputs.from_embeddings,
            inputs.joining,
            inputs.of_context,
        ],
    }
    assert {name: [(tuple(each.shape), each.dtype) for each in part] for name, part in found.items()} == {
        name: [(tuple(spec.shape), spec.dtype) for spec in specs] for name, specs in stated.items()
    }
    assert bool(stated["gates"]) != recompute


def test_nothing_outlives_the_backward_pass():
    outputs = Call().run()
    _, _, kept, _ = outputs.grad_fn.call
    found = [weakref.ref(each) for each in (*kept.gates, *kept.cells, kept.joined, *kept.steps.result.kept)]
    del kept
    assert all(each() is not None for each in found)
    outputs.sum().backward()
    assert all(each() is None for each in found)


def test_nothing_outlives_outputs_that_are_dropped():
    outputs = Call().run()
    found = weakref.ref(outputs.grad_fn.call[2].joined)
    del outputs
    assert found() is None


@pytest.mark.skipif(not widens(), reason="PyTorch 2.6 has no product of float16 with a float32 result")
def test_on_a_gpu_operands_in_float16_take_half():
    sizes = feeding.Problem(50, 50, 128, 512, 2, 512, 512, 512)
    device = Device.named("h200")
    exact, rounded = (feeding.kept(sizes.replace(allow_tf32=allowed), device) for allowed in (False, True))
    assert [each.dtype for each in rounded["operands"]] == [torch.float16] * 2
    assert sum(each.nbytes for each in exact["operands"]) == 2 * sum(each.nbytes for each in rounded["operands"])
    assert exact["outputs"] == exact["source"] == ()
    assert [tuple(each.shape) for each in rounded["outputs"]] == [(50, 128, 512)]
