"""`gatewise train nmt`: its output, files, errors, and resumed runs."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import time
import tomllib

import pytest
import torch

from gatewise.cli import nmt_data
from gatewise.cli.bench_quality import quality_record
from gatewise.cli.saved_translator import Translator
from gatewise.data import PairBatches, phrase_examples
from gatewise.training import RunFolder, read_tensors
from gatewise.training.loop import CHECKPOINT, MODEL
from tests.pairwise import exhaustive, exhaustive_unless
from tests.programs import Program, together

pytest.importorskip("tokenizers")
pytest.importorskip("sacrebleu")
pytest.importorskip("babel")


def weights(folder, name="model"):
    return read_tensors(getattr(RunFolder(folder), name), MODEL)[0]


def history(folder):
    return read_tensors(RunFolder(folder).checkpoint, CHECKPOINT)[1]["history"]


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


NUMBERS = {"eins": "one", "zwei": "two", "drei": "three", "vier": "four", "fünf": "five"}


def parallel(folder, name="cards", count=150):
    """Write sentences whose words are translated one by one, in reverse order."""
    generator = torch.Generator().manual_seed(count)
    words = list(NUMBERS)
    source, target = [], []
    for _ in range(count):
        picked = [words[int(torch.randint(5, (), generator=generator))] for _ in range(2 + len(source) % 4)]
        source.append(" ".join(picked))
        target.append(" ".join(NUMBERS[word] for word in reversed(picked)))
    files = folder / f"{name}.de", folder / f"{name}.en"
    for file, lines in zip(files, (source, target), strict=True):
        file.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    return files


@pytest.fixture
def files(tmp_path):
    return parallel(tmp_path)


SIZES = {
    "tokens": "word", "vocabulary-size": 0, "embedding-size": 16, "hidden-size": 16, "batch-tokens": 60, "epochs": 2,
    "learning-rate": 0.02, "threads": 1,
}  # fmt: skip


@pytest.fixture
def small(files):
    """The options of a run that takes a second."""
    words = [word for name, value in SIZES.items() for word in (f"--{name}", value)]
    return ["--train-source", files[0], "--train-target", files[1], *words, "--set", "warmup_steps=0"]


def test_empty_translations_are_counted_and_explained(gatewise, small, monkeypatch):
    monkeypatch.setattr(Translator, "text", lambda *given: "")
    answer = gatewise("train", "nmt", *small, "--output", "short", "--epochs", 1)
    assert answer.status == 0
    pattern = (
        r"note (\d+) of the \1 translations of the test set are empty: \d+ steps are too few to learn\. Raise `--ep"
    )
    assert re.search(pattern, " ".join(answer.out.split()))


def test_a_run_trains_scores_saves_and_shows_alignments(gatewise, drawn, small):
    answer = gatewise("train", "nmt", *small, "--output", "run", "--epochs", 20, "--set", "expect.test_bleu=1.0")
    assert answer.status == 0, answer.err
    assert "input feeding" in answer.out
    assert "note" not in answer.out
    assert " shapes, " in answer.out
    assert "nrefs:1|case:mixed|eff:no|tok:13a" in answer.out
    assert "test bleu at least 1: reached" in " ".join(answer.out.split())
    assert "one < eins (" in answer.out
    assert "gatewise translate --checkpoint run" in answer.out
    assert max(map(len, answer.out.splitlines())) <= 80
    run = RunFolder("run")
    result = json.loads(run.result.read_text())
    assert result["valid_perplexity"] < 3
    assert {"test_bleu", "test_chrf", "test_exact", "bleu_signature"} <= result.keys()
    assert run.curves.read_bytes().startswith(b"\x89PNG")
    assert any(run.tensorboard.iterdir())
    assert len((run.path / "test.translated").read_text("utf-8").splitlines()) > 1
    assert {"BLEU", "chrF", "exact"} == history("run")[-1]["scores"].keys()
    tensors, facts = read_tensors(run.model, MODEL)
    assert facts["vocabularies"]["source"]["kind"] == "word"
    assert weights("run", "last").keys() == tensors.keys()
    assert tomllib.loads(run.recipe.read_text())["model"]["hidden_size"] == 16


def test_without_files_it_learns_phrases(gatewise):
    sizes = ["--epochs", 1, "--hidden-size", 8, "--embedding-size", 8, "--set", "phrases=120", "--batch-tokens", 200]
    answer = gatewise("train", "nmt", *sizes, "--threads", 1, "--to", "iso", "--from", "fr", "--vocabulary-size", 300)
    assert answer.status == 0, answer.err
    assert "dates and amounts, fr to iso: train 108, valid 6, test 6" in " ".join(answer.out.split())
    assert RunFolder("runs/nmt").model.exists()


def test_what_is_left_out_is_reported(gatewise, small, files, tmp_path):
    source, target = files[0].read_text("utf-8"), files[1].read_text("utf-8")
    files[0].write_text(source + "\neins\n" + "zwei " * 30 + "\neins " + "drei " * 8 + "\n", "utf-8")
    files[1].write_text(target + "one\n\ntwo\none\n", "utf-8")
    others = [part for split in ("valid", "test") for part in parallel(tmp_path, split, 20)]
    names = ("valid-source", "valid-target", "test-source", "test-target")
    given = [word for name, file in zip(names, others, strict=True) for word in (f"--{name}", file)]
    answer = gatewise("train", "nmt", *small, *given, "--longest", 20, "--ratio", 4, "--epochs", 1)
    assert answer.status == 0, answer.err
    told = "train: 150 of 154 kept; left out: 2 empty, 1 too long, 1 of uneven length"
    assert told in " ".join(answer.out.split())
    assert "train 150, valid 20, test 20" in answer.out


@pytest.mark.parametrize(
    "extra",
    [["--average", "last"], *exhaustive([], ["--set", "input_feeding=false"])],
    ids=["last", "", "no"],
)
def test_a_run_that_was_interrupted_goes_on_to_the_same_bits(gatewise, small, monkeypatch, extra):
    assert gatewise("train", "nmt", *small, *extra, "--output", "whole").status == 0
    windows, seen = PairBatches.windows, []

    def interrupted(self, epoch=0, start=0):
        for batch in windows(self, epoch, start):
            if self._shuffle:
                seen.append(batch)
                if len(seen) == 8:
                    os.kill(os.getpid(), signal.SIGINT)
            yield batch

    monkeypatch.setattr(PairBatches, "windows", interrupted)
    answer = gatewise("train", "nmt", *small, *extra, "--output", "parts")
    assert answer.status == 130
    assert "gatewise train nmt --output parts --resume" in " ".join(answer.out.split())
    assert RunFolder("parts").last.exists()
    assert len(seen) == 8
    monkeypatch.setattr(PairBatches, "windows", windows)
    assert gatewise("train", "nmt", "--output", "parts", "--resume").status == 0
    assert same(weights("whole"), weights("parts"))
    assert same(weights("whole", "last"), weights("parts", "last"))
    results = [json.loads(RunFolder(name).result.read_text()) for name in ("whole", "parts")]
    for result in results:
        for name in ("minutes", "evaluations", "run"):
            del result[name]
    assert results[0] == results[1]


def test_a_run_becomes_a_record_of_its_quality(gatewise, small):
    assert gatewise("train", "nmt", *small, "--output", "run").status == 0
    found, result = quality_record(RunFolder("run")), json.loads(RunFolder("run").result.read_text())
    assert (found.task, found.figure("test"), found.minutes) == ("nmt", result["test_bleu"], result["minutes"])
    assert [each["valid_bleu"] for each in found.evaluations] == [each["scores"]["BLEU"] for each in history("run")]
    assert found.minutes > found.evaluations[-1]["minutes"]


def test_an_interruption_while_the_test_set_is_translated_loses_nothing(gatewise, small, monkeypatch):
    assert gatewise("train", "nmt", *small, "--output", "whole").status == 0
    translate = Translator.translate

    def interrupted(self, sentences, search, *rest):
        if search.beam_size > 1:
            raise KeyboardInterrupt
        return translate(self, sentences, search, *rest)

    monkeypatch.setattr(Translator, "translate", interrupted)
    assert gatewise("train", "nmt", *small, "--output", "parts").status == 130
    assert not RunFolder("parts").result.exists()
    monkeypatch.setattr(Translator, "translate", translate)
    assert gatewise("train", "nmt", "--output", "parts", "--resume").status == 0
    assert same(weights("whole"), weights("parts"))
    results = [json.loads(RunFolder(name).result.read_text()) for name in ("whole", "parts")]
    assert results[0]["test_bleu"] == results[1]["test_bleu"]


def test_words_that_were_never_seen_are_read_as_unknown(gatewise, small, tmp_path):
    names, others = ("valid-source", "valid-target", "test-source", "test-target"), []
    for split in ("valid", "test"):
        others += parallel(tmp_path, split, 20)
        others[-2].write_text(others[-2].read_text("utf-8").replace("eins", "elf"), "utf-8")
        others[-1].write_text(others[-1].read_text("utf-8").replace("one", "eleven"), "utf-8")
    given = [word for name, file in zip(names, others, strict=True) for word in (f"--{name}", file)]
    answer = gatewise("train", "nmt", *small, *given, "--epochs", 1)
    assert answer.status == 0, answer.err
    assert "eleven" not in (RunFolder("runs/nmt").path / "test.translated").read_text("utf-8")


# In `make test` a classifier stops early: test_train_classify.py.
@pytest.mark.exhaustive
def test_training_stops_when_nothing_gets_better(gatewise, small):
    constant = ["--schedule", "constant"]
    answer = gatewise("train", "nmt", *small, "--epochs", 20, "--patience", 1, "--learning-rate", 2.0, *constant)
    assert answer.status == 0, answer.err
    assert "no improvement in 1 evaluations" in answer.out
    assert len(history("runs/nmt")) < 20


# The recipe's section of the model reaches the model as a whole, whose options are tested with the models.
OF_THE_MODEL = {
    *("model.embedding_size", "model.hidden_size", "model.encoder_layers", "model.decoder_layers"),
    *("model.attention_size", "model.attention_layer_norm", "model.dropout", "model.tied"),
}


def changes():
    given = [
        ("data.vocabulary", "joint"), ("data.tokens", "character"), ("data.batch_tokens", 30), ("data.longest", 3),
        ("data.division_seed", 1), ("data.shares", "[0.5, 0.25, 0.25]"),
        ("data.vocabulary_size", 4), ("model.embedding_size", 8), ("model.hidden_size", 8),
        ("model.encoder_layers", 2), ("model.decoder_layers", 2), ("model.score", "dot"), ("model.attention_size", 5),
        ("model.attention_layer_norm", "true"), ("model.input_feeding", "false"), ("model.dropout", 0.5),
        ("model.tied", "target"), ("model.label_smoothing", 0.2), ("training.seed", 1),
    ]  # fmt: skip
    return exhaustive_unless([each for each in given if each[0] not in OF_THE_MODEL], given)


@pytest.fixture(scope="module")
def plain_losses(tmp_path_factory):
    return {}


@pytest.mark.usefixtures("training_alone")
@pytest.mark.parametrize(("key", "value"), changes())
def test_the_option_changes_the_run(gatewise, small, tmp_path, key, value, plain_losses):
    parallel(tmp_path, count=60)  # in place of 150 pairs, which take more than twice as long

    def losses(*more):
        shutil.rmtree("run", ignore_errors=True)
        answer = gatewise("train", "nmt", *small, "--output", "run", "--epochs", 1, "--set", "examples=0", *more)
        assert answer.status == 0, answer.err
        return [each["train_loss"] for each in history("run")]

    if not plain_losses:
        plain_losses["plain"] = losses()
    assert losses("--set", f"{key}={value}") != plain_losses["plain"]


def test_layer_dropout_changes_a_run_of_two_layers(gatewise, small):
    def losses(rate):
        layers = ["--encoder-layers", 2, "--set", f"model.layer_dropout={rate}"]
        assert gatewise("train", "nmt", *small, *layers, "--output", f"run{rate}", "--epochs", 1).status == 0
        return [each["train_loss"] for each in history(f"run{rate}")]

    assert losses(0.0) != losses(0.5)


def test_named_kernels_are_asked_or_refuse(gatewise, small):
    answer = gatewise("train", "nmt", *small, "--kernel", "cudnn")
    assert answer.refused
    assert "the kernel 'cudnn' cannot train this model" in answer.err
    answer = gatewise("train", "nmt", *small, "--attention-kernel", "flash")
    assert answer.refused
    assert "flash" in answer.err
    assert gatewise("train", "nmt", *small, "--overwrite", "--attention-kernel", "reference").status == 0


def lines(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("eins\nzwei\n", "one\n", "has 2 lines and"),
        ("", "one\n", "is empty"),
        (b"eins\nf\xfcnf\n", "one\ntwo\n", "is not UTF-8: byte 6 is 0xfc"),
        ("eins\nzwei\n", "one\ntwo\n", "too few to be divided"),
    ],
)
def test_files_that_cannot_be_learned_from_are_refused(gatewise, tmp_path, source, target, message):
    files = lines(tmp_path / "a.de", source), lines(tmp_path / "a.en", target)
    answer = gatewise("train", "nmt", "--train-source", files[0], "--train-target", files[1])
    assert answer.refused
    assert message in answer.err
    assert not RunFolder("runs/nmt").exists()


def test_files_of_which_nothing_is_left_are_refused(gatewise, small):
    answer = gatewise("train", "nmt", *small, "--longest", 1)
    assert answer.refused
    assert "0 of 136 kept; left out: 136 too long" in answer.err


def test_a_pair_that_is_too_long_for_any_batch_is_named(gatewise, small, files, tmp_path):
    answer = gatewise("train", "nmt", *small, "--batch-tokens", 5)
    assert answer.refused
    assert "too long for any batch" in answer.err
    assert "of the training pairs" in answer.err
    answer = gatewise("train", "nmt", *small, "--set", "evaluation_batch_tokens=5")
    assert "of the validation pairs" in answer.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--valid-source", "x"], "no `--valid-target`"),
        (["--tied", "all"], "`--tied` must be none or target"),
        (["--attention-kernel", "fastest"], "`--attention-kernel` must be one of 'auto', 'fused'"),
        (
            ["--set", "attention_layer_norm=true", "--score", "dot"],
            "`--set model.attention_layer_norm` must be False for the dot score, got True.",
        ),
        (["--hidden-size", 7], "`--hidden-size` must be even"),
        (["--vocabulary", "both"], "one of joint, separate"),
        (["--beam-size", 0], "`--beam-size` must be"),
        (["--set", "ratio=0.5"], "`--ratio` must be"),
        (["--set", "phrases=0"], "`--set data.phrases` must be"),
        (["--set", "examples=-1"], "`--set translation.examples` must be"),
        (["--tokens", "bpe", "--vocabulary-size", 10], "at least 256"),
    ],
)
def test_options_that_make_no_sense_are_refused(gatewise, small, options, message):
    answer = gatewise("train", "nmt", *small, *options)
    assert answer.refused
    assert message in answer.err


@pytest.mark.parametrize("option", ["--from", "--to"])
def test_an_unknown_language_is_refused(gatewise, option):
    answer = gatewise("train", "nmt", option, "xx")
    assert answer.refused
    assert f"`{option}` must be a locale" in answer.err


def test_more_phrases_than_there_are_is_refused(gatewise, monkeypatch):
    monkeypatch.setattr(phrase_examples, "_DRAWS_PER_PAIR", 1)
    answer = gatewise("train", "nmt", "--set", "phrases=2000")
    assert answer.refused
    assert "`--set data.phrases` must be at most the number of different phrases" in answer.err


def test_a_run_without_its_vocabularies_or_of_other_text_does_not_go_on(gatewise, small, files):
    assert gatewise("train", "nmt", *small, "--output", "run").status == 0
    text = files[0].read_text("utf-8")
    files[0].write_text(text.replace("eins", "vier"), "utf-8")
    answer = gatewise("train", "nmt", "--output", "run", "--resume")
    assert answer.refused
    assert "another training text" in answer.err
    RunFolder("run").tokenizer.unlink()
    answer = gatewise("train", "nmt", "--output", "run", "--resume")
    assert answer.refused
    assert "held its vocabulary" in answer.err


def test_two_processes_train_one_model(small, tmp_path):
    first, second = together(["train", "nmt", *small, "--output", "run", "--device", "cpu"], tmp_path)
    assert (first.status, second.status) == (0, 0), first.err + second.err
    result = json.loads(RunFolder(tmp_path / "run").result.read_text())
    assert result["test_bleu"] >= 0
    assert "2 processes" in first.out
    assert second.out == ""
    # 10 of 150 sentences, at least, of which each process translates its share.
    answers = (tmp_path / "run" / "test.translated").read_text("utf-8").splitlines()
    assert f"test {len(answers)}" in first.out


@pytest.mark.exhaustive  # test_train_lm.py kills a language model
def test_a_run_that_was_killed_goes_on(gatewise, small, tmp_path):
    words = ["train", "nmt", *small, "--output", "killed", "--set", "checkpoint_steps=1", "--epochs", 4]
    program = Program(words, tmp_path)
    while not RunFolder(tmp_path / "killed").model.exists() and program.status is None:
        time.sleep(0.005)
    program.process.kill()
    assert program.ended().status == -signal.SIGKILL
    assert gatewise("train", "nmt", "--output", "killed", "--resume").status == 0
    assert gatewise("train", "nmt", *small, "--output", "whole", "--epochs", 4).status == 0
    assert same(weights("whole"), weights("killed"))


def test_files_replace_the_folder_of_a_recipe_and_the_reverse(gatewise, small, tmp_path):
    (tmp_path / "folder.toml").write_text('[data]\nfolder = "absent"\n')
    answer = gatewise("train", "nmt", "--recipe", "folder.toml", *small, "--epochs", 1)
    assert answer.status == 0, answer.err
    (tmp_path / "files.toml").write_text('[data]\ntrain_source = "a"\ntrain_target = "b"\n')
    answer = gatewise("train", "nmt", "--recipe", "files.toml", "--data", "absent")
    assert "there is no text file" in answer.err
    assert "absent/train.de" in answer.err


def test_a_folder_holds_all_six_files_by_language(gatewise, small, tmp_path):
    folder = tmp_path / "pairs"
    folder.mkdir()
    for split, count in (("train", 100), ("valid", 10), ("test", 12)):
        parallel(folder, split, count)
    words = small[4:]
    answer = gatewise("train", "nmt", "--data", folder, *words, "--epochs", 1)
    assert answer.status == 0, answer.err
    assert "train.de: train 100, valid 10, test 12" in answer.out
    answer = gatewise("train", "nmt", "--data", folder, *small, "--epochs", 1)
    assert answer.refused
    assert "`--data` and `--train-source`, `--train-target` exclude each other." in " ".join(answer.err.split())
    answer = gatewise("train", "nmt", "--data", folder, *words, "--to", "fr")
    assert answer.refused
    assert "train.fr" in answer.err


def test_the_hash_of_the_training_text_is_that_of_one_sentence_after_another(monkeypatch):
    monkeypatch.setattr(nmt_data, "_AT_ONCE", 3)
    sentences = [torch.randint(1 << 31, (length,)) for length in (3, 0, 1, 7, 2, 0, 4)]
    expected = hashlib.sha256()
    for each in sentences:
        expected.update(each.to(torch.int32).numpy().tobytes() + b"\n")
    assert nmt_data._digest(sentences) == expected.hexdigest()[:16]
