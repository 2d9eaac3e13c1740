"""Fit the weights by which tilings of `persistent` are ranked to measured loops.

    python -m benchmarks.loops.tiling_weights RECORD [RECORD ...]     # records of benchmarks.loops.tilings

The lines that it prints are for `gatewise/selection/rates/rankings`. A tiling has the quantities and the ranking that
it has today, also where the record has others. Before them, it tells how much longer the loops of
the present and of the new choices take than the fastest measured ones, also for weights that were fitted without the
case that they choose for. Of records made with `--weights`, it tells how long the choices of those weights take beside
the present ones. The script needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gatewise.contract.device import Device
from gatewise.contract.ranking import weights as present_weights
from gatewise.kernels.persistent.sizes.tiling import Tiling

_NOT_ADDED = "few_warps"  # a share of the clock cycles instead of a part of them; see `Tiling.clocks_by`
_DRAWS, _SEED = 1500, 0
_SOFTNESS = 0.03  # share of the clock cycles within which tilings count as chosen together
_PRIOR = 0.02  # loss of weights that are all a factor of e away from the present ones


class Choice(NamedTuple):
    """The loops of one case and pass that were timed.

    Attributes:
        case: The case and the pass, by name.
        clocks: The measured clock cycles of each tiling.
        quantities: The quantities of each tiling.
        presently: The index of the tiling that ranks first by the present weights.
    """

    case: str
    clocks: list[float]
    quantities: list[dict[str, float]]
    presently: int


def main() -> None:
    """Fit weights to records."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("records", type=Path, nargs="+", help="files of benchmarks.loops.tilings")
    given = parser.parse_args()
    lines = [json.loads(line) for record in given.records for line in record.read_text().splitlines()]
    print("\n".join(report(lines)))


def report(lines: Sequence[Mapping[str, Any]], ghz: float = 1.98) -> Iterator[str]:
    """Yield the fitted weights of each ranking as lines of data, and how good the choices are.

    Args:
        lines: The lines of a record.
        ghz: The clock rate in GHz at which microseconds are clock cycles.
    """
    for ranking, rows in groups([as_ranked_now(line) for line in lines], "ranking").items():
        device = Device.named("h200").replace(name=rows[0]["device"])
        present = present_weights(device, ranking)
        names = [name for name in present if name != _NOT_ADDED]
        few_warps = present.get(_NOT_ADDED, 0.0)
        cases = cases_of(rows)
        if max(map(len, cases.values()), default=0) <= 2:
            yield compared(ranking, cases)
            continue
        choices = [choice_of(case, of_case, present, ghz) for case, of_case in cases.items()]
        fitted = fit(choices, names, present)
        apart = [
            slower(choice, fit([other for other in choices if other is not choice], names, present))
            for choice in choices
        ]
        kept = [choice.clocks[choice.presently] / min(choice.clocks) for choice in choices]
        chosen = [slower(choice, fitted) for choice in choices]
        misses = [
            clocks_by(fitted, quantities) / clocks
            for choice in choices
            for clocks, quantities in zip(choice.clocks, choice.quantities, strict=True)
        ]
        yield f"{ranking}: {len(misses)} loops of {len(choices)} cases"
        for label, ratios in (("present", kept), ("fitted", chosen), ("fitted without the case", apart)):
            worst = max(range(len(ratios)), key=ratios.__getitem__)
            most = f"{ratios[worst]:.2f} ({choices[worst].case})"
            yield f"  {label}: {geometric(ratios):.3f} of the fastest, at most {most}"
        spread = math.exp(statistics.pstdev(map(math.log, misses)))
        yield f"  clock cycles by the fitted weights: within a factor of {spread:.2f} (one standard deviation)"
        kept_share = {_NOT_ADDED: few_warps} if _NOT_ADDED in present else {}
        yield json.dumps({"ranking": ranking, "device": rows[0]["device"], "weights": fitted | kept_share})


