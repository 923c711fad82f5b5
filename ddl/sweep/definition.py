"""The definition of a sweep, in `sweep.json` of its folder: base config and points."""

import dataclasses
import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ddl.checkpoints.durable_files import write_atomically
from ddl.config.parsing import Reader
from ddl.config.usage import is_shipped
from ddl.config.values import Import, name_of
from ddl.errors import ConfigError, ModelDirectoryError, NotReady
from ddl.files import unwritable
from ddl.sweep.axes import SEED, Point, run_name

FILE = "sweep.json"
RUNS, LOGS = "runs", "logs"
_VERSION = 1
_SHOWN = 5


@dataclasses.dataclass(frozen=True)
class Definition:
    """Settings of a sweep that determine the results of its runs.

    Attributes:
      base: The bindings of the base config that no point overrides, as texts by name, without the
        defaults that come with ddl. An `import` is a binding of its own name.
      points: The points, one for each run.
      axes: The flags that describe the points, for whoever reads the file.
    """

    base: Mapping[str, str]
    points: Sequence[Point]
    axes: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def runs(self) -> dict[str, Point]:
        """The points by the names of their runs."""
        return {run_name(point): point for point in self.points}

    @property
    def settings(self) -> dict[str, list[str]]:
        """The names of the runs of each setting, by the name of the point without its seed."""
        found: dict[str, list[str]] = {}
        for name, point in self.runs.items():
            setting = {key: value for key, value in point.items() if key != SEED}
            found.setdefault(run_name(setting), []).append(name)
        return found

    def to_json(self) -> str:
        """Returns the text of `sweep.json`."""
        values = {
            "version": _VERSION,
            "axes": self.axes,
            "base": self.base,
            "runs": [{"name": name, "bindings": point} for name, point in self.runs.items()],
        }
        return json.dumps(values, indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Definition":
        """Parses the text of `sweep.json`.

        Raises:
          ValueError: If it is not one that `to_json` returned.
        """
        try:
            values = json.loads(text)
            points = [dict(run["bindings"]) for run in values["runs"]]
            texts = [text for one in [values["base"], *points] for text in one.values()]
            if values["version"] != _VERSION or not all(isinstance(one, str) for one in texts):
                raise ValueError("its version or a value is unknown")
            return cls(dict(values["base"]), points, values["axes"])
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError("it has other content") from error


def base_bindings(
    files: Sequence[str], params: Sequence[str], search_path: Sequence[str], points: Sequence[Point]
) -> dict[str, str]:
    """Returns the bindings of the base config that no point overrides, as texts by name.

    The defaults that come with ddl (`standard.gin`) are left out: a later version may have more.

    Args:
      files: Config files.
      params: Single statements, read after the files.
      search_path: Further folders to search.
      points: The points.

    Raises:
      ConfigError: If a file cannot be read, or a statement cannot be parsed.
    """
    reader = Reader(search_path)
    statements = [statement for file in files for statement in reader.file(file)]
    statements += [statement for param in params for statement in reader.parameter(param)]
    found: dict[str, str] = {}
    for statement in statements:
        if isinstance(statement, Import):
            found[f"import {statement.module}"] = "yes"
        elif not is_shipped(statement):
            found[name_of(statement.key)] = repr(statement.value)
    swept = {name for point in points for name in point}
    return {name: text for name, text in sorted(found.items()) if name not in swept}


def read(folder: Path) -> Definition | None:
    """Reads the definition of the sweep in a folder.

    Returns:
      None if the folder is missing or empty.

    Raises:
      ModelDirectoryError: If the folder holds something else, or the file cannot be read.
    """
    path = folder / FILE
    try:
        return Definition.from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        found = sorted(os.listdir(folder)) if folder.is_dir() else []
    except NotADirectoryError:
        raise ModelDirectoryError(
            f"--sweep_dir={folder} must be a folder, but it is a file, or lies under one. Pass "
            "another folder."
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ModelDirectoryError(
            f"{path} cannot be read as the definition of a sweep: {reason}. Restore the file from "
            "a backup, or pass another --sweep_dir."
        ) from error
    if found:
        raise ModelDirectoryError(
            f"--sweep_dir={folder} must be a new folder or that of a sweep, which has the file "
            f"{FILE}, but it holds {_listed(found)}. Pass another folder."
        )
    return None


def extended(folder: Path, saved: Definition | None, given: Definition) -> list[str]:
    """Compares a definition with the saved one: it may have more runs, and nothing else may differ.

    Args:
      folder: The folder of the sweep.
      saved: The saved definition; None for a new sweep.
      given: The definition of the command line.

    Returns:
      The names of the added runs; all for a new sweep.

    Raises:
      ConfigError: If the base config differs, or a run is missing in the given definition.
    """
    if saved is None:
        return list(given.runs)
    names = [*saved.base, *(name for name in given.base if name not in saved.base)]
    changes = [
        f"  {name}: {saved.base.get(name, 'not bound')} → {given.base.get(name, 'not bound')}"
        for name in names
        if saved.base.get(name) != given.base.get(name)
    ]
    missing = [name for name in saved.runs if name not in given.runs]
    if missing:
        raise ConfigError(
            f"The flags must give all runs of the sweep in {folder}, but lack {len(missing)} of "
            f"them: {_listed(missing)}. Pass at least the values and draws of that sweep, or "
            "another --sweep_dir."
        )
    if changes:
        raise ConfigError(
            f"The sweep in {folder} has another base config. The differences (saved → given):\n"
            + "\n".join(changes)
            + "\nPass the config of that sweep, or another --sweep_dir."
        )
    return [name for name in given.runs if name not in saved.runs]


def write(folder: Path, definition: Definition) -> None:
    """Writes the definition to the folder of the sweep.

    Raises:
      ModelDirectoryError: If it cannot be written.
    """
    path = folder / FILE
    try:
        write_atomically(path, definition.to_json())
    except OSError as error:
        raise ModelDirectoryError(unwritable(path, error)) from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Creates the folder of a sweep, and locks it within the `with` block.

    Raises:
      ModelDirectoryError: If it cannot be created.
      NotReady: If another sweep runs there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ModelDirectoryError(
            f"--sweep_dir={folder} cannot be created: {error.strerror}. Pass another folder."
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise NotReady(
                f"--sweep_dir={folder}: another ddl sweep runs there. Wait until it ends, or pass "
                "another folder."
            ) from None
        except OSError:
            pass  # some network file systems have no locks
        yield
    finally:
        os.close(descriptor)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
