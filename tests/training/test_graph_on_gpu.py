"""The training step as a CUDA graph on a GPU: the same bits as without a graph, interrupted or not."""

from __future__ import annotations

import pytest
import torch
from echo_model import Diary, train
from test_resumption import AWD, AWD_TRAINING, StopAt, files_of

from gatewise.data import PairBatches, TokenStream
from gatewise.models import LanguageModel, Seq2Seq
from gatewise.training.processes import Processes

pytestmark = pytest.mark.gpu

WINDOWS = 28  # an epoch: 27 of 10 steps, and one of 5


def train_on_gpu(
    folder, stop_at=0, loss=None, hidden_size=64, layer_dropout=0.3, model_options=None, jitter=0.0, **options
):
    """Train a small LSTM with every dropout; return the outcome, the model and the remarks."""
    tokens = torch.randint(50, (4 * (10 * WINDOWS - 5) + 4,), generator=torch.Generator().manual_seed(0))
    gpu = Processes(0, 1, torch.device("cuda", 0))
    torch.manual_seed(0)
    model = LanguageModel(
        50,
        hidden_size,
        hidden_size,
        2,
        dropout=0.3,
        embedding_dropout=0.3,
        layer_dropout=layer_dropout,
        **(model_options or {}),
    )
    model = model.to(gpu.device)
    if loss is not None:
        model.loss = loss(model)
    torch.manual_seed(1)
    diary = Diary()
    outcome, model = train(
        folder,
        model,
        StopAt(TokenStream(tokens, 4, 10, device=gpu.device, rotate=True, jitter=jitter), stop_at),
        TokenStream(tokens[:400], 4, 10, device=gpu.device),
        processes=gpu,
        observers=[diary],
        **({"epochs": 3, "learning_rate": 0.01} | options),
    )
    return outcome, model, diary.remarks


def settings_of_each_kind():
    sgd = {"optimizer": "sgd", "learning_rate": 1.0, "momentum": 0.0, "clip": 0.25}
    averaged = {"optimizer": "adamw", "average": "ema", "average_decay": 0.9, "warmup_steps": 10}
    return [
        pytest.param({**options, "precision": precision}, id=f"{options['optimizer']}-{precision}")
        for options in (sgd, averaged)
        for precision in ("float32", "tf32", "bfloat16")
    ]


@pytest.mark.parametrize("options", settings_of_each_kind())
def test_replays_end_in_the_bits_of_steps(tmp_path, options):
    first, _, remarks = train_on_gpu(tmp_path / "steps", cuda_graph=False, **options)
    assert remarks == ["steps are not captured as a CUDA graph: `cuda_graph` is off"]
    second, _, remarks = train_on_gpu(tmp_path / "graph", **options)
    assert remarks == ["steps are replayed as one CUDA graph"]
    assert first.step == second.step == 3 * WINDOWS
    assert files_of(tmp_path / "steps") == files_of(tmp_path / "graph")
    assert first.history[-1].train_loss < first.history[0].train_loss


def test_replays_of_the_awd_lstm_with_windows_of_random_lengths_end_in_the_bits_of_steps(tmp_path):
    options = {"model_options": AWD, "jitter": 2.0, "epochs": 8, "precision": "bfloat16", **AWD_TRAINING}
    train_on_gpu(tmp_path / "steps", cuda_graph=False, **options)
    _, _, remarks = train_on_gpu(tmp_path / "graphs", **options)
    assert remarks == ["steps are replayed as one CUDA graph"]
    assert files_of(tmp_path / "steps") == files_of(tmp_path / "graphs")
    for pause in (1, 30, 100):
        outcome, _, _ = train_on_gpu(tmp_path / "parts", stop_at=pause, **options)
        assert outcome.interrupted
    train_on_gpu(tmp_path / "parts", **options)
    assert files_of(tmp_path / "steps") == files_of(tmp_path / "parts")


