"""The folder beside a file of predictions that holds its rows until all are there."""

import fcntl
import filecmp
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ddl.checkpoints.durable_files import sync, write_atomically
from ddl.errors import ModelDirectoryError, NotReady
from ddl.run.predicting.columns import Column
from ddl.run.predicting.formats import write_rows
from ddl.run.predicting.part_files import packed, read_part

_IDENTITY = "identity.json"
_COLUMNS = "columns.json"
_WHOLE = "whole"
_PART = re.compile(r"rows-(\d{15})-(\d{15})\.npz")


class PartialFile:
    """The rows of a file that is not complete, in the folder FILE.partial. Only on the chief.

    Each part holds whole batches and is written atomically, so that a process killed anywhere
    leaves whole parts. The file gets its name when all of its rows are there. A file without the
    folder is complete: the folder is renamed to FILE.partial.done before it is removed.

    Attributes:
      path: The file.
      folder: FILE.partial.
    """

    def __init__(self, path: str | os.PathLike[str]):
        """Keeps the path; creates nothing on disk.

        Raises:
          ModelDirectoryError: If the path is a URL or a folder, or cannot be reached; or the file
            is there and no command was stopped while it wrote it.
        """
        if "://" in os.fspath(path):
            raise ModelDirectoryError(
                f"--predictions must be a local path, got the URL {path}. Pass a local file."
            )
        self.path = Path(path)
        self.folder = self.path.with_name(self.path.name + ".partial")
        self._done = self.path.with_name(self.path.name + ".partial.done")
        self._lock: int | None = None
        try:
            is_folder = self.path.is_dir()
            is_complete = self.path.exists() and not self.folder.exists()
        except OSError as error:
            raise ModelDirectoryError(
                f"--predictions={path} cannot be reached: {error.strerror}. Change the permissions "
                "of its folder, or pass another name."
            ) from error
        if is_folder:
            raise ModelDirectoryError(
                f"--predictions={path} is a folder. Pass the name of a file in it."
            )
        if is_complete:
            shutil.rmtree(self._done, ignore_errors=True)  # of a command killed at its very end
            raise self._is_there()

    def _is_there(self) -> ModelDirectoryError:
        return ModelDirectoryError(
            f"--predictions={self.path} is there already. Remove it, or pass another name."
        )

    def open(self, identity: Mapping[str, str]) -> None:
        """Creates and locks the folder, or opens that of a command that was stopped.

        Args:
          identity: Texts by name that a stopped command must share.

        Raises:
          ModelDirectoryError: If the folder cannot be used, or a text differs.
          NotReady: If another process writes to the folder.
        """
        with self._writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            self._claim()
            file = self.folder / _IDENTITY
            if not file.exists():
                write_atomically(file, json.dumps(dict(identity), indent=1))
                return
            saved = self._read(file)
        if differing := [name for name in identity if saved.get(name) != identity[name]]:
            listing = "\n".join(
                f"  {line}" for name in differing for line in _changes(name, saved, identity)
            )
            raise ModelDirectoryError(
                f"{self.folder} holds rows of {self.path.name} from a command that was stopped, "
                f"and this command computes others. The differences (stopped → given):\n{listing}\n"
                "Repeat the stopped command, with its --checkpoint; or remove the folder to start "
                "over; or pass another --predictions."
            )

    def _claim(self) -> None:
        self._lock = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise NotReady(
                f"--predictions={self.path}: another process is writing to {self.folder}. Wait "
                "until it ends, or pass another name."
            ) from None
        except OSError:
            pass  # some network file systems have no locks

    def close(self) -> None:
        """Releases the lock."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def rows(self, batch: int, total: int) -> int:
        """Returns the number of rows that are there, from the first on; removes parts after a gap.

        Args:
          batch: Rows of a batch. Parts end with a batch or with the data.
          total: Number of rows of the data.
        """
        end = 0
        with self._writing():
            for first, last, part in self._parts():
                if first == end and (last % batch == 0 or last == total):
                    end = last
                else:
                    part.unlink()
        return end

    def columns(self) -> list[Column] | None:
        """Returns the columns of the parts; None if there are none yet."""
        file = self.folder / _COLUMNS
        if not file.exists():
            return None
        return [Column(name, dtype, tuple(shape)) for name, dtype, shape in self._read(file)]

    def write_columns(self, columns: Sequence[Column]) -> None:
        """Writes the columns. Raises ModelDirectoryError if they cannot be written."""
        with self._writing():
            write_atomically(self.folder / _COLUMNS, json.dumps(columns))

    def add(self, first: int, part: Mapping[str, np.ndarray]) -> None:
        """Writes a part, whole or not at all.

        Args:
          first: Number of its first row.
          part: Its columns.

        Raises:
          ModelDirectoryError: If it cannot be written.
        """
        last = first + len(next(iter(part.values())))
        with self._writing():
            name = f"rows-{first:015d}-{last:015d}.npz"
            write_atomically(self.folder / name, packed(part))

    def complete(self, columns: Sequence[Column], total: int) -> None:
        """Writes the file from its parts, and removes these.

        Args:
          columns: The columns.
          total: Number of rows.

        Raises:
          ModelDirectoryError: If it cannot be written, a part is damaged, or another file has taken
            its name.
        """
        form = {column.name: column for column in columns}

        def parts(names: Sequence[str] | None) -> Iterable[dict[str, np.ndarray]]:
            for first, last, part in self._parts():
                yield read_part(part, last - first, [form[name] for name in names or form])

        whole = self.folder / _WHOLE
        with self._writing():
            write_rows(whole, self.path.name, columns, total, parts)
            # Where a command was killed after it gave the file its name, this is the same file.
            if self.path.exists() and not filecmp.cmp(whole, self.path, shallow=False):
                raise self._is_there()
            os.replace(whole, self.path)
            sync(self.path.parent)
            shutil.rmtree(self._done, ignore_errors=True)
            os.rename(self.folder, self._done)
            sync(self.path.parent)
            shutil.rmtree(self._done, ignore_errors=True)  # the file is complete

    def _parts(self) -> list[tuple[int, int, Path]]:
        """Returns first row, end and file of each part, in order."""
        found = []
        for path in self.folder.iterdir():
            if match := _PART.fullmatch(path.name):
                found.append((int(match[1]), int(match[2]), path))
        return sorted(found)

    def _read(self, file: Path) -> Any:
        try:
            return json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise ModelDirectoryError(
                f"{file} cannot be read: {error}. Remove {self.folder} to start over."
            ) from error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ModelDirectoryError(
                f"--predictions={self.path} cannot be written: {error}. Check the free disk space "
                "and the permissions, and run the same command to resume."
            ) from error


def _changes(name: str, saved: Mapping[str, str], given: Mapping[str, str]) -> list[str]:
    """Returns the lines of a text that differ."""
    before, after = str(saved.get(name, "nothing")).splitlines(), given[name].splitlines()
    if len(before) == len(after) == 1:
        return [f"{name}: {before[0]} → {after[0]}"]
    removed = [f"{name}: {line} → nothing" for line in before if line not in after]
    return removed + [f"{name}: nothing → {line}" for line in after if line not in before]
