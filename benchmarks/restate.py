"""Write anew the work in the files of measured times: after a kernel states its work otherwise.

    python benchmarks/restate.py
    python benchmarks/restate.py --without "products by warpgroups"
    python benchmarks/restate.py --without-restated persistent

The times stay as they were measured; what predictions correct is the estimate of the stated work. With `--without`,
the calls are left out whose algorithm, as `explain` words it, has these words: those that a kernel now computes by
other code than the one that was measured. With `--without-restated`, the calls of a kernel are left out whose work is
stated otherwise now: run it after `benchmarks/rates.py write`, which states the work of calls that were measured again.
"""

import argparse
from pathlib import Path

from gatewise import files
from gatewise.selection import kernel_named, points

RATES = Path(points.__file__).parent / "rates"


def main() -> None:
    """Rewrite every packaged file."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--without", metavar="WORDS", help="leave out the calls whose algorithm has these words")
    parser.add_argument("--without-restated", metavar="KERNEL", help="leave out its calls with another stated work")
    given = parser.parse_args()
    for path in sorted(RATES.glob("*.jsonl")):
        known = points.read(path.read_text().splitlines())
        found = [
            new
            for point, new in zip(known, map(points.restated, known), strict=True)
            if (not given.without or given.without not in algorithm(point))
            and (point.kernel != given.without_restated or points.stated(new.work) == points.stated(point.work))
        ]
        files.write_text(path, "\n".join(points.lines(found)) + "\n")
        print(f"{path.name}: {len(found):,} calls")


def algorithm(point: points.Point) -> str:
    """Return the words in which `explain` describes how a measured call is computed now."""
    return kernel_named(point.kernel).algorithm(point.problem, point.record.device)


if __name__ == "__main__":
    main()
