"""The checkpoint files of a run, written atomically, verified when read, and kept by a rule.

The checkpoint of step N consists of `step-N.index` and `step-N.data-…`, in TensorFlow's format, and
of `step-N.json`, which lists the values and says where the run stands. The files are written to a
folder `step-N.partial`, synced to disk and moved out, the index last: a checkpoint exists once its
index does.
"""

import dataclasses
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import tensorflow as tf
from absl import logging

from ddl.checkpoints.contents import Entries, digest_of
from ddl.choices import check_count
from ddl.errors import ModelDirectoryError
from ddl.figures import Direction, direction_of

_JSON = "json"  # key of the JSON text in TensorFlow's file
_FILE = re.compile(r"step-(?P<step>\d+)\.(?P<ending>index|json|partial|data-\d+-of-\d+)")


@dataclasses.dataclass(frozen=True)
class Metadata:
    """Metadata of a checkpoint.

    Attributes:
      metrics: Metrics of the evaluation at this step, if any, that are finite.
      values: Path, shape and dtype of each value, by its key in TensorFlow's file.
      position: Values on which the position in the data and the loss scale depend, by their names.
      sha256: Digest of keys and bytes of weights, slots, statistics and averages, which equal runs
        share. `CheckpointDirectory.write` fills it in.
    """

    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    values: Entries = dataclasses.field(default_factory=dict)
    position: Mapping[str, int | str | None] = dataclasses.field(default_factory=dict)
    sha256: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class SavedCheckpoint:
    """One checkpoint on disk.

    Attributes:
      step: Number of updates made before the save.
      prefix: Path of the files without their endings, as TensorFlow expects it.
      metadata: The metadata; defaults if the JSON file is missing or damaged.
      text: The JSON text, which TensorFlow's file holds too, and so its checksum.
    """

    step: int
    prefix: str
    metadata: Metadata = Metadata()
    text: str = ""

    def __str__(self) -> str:
        return self.prefix


@dataclasses.dataclass(frozen=True)
class Retention:
    """The checkpoints to keep: the last few, those at every N steps, and the best.

    During training the folder holds one checkpoint more, since old ones are removed before the
    next write. The best checkpoint is found from the metrics saved with each checkpoint; no other
    file records it.

    Attributes:
      last: How many of the latest checkpoints to keep.
      every: Steps; checkpoints at multiples of it are kept for good. None keeps none this way.
      best_metric: Evaluation metric, such as `accuracy`, by which the best checkpoint is kept;
        None keeps none this way. An evaluation better than all before it saves a checkpoint.
      best_mode: `max` or `min`; None takes the smallest loss or the largest accuracy. Any other
        metric requires it.

    Raises:
      ConfigError: If a number is below 1, or `best_mode` is missing or unknown.
    """

    last: int = 3
    every: int | None = None
    best_metric: str | None = None
    best_mode: Direction | None = None

    def __post_init__(self) -> None:
        check_count("Retention.last", self.last)
        check_count("Retention.every", 1 if self.every is None else self.every)
        if self.best_metric is not None:
            direction_of(self.best_metric, self.best_mode, "Retention.best_mode")

    def best(self, saved: Sequence[SavedCheckpoint]) -> SavedCheckpoint | None:
        """Returns the best checkpoint, the earliest among equals; None if none was evaluated."""
        best = max(saved, key=lambda each: self._rating(each.metadata.metrics), default=None)
        return best if best and self._rating(best.metadata.metrics) > -math.inf else None

    def improves(self, metrics: Mapping[str, float], saved: Sequence[SavedCheckpoint]) -> bool:
        """Returns whether a checkpoint with these metrics would be better than all in `saved`."""
        best = self.best(saved)
        return self._rating(metrics) > (self._rating(best.metadata.metrics) if best else -math.inf)

    def removable(self, saved: Sequence[SavedCheckpoint]) -> list[SavedCheckpoint]:
        """Returns the checkpoints that need not be kept; `saved` is sorted by step."""
        every, stays = self.every, [*saved[-self.last :], self.best(saved)]
        # Without its JSON, which may be readable later, it might be the best.
        others = [each for each in saved if each not in stays and each.metadata.sha256]
        return [each for each in others if not (every and each.step % every == 0)]

    def _rating(self, metrics: Mapping[str, float]) -> float:
        """Returns a rating, higher is better; -inf if `metrics` lacks the metric."""
        value = metrics.get(self.best_metric or "", math.nan)
        if not math.isfinite(value):  # no checkpoint holds it
            return -math.inf
        falls = direction_of(str(self.best_metric), self.best_mode, "Retention.best_mode") == "min"
        return -value if falls else value


