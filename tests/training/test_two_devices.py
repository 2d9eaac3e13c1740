"""Language and translation models on two devices: NCCL and CUDA graphs, or gloo and a stand-in for graphs."""

from __future__ import annotations

import multiprocessing

import pytest
import torch
from echo_model import Diary, train
from several import Recorder, together
from test_processes import SIZES, history, of_different_shapes, same
from test_resumption import StopAt, files_of

from gatewise.data import PairBatches, TokenStream
from gatewise.models import LanguageModel, Seq2Seq
from gatewise.training.processes import Processes
from tests.pairwise import exhaustive

REPLAYED = ["steps are replayed as one CUDA graph"]
SGD = {"optimizer": "sgd", "learning_rate": 0.5, "momentum": 0.0}


def language_model(processes, folder, stop_at=0, dropout=0.0, waits=False, **options):
    """Train a small language model together; with `waits`, that of the last process synchronises by reading its
    loss."""
    device, last = processes.device, processes.rank == processes.count - 1
    tokens = torch.randint(50, (4 * 105 + 4,), generator=torch.Generator().manual_seed(0))
    shares = {"device": device, "rank": processes.rank, "processes": processes.count}
    torch.manual_seed(0)
    model = LanguageModel(50, 64, 64, 2, dropout=dropout, embedding_dropout=dropout, layer_dropout=dropout)
    model = model.to(device)
    if waits and last:
        model.loss = waiting(model)
    data = StopAt(TokenStream(tokens, 4, 10, rotate=True, **shares), stop_at if last else 0)
    return fitted(processes, folder, model, data, TokenStream(tokens[:200], 4, 10, **shares), **options)


def waiting(model):
    def loss(batch, state=None):
        mean, state = LanguageModel.loss(model, batch, state)
        return mean * (1.0 if mean.item() < 1e9 else 0.0), state

    return loss


def translation(processes, folder, **options):
    """Train a small translation model together, on sentences of several lengths, in batches that divide equally."""
    generator = torch.Generator().manual_seed(0)
    source = [torch.randint(3, 40, (1 + row * 7 % 8,), generator=generator) for row in range(240)]
    pairs = source, [each.flip(0) + 5 for each in source]
    shares = {"device": processes.device, "rank": processes.rank, "processes": processes.count}
    torch.manual_seed(0)
    model = Seq2Seq(40, 50, 64, 64).to(processes.device)
    data = PairBatches(*pairs, 240, shuffle=True, **shares)
    assert data.shapes > 4
    valid = PairBatches(*(side[:40] for side in pairs), 240, **shares)
    return fitted(processes, folder, model, data, valid, **({"epochs": 2} | options))


def fitted(processes, folder, model, data, valid, **options):
    # Without CUDA graphs, over gloo, a stand-in is used, which refuses functions that would synchronise.
    refuses = "waits for the device" if "loss" in vars(model) else ""
    recorder = Recorder(refuses) if processes.device.type == "cpu" and options.get("cuda_graph", True) else None
    start, diary = weights_of(model), Diary()
    outcome, model = train(
        folder, model, data, valid,
        processes=processes, observers=[diary], record_step=recorder, **({"epochs": 2} | SGD | options),
    )  # fmt: skip
    return {
        "step": outcome.step,
        "interrupted": outcome.interrupted,
        "start": start,
        "weights": weights_of(model),
        "remarks": diary.remarks,
    }


def weights_of(model):
    return [each.detach().cpu().numpy().copy() for each in model.parameters()]


def distance(ones, others):
    return sum(((one - other).astype(float) ** 2).sum() for one, other in zip(ones, others, strict=True)) ** 0.5


