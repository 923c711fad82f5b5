"""The directory of a run: what lies where, and that it belongs to this run."""

import fcntl
import os
from pathlib import Path

from ddl.durable_files import write_whole
from ddl.errors import ModelDirectoryError


class RunDirectory:
    """Names the files under model_dir. Nothing is created before `open`."""

    def __init__(self, path: str | os.PathLike[str]):
        """Checks, without touching anything, that the directory can be used.

        Raises:
          ModelDirectoryError: If it is a file, or cannot be written.
        """
        if "://" in str(path):
            raise ModelDirectoryError(
                f"--model_dir={path}: only folders of this machine can be written. Give one, or "
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
        while not existing.exists() and existing != existing.parent:
            existing = existing.parent
        if not existing.is_dir():
            raise ModelDirectoryError(
                f"--model_dir={self.path}: {existing} is a file, not a directory. Give another one."
            )
        if not os.access(existing, os.W_OK | os.X_OK):
            raise ModelDirectoryError(
                f"--model_dir={self.path}: {existing} cannot be written. Give another directory, "
                "or change its permissions."
            )

    def saved_config(self) -> str | None:
        """The text of config.gin that an earlier run left, if any."""
        try:
            return self.config.read_text()
        except FileNotFoundError:
            return None

    def open(self) -> None:
        """Creates the directory, and claims it.

        Raises:
          ModelDirectoryError: If that is not possible.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ModelDirectoryError(
                f"--model_dir={self.path} cannot be created: {error.strerror}"
            ) from error
        self.claim()

    def claim(self) -> None:
        """Keeps other trainings out of the directory, if it exists, until `release`.

        The claim is the process's own and gone with it, however it ends.

        Raises:
          ModelDirectoryError: If another process has claimed it.
        """
        if self._claim is not None or not self.path.exists():
            return
        self._claim = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self._claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise ModelDirectoryError(
                f"--model_dir={self.path}: another process trains there. Wait for it, or give "
                "another directory."
            ) from None
        except OSError:
            pass  # some network file systems have no locks

    def release(self) -> None:
        """Gives the claim up, if there is one."""
        if self._claim is not None:
            os.close(self._claim)
            self._claim = None

    def write_configs(self, given: str, operative: str) -> None:
        """Writes config.gin and operative_config.gin, each at once or not at all."""
        self._write(self.config, given)
        self._write(self.operative_config, operative)

    def _write(self, path: Path, text: str) -> None:
        try:
            write_whole(path, text)
        except OSError as error:
            raise ModelDirectoryError(f"{path} cannot be written: {error.strerror}") from error