def as_ranked_now(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line of a record with the ranking and the quantities that its tiling has now."""
    found = Tiling(**line["tiling"])
    least = present_weights(Device.named("h200"), "persistent wide layers")["least_units_of_several_groups"]
    cut = found.replace(wide=not found.exact and found.hidden >= least)
    return {**line, "ranking": cut.ranking, "quantities": cut.quantities()}


def cases_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the loops of a ranking by case, precision and GPU, of the cases in which several tilings were timed."""
    named = [{**row, "choice": f"{row['case']} {row['dtype']} {row['device']}"} for row in rows]
    return {case: of_case for case, of_case in groups(named, "choice").items() if len(of_case) > 1}


def compared(ranking: str, cases: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return a line about the times of other choices over those of the present ones, in cases where they differ."""
    ratios = {case: rows[1]["us_a_step"] / rows[0]["us_a_step"] for case, rows in cases.items()}
    if not ratios:
        return f"{ranking}: no other choice"
    shown = ", ".join(f"{case} {ratio:.2f}" for case, ratio in sorted(ratios.items(), key=lambda item: item[1]))
    return f"{ranking}: {len(ratios)} other choices take {geometric(list(ratios.values())):.3f} of the time: {shown}"


def choice_of(case: str, rows: Sequence[Mapping[str, Any]], present: Mapping[str, float], ghz: float) -> Choice:
    """Return the loops of a case and pass; the weights count for each of a step's rounds.

    Args:
        case: The case.
        rows: The lines of its loops.
        present: The present weights.
        ghz: The clock rate in GHz.
    """
    clocks = [1e3 * ghz * row["us_a_step"] for row in rows]
    factors = [row["rounds"] * (1 + present.get(_NOT_ADDED, 0.0) * row["few_warps"]) for row in rows]
    scaled = [
        {name: factor * number for name, number in row["quantities"].items()}
        for row, factor in zip(rows, factors, strict=True)
    ]
    added = {name: weight for name, weight in present.items() if name != _NOT_ADDED}
    return Choice(case, clocks, scaled, min(range(len(rows)), key=lambda index: clocks_by(added, scaled[index])))


def fit(choices: Sequence[Choice], names: Sequence[str], start: Mapping[str, float]) -> dict[str, float]:
    """Return weights near others by which the fastest tilings are chosen.

    A random search lowers the mean, over all choices, of the time of the chosen tiling over that of the fastest one (as
    logarithms). Tilings whose clock cycles are close by the weights count by parts, and weights that differ from the
    start cost something, so that those on which no choice depends stay.

    Args:
        choices: The measured loops.
        names: The quantities that have a weight.
        start: The weights to begin with.
    """
    generator = np.random.default_rng(_SEED)
    quantities = [np.array([[row.get(name, 0.0) for name in names] for row in choice.quantities]) for choice in choices]
    losses = [np.log(np.array(choice.clocks) / min(choice.clocks)) for choice in choices]
    first = np.log([max(start[name], 1e-9) for name in names])

    def loss(logarithms: np.ndarray) -> float:
        total = 0.0
        for amounts, lost in zip(quantities, losses, strict=True):
            clocks = np.log(amounts @ np.exp(logarithms))
            shares = np.exp((clocks.min() - clocks) / _SOFTNESS)
            total += float(shares @ lost / shares.sum())
        return total / len(choices) + _PRIOR * float(np.mean((logarithms - first) ** 2))

    best, least = first, loss(first)
    for _ in range(_DRAWS):
        tried = best + generator.normal(0, 0.25, len(first)) * (generator.random(len(first)) < 0.4)
        if (found := loss(tried)) < least:
            best, least = tried, found
    return {name: float(f"{weight:.4g}") for name, weight in zip(names, np.exp(best), strict=True)}


def clocks_by(weights: Mapping[str, float], quantities: Mapping[str, float]) -> float:
    """Return the clock cycles of a step by weights."""
    return sum(weight * quantities.get(name, 0.0) for name, weight in weights.items())


def slower(choice: Choice, weights: Mapping[str, float]) -> float:
    """Return the measured time of the tiling that weights choose, over that of the fastest."""
    first = min(range(len(choice.clocks)), key=lambda index: clocks_by(weights, choice.quantities[index]))
    return choice.clocks[first] / min(choice.clocks)


def groups(rows: Sequence[Mapping[str, Any]], name: str) -> dict[str, list[Mapping[str, Any]]]:
    """Return rows by the value of a field, in the order of their first occurrence."""
    values = dict.fromkeys(row[name] for row in rows)
    return {value: [row for row in rows if row[name] == value] for value in values}


def geometric(ratios: Sequence[float]) -> float:
    """Return the geometric mean."""
    return math.exp(statistics.fmean(map(math.log, ratios)))


if __name__ == "__main__":
    main()
