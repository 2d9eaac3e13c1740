"""`gatewise translate`: translation of standard input to standard output."""

from __future__ import annotations

import io
import itertools
import os
import signal
import subprocess
import sys

import pytest
import torch

from gatewise.cli.nmt_alignment import alignment_words, draw_alignment
from gatewise.contract.errors import ArgumentError
from gatewise.data import ParallelText, build_vocabularies
from gatewise.data.sentences import END
from gatewise.training.loop import MODEL
from tests.pairwise import each_value

SOURCE, TARGET = ("eins zwei drei", "vier fünf"), ("one two three", "four <b> $ five")


def untrained(path, tokens):
    """Write an untrained model with different translations for different sentences."""
    from gatewise.cli.saved_translator import build_translation_model, translation_facts
    from gatewise.training.checkpoint import write_tensors
    from gatewise.training.snapshot import weights_of

    torch.manual_seed(3)
    both = build_vocabularies(tokens, ParallelText("x", SOURCE, TARGET))
    sizes = {"source_size": len(both[0]), "target_size": len(both[1]), "embedding_size": 6, "hidden_size": 8}
    model = build_translation_model(sizes, torch.device("cpu"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6)
        model.output.bias[END] -= 1
    write_tensors(path, weights_of(model), MODEL, translation_facts(sizes, *both))
    return path


@pytest.fixture
def checkpoint(tmp_path):
    return untrained(tmp_path / "model.safetensors", "word")


@pytest.fixture
def translate(gatewise, checkpoint, monkeypatch):
    """Call `gatewise translate` with some text on standard input."""

    def call(text, *words):
        content = text if isinstance(text, bytes) else text.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        return gatewise("translate", "--checkpoint", checkpoint, *words)

    return call


TEXT = "eins zwei drei\nvier\nfünf fünf\nzwei\n"


@pytest.mark.parametrize(("beams", "at_once"), each_value([*itertools.product([1, 3], [1, 3, 64])]), ids=str)
def test_lines_are_answered_in_order_however_many_are_read_at_once(translate, beams, at_once):
    whole = translate(TEXT, "--beam-size", beams, "--batch-lines", at_once)
    assert whole.status == 0, whole.err
    alone = [translate(f"{line}\n", "--beam-size", beams).out for line in TEXT.splitlines()]
    assert whole.out == "".join(alone)
    assert len(set(alone)) > 1


def test_an_empty_line_stays_an_empty_line(translate):
    answer = translate("\neins\n \t\n\nzwei")
    lines = answer.out.split("\n")
    assert [bool(line) for line in lines] == [False, True, False, False, True, False]
    assert translate("").out == ""
    assert translate("\n", "--scores").out == "0 |||  ||| 0.0000\n"


def test_a_byte_order_mark_and_windows_line_ends_are_no_words(translate):
    assert translate(b"\xef\xbb\xbfeins\r\nzwei\r\n").out == translate("eins\nzwei\n").out


def test_several_translations_come_with_falling_scores(translate):
    answer = translate("eins zwei\nvier\n", "--n-best", 3)
    fields = [line.split(" ||| ") for line in answer.out.splitlines()]
    assert [number for number, _, _ in fields] == ["0", "0", "0", "1", "1", "1"]
    scores = [float(score) for _, _, score in fields]
    assert scores[:3] == sorted(scores[:3], reverse=True)
    assert len({text for _, text, _ in fields[:3]}) == 3
    best = translate("eins zwei\nvier\n", "--scores").out.splitlines()
    assert best == [" ||| ".join(fields[0]), " ||| ".join(fields[3])]
    assert translate("eins zwei\nvier\n", "--n-best", 2, "--length-penalty", 0).out != answer.out


def test_words_that_were_never_seen_are_counted(translate):
    answer = translate("eins Igel Fuchs\n")
    assert answer.status == 0
    assert "2 words are not in the vocabulary" in answer.err
    assert "vocabulary" not in translate("eins\n").err


def test_unknown_words_can_be_copied(checkpoint, translate):
    from gatewise.cli import nmt_translation
    from gatewise.cli.saved_translator import load_translator
    from gatewise.models import Translation

    translator = load_translator(checkpoint, torch.device("cpu"))
    unknown, known = translator.target.unknown, int(translator.target.encode("two"))
    found = Translation((unknown, known), -1.0, -1.0, torch.tensor([[0.1, 0.9], [0.5, 0.5], [1.0, 0.0]]))
    for copies, wanted in ((True, "Igel two"), (False, "<unk> two")):
        output = nmt_translation.Output(replace_unknown=copies)
        assert list(nmt_translation._texts(translator, "eins Igel", [found], 0, output)) == [wanted]
    assert translate("eins\n", "--replace-unknown").status == 0


def test_copies_of_unknown_words_are_refused_where_there_are_none(translate, checkpoint):
    untrained(checkpoint, "bpe")
    answer = translate("eins\n", "--replace-unknown")
    assert answer.refused
    expected = (
        "`--replace-unknown` must be given for a model of --tokens word, got a model of --tokens bpe. Leave it out"
    )
    assert expected in " ".join(answer.err.split())
    assert answer.out == ""


def test_a_line_that_is_not_utf8_is_named_after_those_before_it(translate):
    answer = translate(b"eins\nzwei\nf\xfcnf\nvier\n")
    assert answer.status == 1
    assert "line 3 of the input is not UTF-8: its byte 1 is 0xfc" in answer.err
    assert answer.out == translate("eins\nzwei\n").out


def test_a_file_in_utf16_is_told_how_to_convert(translate):
    answer = translate("eins\n".encode("utf-16"))
    assert "byte 0 is 0xff. Convert the input first, for example by: iconv -f utf-16 -t utf-8" in answer.err


def test_lines_with_zeros_that_are_not_utf8_are_not_told_how_to_convert(translate):
    answer = translate(b"eins\nzw\xff\0\0\0\0i\n")
    assert "line 2 of the input is not UTF-8: its byte 2 is 0xff. It holds NUL characters" in answer.err


@pytest.mark.parametrize("name", ["a.png", "a.html"])
def test_the_alignment_of_the_first_line_is_drawn(translate, drawn, tmp_path, name):
    answer = translate("\neins zwei\nvier\n", "--attention", tmp_path / name)
    assert answer.status == 0, answer.err
    content = (tmp_path / name).read_bytes()
    if name.endswith("png"):
        assert content.startswith(b"\x89PNG")
    else:
        assert b"<th>eins</th><th>zwei</th></tr>" in content
        assert b"vier" not in content
    (tmp_path / name).unlink()
    answer = translate("\n", "--attention", tmp_path / name)
    assert "there was no line to translate" in answer.err
    assert not (tmp_path / name).exists()


def test_alignments_show_any_token_and_every_share(drawn, tmp_path):
    source, target = ["<b>", "$x$", "&"], ["<i>", "</s>"]
    shares = torch.tensor([[0.05, 0.9, 0.05], [0.2, 0.3, 0.5]])
    draw_alignment(tmp_path / "a.html", source, target, shares)
    page = (tmp_path / "a.html").read_text("utf-8")
    assert "<th>&lt;b&gt;</th><th>$x$</th><th>&amp;</th>" in page
    assert page.count(">90%</td>") == page.count(">30%</td>") == 1
    assert ">5%</td>" not in page
    draw_alignment(tmp_path / "a.png", source, target, shares)
    assert alignment_words(source, target[:1], shares) == ["<i> < $x$ (90%)"]
    with pytest.raises(ArgumentError, match=r"ends in \.png or \.html"):
        draw_alignment(tmp_path / "a.pdf", source, target, shares)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--attention", "a.pdf"], "ends in .png or .html"),
        (["--beam-size", 2, "--n-best", 3], "`--n-best` must be from 1 to the beam size, 2"),
        (["--device", "tpu"], "`--device` must be"),
    ],
)
def test_options_that_make_no_sense_are_refused(translate, words, message):
    answer = translate("eins\n", *words)
    assert answer.refused
    assert message in answer.err
    assert answer.out == ""


