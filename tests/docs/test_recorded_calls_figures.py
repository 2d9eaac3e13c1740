"""The figures on the page of benchmarks about recorded calls are those of the newest record."""

import json
import statistics
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECORD = json.loads((ROOT / "benchmarks/results/recorded_calls.jsonl").read_text("utf-8").splitlines()[-1])
PAGE = " ".join((ROOT / "docs/benchmarks.md").read_text("utf-8").split())


def over_the_faster(index_of):
    return [row["us"][index_of(row)] / min(row["us"]) for row in RECORD["rows"]]


def test_the_page_states_the_judged_choices():
    assert RECORD["judged"]
    chosen = over_the_faster(lambda row: int(row["chosen"]))
    explicit, recorded = (statistics.geometric_mean(over_the_faster(lambda row, form=form: form)) for form in (0, 1))
    mean = statistics.geometric_mean(chosen)
    assert (
        f"Of {len(chosen)} calls drawn afterwards, on an AMD EPYC, the choice took at most {max(chosen):.2f} times the "
        f"time of the faster of both (geometric mean {mean:.3f}); always the explicit passes would have taken "
        f"{explicit:.2f} times, and always recording {recorded:.2f} times."
    ) in PAGE
