"""Install gatewise and its extras into the environment of the interpreter that runs this file, from pip's indexes.

    .venv/bin/python .ci/install.py dev
    .venv/bin/python .ci/install.py train --extra-index-url https://download.pytorch.org/whl/cpu

uv installs, which takes a third of pip's time. It does not read pip's configuration, so the indexes, constraints and
certificates that pip is configured with are given to it as options. Where uv cannot be had or fails, pip installs.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
OPTIONS = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "constraint": "--constraint",
    "trusted-host": "--allow-insecure-host",
}
"""Options of pip, each with uv's option for one of its values."""
PIP = [sys.executable, "-m", "pip"]


def main() -> None:
    """Install with uv, or else with pip, and exit with pip's status if that fails too."""
    extra, *options = sys.argv[1:]
    what = [*options, "--constraint", "constraints.txt", "--editable", f".[{extra}]"]
    pip = [*PIP, "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    if subprocess.run([*pip, *options, "uv"], cwd=ROOT, stderr=subprocess.DEVNULL, check=False).returncode == 0:
        settings = configured()
        uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", sys.executable]
        # Like pip, take the best version of all indexes.
        command = [*uv, "--index-strategy", "unsafe-best-match", *translated(settings), *what]
        environment = os.environ | ({"SSL_CERT_FILE": settings["cert"]} if "cert" in settings else {})
        if subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode == 0:
            return
        print("uv could not install these packages; pip is tried.", file=sys.stderr, flush=True)
    sys.exit(subprocess.run([*pip, *what], cwd=ROOT, check=False).returncode)


def configured() -> dict[str, str]:
    """Return pip's options from its files and the environment, the latter before the former."""
    listed = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=False).stdout
    found: dict[str, str] = {}
    for line in sorted(listed.splitlines(), key=lambda line: line.startswith(":env:")):
        name, _, value = line.partition("=")
        section, _, option = name.rpartition(".")
        if section in ("global", "install", ":env:"):
            found[option] = str(ast.literal_eval(value))
    return found


def translated(settings: dict[str, str]) -> Sequence[str]:
    """Return uv's options for pip's."""
    found = []
    for option, own in OPTIONS.items():
        for value in settings.get(option, "").split():
            found += [own, value]
    return found + (["--no-index"] if settings.get("no-index", "").lower() in ("1", "true", "yes", "on") else [])


if __name__ == "__main__":
    main()
