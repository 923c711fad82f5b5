"""The directory of a run: its paths, its lock and its config files."""

import ast
import fcntl
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ddl.checkpoints.durable_files import write_atomically
from ddl.errors import ModelDirectoryError, NotReady
from ddl.output import unwritable

_MACRO = re.compile(r"^([A-Z][A-Z0-9_]*) = (.+)$", re.MULTILINE)


class RunDirectory:
    """The files under model_dir. Nothing is created before `open`.

    Attributes:
      path: The model directory.
      checkpoints: Folder of the checkpoints.
      config: config.gin, the bound config.
      operative_config: operative_config.gin, all values used, including defaults.
      metrics: metrics.jsonl.
      export: Folder of the exported model.
    """

    def __init__(self, path: str | os.PathLike[str]):
        """Checks that the directory can be used. Changes nothing on disk.

        Raises:
          ModelDirectoryError: If `path` is a URL, is or lies under a file, or cannot be reached or
            written.
        """
        if "://" in str(path):
            raise ModelDirectoryError(
                f"--model_dir must be a local path, got the URL {path}. Pass a local directory, or "
                "mount the remote one."
            )
        self._claim: int | None = None
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.config = self.path / "config.gin"
        self.operative_config = self.path / "operative_config.gin"
        self.metrics = self.path / "metrics.jsonl"
        self.export = self.path / "export"
        existing = self.path
        with self._reaching():
            while not existing.exists() and existing != existing.parent:
                existing = existing.parent
        if not existing.is_dir():
            raise ModelDirectoryError(
                f"--model_dir={self.path}: {existing} is a file, not a directory. Pass another one."
            )
        if not os.access(existing, os.W_OK | os.X_OK):
            raise ModelDirectoryError(
                f"--model_dir={self.path}: {existing} cannot be written. Change its permissions, "
                "or pass another directory."
            )

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """Names the directory in errors of the system, such as a name that is too long."""
        try:
            yield
        except OSError as error:
            raise ModelDirectoryError(
                f"--model_dir={self.path} cannot be reached: {error.strerror}. Change its "
                "permissions, or pass another directory."
            ) from error

    def profiles(self, worker: int, number: int) -> Path:
        """Returns the folder of a worker's profiles.

        Args:
          worker: Index of the worker.
          number: Number of workers.
        """
        folder = self.path / "profile"
        return folder if number == 1 else folder / f"worker-{worker}"

    def saved_config(self) -> str | None:
        """Returns the text of an earlier run's operative_config.gin; None if there is none.

        Raises:
          ModelDirectoryError: If that file or config.gin cannot be read, or is not UTF-8.
        """
        text = None
        for file in filter(Path.exists, (self.config, self.operative_config)):
            try:
                text = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ModelDirectoryError(
                    f"{file} cannot be read: {error}. Restore the file from a backup, or pass "
                    "another --model_dir."
                ) from error
        return text

    def macros(self) -> dict[str, Any]:
        """Returns the macros that a run from a config has written, by name; {} without a config."""
        try:
            text = self.operative_config.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):  # they are a comfort, and end no run
            return {}
        return {name: _literal(value) for name, value in _MACRO.findall(text)}

    def open(self) -> None:
        """Creates the directory and locks it; see `claim`.

        Raises:
          ModelDirectoryError: If the directory cannot be created.
          NotReady: If another process trains there.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ModelDirectoryError(
                f"--model_dir={self.path} cannot be created: {error.strerror}. Pass another "
                "directory."
            ) from error
        self.claim()

    def claim(self) -> None:
        """Locks the directory, if it exists, against other training processes until `release`.

        The operating system releases the lock when the process ends. File systems without locks
        are not protected.

        Raises:
          ModelDirectoryError: If the directory cannot be read.
          NotReady: If another process holds the lock.
        """
        with self._reaching():
            if self._claim is not None or not self.path.exists():
                return
            self._claim = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self._claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise NotReady(
                f"--model_dir={self.path}: another process is training there. Wait until it ends, "
                "or pass another directory."
            ) from None
        except OSError:
            pass  # some network file systems have no locks

    def release(self) -> None:
        """Releases the lock, if this process holds it."""
        if self._claim is not None:
            os.close(self._claim)
            self._claim = None

    def write_configs(self, given: str, operative: str) -> None:
        """Writes config.gin and operative_config.gin, each atomically.

        Args:
          given: Text of config.gin.
          operative: Text of operative_config.gin.

        Raises:
          ModelDirectoryError: If a file cannot be written.
        """
        self._write(self.config, given)
        self._write(self.operative_config, operative)

    def _write(self, path: Path, text: str) -> None:
        try:
            write_atomically(path, text)
        except OSError as error:
            raise ModelDirectoryError(unwritable(path, error)) from error


def _literal(text: str) -> Any:
    """Returns the value of a literal; any other text as it is."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


class NoCheckpoints:
    """The checkpoints of a run without a directory: it saves and restores nothing."""

    def has_any(self) -> bool:
        """Returns False."""
        return False

    def would_be_best(self, metrics: Mapping[str, float]) -> bool:
        """Returns False."""
        return False

    def save(
        self,
        metrics: Mapping[str, float] | None = None,
        scheduled: bool = True,
        ended_by: str | None = None,
    ) -> bool:
        """Returns False: nothing is saved."""
        return False

    def written(self) -> None:
        """Returns None: nothing is written."""

    def restore_latest(self, scheduled: bool = False) -> None:
        """Does nothing; there is no checkpoint."""

    def finish(self) -> None:
        """Does nothing."""
