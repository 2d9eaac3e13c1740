"""Build the wheel and the sdist, install them into empty environments, and run the tests against what is installed.

    make release                                             every Python and PyTorch that can be had here
    make release PYTHONS=3.11 TORCHES=2.13 TESTS=tests/nn    one of each, and some of the tests
    make release PYTHONS="3.11 /opt/python3.13/bin/python"   an interpreter that is not on the PATH

Nothing is uploaded. What cannot be had, such as an interpreter that is not installed, is skipped with a sentence, and
all that was not tried is listed at the end; the exit status is 1 if anything failed or nothing was tested. dist/ is
replaced only when both files have been built.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

from install import install

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
EXTRAS = ("", "train,parquet,keras,cuda")
"""What is installed beside the library: nothing, and everything."""
TOOLS = ("pytest", "pytest-xdist", "pytest-timeout", "hypothesis", "expecttest", "scipy", "sybil")
"""The packages of the extra `dev` with which tests are run."""
LIGHT = ("tests/test_import.py", "tests/contract", "tests/selection", "tests/functional", "tests/nn")
"""The tests that are run without extras."""
COMMANDS = ("--version", "--help", "doctor", "explain --input 35,20,64 --hidden 64", "recipes", "recipes demo")
"""The commands that need no extra."""


class Failed(Exception):
    """A step of the release failed; its output has been printed."""


def main() -> None:
    """Build, and test every combination that can be had."""
    options = _options()
    wheel, sdist = build(options.pip)
    done, failed, skipped = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        source = unpacked(sdist, Path(folder))
        for python, torch, extras in combinations(options):
            name = f"Python {python}, PyTorch {torch}, {f'extras {extras}' if extras else 'no extras'}"
            program = python if "/" in python else f"python{python}"
            interpreter = shutil.which(program)
            if interpreter is None or not _runs(interpreter):
                advice = "Add it to the PATH, or give the path of an interpreter in PYTHONS."
                print(f"skipped: {name}: {program} is not installed. {advice}", flush=True)
                skipped.append(name)
                continue
            try:
                if not available(interpreter, torch, options.pip):
                    advice = "Name its index: PIP_OPTIONS=..."
                    print(f"skipped: {name}: pip finds no PyTorch {torch} for it. {advice}", flush=True)
                    skipped.append(name)
                    continue
                # Without extras the sdist is installed, so that both are.
                check(interpreter, torch, extras, wheel if extras else sdist, source, options)
            except Failed as failure:
                print(f"FAILED: {name}: {failure}", flush=True)
                failed.append(name)
            else:
                print(f"passed: {name}", flush=True)
                done.append(name)
    for name in skipped:
        print(f"not tried: {name}")
    counts = f"{len(done)} combinations passed, {len(failed)} failed, {len(skipped)} skipped"
    print(f"\n{counts}. In {DIST}: {wheel.name}, {sdist.name}")
    sys.exit(0 if done and not failed else 1)


def build(pip: Sequence[str]) -> tuple[Path, Path]:
    """Build the sdist, and the wheel from it, into dist/, and return the wheel and the sdist."""
    with tempfile.TemporaryDirectory() as folder:
        python = environment(sys.executable, Path(folder))
        run(python, "-m", "pip", "install", "--quiet", *pip, "build")
        built = Path(folder) / "dist"
        run(python, "-m", "build", "--outdir", built, ROOT)
        (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
        shutil.rmtree(DIST, ignore_errors=True)  # what an earlier release left must not be uploaded with this one
        DIST.mkdir()
        return Path(shutil.move(wheel, DIST)), Path(shutil.move(sdist, DIST))


def unpacked(sdist: Path, folder: Path) -> Path:
    """Unpack the sdist without the package, so that its tests import what is installed."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    shutil.rmtree(source / "gatewise")
    return source


