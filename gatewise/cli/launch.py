"""From the options of `gatewise train` to a run in a folder."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import secrets
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console

from gatewise.cli.expected_scores import with_valid_expectations
from gatewise.cli.failures import USAGE, print_error, reported, status_of
from gatewise.cli.option_names import naming
from gatewise.cli.recipe import differences, overridden, parse_settings, read_recipe
from gatewise.cli.recipe_files import recipe_path
from gatewise.cli.recipe_options import option_names
from gatewise.cli.values import is_utf8
from gatewise.contract.errors import ArgumentError, GatewiseError, NotFinite, sentence
from gatewise.training import RunFolder
from gatewise.training.interruption import terminable
from gatewise.training.loop import Outcome, check_checkpoint, progress_at
from gatewise.training.processes import Processes, join_processes

RUNS = Path("runs")
INTERRUPTED = 130
_CHANGEABLE = ("training.epochs", "model.kernel", "model.attention_kernel")
"""The keys that may change when a run is resumed. Another kernel is the remedy for one with wrong results."""

_FILES = ("recipe", "checkpoint", "model", "result", "curves", "fault")
"""The files that every run may write in its folder, as attributes of `RunFolder`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """A kind of model that `gatewise train` trains.

    Attributes:
        name: The command under `gatewise train`.
        defaults: The recipe for a run without options.
        run: The function that trains as a recipe says in a folder, or resumes the run there.
        section: The section of the recipe that names the training data.
        paths: The keys of the section that are paths; the first one alone, or all others, name the data.
        named: The names of built-in data, which are not paths.
        files: The files that a run of this command writes in addition to `_FILES`, as attributes of `RunFolder`.
        advice: The advice in the error for too little memory.
    """

    name: str
    defaults: Any
    run: Callable[[Any, RunFolder, Processes, Console], Outcome]
    section: str
    paths: tuple[str, ...]
    named: tuple[str, ...]
    files: tuple[str, ...]
    advice: str


def launch(
    task: Task,
    recipe: str | None,
    flags: Mapping[str, Any],
    settings: Sequence[str],
    output: Path | None,
    resume: bool,
    overwrite: bool,
    device: str | None,
) -> None:
    """Determine recipe and folder, train, and print how to resume.

    Args:
        task: The task to train.
        recipe: The path of a TOML file or the name of a recipe that comes with gatewise; None for the defaults.
        flags: The options by dotted key; None for those that were not given.
        settings: The settings ``key=value``, which take precedence over `flags`.
        output: The folder; None for a new one under `RUNS`.
        resume: Whether to resume the run in the folder.
        overwrite: Whether to replace the run in the folder.
        device: The device; see `join_processes`.

    Raises:
        Exit: With that of the error if the folder or the recipe was refused, after printing it; with 130 if the run
            was interrupted, after saving everything.
    """
    if resume and overwrite:
        raise ArgumentError("`--resume` and `--overwrite` exclude each other. Give one of them.")
    if output is not None and not is_utf8(str(output)):  # TensorBoard writes no other path
        raise ArgumentError(sentence("output", "a path in UTF-8", ascii(str(output)), "Choose another."))
    given = None if recipe is None else read_recipe(recipe_path(task.name, recipe), task.defaults)
    options = {key: value for key, value in flags.items() if value is not None}
    request = _Request(task, given, options, parse_settings(settings), output, resume, overwrite)
    request.changed(task.defaults if given is None else given)  # so that wrong values are refused at once
    with (
        reported(lambda: task.advice),
        naming(_names_in(task)),
        join_processes(device) as processes,
        # A process that waits for others, which is in code of C++, would not handle the signal.
        terminable() if processes.count == 1 else contextlib.nullcontext(),
        _opened(request, processes) as opened,
    ):
        ended = opened if isinstance(opened, int) else _trained(task, *opened, processes)
    if isinstance(ended, int):
        raise typer.Exit(ended)
    if ended.interrupted:
        raise typer.Exit(INTERRUPTED)


def _names_in(task: Task) -> dict[str, str]:
    """Return the options by which errors name the fields of a recipe and the arguments of a run."""
    return option_names(task.defaults) | {"output": "--output", "device": "--device"}


