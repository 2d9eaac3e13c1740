"""Translation on a GPU: the numbers of the CPU, and training that goes on in its bits."""

from __future__ import annotations

import pytest
import torch
from echo_model import Diary, train

from gatewise.data import PairBatches
from gatewise.feeding import products
from gatewise.models import Search, Seq2Seq, translate
from gatewise.models.greedy_search import GreedyGraphs
from gatewise.training.graph import cuda_graphs
from gatewise.training.precision import arithmetic
from gatewise.training.processes import Processes

pytestmark = pytest.mark.gpu

OPTIONS = [{}, {"input_feeding": False}, {"score": "general", "attention_size": 0}, {"attention_layer_norm": True}]


def sentences(size, count, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, size, (1 + (row * 7 + seed) % 13,), generator=generator) for row in range(count)]


def model(device, dtype, **options):
    torch.manual_seed(0)
    return Seq2Seq(40, 50, 24, 32, **options).to(device, dtype)


def batch(device):
    (only,) = PairBatches(sentences(40, 20, 0), sentences(50, 20, 1), 1000, device=device).windows()
    return only


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("dtype", "budget"), [(torch.float64, 1e-7), (torch.float32, 1e-5)], ids=str)
def test_loss_and_gradients_are_those_of_the_cpu(options, dtype, budget):
    def results(device, dtype):
        ours = model(device, dtype, **options)
        with arithmetic("float32"):
            loss, _ = ours.loss(batch(device))
            loss.backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in ours.parameters()])
        return loss.detach().cpu().double(), gradient.cpu().double()

    for found, wanted in zip(results("cuda", dtype), results("cpu", torch.float64), strict=True):
        assert (found - wanted).norm() / wanted.norm() < budget


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("feeding", [True, False])
def test_translations_are_those_of_the_cpu(beams, feeding):
    def found(device):
        ours, each = model(device, torch.float64, input_feeding=feeding).eval(), batch(device)
        with torch.no_grad():
            for parameter in ours.parameters():
                parameter.mul_(3)
        return translate(ours, each.source, each.source_lengths, Search(1, 2, (0, 1), beams, 1.0, beams))

    for one, other in zip(found("cuda"), found("cpu"), strict=True):
        assert [each.tokens for each in one] == [each.tokens for each in other]
        for left, right in zip(one, other, strict=True):
            torch.testing.assert_close(left.attention, right.attention, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("feeding", [True, False])
def test_replayed_steps_translate_as_steps_do(feeding):
    ours = model("cuda", torch.float32, input_feeding=feeding).eval()
    graphs = GreedyGraphs(ours, cuda_graphs())
    each, search = batch("cuda"), Search(1, 2, (0, 1))
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.mul_(3)
    for change in range(4):
        with torch.no_grad():
            ours.output.bias.add_(0.3 * change * torch.linspace(-1, 1, 50, device="cuda"))
        source = each.source.roll(change, 1)
        lengths = each.source_lengths.roll(change)
        # Recorded steps may run on another kernel: TF32, which cuDNN's take by default, would tell them apart.
        with arithmetic("float32"):
            found = translate(ours, source, lengths, search, graphs)
            wanted = translate(ours, source, lengths, search)
        assert [one.tokens for (one,) in found] == [one.tokens for (one,) in wanted]
    assert not graphs.refusal
    assert sum(recorded is not None for recorded in graphs._known.values()) == 1


def test_weights_that_autocast_converts_are_read_at_every_replay():
    ours = model("cuda", torch.float32).eval()
    graphs = GreedyGraphs(ours, cuda_graphs())
    each, search = batch("cuda"), Search(1, 2, (0, 1))
    with torch.autocast("cuda", torch.bfloat16):
        for token in (10, 20, 30, 40):
            with torch.no_grad():
                ours.output.weight.zero_()
                ours.output.bias.zero_()
                ours.output.bias[token] = 1.0
            found = translate(ours, each.source, each.source_lengths, search, graphs)
            assert {token for (one,) in found for token in one.tokens} == {token}
    assert not graphs.refusal


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("feeding", [True, False])
def test_training_learns_and_replays_are_the_steps_themselves(tmp_path, feeding, precision):
    gpu = Processes(0, 1, torch.device("cuda", 0))
    source = sentences(40, 400, 2)
    pairs = source, [each.flip(0) + 5 for each in source]

    def run(folder, **options):
        ours, diary = model("cuda", torch.float32, input_feeding=feeding, dropout=0.1), Diary()
        torch.manual_seed(1)
        train_pairs = PairBatches(*pairs, 300, device="cuda", shuffle=True)
        valid = PairBatches(*(side[:50] for side in pairs), 300, device="cuda")
        return *train(folder, ours, train_pairs, valid, processes=gpu, observers=[diary], epochs=4,
                      learning_rate=0.01, precision=precision, **options), diary.remarks  # fmt: skip

    first, one, remarks = run(tmp_path / "graph")
    print(remarks)
    second, other, _ = run(tmp_path / "steps", cuda_graph=False)
    losses = [each.valid_loss for each in first.history]
    assert losses[-1] < losses[0]
    assert losses == pytest.approx([each.valid_loss for each in second.history], rel=1e-2)
    assert all(parameter.isfinite().all() for parameter in (*one.parameters(), *other.parameters()))


def test_where_products_may_be_rounded_float16_ones_err_no_more(monkeypatch):
    def gradient(precision):
        ours = model("cuda", torch.float32)
        with arithmetic(precision):
            ours.loss(batch("cuda"))[0].backward()
        return torch.cat([parameter.grad.flatten() for parameter in ours.parameters()]).double()

    exact, ours = gradient("float32"), gradient("tf32")
    monkeypatch.setattr(products, "widens", lambda: False)
    theirs = gradient("tf32")
    assert not torch.equal(ours, theirs)
    assert (ours - exact).norm() <= 2 * (theirs - exact).norm()
