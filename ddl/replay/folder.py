"""The directory of a run, read for a replay. Imports no TensorFlow."""

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ddl.errors import ConfigError, ModelDirectoryError, NotReady
from ddl.report import record
from ddl.report.files_of_run import is_locked, text_in
from ddl.run.directory import MARK

_INDEX = re.compile(r"step-(\d+)\.index")
_LARGEST_JSON = 2**22
_EXPORTED = ("saved_model.pb", "model.keras", "saved_model")


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that can be replayed.

    Attributes:
      path: The directory.
      bindings: The bindings of operative_config.gin.
      checkpoints: For the step of each checkpoint, what its JSON file says; {} if that cannot be
        read.
      reached: The last step that the run reached.
    """

    path: Path
    bindings: Mapping[str, str]
    checkpoints: Mapping[int, Mapping[str, Any]]
    reached: int

    @property
    def config(self) -> Path:
        """The config that a replay loads."""
        return self.path / "operative_config.gin"

    def check_step(self, step: int) -> None:
        """Raises ConfigError unless the run has made an update `step`, counted from 1."""
        if not self.reached:
            raise ConfigError(
                f"{self.path} has no update to replay: it has neither metrics nor checkpoints. "
                "Train first, or pass another directory."
            )
        if not 1 <= step <= self.reached:
            raise ConfigError(
                f"--step must be from 1 to {self.reached:,}, the last step that {self.path} is "
                f"known to have reached, got {step:,}."
            )

    def following(self, step: int) -> int | None:
        """Returns the step of the first checkpoint at a step or after it; None if there is none."""
        return min((saved for saved in self.checkpoints if saved >= step), default=None)

    def metadata_at(self, step: int) -> Mapping[str, Any]:
        """Returns what the checkpoint says that the process saved which computed a step."""
        following = self.following(step)
        if following is None:
            following = max(self.checkpoints, default=None)
        return {} if following is None else self.checkpoints[following]


@contextmanager
def unchanged(paths: Sequence[Path]) -> Iterator[None]:
    """Checks that the `with` block changes nothing in the directories of runs.

    Raises:
      ModelDirectoryError: If a file was added, removed or changed, as by a callback of the run that
        writes to a path in its config.
    """
    before = [_listing(path) for path in paths]
    try:
        yield
    except Exception as error:
        for text in _changes(paths, before):
            error.add_note(text)
        raise
    for text in _changes(paths, before):
        raise ModelDirectoryError(text)


def _changes(
    paths: Sequence[Path], before: Sequence[Mapping[Path, tuple[int, int]]]
) -> Iterator[str]:
    """Yields a text for each directory in which files changed."""
    for path, then in zip(paths, before, strict=True):
        now = _listing(path)
        if changed := sorted(
            str(file) for file in {*then, *now} if then.get(file) != now.get(file)
        ):
            yield (
                f"While {path} was replayed, files in it changed: {', '.join(changed[:5])}. A "
                "callback of the run may write to a path of its own. Replay a copy of the "
                "directory, or leave the callback out with --gin_param."
            )


def _listing(path: Path) -> dict[Path, tuple[int, int]]:
    """Returns size and time of change of each file below a directory."""
    found = {}
    for file in path.rglob("*"):
        with suppress(OSError):
            status = file.stat()
            found[file.relative_to(path)] = (status.st_size, status.st_mtime_ns)
    return found


def read_run(path: Path) -> Run:
    """Reads the directory of a run. Changes nothing.

    Raises:
      ModelDirectoryError: If it is not that of a run which can be replayed.
      NotReady: If the run is training.
    """
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise ModelDirectoryError(
            f"The directory of a run (--model_dir) is needed, but {path} {what}. Correct the path."
        )
    if any((path / name).exists() for name in _EXPORTED):
        run = path.parent
        raise ModelDirectoryError(
            f"{path} holds an exported model, which has neither optimizer nor data. Pass the "
            f"directory of the run that it was exported from, such as {run}."
        )
    if (path / MARK).exists():
        raise ModelDirectoryError(
            f"{path} was written by --overfit_batch or --fast_run, which train on other data than "
            "their config says. Pass the directory of a real run."
        )
    if is_locked(path):
        raise NotReady(
            f"A process is training in {path}, and its checkpoints change. Wait until it ends, or "
            "pass a copy of the directory."
        )
    found = record.read(path)
    if found.config is None or found.config_file != "operative_config.gin":
        raise ModelDirectoryError(f"{path} cannot be replayed: {_without_config(path, found)}")
    checkpoints = _checkpoints(path / "checkpoints")
    steps = [int(found.step or 0), *checkpoints]
    return Run(path, found.bindings, checkpoints, max(steps))


def _without_config(path: Path, found: record.Record) -> str:
    """Returns why there is no operative_config.gin, with the remedy."""
    file = path / "operative_config.gin"
    if file.exists():
        return f"{file} cannot be read. Restore the file from a backup."
    if found.checkpoint is not None or found.step is not None:
        return (
            "there is no operative_config.gin to rebuild the run from. A run from Python (ddl.fit) "
            "writes none; train from a config to replay it."
        )
    return (
        "it holds no run: neither a config, metrics nor checkpoints. Pass the --model_dir of a "
        "run that has begun to train."
    )


def _checkpoints(folder: Path) -> dict[int, Mapping[str, Any]]:
    names = [each.name for each in folder.iterdir()] if folder.is_dir() else []
    steps = sorted(int(found[1]) for found in map(_INDEX.fullmatch, names) if found)
    return {step: _metadata(folder / f"step-{step}.json") for step in steps}


def _metadata(file: Path) -> Mapping[str, Any]:
    try:
        values = json.loads(text_in(file, _LARGEST_JSON))
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}
