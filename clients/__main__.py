"""Run the programs of clients with and without gatewise, compare their numbers, and fill the documentation's table.

    make clients                      all of them: environments in .clients, one line each in the record, the table
    make clients CLIENTS="captum"     some of them; the others keep their newest records
    python -m clients --table         the table only, from the record

`uv` makes the environments; a copy of it is installed in one of its own if the command is not there. The exit status is
1 if a program fails or its numbers differ.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from clients import own_tests
from clients.comparison import Comparison, compared, failed
from clients.environment import Failed, environment, uv
from clients.paths import FOLDER, PAGE, ROOT
from clients.record import append, newest
from clients.run import run
from clients.table import table
from clients.trial import WAYS
from gatewise.benchmarks.report import fill_block


def main() -> None:
    """Run what the command line names."""
    options = _options()
    wrong = []
    for client in () if options.table else options.clients:
        found = examined(client, options.environments, options.timeout)
        append(found)
        print(f"{client} {found.version}: {found.verdict}", flush=True)
        if not found.agrees or (client in own_tests.TESTS and not passed(found, options.environments, options.timeout)):
            wrong.append(client)
    fill_block(PAGE, "clients", table(newest()))
    fill_block(PAGE, "client-tests", own_tests.table(own_tests.newest()))
    sys.exit(f"{', '.join(wrong)}: see {PAGE.relative_to(ROOT)}" if wrong else 0)


def examined(client: str, environments: Path, timeout: float) -> Comparison:
    """Run the program of a client in all ways, and compare what it reports.

    Args:
        client: The name of the client in the package index.
        environments: The folder in which its environment is made.
        timeout: The time after which a run is ended, in seconds.
    """
    try:
        python = environment(uv(environments), environments / client, FOLDER / "requirements" / f"{client}.txt")
        return compared(client, {way: run(python, client, way, timeout) for way in WAYS})
    except Failed as failure:
        return failed(client, str(failure))


def passed(found: Comparison, environments: Path, timeout: float) -> bool:
    """Run a client's own tests, and return whether as many pass after the line as before.

    Args:
        found: The comparison of its runs.
        environments: The folder of the environments.
        timeout: The time after which the tests are ended, in seconds.
    """
    python = environments / found.client / "bin" / "python"
    try:
        results = own_tests.own_tests(python, found.client, found.version, found.commit, timeout)
    except Failed as failure:
        print(f"{found.client}: its own tests: {failure}", flush=True)
        return False
    print(f"{found.client}: its own tests: {results.before}, with gatewise {results.after}", flush=True)
    return results.before == results.after


def _options() -> argparse.Namespace:
    known = sorted(path.stem for path in (FOLDER / "requirements").glob("*.txt"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clients", nargs="*", help=f"all, if none is named: {', '.join(known)}")
    parser.add_argument("--environments", type=Path, default=ROOT / ".clients", help="the folder of the environments")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each run of a program")
    parser.add_argument("--table", action="store_true", help="run nothing, and fill the table from the record")
    options = parser.parse_args()
    unknown = set(options.clients) - set(known)
    if unknown:
        parser.error(f"`clients` must be among {', '.join(known)}, got {', '.join(sorted(unknown))}.")
    options.clients = options.clients or known
    options.environments = options.environments.resolve()
    return options


if __name__ == "__main__":
    main()