DEVICES = [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
SECONDS = 120


class Runs:
    """Runs on two devices.

    Attributes:
        device: "cpu" or "cuda".
        folder: The folder that has one of each run of a model.
    """

    def __init__(self, device, folder, new_folder, jobs, context):
        self.device, self.folder = device, folder
        self._new_folder, self._jobs, self._context, self._found = new_folder, jobs, context, {}

    def of(self, *names):
        """Return the results of runs, of both processes each, and run them before if no test has asked for them.

        To start processes on GPUs takes longer than all runs do.
        """
        asked = [*self._jobs] if self.device == "cuda" else names
        missing = {name: self._jobs[name] for name in asked if name not in self._found}
        if missing:
            self._found |= together(self._new_folder("results"), missing, self.device, self._context, SECONDS)
        return [self._found[name] for name in names]


@pytest.fixture(scope="module", params=DEVICES)
def runs(request, tmp_path_factory):
    device = request.param
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    folder = tmp_path_factory.mktemp("runs")
    launched, bf16 = {"cuda_graph": False}, {"precision": "bfloat16"}
    kinds = {
        "lm launched": (language_model, launched),
        "lm": (language_model, {}),
        "lm bf16 launched": (language_model, bf16 | launched),
        "lm bf16": (language_model, bf16),
        "nmt launched": (translation, launched),
        "nmt": (translation, {}),
        "nmt bf16 adamw": (translation, bf16 | {"optimizer": "adamw", "learning_rate": 0.003}),
        "whole": (language_model, bf16 | {"dropout": 0.3, "epochs": 3}),
    }
    jobs = {name: (job, {"folder": folder / name} | options) for name, (job, options) in kinds.items()}
    parts = kinds["whole"][1] | {"folder": folder / "parts"}
    jobs["stopped"] = (language_model, parts | {"stop_at": 15})
    jobs["resumed"] = (language_model, parts)
    jobs |= {f"shapes {kind}": (of_different_shapes, {"recorded": kind, "sizes": SIZES}) for kind in (0, 1)}
    jobs["waits"] = (language_model, {"folder": folder / "waits", "waits": True})
    context = multiprocessing.get_context("spawn") if device == "cuda" else None
    return Runs(device, folder, tmp_path_factory.mktemp, jobs, context)


# Two processes without GPUs train a smaller model in these ways in tests/training/test_processes.py.
in_other_ways = pytest.mark.parametrize(
    "runs", [pytest.param("cpu", marks=[pytest.mark.slow, pytest.mark.exhaustive]), DEVICES[1]], indirect=True
)


# Two processes train a language model in tests/cli/test_train_lm.py, too.
@pytest.mark.parametrize("kind", ["nmt", *exhaustive("lm launched", "lm", "nmt launched")])
def test_two_devices_have_the_losses_of_one(runs, tmp_path, kind):
    device, folder = runs.device, runs.folder
    ((first, second),) = runs.of(kind)
    job = translation if kind.startswith("nmt") else language_model
    alone = job(Processes(0, 1, torch.device(device, 0)), tmp_path / "one", cuda_graph=False)
    assert same(first["weights"], second["weights"])
    assert first["step"] == alone["step"]
    # A wrong part of the batch would change the weights as much as training does; rounding does not.
    assert distance(first["weights"], alone["weights"]) < 0.001 * distance(alone["start"], alone["weights"])
    for one, other in zip(history(folder / kind), history(tmp_path / "one"), strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    assert history(folder / kind)[-1][0] < history(folder / kind)[0][0]


@pytest.mark.parametrize("kind", ["nmt", *exhaustive("lm", "lm bf16")])
def test_replays_on_two_devices_end_in_the_bits_of_steps(runs, kind):
    (first, second), _ = runs.of(kind, f"{kind} launched")
    assert same(first["weights"], second["weights"])
    assert first["remarks"] == second["remarks"] == REPLAYED
    assert files_of(runs.folder / f"{kind} launched") == files_of(runs.folder / kind)


@in_other_ways
def test_weights_are_equal_on_both_devices_to_the_bit(runs):
    translated, whole, _, resumed = runs.of("nmt bf16 adamw", "whole", "stopped", "resumed")
    for first, second in (translated, whole, resumed):
        assert same(first["weights"], second["weights"])
        assert first["remarks"] == second["remarks"] == REPLAYED


@in_other_ways
def test_an_interruption_of_two_devices_and_the_rest_end_in_the_same_bits(runs):
    _, stopped, _ = runs.of("whole", "stopped", "resumed")
    assert [(each["step"], each["interrupted"]) for each in stopped] == [(25, True), (25, True)]
    assert files_of(runs.folder / "whole") == files_of(runs.folder / "parts")


@in_other_ways
def test_shapes_may_differ_between_devices(runs):
    launched, replayed = runs.of("shapes 0", "shapes 1")
    for rank in range(2):
        assert launched[rank][0] == replayed[rank][0], "losses"
        assert same(launched[rank][1], replayed[rank][1])
        assert replayed[rank][3][-1][1] == 6, "shapes that were recorded"
    assert same(replayed[0][1], replayed[1][1])


@in_other_ways
def test_what_one_device_cannot_record_none_replays(runs):
    both, _ = runs.of("waits", "lm launched")
    for each in both:
        (remark,) = each["remarks"]
        assert remark.startswith("steps are not captured as a CUDA graph: ")
        assert remark.endswith(" (process 1)")
    assert files_of(runs.folder / "waits") == files_of(runs.folder / "lm launched")
