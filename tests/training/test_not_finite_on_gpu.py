"""A step on a GPU that is not finite is found later and repeated with the same values, also in a CUDA graph."""

from __future__ import annotations

import pytest
import torch
from echo_model import Batch, Diary, Echoes, train
from faulty_model import WRONG, faulty_model
from test_resumption import files_of

from gatewise.cli.reference import on_reference
from gatewise.contract.errors import KernelFault, TrainingDiverged
from gatewise.data import PairBatches, TokenStream
from gatewise.models import LanguageModel, Seq2Seq
from gatewise.training import RunFolder
from gatewise.training.precision import arithmetic, autocast
from gatewise.training.processes import Processes
from gatewise.training.recorded_step import read_step

pytestmark = pytest.mark.gpu

REPLAYED = ["steps are replayed as one CUDA graph"]


class OnGpu(Echoes):
    """Batches on the GPU, in epochs long enough for a fault to be found before the end."""

    def __init__(self, length=120, **kind):
        super().__init__(length=length, **kind)

    def windows(self, epoch=0, start=0):
        for batch in super().windows(epoch, start):
            yield Batch(batch.x.cuda(), batch.y.cuda())


def gpu():
    return Processes(0, 1, torch.device("cuda", 0))


def trained(folder, model, **options):
    data, valid = OnGpu(), OnGpu(length=5, seed=1)
    return train(folder, model.cuda(), data, valid, processes=gpu(), reference=model.reference(), **options)


@pytest.mark.parametrize("graph", [True, False], ids=["replayed", "launched"])
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize(("epoch", "number"), [(0, 0), (0, 60), (1, 119)])
def test_a_faulty_step_is_repeated_from_the_same_numbers(tmp_path, wrong, graph, epoch, number):
    step, data, options = 120 * epoch + number, OnGpu(), {"schedule": "constant", "epochs": epoch + 1}
    model, diary = faulty_model(number, epoch, wrong, data), Diary()
    with pytest.raises(KernelFault, match=f"step {step + 1} of training"):
        trained(tmp_path / "faulty", model, cuda_graph=graph, observers=[diary], **options)
    if graph and step > 5:
        assert diary.remarks == REPLAYED
    assert all(each.isfinite().all() for each in model.parameters())
    # A run without a fault, without a CUDA graph.
    right, found = faulty_model(data=data), []
    plain = right.loss

    def noting(batch, state=None):
        loss, after = plain(batch, state)
        if right.training:
            found.append(loss.detach())
        return loss, after

    right.loss = noting
    trained(tmp_path / "right", right, cuda_graph=False, **options)
    facts = read_step(RunFolder(tmp_path / "faulty").fault, torch.device("cpu"))[2]
    assert facts["on the reference"][0]["loss"] == found[step].item()


def test_a_run_goes_on_after_a_fault_in_the_same_bits(tmp_path):
    trained(tmp_path / "whole", faulty_model())
    model = faulty_model(60, 1, data=OnGpu())
    with pytest.raises(KernelFault, match=r"The checkpoint of step 120 is as it was"):
        trained(tmp_path / "parts", model)
    RunFolder(tmp_path / "parts").fault.unlink()
    with model.trusted():
        trained(tmp_path / "parts", model)
    assert files_of(tmp_path / "whole") == files_of(tmp_path / "parts")


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_training_that_diverges_is_told_apart(tmp_path, optimizer):
    options = {"optimizer": optimizer, "learning_rate": 1e38, "clip": 0.0, "schedule": "constant"}
    with pytest.raises(TrainingDiverged):
        trained(tmp_path, faulty_model(), **options)


@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
def test_models_have_the_losses_of_the_reference(precision):
    """The reference computes the same model without kernels of our own."""
    tokens = torch.randint(50, (4 * 40 + 4,), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    language = LanguageModel(50, 64, 64, 2).cuda(), next(TokenStream(tokens, 4, 10, device=gpu().device).windows())
    sentences = [torch.randint(3, 40, (5,)) for _ in range(20)]
    pairs = PairBatches(sentences, sentences, 100, device=gpu().device)
    for model, batch in (language, (Seq2Seq(40, 50, 64, 64).cuda(), next(iter(pairs.windows())))):
        with arithmetic(precision), autocast(precision, gpu().device):
            loss, _ = model.loss(batch)
            loss.backward()
            gradients = [each.grad.clone() for each in model.parameters()]
            model.zero_grad()
            with on_reference(model):
                expected, _ = model.loss(batch)
                expected.backward()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5 if precision == "float32" else 1e-2)
        wanted = [each.grad for each in model.parameters()]
        distance = sum((one - other).square().sum() for one, other in zip(gradients, wanted, strict=True))
        assert distance <= 0.05**2 * sum(each.square().sum() for each in wanted)