class CheckpointDirectory:
    """Lists, writes, checks and removes the checkpoints in one folder."""

    def __init__(self, path: str | os.PathLike[str]):
        """Keeps the path; reads and creates no files."""
        self.path = Path(path)

    def saved(self) -> list[SavedCheckpoint]:
        """Returns the checkpoints in the folder, sorted by step."""
        steps = [step for step, files in self._files().items() if "index" in files]
        return [self.at(step) for step in sorted(steps)]

    def at(self, step: int) -> SavedCheckpoint:
        """Returns the checkpoint of a step."""
        prefix, text, metadata = f"{self.path / 'step-'}{step}", "", Metadata()
        with suppress(OSError, ValueError, TypeError, RecursionError):  # `damage_of` finds it
            text = Path(f"{prefix}.json").read_text()
            metadata = Metadata(**json.loads(text))
        return SavedCheckpoint(step, prefix, metadata, text)

    def newest(
        self, report: Callable[[str], None] = logging.warning, moves: bool = False
    ) -> SavedCheckpoint | None:
        """Returns the newest readable checkpoint, if any.

        Args:
          report: Called with a message for each newer, damaged one.
          moves: Whether to give the files of damaged ones the ending `.damaged`.

        Raises:
          ModelDirectoryError: If there are checkpoints and all are damaged.
        """
        damaged: dict[SavedCheckpoint, str] = {}
        for saved in reversed(self.saved()):
            if not (damage := self.damage_of(saved)):
                for each, why in damaged.items():
                    report(f"{each} is damaged: {why}. The checkpoint before it is used.")
                    with file_errors(str(each)):
                        # The index last: files without an index count as left over.
                        for path in reversed(self._files()[each.step].values()) if moves else ():
                            os.replace(path, f"{path}.damaged")
                return saved
            if "index" not in self._files().get(saved.step, ()):
                # The run has just removed this checkpoint, and has written newer ones.
                return self.newest(report, moves)
            damaged[saved] = damage
        if damaged:
            listing = "\n".join(f"  {saved}: {damage}" for saved, damage in damaged.items())
            raise ModelDirectoryError(
                f"No checkpoint in {self.path} can be read:\n{listing}\n"
                "Restore one from a backup, or start a new run in another model_dir."
            )
        return None

    def damage_of(self, saved: SavedCheckpoint) -> str:
        """Reads a checkpoint with all its checksums; returns what is damaged, or "".

        Raises:
          ModelDirectoryError: If the system fails to read a file, whose content may be whole.
        """
        if not _damage_of(saved):
            return ""
        with file_errors(str(saved)):
            for path in self._files().get(saved.step, {}).values():
                with suppress(FileNotFoundError, IsADirectoryError):
                    shutil.copyfile(path, os.devnull)
        return _damage_of(self.at(saved.step))  # a failure of the system may have passed

    def write(self, step: int, tensors: Mapping[str, tf.Tensor], metadata: Metadata) -> None:
        """Writes a checkpoint; replaces one of the same step.

        Args:
          step: Number of updates made; names the files.
          tensors: The tensors of `metadata.values`, on the host.
          metadata: Content of the JSON file.

        Raises:
          ModelDirectoryError: If the checkpoint cannot be written. No incomplete checkpoint
            remains; an earlier one of the same step may.
        """
        partial = self.path / f"step-{step}.partial"
        digest = digest_of(metadata.values, lambda key: tensors[key].numpy())
        fields = dataclasses.asdict(dataclasses.replace(metadata, sha256=digest))
        text = json.dumps(fields, indent=1, allow_nan=False)
        tensors = {**tensors, _JSON: tf.constant(text)}
        try:
            with file_errors(f"The checkpoint of step {step} in {self.path}"):
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
                with tf.device("CPU:0"):
                    tf.raw_ops.SaveV2(
                        prefix=str(partial / f"step-{step}"),
                        tensor_names=list(tensors),
                        shape_and_slices=[""] * len(tensors),
                        tensors=list(tensors.values()),
                    )
                (partial / f"step-{step}.json").write_text(text)
                files = list(partial.iterdir())
                for path in [*files, partial]:
                    sync(path)
                self.remove([self.at(step)])
                for path in sorted(files, key=lambda path: path.suffix == ".index"):
                    os.replace(path, self.path / path.name)
                sync(self.path)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def remove(self, many: Iterable[SavedCheckpoint]) -> None:
        """Removes checkpoints. Raises ModelDirectoryError if a file cannot be removed."""
        there = self._files()
        with file_errors(str(self.path)):
            for saved in many:
                for ending, path in there.get(saved.step, {}).items():
                    if ending != "partial":
                        path.unlink(missing_ok=True)

    def clear_partial(self) -> None:
        """Removes the files that an interrupted save or removal left behind."""
        for step, files in self._files().items():
            if "partial" in files:
                shutil.rmtree(files["partial"], ignore_errors=True)
            if "index" not in files:
                self.remove([self.at(step)])

    def _files(self) -> dict[int, dict[str, Path]]:
        """Returns the files by step and ending, each step's index first."""
        names: list[str] = []
        with file_errors(str(self.path)), suppress(FileNotFoundError, NotADirectoryError):
            names = os.listdir(self.path)  # `Path.glob` would hide that the folder is not readable
        found: dict[int, dict[str, Path]] = {}
        for file in sorted(names, key=lambda file: not file.endswith(".index")):
            if name := _FILE.fullmatch(file):
                found.setdefault(int(name["step"]), {})[name["ending"]] = self.path / file
        return found


