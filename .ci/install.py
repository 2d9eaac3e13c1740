"""Install gatewise and its extras into the environment of an interpreter, from pip's indexes.

    python .ci/install.py .venv/bin/python dev
    python .ci/install.py .venv/bin/python train --extra-index-url https://download.pytorch.org/whl/cpu

uv installs, which takes a third of pip's time. It does not read pip's configuration, so the indexes, constraints and
certificates that pip is configured with are given to it as options. Where uv cannot be had or fails, pip installs. The
environment may be without pip, as creating one with pip takes eight seconds; it has pip afterwards.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

ROOT = Path(__file__).parents[1]
OPTIONS = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "constraint": "--constraint",
    "trusted-host": "--allow-insecure-host",
}
"""Options of pip, each with uv's option for one of its values."""
QUIET = ("--quiet", "--disable-pip-version-check")


def main() -> None:
    """Install, and exit with the status."""
    python, extra, *options = sys.argv[1:]
    words = [*options, "--constraint", "constraints.txt", "--editable", f".[{extra}]", "pip"]
    sys.exit(install(str(Path(python).absolute()), words, options))


def install(python: str, words: Sequence[str], options: Sequence[str] = ()) -> int:
    """Install packages into the environment of an interpreter with uv, or else with pip, and return the exit status.

    Args:
        python: The interpreter.
        words: The words after `pip install`, which are the same for uv. Paths are those from the project's root.
        options: The options with which pip installs uv.
    """
    pip = pip_for(python)
    if _run([*pip, "install", *QUIET, *options, "uv"], stderr=subprocess.DEVNULL) == 0:
        settings = configured(pip)
        uv = [python, "-m", "uv", "pip", "install", "--quiet", "--python", python]
        # Like pip, take the best version of all indexes.
        command = [*uv, "--index-strategy", "unsafe-best-match", *translated(settings), *words]
        certificates = {"SSL_CERT_FILE": settings["cert"]} if "cert" in settings else {}
        if _run(command, certificates) == 0:
            return 0
        print("uv could not install these packages; pip is tried.", file=sys.stderr, flush=True)
    return _run([*pip, "install", *QUIET, "--no-compile", *words])


def pip_for(python: str) -> list[str]:
    """Return the command of a pip that installs into the environment of an interpreter, with a new one if need be."""
    own, running = [python, "-m", "pip"], [sys.executable, "-m", "pip", "--python", python]
    for command in (own, running):
        if _run([*command, "--version"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) == 0:
            return command
    if _run([python, "-m", "ensurepip"], stdout=subprocess.DEVNULL):
        sys.exit(f"{sys.executable} has neither pip nor ensurepip; on Debian and Ubuntu, install python3-venv.")
    return own


def configured(pip: Sequence[str]) -> dict[str, str]:
    """Return pip's options from its files and the environment, of which the latter come first."""
    command = [*pip, "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    found: dict[str, str] = {}
    for line in sorted(listed.splitlines(), key=lambda line: line.startswith(":env:")):
        name, _, value = line.partition("=")
        section, _, option = name.rpartition(".")
        if section in ("global", "install", ":env:"):
            found[option] = str(ast.literal_eval(value))
    return found


def translated(settings: Mapping[str, str]) -> list[str]:
    """Return uv's options for pip's."""
    found = []
    for option, own in OPTIONS.items():
        for value in settings.get(option, "").split():
            found += [own, value]
    return found + (["--no-index"] if settings.get("no-index", "").lower() in ("1", "true", "yes", "on") else [])


def _run(command: Sequence[str], variables: Mapping[str, str] = MappingProxyType({}), **more: Any) -> int:
    # What lies on PYTHONPATH is not in the environment, although pip would find it there.
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, cwd=ROOT, env=clean | dict(variables), check=False, **more).returncode


if __name__ == "__main__":
    main()