def _trained(task: Task, folder: RunFolder, recipe: Any, processes: Processes) -> Outcome:
    """Train, and print how to resume after an interruption."""
    if recipe.threads:
        torch.set_num_threads(recipe.threads)
    console = Console(quiet=not processes.first)
    with naming(_names_in(task)):
        outcome = task.run(recipe, folder, processes, console)
    if outcome.interrupted:
        console.print(
            f"\nStopped after {outcome.step:,} steps; everything is saved. Resume with:\n"
            f"  {processes.launcher}gatewise train {task.name} --output {shlex.quote(str(folder.path))} --resume",
            highlight=False,
        )
    return outcome


@dataclasses.dataclass(frozen=True, slots=True)
class _Request:
    """The arguments of `launch`, after parsing.

    Attributes:
        task: The task to train.
        recipe: The recipe that was given; None for none.
        options: The options that were given, by dotted key.
        settings: The settings that were given, which take precedence over the options.
        output: The folder; None for a new one under `RUNS`.
        resume: Whether to resume the run in the folder.
        overwrite: Whether to replace the run in the folder.
    """

    task: Task
    recipe: Any
    options: dict[str, Any]
    settings: dict[str, Any]
    output: Path | None
    resume: bool
    overwrite: bool

    @property
    def asked(self) -> Any:
        """The recipe of a new run."""
        return self.changed(self.task.defaults if self.recipe is None else self.recipe)

    @property
    def specified(self) -> bool:
        """Whether an option was given that a resumed run may not change."""
        return bool(self.recipe is not None or self.settings or set(self.options) - set(_CHANGEABLE))

    def changed(self, recipe: Any) -> Any:
        """Return a recipe with the options and settings, with absolute paths, and with the expectations that hold."""
        given = self._without_other_data(recipe)
        made = _with_absolute_paths(self.task, overridden(overridden(given, self.options), self.settings))
        return with_valid_expectations(recipe, made, self.task.section, self.task.paths)

    def _without_other_data(self, recipe: Any) -> Any:
        """Return a recipe without the data that it names in another way than the options and settings.

        Raises:
            ArgumentError: The options and settings name data in both ways, or a name is empty.
        """
        one, *others = self.task.paths
        given = {key.rpartition(".")[2]: value for key, value in (self.options | self.settings).items()}
        for name in self.task.paths:
            if given.get(name) == "":  # of a variable of the shell that is not set, for example
                raise ArgumentError(
                    sentence(name, "a path or a name", "''", "Leave it out for the data of the recipe.")
                )
        both = [name for name in others if given.get(name)]
        if given.get(one) and both:
            raise ArgumentError(
                f"`{one}` and `{', '.join(both)}` exclude each other. Name the data in one of these ways."
            )
        replaced = others if one in given else [one] if given.keys() & {*others} else []
        defaults, options = (getattr(each, self.task.section) for each in (self.task.defaults, recipe))
        values = {name: getattr(defaults, name) for name in replaced}
        return dataclasses.replace(recipe, **{self.task.section: dataclasses.replace(options, **values)})


@contextlib.contextmanager
def _opened(request: _Request, processes: Processes) -> Iterator[tuple[RunFolder, Any] | int]:
    """Determine folder and recipe, and lock the folder, in the first process; send them to the others.

    Yields an exit status if they are refused: the first process has printed the error, and all processes exit without
    another.
    """
    # The agents of several machines count differently: see `gatewise.training.attempt`.
    restarted = processes.any(_of_torchrun("RESTART_COUNT") > 0)
    with contextlib.ExitStack() as held:
        found = _in_the_first(lambda opening: _locked(request, opening, restarted), request, processes, held)
        sent = processes.broadcast((str(found[0].path), found[1]) if isinstance(found, tuple) else found)
        if isinstance(sent, int):
            yield sent
            return
        folder, recipe = found or (RunFolder(sent[0]), sent[1])
        if not _is_shared(folder.path, processes):
            yield USAGE
            return
        # This is checked before the files of an earlier run are moved, because they are deleted when a run ends without
        # an error.
        refused = processes.broadcast(
            _in_the_first(lambda opening: _claim(request, folder, opening, processes), request, processes, held)
        )
        yield refused or (folder, recipe)