def _damage_of(saved: SavedCheckpoint) -> str:
    try:
        with reading(saved.prefix) as reader:
            if reader.get_tensor(_JSON).decode() != saved.text:
                return "its JSON file is missing or was changed"
            digest = digest_of(saved.metadata.values, reader.get_tensor)
    except Exception as error:  # TensorFlow raises errors of many kinds here
        return str(error).partition("\n")[0].partition(" [Op:")[0] or type(error).__name__
    return "" if digest == saved.metadata.sha256 else "its values have another digest"


@contextmanager
def reading(prefix: str) -> Iterator[Any]:
    """Yields TensorFlow's reader of a checkpoint.

    TensorFlow reads the prefix as a glob pattern and finds nothing in a folder such as `lr[0.1]`.
    The reader of such a folder goes through a temporary symbolic link.
    """
    if not set(prefix) & set("*?[\\"):
        yield tf.train.load_checkpoint(prefix)
        return
    folder, name = os.path.split(os.path.abspath(prefix))
    with tempfile.TemporaryDirectory(prefix="ddl-") as temporary:
        link = os.path.join(temporary, "checkpoints")
        os.symlink(folder, link)
        yield tf.train.load_checkpoint(os.path.join(link, name))


@contextmanager
def file_errors(what: str) -> Iterator[None]:
    """Turns errors of the system in the `with` block into ModelDirectoryErrors that name a file."""
    try:
        yield
    except (OSError, ValueError, tf.errors.OpError) as error:
        raise ModelDirectoryError(
            f"{what} cannot be written or read: {str(error).partition(' [Op:')[0]}. Check "
            "permissions and disk space, restore it from a backup, or pass another name."
        ) from error


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replaces a file's content atomically: a crash leaves the old content or the new one.

    Raises:
      OSError: If the content cannot be written; the old content then stays. Or if the folder
        cannot be synced after the replacement.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        partial.unlink(missing_ok=True)  # left by a crash, or a link that somebody planted
        with partial.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Flushes a file's content or a folder's entries to disk. Raises OSError if it cannot."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
