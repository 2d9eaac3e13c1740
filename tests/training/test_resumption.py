"""However a run is stopped, the resumed run ends with the same bits."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
import torch
from echo_model import Diary, Echoes, train

from gatewise.contract.errors import NotFinite
from gatewise.data import TokenStream
from gatewise.models import LanguageModel
from gatewise.training import RunFolder, read_tensors
from gatewise.training.loop import CHECKPOINT
from tests.pairwise import each_value, exhaustive, pairwise
from tests.programs import processes_that_start_fast

OPTIONS = {
    "plain": {"checkpoint_steps": 7},
    "sgd, plateau, tail": {
        "optimizer": "sgd",
        "learning_rate": 0.2,
        "schedule": "plateau",
        "average": "tail",
        "average_patience": 0,
        "checkpoint_steps": 3,
    },
    "warm-up, ema, several evaluations": {
        "warmup_steps": 10,
        "average": "ema",
        "average_decay": 0.9,
        "evaluations_per_epoch": 3,
        "checkpoint_steps": 5,
    },
    "checkpoints after some evaluations": {
        "average": "tail",
        "beta2": 0.9,
        "rate_tokens": 16,
        "evaluations_per_epoch": 3,
        "checkpoint_evaluations": 4,
    },
    "evaluations after some epochs": {"average": "ema", "epochs_per_evaluation": 2, "checkpoint_steps": 6},
    "mean of the last three": {"average": "last", "average_last": 3, "evaluations_per_epoch": 2, "checkpoint_steps": 5},
}


AWD = {
    "last_hidden_size": 16,
    "locked": True,
    "word_dropout": 0.1,
    "weight_dropout": 0.5,
    "activation_penalty": 2.0,
    "change_penalty": 1.0,
}


def train_language_model(folder, stop_at=0, model_options=None, jitter=0.0, **options):
    """Train a small LSTM with every dropout on rotated text."""
    tokens = torch.randint(50, (2000,), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    dropouts = {"dropout": 0.3, "embedding_dropout": 0.3, "layer_dropout": 0.3}
    model = LanguageModel(50, 24, 24, 2, **dropouts, tied=True, **(model_options or {}))
    return train(
        folder,
        model,
        StopAt(TokenStream(tokens, 4, 10, rotate=True, jitter=jitter), stop_at),
        TokenStream(tokens[:400], 4, 10),
        **({"epochs": 3, "learning_rate": 0.01} | options),
    )


def files_of(folder):
    """Return the bytes of the best model, and everything in the checkpoint except for times."""
    run = RunFolder(folder)
    tensors, facts = read_tensors(run.checkpoint, CHECKPOINT)
    for name in ("seconds", "segment_seconds"):
        del facts[name]
    for evaluation in facts["history"]:
        del evaluation["seconds"], evaluation["tokens_per_second"]
    bits = {name: tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}
    return run.model.read_bytes(), bits, facts


class StopAt:
    """Data that sends Ctrl-C while it yields the n-th batch."""

    def __init__(self, batches, step: int) -> None:
        self.batches, self.step, self.served = batches, step, 0

    def __len__(self):
        return len(self.batches)

    def windows(self, epoch=0, start=0):
        for batch in self.batches.windows(epoch, start):
            self.served += 1
            if self.served == self.step:
                os.kill(os.getpid(), signal.SIGINT)
            yield batch


@pytest.mark.parametrize(("kind", "step"), each_value(pairwise([*OPTIONS], [1, 19, 20, 21, 60]), most=4))
def test_ctrl_c_saves_and_the_rest_follows_in_the_same_bits(tmp_path, kind, step):
    options = OPTIONS[kind]
    train(tmp_path / "whole", **options)
    outcome, _ = train(tmp_path / "parts", data=StopAt(Echoes(), step), **options)
    assert outcome.interrupted
    assert outcome.step == step
    diary = Diary()
    outcome, _ = train(tmp_path / "parts", observers=[diary], **options)
    assert not outcome.interrupted
    assert diary.starts[0][0] == step
    assert files_of(tmp_path / "whole") == files_of(tmp_path / "parts")


AWD_TRAINING = {"optimizer": "sgd", "learning_rate": 3.0, "clip": 0.25, "average": "tail", "rate_tokens": 40}


@pytest.mark.parametrize(
    "options", [*exhaustive({}), {"model_options": AWD, "jitter": 2.0, **AWD_TRAINING}], ids=["plain", "awd"]
)
def test_a_language_model_is_interrupted_at_every_kind_of_step(tmp_path, options):
    options = {"epochs": 2, **options}
    train_language_model(tmp_path / "whole", **options)
    steps = 0
    for pause in (1, 49, 1, 30):  # 50 windows an epoch, 52 with jitter
        outcome, _ = train_language_model(tmp_path / "parts", stop_at=pause, **options)
        steps += pause
        assert (outcome.interrupted, outcome.step) == (True, steps)
    train_language_model(tmp_path / "parts", **options)
    assert files_of(tmp_path / "whole") == files_of(tmp_path / "parts")


@pytest.mark.slow
@pytest.mark.parametrize("kills", [2, *exhaustive(20)])
def test_kills_at_random_moments_lose_nothing(tmp_path, kills):
    """Processes are killed with SIGKILL at any point: in a step, in an evaluation, or while a file is written."""
    options = {"epochs": 6 if kills > 2 else 2, "checkpoint_steps": 1}
    train_language_model(tmp_path / "whole", **options)
    context = processes_that_start_fast()
    chance, checkpoint = random.Random(0), RunFolder(tmp_path / "parts").checkpoint
    # The last third is left out, because a busy machine may be late.
    for step in sorted(chance.sample(range(100 * options["epochs"] // 3), kills)):
        process = context.Process(target=train_language_model, args=(tmp_path / "parts",), kwargs=options)
        process.start()
        while not checkpoint.exists() or read_tensors(checkpoint, CHECKPOINT)[1]["step"] < step:
            assert process.exitcode is None, f"ended before step {step}"
            time.sleep(0.003)
        time.sleep(chance.uniform(0.0, 0.005))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL
    train_language_model(tmp_path / "parts", **options)
    assert files_of(tmp_path / "whole") == files_of(tmp_path / "parts")


def test_a_finished_run_stays_as_it_is(tmp_path):
    first, _ = train(tmp_path)
    before = files_of(tmp_path)
    second, _ = train(tmp_path)
    assert (second.history, second.step, second.interrupted) == (first.history, first.step, False)
    assert files_of(tmp_path) == before


def test_checkpoints_come_with_some_evaluations_and_at_the_end(tmp_path):
    diary, steps = Diary(), []
    diary.evaluated = lambda _: steps.append(read_tensors(RunFolder(tmp_path).checkpoint, CHECKPOINT)[1]["step"])
    outcome, _ = train(tmp_path, observers=[diary], epochs=5, checkpoint_evaluations=2, learning_rate=0.05)
    assert steps == [0, 0, 40, 40, 80]  # while the epochs of 20 steps end
    assert read_tensors(RunFolder(tmp_path).checkpoint, CHECKPOINT)[1]["step"] == outcome.step == 100
    train(tmp_path / "others", epochs=5, learning_rate=0.05)
    assert RunFolder(tmp_path).model.read_bytes() == RunFolder(tmp_path / "others").model.read_bytes()


def test_training_that_diverges_says_so(tmp_path):
    with pytest.raises(NotFinite, match=r"step \d+ of training .* was not finite .* Lower `learning_rate`"):
        train(tmp_path, optimizer="sgd", learning_rate=1e30, clip=0.0)
