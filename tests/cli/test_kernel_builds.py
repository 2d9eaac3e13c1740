"""What `gatewise train` compiles ahead is what its batches launch."""

from __future__ import annotations

import contextlib

import pytest
import torch

from gatewise.cli import kernel_builds
from gatewise.cli.kernel_builds import DecoderCalls, LayerCall, decided, kernels_ahead
from gatewise.cli.nmt_run import layer_calls
from gatewise.contract.device import Device
from gatewise.data import PairBatches
from gatewise.kernels.persistent.launches import Launch, builds
from gatewise.models import LanguageModel, Seq2Seq
from gatewise.selection import explain

H200 = Device.named("h200")


def translation_model(**options):
    return Seq2Seq(50, 50, 64, 128, 2, 1, **options, device="meta")


def pairs(count=400):
    lengths = torch.randint(1, 30, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    return [torch.full((length,), 5) for length in lengths]


@pytest.mark.parametrize("feeding", [True, False])
def test_every_call_of_every_batch_is_compiled_ahead(monkeypatch, feeding):
    model, batches = translation_model(input_feeding=feeding), PairBatches(pairs(), pairs(), 600, shuffle=True)
    built = []
    monkeypatch.setattr(Device, "probe", classmethod(lambda cls, device: H200))
    monkeypatch.setattr(builds, "building", lambda found: _recording(built, found))
    shapes = batches.shapes_by_count()
    decoder = DecoderCalls(model, shapes) if feeding else None
    with kernels_ahead(list(layer_calls(model, shapes)), "bfloat16", torch.device("cuda", 0), decoder):
        pass
    assert built
    layers = [(layer, True) for layer in model.encoder] + ([] if feeding else [(model.decoder, False)])
    seen = set()
    for batch in batches.windows():
        for layer, lengths in layers:
            shape = (*batch.source.shape, layer.input_size)
            options = {"dtype": torch.bfloat16, "training": True, "device": H200}
            decision = explain(layer, shape, lengths=lengths or None, **options)
            assert decision.chosen == "persistent"
            seen |= {launch.source for launch in builds.launches_of(decision.problem, H200)}
    assert seen == {each.source for each in built if isinstance(each, Launch)}
    others = {each.file.name for each in built if not isinstance(each, Launch)}
    assert others == ({"cell.cu", "attend.cu"} if feeding else set())


@contextlib.contextmanager
def _recording(built, found):
    built += found
    yield len(built)


def test_decisions_are_those_of_training_in_its_precision():
    model = LanguageModel(50, 128, 128, num_layers=2, device="meta")
    call = LayerCall(model.lstm, (35, 20, 128))
    for precision, dtype, tf32 in (("bfloat16", torch.bfloat16, False), ("tf32", torch.float32, True)):
        (decision,) = decided([call, call], precision, H200)
        assert (decision.problem.dtype, decision.problem.needs_grad) == (dtype, True)
        assert decision.problem.allow_tf32 is tf32


def test_calls_of_evaluations_are_decided_without_gradients():
    model = LanguageModel(50, 32, 64, 3, last_hidden_size=32, locked=True, layer_dropout=0.1, device="meta")
    calls = [
        LayerCall(layer, (35, 8, layer.input_size), training=training)
        for layer in model.layers
        for training in (True, False)
    ]
    decisions = decided(calls, "bfloat16", H200)
    assert [each.problem.needs_grad for each in decisions] == [True, False] * 3
    assert [each.problem.hidden_size for each in decisions] == [64, 64, 64, 64, 32, 32]


def test_nothing_is_decided_for_a_cpu(monkeypatch):
    monkeypatch.setattr(kernel_builds, "decided", lambda *given: pytest.fail("decided"))
    with kernels_ahead([LayerCall(translation_model().encoder[0], (5, 3, 64))], "float32", torch.device("cpu")):
        pass


@pytest.mark.parametrize(("cpus", "processes", "threads"), [(8, None, 8), (8, "4", 2), (2, "8", 1)])
@pytest.mark.parametrize("bound", [True, False])
def test_the_processes_of_a_machine_share_its_cpus(monkeypatch, cpus, processes, threads, bound):
    if bound:
        monkeypatch.setattr(builds.os, "sched_getaffinity", lambda process: set(range(cpus)), raising=False)
        monkeypatch.setattr(builds.os, "cpu_count", lambda: 1000)
    else:
        monkeypatch.delattr(builds.os, "sched_getaffinity", raising=False)
        monkeypatch.setattr(builds.os, "cpu_count", lambda: cpus)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if processes:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    assert builds._share_of_cpus() == threads
