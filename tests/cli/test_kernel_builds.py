"""What `gatewise train` compiles ahead is what its batches launch."""

from __future__ import annotations

import contextlib

import pytest
import torch

from gatewise.attention.fused import launch as attention_launch
from gatewise.cli.kernel_builds import LayerCall, decided, kernels_ahead, layer_builds, lookup_builds
from gatewise.cli.nmt_builds import TranslationCalls, translation_builds
from gatewise.contract.device import Device
from gatewise.contract.triton_kernels import TritonLaunch
from gatewise.data import PairBatches, ParallelText, build_vocabularies
from gatewise.feeding.builds import Compilation
from gatewise.kernels.persistent.launches import Launch, builds
from gatewise.kernels.persistent.launches.auxiliary import Copying
from gatewise.models import LanguageModel, Seq2Seq, fused_rows, fused_softmax, table_gradient
from gatewise.selection import explain
from gatewise.training.processes import Processes

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
    monkeypatch.setattr(builds, "building", lambda found, device: _recording(built, found))
    calls = TranslationCalls(model, batches.shapes_by_count())
    with kernels_ahead(lambda device: translation_builds(calls, "bfloat16", device), torch.device("cuda", 0)):
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
    # The encoder's gradients gather what sequences of several lengths have read.
    assert {each for each in built if isinstance(each, Copying)} == {Copying("operands", 16, "sm_90")}
    others = {each.file.name for each in built if isinstance(each, Compilation)}
    assert others == ({"cell.cu", "attend.cu"} if feeding else set())


def programs(*names):
    return {attention_launch._function(f"{name}_program") for name in names}


@pytest.mark.parametrize("feeding", [True, False])
def test_the_triton_kernels_of_training_evaluation_and_search_are_compiled_ahead(feeding):
    model = translation_model(input_feeding=feeding, label_smoothing=0.1)

    def found(calls):
        every = [each for each in translation_builds(calls, "bfloat16", H200) if isinstance(each, TritonLaunch)]
        softmax = [each.constants for each in every if each.function is fused_softmax._FUNCTION]
        rows = [each.constants["SCALES"] for each in every if each.function is fused_rows._FUNCTION]
        around = [False, False, True] if softmax and softmax[0]["GRADIENT"] else [False, False]
        assert rows == (around if softmax else [])
        return {each.function for each in every} - {fused_softmax._FUNCTION, fused_rows._FUNCTION}, softmax

    gradients = programs("short_gradient", "input_gradient", "parameter_gradient")
    forward = programs("score", "context")
    of_training, softmax = found(TranslationCalls(model, [(12, 40)]))
    assert of_training == gradients | (set() if feeding else forward)
    assert [(each["GRADIENT"], each["SMOOTH"]) for each in softmax] == [(True, True)]
    of_evaluation, softmax = found(TranslationCalls(model, [], [(12, 40)]))
    assert of_evaluation == (set() if feeding else forward)
    assert [(each["GRADIENT"], each["SMOOTH"]) for each in softmax] == [(False, False)]
    assert found(TranslationCalls(model, [], [], [(12, 40)])) == (programs("step"), [])


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bfloat16", "bfloat16"), ("tf32", "float16"), ("float32", "float32")]
)
def test_the_softmax_is_compiled_for_the_dtype_of_its_products(precision, dtype):
    calls = TranslationCalls(translation_model(), [(12, 40)])
    (softmax,) = (
        each
        for each in translation_builds(calls, precision, H200)
        if isinstance(each, TritonLaunch) and each.function is fused_softmax._FUNCTION
    )
    scores, targets, losses, vocabulary, stride, _ = softmax.arguments
    assert (scores.dtype, vocabulary, stride) == (getattr(torch, dtype), 50, 56)
    assert (targets.dtype, losses.dtype) == (torch.int64, torch.float32)