def test_a_closed_standard_input_is_one_sentence(gatewise, checkpoint, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    answer = gatewise("translate", "--checkpoint", checkpoint)
    assert answer.status == 1
    assert answer.err.startswith("error: `standard input` must be open, got a closed one.")


def test_a_checkpoint_without_its_vocabulary_is_refused(gatewise, checkpoint, tmp_path):
    from gatewise.training import read_tensors
    from gatewise.training.checkpoint import write_tensors

    tensors, facts = read_tensors(checkpoint, MODEL)
    for wrong, message in (
        ({"translation": facts["translation"]}, "lacks its vocabularies"),
        ({"vocabularies": facts["vocabularies"]}, "is not a translation model"),
        (facts | {"vocabularies": {"source": {"kind": "word"}}}, "is not a translation model"),
        (facts | {"translation": facts["translation"] | {"hidden_size": 10}}, "of another model"),
        (facts | {"translation": facts["translation"] | {"hidden_size": -1}}, "is not a translation model"),
        (facts | {"translation": 3}, "is not a translation model"),
        (facts | {"vocabularies": {"source": {"kind": "word", "words": ["<unk>", "<eos>"]}}}, "vocabulary of 5 tokens"),
    ):
        write_tensors(tmp_path / "wrong.safetensors", tensors, MODEL, wrong)
        answer = gatewise("translate", "--checkpoint", "wrong.safetensors")
        assert answer.status == 1
        assert message in " ".join(answer.err.split())
        assert "wrong.safetensors " in answer.err


def test_models_that_do_not_exist_are_refused(gatewise, tmp_path):
    (tmp_path / "empty").mkdir()
    for path, message in (("nowhere", "does not exist"), ("empty", "has no model yet")):
        answer = gatewise("translate", "--checkpoint", path)
        assert answer.status == 1
        assert message in answer.err


# `gatewise` without looking for garbage, which would take a fifth of its start: imports leave none.
PROGRAM = """
import gc
gc.disable()
from gatewise.cli import main
main()
"""


def test_what_was_translated_is_there_when_somebody_interrupts(checkpoint, tmp_path):
    words = ["translate", "--checkpoint", str(checkpoint), "--batch-lines", "1"]
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        # A shell's background jobs ignore the signal, and so do the processes that they start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        process.stdin.write(b"eins zwei\n")
        process.stdin.flush()
        assert process.stdout.readline().endswith(b"\n")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.communicate()