def _in_the_first(
    action: Callable[[contextlib.ExitStack], Any], request: _Request, processes: Processes, held: contextlib.ExitStack
) -> Any:
    """Call a function in the first process only.

    Args:
        action: The function; it enters contexts that end with the run, or at once if it raises an error.
        request: The arguments of `launch`.
        processes: The processes.
        held: The contexts that end with the run, to which those of the function are added.

    Returns:
        What the function returned; None in the other processes; the exit status after an error of gatewise, which is
        printed.
    """
    if not processes.first:
        return None
    try:
        with naming(_names_in(request.task)), contextlib.ExitStack() as opening:
            result = action(opening)
            held.enter_context(opening.pop_all())
            return result
    except GatewiseError as error:
        print_error(str(error))  # before the others exit, because a launcher ends all processes after the first exit
        return status_of(error)


def _is_shared(folder: Path, processes: Processes) -> bool:
    """Return whether all machines have the folder, from which all processes read checkpoints and the best weights."""
    if processes.machines == 1:
        return True
    probe = folder / processes.broadcast(f".gatewise-shared-{secrets.token_hex(8)}")
    if processes.first:
        probe.touch()
    processes.barrier()
    without = [rank for rank, sees in enumerate(processes.all_gather_number(int(probe.exists()))) if not sees]
    if processes.first:
        probe.unlink()
    if without and processes.first:
        expectation = "a folder on a file system that all machines share"
        got = f"{folder}, which process {without[0]} does not have"
        print_error(sentence("--output", expectation, got, "Choose another `--output`."))
    return not without


def _locked(request: _Request, held: contextlib.ExitStack, restarted: bool) -> tuple[RunFolder, Any]:
    """Return the folder, locked, and the recipe; the new run changes no file yet.

    Args:
        request: The arguments of `launch`.
        held: The contexts that end with the run.
        restarted: Whether torchrun started these processes again, so that a run in the folder is theirs.
    """
    if _of_torchrun("MAX_RESTARTS"):
        _check_can_restart(request)
    folder = _locked_folder(request, held)
    folder.recover()
    return folder, _recipe_to_run(request, folder, restarted=restarted)


def _claim(request: _Request, folder: RunFolder, held: contextlib.ExitStack, processes: Processes) -> None:
    """Make a locked folder ready for writing, and check the checkpoint of a run to resume."""
    if request.overwrite:
        held.enter_context(folder.replaced())
    new = not folder.exists()
    # A file that gatewise did not write is refused before `_begun_or_discarded` could read it as a checkpoint.
    folder.manifest.claim(getattr(folder, name) for name in (*_FILES, *request.task.files))
    if folder.checkpoint.exists():  # before the report of a run that cannot be resumed
        check_checkpoint(folder.checkpoint, processes)
    if new and processes.count == 1:  # if another process fails, the errors of this one do not say why
        held.enter_context(_begun_or_discarded(folder))


def _of_torchrun(name: str) -> int:
    """Return a number that torchrun tells its processes; 0 without torchrun."""
    return int(os.environ.get(f"TORCHELASTIC_{name}") or 0)


def _check_can_restart(request: _Request) -> None:
    """Check that the same command, started again after a failure, can only go on with the run that it began."""
    if request.output is None:
        expectation = "given with `torchrun --max-restarts`, so that processes that start again find their run"
        raise ArgumentError(sentence("output", expectation, "none"))
    if request.overwrite:
        raise ArgumentError(
            "`--overwrite` and `torchrun --max-restarts` exclude each other: processes that start again would replace "
            "their own run. Delete the old run, or choose another `--output`."
        )


@contextlib.contextmanager
def _begun_or_discarded(folder: RunFolder) -> Iterator[None]:
    """Delete the files of a new run if the context ends with an error before a checkpoint or a model of any step."""
    try:
        yield
    except NotFinite:
        raise  # the message refers to the checkpoint
    except BaseException:
        if not _step(folder) and not folder.model.exists():
            folder.discard()
        raise


def _step(folder: RunFolder) -> int:
    """Return the number of steps at the last checkpoint."""
    return progress_at(folder.checkpoint)[0] if folder.checkpoint.exists() else 0