@pytest.mark.parametrize("feeding", [True, False])
def test_the_layers_of_evaluation_and_search_are_compiled_without_gradients(feeding):
    model = translation_model(input_feeding=feeding)
    training = {each.source for each in _launches(TranslationCalls(model, [(12, 40)]))}
    evaluation = {each.source for each in _launches(TranslationCalls(model, [], [(12, 40)]))}
    assert evaluation < training
    (first, *_), lengths = model.encoder, (30, 9)
    searched = {each.source for each in _launches(TranslationCalls(model, [], [], [lengths]))}
    decision = explain(first, (*lengths, 64), lengths=True, dtype=torch.bfloat16, training=False, device=H200)
    assert {each.source for each in builds.launches_of(decision.problem, H200)} <= searched


def _launches(calls):
    return [each for each in translation_builds(calls, "bfloat16", H200) if isinstance(each, Launch)]


@contextlib.contextmanager
def _recording(built, found):
    built += found
    yield len(built)


def test_decisions_are_those_of_training_in_its_precision():
    model = LanguageModel(50, 128, 128, num_layers=2, device="meta")
    call = LayerCall(model.lstm, (35, 20, 128))
    for precision, dtype, tf32 in (("bfloat16", torch.bfloat16, False), ("tf32", torch.float32, True)):
        decision = decided(call, precision, H200)
        assert (decision.problem.dtype, decision.problem.needs_grad) == (dtype, True)
        assert decision.problem.allow_tf32 is tf32


def test_calls_of_evaluations_are_decided_without_gradients():
    model = LanguageModel(50, 32, 64, 3, last_hidden_size=32, locked=True, layer_dropout=0.1, device="meta")
    calls = [
        LayerCall(layer, (35, 8, layer.input_size), training=training)
        for layer in model.layers
        for training in (True, False)
    ]
    decisions = [decided(call, "bfloat16", H200) for call in calls]
    assert [each.problem.needs_grad for each in decisions] == [True, False] * 3
    assert [each.problem.hidden_size for each in decisions] == [64, 64, 64, 64, 32, 32]


def test_a_call_that_occurs_again_is_decided_once(monkeypatch):
    call = LayerCall(translation_model().encoder[0], (12, 40, 64), lengths=True)
    once = list(layer_builds([call], "bfloat16", H200))
    assert len(once) == 3
    assert list(layer_builds([call, call._replace(lengths=True)], "bfloat16", H200)) == once


@pytest.mark.parametrize("count", [1, 2])
def test_several_processes_compile_the_kernels_for_gradients_of_embeddings(count):
    model, processes = translation_model(), Processes(0, count, torch.device("cpu"))
    tables = [model.source_embedding, model.target_embedding, model.source_embedding]
    found = [each.function for each in lookup_builds(tables, processes, H200)]
    both = [table_gradient._ORDER, table_gradient._TABLE]
    assert found == (2 * both if count > 1 else [])
    assert not [*lookup_builds(tables, processes, H200.replace(triton=False))]


def test_nothing_is_decided_for_a_cpu():
    with kernels_ahead(lambda device: pytest.fail("decided"), torch.device("cpu")):
        pass


def test_the_shapes_of_greedy_search_are_those_of_its_batches(monkeypatch):
    from gatewise.cli import saved_translator

    text = ParallelText("counts", ("a b c", "a", "c b", "b c a", "c", "a b"), ("a",) * 6)
    vocabulary, _ = build_vocabularies("word", text)
    model = Seq2Seq(len(vocabulary), len(vocabulary), 8, 8, 1, 1)
    translator, seen = saved_translator.Translator(model, vocabulary, vocabulary), []

    def translate(model, source, lengths, search, graphs):
        seen.append(tuple(source.shape))
        return [[] for _ in lengths]

    monkeypatch.setattr(saved_translator, "translate", translate)
    translator.translate(text.source, translator.search(), 6)
    assert seen == [(3, 2), (2, 3), (1, 1)]
    assert translator.shapes(text.source, 6) == seen


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
