"""The directory of a run: what lies where, and that it belongs to this run."""

import os
from pathlib import Path

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
        """Creates the directory."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ModelDirectoryError(
                f"--model_dir={self.path} cannot be created: {error.strerror}"
            ) from error

    def write_configs(self, given: str, operative: str) -> None:
        """Writes config.gin and operative_config.gin, each at once or not at all."""
        self._write(self.config, given)
        self._write(self.operative_config, operative)

    def _write(self, path: Path, text: str) -> None:
        partial = path.with_name(path.name + ".partial")
        try:
            partial.write_text(text)
            os.replace(partial, path)
        except OSError as error:
            raise ModelDirectoryError(f"{path} cannot be written: {error.strerror}") from error