def combinations(options: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    """Yield Python, PyTorch and extras."""
    for python in options.pythons:
        for torch in options.torches:
            for extras in EXTRAS:
                yield python, torch, extras


def available(interpreter: str, torch: str, pip: Sequence[str]) -> bool:
    """Return whether pip finds a version of PyTorch for an interpreter; raise `Failed` if it cannot say."""
    with tempfile.TemporaryDirectory() as folder:
        python = environment(interpreter, Path(folder))
        words = ["install", "--dry-run", "--quiet", "--no-deps", "--only-binary", ":all:", *pip, f"torch=={torch}.*"]
        command = [python, "-m", "pip", *words]
        answer = subprocess.run(command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if answer.returncode and not _none_is_offered(answer.stdout):
        print(answer.stdout, flush=True)
        raise Failed(shlex.join(command))
    return not answer.returncode


def check(interpreter: str, torch: str, extras: str, package: Path, source: Path, options: argparse.Namespace) -> None:
    """Install a package into an empty environment and test it there."""
    with tempfile.TemporaryDirectory() as folder:
        python = environment(interpreter, Path(folder))
        wanted = f"gatewise[{extras}] @ {package.as_uri()}" if extras else f"gatewise @ {package.as_uri()}"
        install_into(python, wanted, f"torch=={torch}.*", pip=options.pip)
        where = "import gatewise, pathlib; print(pathlib.Path(gatewise.__file__).parent)"
        installed = Path(subprocess.check_output([python, "-c", where], text=True, cwd=folder).strip())
        if Path(folder) not in installed.parents:
            raise Failed(f"gatewise was imported from {installed}, not from the environment")
        for command in COMMANDS:
            run(python, "-m", "gatewise", *command.split(), cwd=folder)
        if options.tests:
            install_into(python, *tools(), pip=options.pip)
            tests = options.tests if extras else light(options.tests)
            words = ["-n", options.workers, "-m", "not gpu and not exhaustive and not slow", *tests]
            if tests:
                run(python, "-m", "pytest", *words, cwd=source)


def light(asked: Sequence[str]) -> list[str]:
    """Return those of the asked tests that need no extras."""
    given = [str(Path(test)) for test in asked]
    narrower = [test for test in given if _within(test, LIGHT) and test not in LIGHT]
    return [test for test in LIGHT if _within(test, given)] + narrower


def tools() -> list[str]:
    """Return the requirements of the packages with which tests are run."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]["dev"]
    return [line for line in declared if line.partition(">=")[0] in TOOLS]


def environment(interpreter: str, folder: Path) -> str:
    """Make an empty environment, and return its interpreter."""
    run(interpreter, "-m", "venv", folder / "environment")
    return str(folder / "environment" / "bin" / "python")


def install_into(python: str, *words: str, pip: Sequence[str]) -> None:
    """Install packages into an environment, with more options for uv and pip."""
    if install(python, [*pip, *words], pip):
        raise Failed(f"the installation of {shlex.join(words)}")


def run(*words: object, cwd: Path | str | None = None) -> None:
    """Run a program, and print its output if it fails."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    command = [str(word) for word in words]
    answer = subprocess.run(command, cwd=cwd, env=clean, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if answer.returncode:
        print(answer.stdout, flush=True)
        raise Failed(shlex.join(command))


def _none_is_offered(said: str) -> bool:
    """Return whether pip says that the index has no such version; it says so without any index, too."""
    unreachable = "(from versions: none)" in said and ("connection broken" in said or "Could not fetch URL" in said)
    return "No matching distribution" in said and not unreachable


def _runs(interpreter: str) -> bool:
    return not subprocess.run([interpreter, "--version"], capture_output=True).returncode


def _within(test: str, asked: Sequence[str]) -> bool:
    return any(Path(test) == Path(each) or Path(each) in Path(test).parents for each in asked)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pythons", type=str.split, default="3.11 3.12 3.13", help="versions, or paths")
    parser.add_argument("--torches", type=str.split, default="2.6 2.11 2.13 2.15")
    parser.add_argument("--tests", type=str.split, default="tests", help="empty for none")
    parser.add_argument("--workers", default="auto", help="processes that run tests")
    parser.add_argument("--pip", type=shlex.split, default="", help="more options for uv and pip")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except Failed as failure:
        sys.exit(f"FAILED: {failure}")