def _locked_folder(request: _Request, held: contextlib.ExitStack) -> RunFolder:
    """Return the given folder, or one under `RUNS`: the newest run to resume, otherwise a new folder."""
    name = request.asked.name
    if request.output is not None:
        folder = RunFolder(request.output)
    elif request.resume:
        folder = _newest_run(name)
    else:
        numbered = _numbered(name)
        while True:
            folder = next(numbered)
            files = [getattr(folder, each) for each in (*_FILES, *request.task.files)]
            # Another process may start a run here between these two checks.
            if not _taken(folder, files) and not folder.try_lock():
                held.callback(folder.unlock)
                if not _taken(folder, files):
                    return folder
                held.pop_all().close()
    held.enter_context(folder.locked())
    return folder


def _taken(folder: RunFolder, files: list[Path]) -> bool:
    return folder.exists() or bool(folder.manifest.foreign(files))


def _newest_run(name: str) -> RunFolder:
    """Return the run with the highest number, or the first folder if there is none."""
    newest = RunFolder(RUNS / name)
    for folder in _numbered(name):
        if folder.exists() and (folder.recipe.exists() or folder.checkpoint.exists()):
            newest = folder
        elif not folder.path.exists():
            break
    return newest


def _numbered(name: str) -> Iterator[RunFolder]:
    yield RunFolder(RUNS / name)
    yield from (RunFolder(RUNS / f"{name}-{number}") for number in itertools.count(2))


def _recipe_to_run(request: _Request, folder: RunFolder, *, restarted: bool) -> Any:
    if not folder.exists() and request.resume and not request.specified and not restarted:
        raise ArgumentError(f"there is no run in {folder.path} to resume. Check `--output`, or omit `--resume`.")
    if not folder.exists() or request.overwrite:
        return request.asked
    lacking = " and ".join(file.name for file in folder.lacking())
    if lacking:
        raise ArgumentError(
            f"{folder.path} holds files of a run that cannot be resumed without {lacking}. Replace them by "
            "`--overwrite`, or choose another `--output`."
        )
    if not request.resume and not restarted:
        raise ArgumentError(
            f"{folder.path} already holds a run. Resume it by `--resume`, replace it by `--overwrite`, or choose "
            "another `--output`."
        )
    try:
        begun = read_recipe(folder.recipe, request.task.defaults)
    except ArgumentError as error:
        raise ArgumentError(
            f"{folder.path} holds no run that `gatewise train {request.task.name}` can resume: {error} Resume it by "
            "the command that began it, with the recipe that it wrote."
        ) from None
    asked = request.changed(begun if request.recipe is None else request.recipe)
    changed = [key for key in differences(begun, asked) if not key.startswith("expect.")]
    if others := [key for key in changed if key not in _CHANGEABLE]:
        names = option_names(request.task.defaults)
        listed = ", ".join(f"`{names[key.rpartition('.')[2]]}`" for key in others)
        raise ArgumentError(
            f"the run in {folder.path} was started with another {listed}. A run can be resumed with other `--epochs` "
            "and another `--kernel` only. Omit the other options, or choose another `--output`."
        )
    if asked.training.epochs != begun.training.epochs:
        _check_epochs(folder, asked.training.epochs)
    return asked


def _check_epochs(folder: RunFolder, epochs: int) -> None:
    """Check that a run has not gone beyond a number of epochs."""
    if not folder.checkpoint.exists():
        return
    _, begun = progress_at(folder.checkpoint)
    if epochs < begun:
        expectation = f"at least {begun} to resume the run in {folder.path}, which has begun its epoch {begun}"
        raise ArgumentError(sentence("epochs", expectation, epochs))


def _with_absolute_paths(task: Task, recipe: Any) -> Any:
    """Return the recipe with absolute paths, so that the run can be resumed from any folder."""
    options = getattr(recipe, task.section)
    paths = {name: getattr(options, name) for name in task.paths}
    absolute = {name: str(Path(path).absolute()) for name, path in paths.items() if path not in ("", *task.named)}
    for name, path in absolute.items():
        if not is_utf8(path):  # the folder in which this process runs may have any bytes in its name
            raise ArgumentError(sentence(name, "a path in UTF-8", ascii(path), "Rename the folder."))
    return dataclasses.replace(recipe, **{task.section: dataclasses.replace(options, **absolute)})
