"""The folder of a training run, and checks that it can hold the files of the run."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from torch import nn

from gatewise.contract.errors import CheckpointError, FolderError, sentence
from gatewise.files import TEMPORARY
from gatewise.training.manifest import Manifest
from gatewise.training.options import TrainingOptions
from gatewise.training.run_lock import RunLock

_ROOM_FOR_LOGS = 32 * 2**20


class RunFolder:
    """The folder of a run: its files, the only ones that are ever replaced or deleted, and the lock on it.

    Args:
        path: The folder; `prepare` and `locked` create it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = path = Path(path)
        self.recipe = path / "recipe.toml"
        self.tokenizer = path / "tokenizer.json"
        self.checkpoint = path / "checkpoint.safetensors"
        self.model = path / "model.safetensors"
        self.last = path / "last.safetensors"
        self.result = path / "result.json"
        self.fault = path / "fault.safetensors"
        self.translations = path / "test.translated"
        self.curves = path / "curves.png"
        self.confusion = path / "confusion.png"
        self.tensorboard = path / "tensorboard"
        self.manifest = Manifest(path)
        self._lock = RunLock(path)
        self._made: list[Path] = []
        self._replaced = path / ".gatewise-replaced"
        self._discarded = path / ".gatewise-discarded"

    def exists(self) -> bool:
        """Whether any file of a run is in this folder, such as a model whose checkpoint was deleted."""
        return any(file.exists() or file.is_symlink() for file in self.manifest.files())

    def lacking(self) -> list[Path]:
        """Return the files that are missing in this folder, and without which its run cannot be resumed."""
        # A run writes a checkpoint before its first model; without it the run would begin anew and replace the model.
        needed = (self.recipe, self.checkpoint) if self.model.exists() else (self.recipe,)
        own = self.manifest.files()
        return [file for file in needed if file not in own or not file.exists()]

    def saved_tokenizer(self, load: Callable[[str], object]) -> str:
        """Return the JSON document of the tokenizer, or of the vocabularies, of the run to resume.

        Args:
            load: The function that will read the document, which raises a ValueError if it cannot.

        Raises:
            CheckpointError: The file is missing, cannot be read, or is damaged.
        """
        try:
            document = self.tokenizer.read_text("utf-8")
            load(document)
        except FileNotFoundError:
            raise CheckpointError(
                f"{self.path} has a checkpoint, but no {self.tokenizer.name}, which held its vocabulary. Start a new "
                "run."
            ) from None
        except OSError as error:
            advice = "Check its permissions, or start a new run."
            raise CheckpointError(f"{self.tokenizer} cannot be read: {error.strerror}. {advice}") from error
        except ValueError as error:  # of the encoding or of `load`
            reason = str(error).rstrip(".")
            raise CheckpointError(
                f"{self.tokenizer} is damaged: {reason}. Use another copy, or start a new run."
            ) from error
        return document

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Prevent other processes from writing to the folder inside the context.

        The folder is created if it is missing, with those above it; those that are empty at the end are removed again.

        Raises:
            FolderError: Another process writes to the folder, or it cannot be created or written.
        """
        if holder := self.try_lock():
            advice = "Wait until it ends, stop it, or choose another `--output`."
            got = f"{self.path}, which is held by {holder}"
            raise FolderError(sentence("output", "a folder in which no other process trains", got, advice))
        try:
            yield
        finally:
            self.unlock()

    def try_lock(self) -> str:
        """Lock the folder, or return the process that has locked it; see `RunLock.acquire`."""
        try:
            self._made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
            return self._lock.acquire()
        except OSError as error:
            raise self._unwritable(error) from error

    def unlock(self) -> None:
        """Release the lock, and remove the folders that the lock created if nothing was written to them."""
        with contextlib.suppress(OSError, CheckpointError):
            if not self.exists():
                self.manifest.path.unlink(missing_ok=True)
        self._lock.release()
        with contextlib.suppress(OSError):
            for folder in self._made:
                folder.rmdir()

    def discard(self) -> None:
        """Delete the files of the run, and the folders in it that are empty then.

        Call it only for a run that began where there was none, see `exists`: the files of an earlier run would be
        deleted as well.
        """
        files = self.manifest.files()
        for file in (*files, self.manifest.path):
            file.unlink(missing_ok=True)
        self._remove_empty(files)

    def prepare(self, needed_bytes: int) -> None:
        """Create the folder, and check before training that the run can be saved in it.

        With several processes, only the first one calls it.

        Args:
            needed_bytes: The number of bytes that the run will write; see `bytes_of_run`.

        Raises:
            FolderError: The folder cannot be created or written, its disk has too little space, or it contains a
                checkpoint, a model or a record of a step that gatewise did not write.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path) as probe:
                probe.write(b"gatewise")
                probe.flush()
            free = shutil.disk_usage(self.path).free
        except OSError as error:
            raise self._unwritable(error) from error
        if free < needed_bytes:
            raise FolderError(
                f"`output` must be on a disk with {_mebibytes(needed_bytes)} free for checkpoints, {self.path} has "
                f"{_mebibytes(free)}. Free some space, or choose another folder."
            )
        self.manifest.claim((self.checkpoint, self.model, self.fault))
        self._remove_half_written()

    @contextlib.contextmanager
    def replaced(self) -> Iterator[None]:
        """Move the files of an earlier run aside; move them back if the context ends with an error before `begun`."""
        try:
            self._put_aside()
            yield
        except BaseException:
            self.recover()
            raise
        self.begun()

    def begun(self) -> None:
        """Delete the files of the earlier run, because the new run has its first checkpoint."""
        if Manifest(self._replaced).path.exists():
            self._replaced.rename(self._discarded)
        _delete_run(self._discarded)

    def recover(self) -> None:
        """Move the files of an earlier run back if the process that was to replace it stopped before `begun`."""
        _delete_run(self._discarded)
        aside = Manifest(self._replaced)
        # In this order, another process can complete the work of a process that was killed at any point.
        if aside.path.exists():
            for file in self.manifest.files():
                file.unlink(missing_ok=True)
            self.manifest.path.unlink(missing_ok=True)
            for file in (*aside.files(), aside.path):
                _move(file, self.path / file.relative_to(self._replaced))
        _remove_empty_folders(self._replaced)

    def _put_aside(self) -> None:
        if not (files := self.manifest.files()):
            return
        for folder in (self._replaced, self._discarded):
            if folder.exists() or folder.is_symlink():
                raise FolderError(
                    f"`output` must be a folder without {folder.name}, to which an earlier run is moved until the new "
                    f"one has begun; {self.path} has it, and gatewise did not write what it contains. Move it away, or "
                    "choose another `--output`."
                )
        try:
            # The list first: while the folder has no list, files with these names belong to the earlier run.
            for file in (self.manifest.path, *files):
                _move(file, self._replaced / file.relative_to(self.path))
        except OSError as error:
            raise self._unwritable(error) from error
        self._remove_empty(files)

    def _remove_empty(self, files: list[Path]) -> None:
        for folder in {file.parent for file in files} - {self.path}:
            with contextlib.suppress(OSError):  # files that no run wrote stay, and so does the folder
                folder.rmdir()

    def _unwritable(self, error: OSError) -> FolderError:
        advice = f"{error.strerror}: choose another."
        return FolderError(sentence("output", "a folder that can be written", str(self.path), advice))

    def _remove_half_written(self) -> None:
        """Remove incomplete temporary files of the run that a killed process left, and no others."""
        own = {file.name for file in (*self.manifest.files(), self.manifest.path)}
        for rest in self.path.glob(f"{TEMPORARY}*"):
            if {file.name for file in rest.iterdir()} <= own:
                shutil.rmtree(rest, ignore_errors=True)


