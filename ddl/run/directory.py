"""The directory of a run: its paths, its lock and its config files."""

import fcntl
import os
from pathlib import Path
from typing import Any

from ddl.checkpoints.directory import file_errors, write_atomically
from ddl.config.statements import MACRO, Binding, Reader, expand
from ddl.errors import ModelDirectoryError, NotReady

_MACRO = f"/{MACRO}.value"  # end of the name of a binding


class RunDirectory:
    """The files under model_dir. Nothing is created before `open`.

    Attributes:
      path: The model directory.
      checkpoints: Folder of the checkpoints.
      config: config.gin, the bound config.
      operative_config: operative_config.gin, all values used, including defaults.
      arguments: arguments.json, what a run of `ddl.fit` was given.
      metrics: metrics.jsonl.
      export: Folder of the exported model.
    """

    def __init__(self, path: str | os.PathLike[str], writes: bool = True):
        """Checks that the directory can be used. Changes nothing on disk.

        Args:
          path: The directory.
          writes: Whether it must be writable.

        Raises:
          ModelDirectoryError: If `path` is empty or a URL, is or lies under a file, or cannot be
            reached or written.
        """
        self.path = Path(path).expanduser()
        self.checkpoints = self.path / "checkpoints"
        self.config = self.path / "config.gin"
        self.operative_config = self.path / "operative_config.gin"
        self.arguments = self.path / "arguments.json"
        self.metrics = self.path / "metrics.jsonl"
        self.export = self.path / "export"
        self._name = f"model_dir={path}"
        self._lock: int | None = None
        fault = ""
        with file_errors(self._name):
            existing = next(path for path in (self.path, *self.path.parents) if path.exists())
        if not os.fspath(path):
            fault = "an empty text is no path. A variable of the shell may be unset. Set it"
        elif "://" in str(path):
            fault = "a URL is no local path. Mount it"
        elif not existing.is_dir():
            fault = f"{existing} is a file, not a directory. Remove it"
        elif writes and not os.access(existing, os.W_OK | os.X_OK):
            fault = f"{existing} cannot be written. Change its permissions"
        if fault:
            raise ModelDirectoryError(f"{self._name}: {fault}, or pass another directory.")

    def saved_config(self) -> str | None:
        """Returns the text of an earlier run's operative_config.gin; None if there is none.

        Raises:
          ModelDirectoryError: If that file or config.gin cannot be read, or is not UTF-8.
        """
        text = None
        for file in filter(Path.exists, (self.config, self.operative_config)):
            with file_errors(str(file)):
                text = file.read_text(encoding="utf-8")
        return text

    def macros(self) -> dict[str, Any]:
        """Returns the macros of the saved config by name; {} for a run without a config."""
        values = read_values(self.saved_config() or "").items()
        return {n.removesuffix(_MACRO): value for n, (_, value) in values if n.endswith(_MACRO)}

    def open(self) -> None:
        """Creates the directory and locks it.

        Raises:
          ModelDirectoryError: If the directory cannot be created.
          NotReady: If another process trains there.
        """
        with file_errors(self._name):
            self.path.mkdir(parents=True, exist_ok=True)
        self.claim()

    def claim(self) -> None:
        """Locks the directory, if it exists, against other training processes until `release`.

        Raises:
          ModelDirectoryError: If the directory cannot be read.
          NotReady: If another process holds the lock.
        """
        with file_errors(self._name):
            if self._lock is None and self.path.exists():
                self._lock = lock_folder(self.path, self._name)

    def release(self) -> None:
        """Releases the lock, if this process holds it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def write(self, path: Path, text: str) -> None:
        """Writes a file of the directory atomically. Raises ModelDirectoryError if it cannot."""
        with file_errors(str(path)):
            write_atomically(path, text)


def lock_folder(path: Path, name: str) -> int:
    """Locks a folder; returns the descriptor to close, which the end of the process closes too.

    File systems without locks are not protected.

    Raises:
      NotReady: If another process holds the lock.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        what = f"{name}: another process is writing to {path}"
        raise NotReady(f"{what}. Wait until it ends, or pass another name.") from None
    except OSError:
        pass  # some network file systems have no locks
    return descriptor


def read_values(text: str) -> dict[str, tuple[Any, Any]]:
    """Returns the values that a written text binds, as written and with macros expanded."""
    found = Reader().text(text, "the saved config")
    bindings = {one[:3]: one for one in found if isinstance(one, Binding)}
    own = {"/".join(filter(None, (k[0], ".".join(k[1:])))): b.value for k, b in bindings.items()}
    return {name: (value, expand(value, bindings)) for name, value in own.items()}