# cuDNN's LSTM, which float32 may run on, has a dropout whose state no checkpoint can hold.
@pytest.mark.parametrize(("precision", "layer_dropout"), [("float32", 0.0), ("bfloat16", 0.3)])
def test_an_interrupted_run_goes_on_in_the_same_bits(tmp_path, precision, layer_dropout):
    options = {"precision": precision, "layer_dropout": layer_dropout}
    train_on_gpu(tmp_path / "whole", **options)
    steps = 0
    for pause in (1, 2, 11, WINDOWS):
        outcome, _, _ = train_on_gpu(tmp_path / "parts", stop_at=pause, **options)
        steps += pause
        assert (outcome.interrupted, outcome.step) == (True, steps)
    train_on_gpu(tmp_path / "parts", **options)
    assert files_of(tmp_path / "whole") == files_of(tmp_path / "parts")


def test_a_model_that_waits_for_the_device_is_trained_step_by_step(tmp_path):
    def waiting(model):
        def loss(batch, state=None):
            mean, state = LanguageModel.loss(model, batch, state)
            return mean * (1.0 if mean.item() < 1e9 else 0.0), state

        return loss

    first, _, _ = train_on_gpu(tmp_path / "steps", cuda_graph=False, loss=waiting)
    second, _, remarks = train_on_gpu(tmp_path / "refused", loss=waiting)
    (remark,) = remarks
    assert remark.startswith("steps are not captured as a CUDA graph: ")
    assert first.step == second.step
    assert files_of(tmp_path / "steps") == files_of(tmp_path / "refused")
    _, _, remarks = train_on_gpu(tmp_path / "next")  # the next run in this process is captured
    assert remarks == ["steps are replayed as one CUDA graph"]


def test_every_kernel_can_be_replayed(tmp_path):
    """A size for which both cuDNN and the persistent kernel can be chosen; the default choice is used."""
    for hidden_size in (31, 128, 650):
        _, _, remarks = train_on_gpu(
            tmp_path / str(hidden_size), hidden_size=hidden_size, precision="bfloat16", epochs=1
        )
        assert remarks == ["steps are replayed as one CUDA graph"]


def test_gradients_of_the_last_step_stay_in_the_weights(tmp_path):
    options = {"optimizer": "sgd", "learning_rate": 1.0, "momentum": 0.0, "epochs": 1}
    found = []
    for captured in (False, True):
        _, model, _ = train_on_gpu(tmp_path / str(captured), stop_at=WINDOWS - 1, cuda_graph=captured, **options)
        found.append([weight.grad for weight in model.parameters()])
    for step, replay in zip(*found, strict=True):
        assert torch.equal(step, replay)


def test_several_shapes_share_memory_and_end_in_the_bits_of_steps(tmp_path):
    """Train on sentences of different lengths: many shapes, all dropouts, float32 and TF32."""
    generator = torch.Generator().manual_seed(0)
    source = [torch.randint(3, 40, (1 + row * 7 % 13,), generator=generator) for row in range(600)]
    pairs = source, [each.flip(0) + 5 for each in source]
    gpu, found, memory = Processes(0, 1, torch.device("cuda", 0)), [], []
    for captured in (False, True):
        torch.manual_seed(0)
        model = Seq2Seq(40, 50, 64, 64, dropout=0.2, layer_dropout=0.2, input_feeding=False).to(gpu.device)
        torch.manual_seed(1)
        torch.cuda.reset_peak_memory_stats()
        folder, diary = tmp_path / str(captured), Diary()
        train_pairs = PairBatches(*pairs, 300, device=gpu.device, shuffle=True)
        valid = PairBatches(*(side[:50] for side in pairs), 300, device=gpu.device)
        assert train_pairs.shapes > 8
        outcome, _ = train(folder, model, train_pairs, valid, processes=gpu, observers=[diary], epochs=6,
                           learning_rate=0.01, precision="bfloat16", cuda_graph=captured)  # fmt: skip
        assert outcome.history[-1].train_loss < outcome.history[0].train_loss
        found.append(files_of(folder))
        memory.append(torch.cuda.max_memory_reserved())
    assert diary.remarks == ["steps are replayed as one CUDA graph"]
    assert found[0] == found[1]
    print(f"reserved: {memory[0]:,} bytes step by step, {memory[1]:,} with graphs of {train_pairs.shapes} shapes")
