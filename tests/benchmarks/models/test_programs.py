"""The models of the benchmark: their sizes, and that the adapted ones compute the same."""

import dataclasses
import itertools

import pytest
import torch
from torch import nn

import gatewise
from gatewise.benchmarks.models.agreement import batches
from gatewise.benchmarks.models.cases import CASES, TINY_CASES
from gatewise.benchmarks.models.ways import Way, ways

CPU = torch.device("cpu")
BY_NAME = {workload.name: workload for workload in (*CASES, *TINY_CASES)}


def loss_and_gradients(workload, way):
    (batch,) = batches(workload, 0, 1, CPU)
    model = way.model(workload, 0, CPU).double().eval()  # without dropout
    loss = model(*(tensor.double() if tensor.is_floating_point() else tensor for tensor in batch))
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize("workload", TINY_CASES, ids=lambda workload: workload.name)
def test_all_ways_compute_the_same(workload):
    before, *others = ways(workload)
    expected = loss_and_gradients(workload, before)
    for way in others:
        torch.testing.assert_close(loss_and_gradients(workload, way), expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("workload", TINY_CASES, ids=lambda workload: workload.name)
def test_one_line_changes_every_layer(workload):
    for way in ways(workload):
        layers = [layer for layer in way.model(workload, 0, CPU).modules() if isinstance(layer, nn.LSTM)]
        assert layers
        assert all(isinstance(layer, gatewise.LSTM) is way.accelerated for layer in layers)


@pytest.mark.parametrize(("name", "layers"), [("bonito-tiny", 3), ("ppo-tiny", 1)])
def test_the_adapted_model_uses_what_pytorch_has_not(name, layers):
    workload = BY_NAME[name]
    (batch,), calls = batches(workload, 0, 1, CPU), []
    model = ways(workload)[-1].model(workload, 0, CPU)
    for layer in model.modules():
        if isinstance(layer, gatewise.LSTM):
            hook = lambda layer, arguments, options, output: calls.append((layer.reverse, "resets" in options))  # noqa: E731
            layer.register_forward_hook(hook, with_kwargs=True)
    model(*batch)
    expected = [(True, False), (False, False), (True, False)] if layers == 3 else [(False, True)]
    assert calls == expected


@pytest.mark.parametrize(("name", "steps"), [("bonito-sup", 1667), ("bonito-hac", 2000)])
def test_the_basecallers_have_the_published_number_of_steps(name, steps):
    program = BY_NAME[name].program
    with torch.device("meta"):
        found = program.build(False).stem(torch.empty(2, 1, program.samples))
    assert found.shape == (2, program.hidden_size, steps)
    (_, found), *_ = itertools.islice(dataclasses.replace(program, batch=1).batches(torch.Generator()), 1)
    assert found.shape == (steps, 1)


def test_the_text_encoder_does_not_read_padding():
    workload = BY_NAME["tts-tiny"]
    ((symbols, lengths, *others),) = batches(workload, 0, 1, CPU)
    assert lengths.min() < symbols.shape[1]
    model = Way("before").model(workload, 0, CPU).eval()
    changed = symbols.clone()
    changed[torch.arange(symbols.shape[1]) >= lengths.unsqueeze(1)] += 1
    assert torch.equal(model(symbols, lengths, *others), model(changed, lengths, *others))


def test_a_seed_gives_the_same_weights_and_batches():
    for workload in TINY_CASES:
        models = [way.model(workload, 3, CPU).state_dict() for way in ways(workload)]
        for found in models[1:]:
            assert all(map(torch.equal, found.values(), models[0].values()))
        first, again = (batches(workload, 3, 2, CPU) for _ in range(2))
        assert all(map(torch.equal, itertools.chain(*first), itertools.chain(*again)))
        assert not torch.equal(first[0][0], first[1][0])
