"""The table of graphed training steps is that of the newest record of each case."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
WAYS = ("nn.LSTM, called", "nn.LSTM, graphed", "gatewise, called", "gatewise, compiled", "gatewise, graphed")
NAMES = {"ptb_large": "language model", "tagger": "tagger", "classifier": "classifier"}


def rows():
    lines = (ROOT / "benchmarks/results/graphed_steps.jsonl").read_text("utf-8").splitlines()
    newest = {row["case"]: row for row in map(json.loads, lines)}
    assert all(row["equal"] for row in newest.values())
    return newest


def line_of(case, row):
    medians = [row["seconds"][way]["median"] for way in WAYS]
    cells = [f"{1e6 * own:,.0f} ({medians[0] / own:.1f}x)" for own in medians]
    return f"| {NAMES[case]} | {f'{1e6 * medians[0]:,.0f}'} | {' | '.join(cells[1:])} |"


def test_the_page_has_the_figures_of_the_record():
    text = (ROOT / "docs/how-to/replay-a-step.md").read_text("utf-8")
    block = text.split("<!-- figures: graphed_steps -->\n")[1].split("<!-- /figures: graphed_steps -->")[0]
    assert block.splitlines()[2:] == [line_of(case, row) for case, row in rows().items()]


def test_the_readme_has_the_figures_of_the_record():
    text = " ".join((ROOT / "README.md").read_text("utf-8").split())
    ratios = {}
    for case, row in rows().items():
        seconds = {way: timing["median"] for way, timing in row["seconds"].items()}
        ratios[case] = {way: seconds[WAYS[0]] / own for way, own in seconds.items()}
    low, high = (pick(each["gatewise, graphed"] for each in ratios.values()) for pick in (min, max))
    called = [each["gatewise, called"] for each in ratios.values()]
    assert f"{low:.1f} to {high:.1f} times as fast as with `torch.nn.LSTM`" in text
    assert f"{min(called):.1f} to {max(called):.1f} times if only their layers are replaced" in text
    theirs = [each["nn.LSTM, graphed"] for each in ratios.values()]
    assert f"replayed step with `torch.nn.LSTM` is {min(theirs):.1f} to {max(theirs):.1f} times as fast" in text


def test_the_page_says_what_one_thread_of_autograd_gains():
    text = " ".join((ROOT / "docs/how-to/replay-a-step.md").read_text("utf-8").split())
    gains = {}
    for layer in ("gatewise", "nn.LSTM"):
        seconds = [row["seconds"] for row in rows().values()]
        of_cases = [own[f"{layer}, called"]["median"] / own[f"{layer}, one thread"]["median"] for own in seconds]
        gains[layer] = "{:.2f}, {:.2f} and {:.2f} times".format(*of_cases)
    assert (
        f"with gatewise are {gains['gatewise']} as fast with it, and those with `torch.nn.LSTM` {gains['nn.LSTM']}."
        in text
    )


def test_the_page_names_the_run_in_which_one_thread_did_not_pay():
    text = " ".join((ROOT / "docs/how-to/replay-a-step.md").read_text("utf-8").split())
    lines = (ROOT / "benchmarks/results/graphed_steps.jsonl").read_text("utf-8").splitlines()
    found = [row["seconds"] for row in map(json.loads, lines) if row["case"] == "ptb_large"]
    first, _ = (own for own in found if "gatewise, one thread" in own)
    gains = [
        first[f"{layer}, called"]["median"] / first[f"{layer}, one thread"]["median"]
        for layer in ("gatewise", "nn.LSTM")
    ]
    told = "the language model was {:.2f} times as fast with gatewise, and {:.2f} times with `torch.nn.LSTM`."
    assert told.format(*gains) in text
