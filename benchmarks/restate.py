"""Write anew the work in the files of measured times: after a kernel states its work otherwise.

    python benchmarks/restate.py

The times stay as they were measured; what predictions correct is the estimate of the stated work.
"""

import dataclasses
from pathlib import Path

from gatewise import files
from gatewise.selection import kernel_named, points

RATES = Path(points.__file__).parent / "rates"


def main() -> None:
    """Rewrite every packaged file."""
    for path in sorted(RATES.glob("*.jsonl")):
        found = [
            dataclasses.replace(point, work=kernel_named(point.kernel).work(point.problem, point.record.device))
            for point in points.read(path.read_text().splitlines())
        ]
        files.write_text(path, "\n".join(points.lines(found)) + "\n")
        print(f"{path.name}: {len(found):,} calls")


if __name__ == "__main__":
    main()
