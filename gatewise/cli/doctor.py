"""`gatewise doctor`: what is installed, what is missing and how to get it, and a test of every kernel."""

from __future__ import annotations

import dataclasses
import os
import textwrap
import warnings
from collections.abc import Iterator
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from gatewise import testing
from gatewise.cli import environment
from gatewise.cli.environment import Extra, Gpu, Requirement, Versions
from gatewise.contract.decision import format_bytes, wrapped
from gatewise.contract.device import Device, tf32_allowed
from gatewise.contract.errors import GatewiseError
from gatewise.contract.kernel import Kernel
from gatewise.contract.problem import Problem
from gatewise.kernels import ALL
from gatewise.selection import preference
from gatewise.training.json_values import to_json

app = typer.Typer(add_completion=False)

_COLUMNS = 80
_TINY = Problem(time=5, batch=3, input_size=5, hidden_size=24, needs_grad=True)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_SETTINGS = ("GATEWISE_KERNEL", "GATEWISE_POLICY", "GATEWISE_CACHE")


@dataclasses.dataclass(frozen=True, slots=True)
class SelfTest:
    """The test result of one kernel on one device.

    Attributes:
        device: The device's name in PyTorch.
        kernel: The kernel's name.
        passed: The largest error as a fraction of the error budget, for each dtype with correct results.
        failed: The failure, for each dtype with wrong results or an error.
        refused: The refusals, for each dtype that the kernel refuses.
    """

    device: str
    kernel: str
    passed: dict[str, float]
    failed: dict[str, str]
    refused: dict[str, tuple[str, ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class Findings:
    """All findings of the doctor."""

    versions: Versions
    core: tuple[Requirement, ...]
    gpus: tuple[Gpu, ...]
    devices: dict[str, Device]
    extras: tuple[Extra, ...]
    settings: dict[str, str]
    tests: tuple[SelfTest, ...]

    def broken(self) -> list[str]:
        """The things that do not work, one sentence each."""
        found = [
            f"{one.package} is {one.installed or 'not installed'}, needed: {one.least} or newer. "
            f"Run: pip install -U {one.package}"
            for one in self.core
            if one.missing or one.too_old
        ]
        found += [
            f"{one.package} is {one.installed}, needed for gatewise[{extra.name}]: {one.least} or newer. "
            f"Run: {extra.command}"
            for extra in self.extras
            for one in extra.requirements
            if one.too_old and extra.installed
        ]
        if self.gpus and self.versions.cuda and len(self.devices) == 1:
            found.append(
                f"PyTorch for CUDA {self.versions.cuda} does not see {self.gpus[0].name}: the driver "
                f"{self.versions.driver} may be too old, or CUDA_VISIBLE_DEVICES hides it. Update the driver, or "
                "install a PyTorch for an older CUDA: https://pytorch.org/get-started/locally"
            )
        found += [
            f"{test.kernel} on {test.device} in {dtype}: {what}"
            for test in self.tests
            for dtype, what in test.failed.items()
        ]
        try:
            preference()
        except GatewiseError as error:  # every call of a layer would raise it
            found.append(str(error))
        return found

    def advice(self) -> list[str]:
        """The possible improvements, one sentence each."""
        if self.gpus and not self.versions.cuda:
            index = "https://download.pytorch.org/whl/cu130"
            command = f"pip install --force-reinstall torch --index-url {index}"
            return [f"{self.gpus[0].name} is not used: this PyTorch is built for the CPU. Run: {command}"]
        return []


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    test: Annotated[bool, typer.Option("--test/--no-test", help="Run the self-test of each kernel.")] = True,
) -> None:
    """Show what is installed or missing, and test every kernel.

    Each kernel computes a tiny problem, forward and backward, on each device,
    and its results are compared with float64. The first run on a GPU compiles
    the kernels.

    \b
    Examples:
      gatewise doctor
      gatewise doctor --json > report.json
      gatewise doctor --no-test

    The exit status is 0 if nothing is broken; missing optional packages do not count as broken.
    """  # noqa: D301 - \b keeps the lines of the examples apart
    found = examined(test)
    typer.echo(to_json(_as_data(found), indent=2) if as_json else "\n".join(_as_lines(found)))
    if found.broken():
        raise typer.Exit(1)


def examined(test: bool = True) -> Findings:
    """Return all findings."""
    gpus, devices = environment.gpus(), environment.devices()
    tests: list[SelfTest] = []
    if test:
        with Console(stderr=True).status("") as status:
            for name in devices:
                for kernel in ALL:
                    status.update(f"testing {kernel.name} on {name}")
                    tests.append(self_test(kernel, name))
    return Findings(
        versions=environment.versions(gpus),
        core=environment.core(),
        gpus=gpus,
        devices=devices,
        extras=environment.extras(),
        settings={name: os.environ[name] for name in _SETTINGS if os.environ.get(name)},
        tests=tuple(tests),
    )


def self_test(kernel: Kernel, device: str) -> SelfTest:
    """Compare a kernel with float64 on a tiny problem, in every dtype that it allows.

    Args:
        kernel: The kernel to test.
        device: The device's name in PyTorch.
    """
    found = SelfTest(device, kernel.name, {}, {}, {})
    for dtype in _DTYPES:
        name = str(dtype).removeprefix("torch.")
        on_gpu = device != "cpu"
        problem = _TINY.replace(dtype=dtype, allow_tf32=on_gpu and dtype == torch.float32 and tf32_allowed())
        refusals = testing.why_not(kernel, problem, device)
        if refusals:
            found.refused[name] = tuple(refusals)
            continue
        try:
            # PyTorch's warnings are about the reference with which the kernel is compared.
            with warnings.catch_warnings(action="ignore"):
                measured = testing.check_kernel(kernel, problem, device)
        except (GatewiseError, AssertionError, RuntimeError, ImportError, OSError, ValueError, TypeError) as error:
            # Every error is a finding, and must not prevent the tests of the other kernels.
            found.failed[name] = " ".join(f"{type(error).__name__}: {error}".split())
        else:
            found.passed[name] = max(tensor.error / tensor.budget for tensor in measured.values())
    return found


def _as_lines(found: Findings) -> Iterator[str]:
    version = found.versions
    yield f"gatewise {version.gatewise}"
    gpu_build = f"{version.cuda}" if version.cuda else "none: this PyTorch is built for the CPU"
    rows = {
        "python": f"{version.python} on {version.system}",
        **{one.package: one.installed or "not installed" for one in found.core},
        "torch": version.torch,
        "CUDA": gpu_build,
        "cuDNN": version.cudnn or "none",
        "driver": version.driver or "none found",
        **found.settings,
    }
    for name, value in rows.items():
        yield from wrapped(f"  {name:<10} ", value)
    yield from ("", "devices")
    for name, device in found.devices.items():
        yield from wrapped(f"  {name:<10} ", _device_text(device))
    yield from ("", "extras")
    for extra in found.extras:
        yield from _extra_lines(extra)
    if found.tests:
        sizes = f"T {_TINY.time}, B {_TINY.batch}, I {_TINY.input_size}, H {_TINY.hidden_size}"
        yield from ("", f"kernels: forward and backward of {sizes}, compared with float64")
    for test in found.tests:
        yield from _test_lines(test)
    yield ""
    for sentence in found.advice():
        yield from wrapped("note: ", sentence)
    broken = found.broken()
    yield typer.style("broken:", fg="red", bold=True) if broken else typer.style("nothing is broken", fg="green")
    for sentence in broken:
        yield from wrapped("  - ", sentence)


def _device_text(device: Device) -> str:
    memory = format_bytes(device.memory_bytes)
    if device.kind == "cpu":
        return f"{device.name}, {memory}"
    return f"{device.name}, {device.architecture}, {device.multiprocessors} multiprocessors, {memory}"


def _extra_lines(extra: Extra) -> Iterator[str]:
    state = typer.style("missing  ", fg="yellow") if extra.lacking else typer.style("installed", fg="green")
    yield f"  {extra.name:<10} {state}  {extra.adds}"
    if extra.lacking:
        lacking = ", ".join(f"{one.package}{f' ({one.installed})' if one.too_old else ''}" for one in extra.lacking)
        yield from wrapped(" " * 13, f"lacks {lacking}. Run: {extra.command}")


def _test_lines(test: SelfTest) -> Iterator[str]:
    lead = f"  {test.device:<10} {test.kernel:<11} "
    if test.failed:
        yield f"{lead}{typer.style('FAILED', fg='red', bold=True)} in {', '.join(test.failed)}"
    if test.passed:
        worst = max(test.passed.values())
        rest = f"{', '.join(test.passed)}; largest error {worst:.2f} of its budget"
        first, *more = textwrap.wrap(rest, _COLUMNS - len(lead) - 9)
        yield f"{lead}{typer.style('ok', fg='green')}       {first}"
        yield from (" " * (len(lead) + 9) + line for line in more)
    if not (test.passed or test.failed):
        yield f"{lead}refuses"
        # The dtype with the fewest refusals is the closest to being supported.
        reasons = min(test.refused.values(), key=len)
        for reason in reasons:
            yield from wrapped(" " * 13 + "- ", reason)


def _as_data(found: Findings) -> dict[str, Any]:
    return {
        "versions": found.versions._asdict(),
        "requirements": [requirement._asdict() for requirement in found.core],
        "gpus": [gpu._asdict() for gpu in found.gpus],
        "devices": {
            name: {
                "name": device.name,
                "capability": list(device.capability),
                "multiprocessors": device.multiprocessors,
                "memory_bytes": device.memory_bytes,
            }
            for name, device in found.devices.items()
        },
        "extras": [
            {
                "name": extra.name,
                "adds": extra.adds,
                "complete": not extra.lacking,
                "command": extra.command,
                "requirements": [requirement._asdict() for requirement in extra.requirements],
            }
            for extra in found.extras
        ],
        "settings": found.settings,
        "tests": [dataclasses.asdict(test) for test in found.tests],
        "broken": found.broken(),
        "advice": found.advice(),
    }
