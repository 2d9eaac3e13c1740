"""The numbers on the page about classification are those of the newest records, and of the task itself."""

from __future__ import annotations

import json
import re
from pathlib import Path

from gatewise.cli.classifier_recipe import ClassifierRecipe
from gatewise.cli.recipe import read_recipe
from gatewise.cli.recipe_files import recipe_path
from gatewise.data import divide_sequences, synthetic
from gatewise.data.sequence_examples import noiseless

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "classification.md").read_text("utf-8")
LINES = (ROOT / "benchmarks" / "results" / "train_classify.jsonl").read_text().splitlines()
NEWEST = {record["command"]: record for record in map(json.loads, LINES)}


def test_the_page_shows_the_newest_records():
    rows = re.findall(r"^\| .* \| ([\d.]+) % \| (\d+) \| (\d+) seconds \|$", PAGE, flags=re.MULTILINE)
    shown = [(float(accuracy), int(epochs), int(seconds)) for accuracy, epochs, seconds in rows]
    assert shown == [
        (round(100 * record["test_accuracy"], 1), record["epochs"], round(60 * record["minutes"]))
        for record in NEWEST.values()
    ]


def test_the_records_reach_what_their_recipes_expect():
    for record in NEWEST.values():
        expect = read_recipe(recipe_path("classify", record["recipe"]), ClassifierRecipe()).expect
        assert record["test_accuracy"] >= expect.test_accuracy
        assert record["minutes"] <= expect.minutes


def test_the_rule_of_the_synthetic_task_is_right_as_often_as_the_page_says():
    test = divide_sequences(synthetic())[2]
    rule = noiseless(test.values.double().numpy().reshape(-1, 10, 2)) > 0
    assert f"right for {(rule == (test.labels == '1')).mean():.1%}".replace("%", " %") in " ".join(PAGE.split())
