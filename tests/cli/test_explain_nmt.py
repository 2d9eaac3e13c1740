"""`gatewise explain nmt`: memory plans for training that does not run, on devices that the machine need not have."""

from __future__ import annotations

import json
import re

import pytest

from gatewise.planning.planner import Planner

IWSLT = ("explain", "nmt", "--hidden-size", 512, "--embedding-size", 512, "--encoder-layers", 2, "--decoder-layers", 2)
THERE = ("--vocabularies", "7710,17192", "--precision", "tf32", "--gpu", "h200")


def data(gatewise, *more):
    answer = gatewise(*IWSLT, *THERE, *more, "--json")
    assert answer.status == 0, answer.err
    return json.loads(answer.out)


@pytest.mark.parametrize(
    ("gpu", "options"),
    [
        pytest.param("h200", (), marks=pytest.mark.exhaustive),
        pytest.param("h200", ("--no-input-feeding",), marks=pytest.mark.exhaustive),
        ("l4", ("--precision", "bfloat16")),
        ("cpu", ()),
        ("cpu", ("--no-input-feeding",)),
    ],
)
def test_it_fits_80_columns_and_names_every_part(gatewise, gpu, options):
    answer = gatewise(*IWSLT, "--gpu", gpu, *options)
    assert answer.status == 0
    assert answer.err == ""
    assert max(map(len, answer.out.splitlines())) <= 80
    for part in ("source", "encoder 1", "encoder 2", "decoder", "attention", "output", "peak"):
        assert f"  {part} " in answer.out
    assert re.search(r"^largest      [\d,]+ pairs of this length in ", answer.out, re.MULTILINE)
    # One way of each part is chosen.
    assert len(re.findall(r"^\* encoder 1 ", answer.out, re.MULTILINE)) == 1
    assert "reference" in answer.out


@pytest.mark.parametrize(("gpu", "chosen", "other"), [("h200", "fused", "eager"), ("cpu", "eager", "fused")])
def test_it_says_which_kernel_computes_a_decoder_with_input_feeding(gatewise, gpu, chosen, other, monkeypatch):
    monkeypatch.setattr(Planner, "largest", lambda *given: 0)
    out = gatewise(*IWSLT, "--gpu", gpu).out
    assert "problem  decoder with input feeding, T 50, S 50, B 128, H 512" in out
    assert re.search(rf"^chosen   {chosen} \(", out, re.MULTILINE)
    assert re.search(rf"^\* {chosen} +accepted", out, re.MULTILINE)
    assert re.search(rf"^  {other} +(accepted|refused)", out, re.MULTILINE)
    assert "decoder with input feeding" not in gatewise(*IWSLT, "--gpu", gpu, "--no-input-feeding").out


def test_a_named_kernel_that_computes_no_decoder_is_refused_with_the_decision(gatewise, monkeypatch):
    monkeypatch.setattr(Planner, "largest", lambda *given: 0)  # which takes twenty plans
    monkeypatch.setenv("GATEWISE_KERNEL", "persistent")
    answer = gatewise(*IWSLT, "--gpu", "h200")
    assert answer.status == 1
    error = " ".join(answer.err.split())
    assert "decoder with input feeding, T 50, S 50, B 128, H 512" in error
    assert "chosen none ('persistent' was named by GATEWISE_KERNEL and computes no decoder with input feeding)" in error
    assert gatewise(*IWSLT, "--gpu", "h200", "--no-input-feeding").status == 0


def test_without_options_it_explains_the_default_model(gatewise):
    answer = gatewise("explain", "nmt", "--gpu", "cpu")
    assert answer.status == 0
    assert "S 50, T 50, B 128" in answer.out


# Budgets are tested in tests/planning.
@pytest.mark.exhaustive
def test_a_smaller_budget_changes_the_plan_and_the_largest_batch(gatewise):
    small, large = data(gatewise, "--memory-budget", "1.05GB"), data(gatewise, "--memory-budget", "8GB")
    assert small["peak"]["bytes"] <= 1.05e9 < large["peak"]["bytes"]
    assert small["largest_batch"] < large["largest_batch"]
    assert [part["chosen"] for part in small["parts"]] != [part["chosen"] for part in large["parts"]]


@pytest.fixture(scope="module")
def plain():
    return {}


@pytest.mark.parametrize(
    "option",
    [
        ("--lengths", "60,50"),
        ("--lengths", "50,60"),
        ("--batch", 100),
        ("--vocabularies", "7710,10000"),
        ("--vocabularies", "8000,17192"),
        ("--hidden-size", 256),
        ("--embedding-size", 256),
        ("--encoder-layers", 3),
        ("--decoder-layers", 3),
        ("--score", "dot"),
        ("--no-input-feeding",),
        ("--dropout", 0),
        ("--tied", "target"),
        ("--kernel", "eager"),
        ("--attention-kernel", "reference"),
        ("--precision", "bfloat16"),
        ("--memory-budget", "100GB"),
        ("--gpu", "l4"),
        ("--set", "training.optimizer=sgd"),
    ],
)
def test_every_option_changes_the_plan(gatewise, option, plain, monkeypatch):
    monkeypatch.setattr(Planner, "largest", lambda *given: 0)  # which takes twenty plans
    if not plain:
        plain.update(data(gatewise))
    assert data(gatewise, *option) != plain


def test_a_recipe_can_be_explained(gatewise, tmp_path):
    path = tmp_path / "narrow.toml"
    path.write_text('memory_budget = "3GB"\n[model]\nhidden_size = 64\nencoder_layers = 1\n', "utf-8")
    out = gatewise("explain", "nmt", "--recipe", path, "--gpu", "h200").out
    assert "(3GB)" in out
    assert "encoder 2" not in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--lengths", "50"), "`--lengths` must be two positive integers, got '50'. For example --lengths 50,60."),
        (("--vocabularies", "0,5"), "`--vocabularies` must be two positive integers, got '0,5'"),
        (
            ("--memory-budget", "plenty"),
            "`--memory-budget` must be 'auto' or a size such as 8GB or 7.5GiB, got 'plenty'",
        ),
        (("--gpu", "h2000"), "`--gpu` must be one of h200, h100"),
        (("--hidden-size", 3), "`--hidden-size` must be even, got 3"),
        (("--attention-kernel", "fast"), "got 'fast'"),
        (("--memory-budget", "1GB", "--batch", 1000), "`--memory-budget` must be at least"),
        (("--memory-budget", "1GB", "--batch", 1000), "lower `--batch` from 1,000 to"),
    ],
)
def test_bad_input_is_one_sentence(gatewise, words, message):
    answer = gatewise("explain", "nmt", "--gpu", "h200", "--hidden-size", 512, *words)
    assert answer.refused
    assert message in " ".join(answer.err.split())
    assert "Traceback" not in answer.err


def test_the_other_call_still_says_what_is_missing(gatewise):
    answer = gatewise("explain")
    assert answer.refused
    assert "`--input` is missing. For example: gatewise explain --input" in " ".join(answer.err.split())