def _delete_run(folder: Path) -> None:
    """Delete a run that was moved to a folder, and the folder unless it contains other files."""
    manifest = Manifest(folder)
    with contextlib.suppress(OSError, CheckpointError):
        # The list last, so that another process can complete the work of a process that was killed.
        for file in (*manifest.files(), manifest.path):
            file.unlink(missing_ok=True)
    _remove_empty_folders(folder)


def _remove_empty_folders(folder: Path) -> None:
    if folder.is_symlink() or not folder.is_dir():
        return
    for each in (*sorted(folder.rglob("*"), reverse=True), folder):
        if each.is_dir() and not each.is_symlink():
            with contextlib.suppress(OSError):  # it is not empty
                each.rmdir()


def _move(file: Path, target: Path) -> None:
    if file.exists() or file.is_symlink():
        target.parent.mkdir(parents=True, exist_ok=True)
        file.replace(target)


def bytes_of_run(model: nn.Module, options: TrainingOptions) -> int:
    """Return the largest disk space of a run: two checkpoints and two models, while one replaces the other."""
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    moments = {"sgd": 1 if options.momentum else 0, "adam": 2, "adamw": 2}[options.optimizer]
    averages = {"none": 0, "last": options.average_last - 1}.get(options.average, 1)
    copies = 1 + moments + averages
    return 2 * weights * (copies + 1) + _ROOM_FOR_LOGS


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"
