"""The checkpoint files of a run, written atomically and verified when read.

The checkpoint of step N consists of `step-N.index` and `step-N.data-…`, in TensorFlow's format, and
of `step-N.json`, which lists the values and says where the run stands. The files are written to a
folder `step-N.partial`, synced to disk and moved out, the index last: a checkpoint exists once its
index does.
"""

import dataclasses
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import tensorflow as tf
from absl import logging

from ddl.checkpoints.contents import Entries, digest_of
from ddl.checkpoints.durable_files import sync, write_atomically
from ddl.errors import ModelDirectoryError

_JSON = "json"  # key of the JSON text in TensorFlow's file
_FILE = re.compile(r"step-(?P<step>\d+)\.(?P<ending>index|json|partial|data-\d+-of-\d+)")


@dataclasses.dataclass(frozen=True)
class Metadata:
    """Metadata of a checkpoint.

    Attributes:
      metrics: Metrics of the evaluation at this step, if any, that are finite.
      values: Path, shape and dtype of each value, by its key in TensorFlow's file.
      position: Numbers on which the position in the data depends, by what they are.
      replicas: Number of replicas of the run.
      seconds: Seconds that the run had spent on updates.
      scheduled: Whether the run plan saves at this step; False for a save on a signal.
      ended_by: Name of the callback that ended the run at this step, if any.
      sha256: Digest of keys and bytes of weights, slots, statistics and averages, which equal runs
        share. `CheckpointDirectory.write` fills it in.
    """

    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    values: Entries = dataclasses.field(default_factory=dict)
    position: Mapping[str, int | None] = dataclasses.field(default_factory=dict)
    replicas: int = 1
    seconds: float = 0.0
    scheduled: bool = True
    ended_by: str | None = None
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
        self,
        report: Callable[[str], None] = logging.warning,
        scheduled: bool = False,
        moves: bool = False,
    ) -> SavedCheckpoint | None:
        """Returns the newest readable checkpoint, if any.

        Args:
          report: Called with a message for each newer, damaged one.
          scheduled: Whether to skip checkpoints that were saved on a signal.
          moves: Whether to give the files of damaged ones the ending `.damaged`.

        Raises:
          ModelDirectoryError: If there are checkpoints and all are damaged.
        """
        damaged: dict[SavedCheckpoint, str] = {}
        for saved in reversed(self.saved()):
            if scheduled and not saved.metadata.scheduled:
                continue
            if not (damage := self.damage_of(saved)):
                for each, why in damaged.items():
                    report(f"{each} is damaged: {why}. The checkpoint before it is used.")
                    if moves:
                        # The index last: files without an index count as left over.
                        for path in reversed(self._files()[each.step].values()):
                            os.replace(path, f"{path}.damaged")
                return saved
            if "index" not in self._files().get(saved.step, ()):
                # The run has just removed this checkpoint, and has written newer ones.
                return self.newest(report, scheduled, moves)
            damaged[saved] = damage
        if damaged:
            listing = "\n".join(f"  {saved}: {damage}" for saved, damage in damaged.items())
            raise ModelDirectoryError(
                f"No checkpoint in {self.path} can be read:\n{listing}\n"
                "Restore one from a backup, or start a new run in another --model_dir."
            )
        return None

    def damage_of(self, saved: SavedCheckpoint) -> str:
        """Reads a checkpoint with all its checksums; returns what is damaged, or ""."""
        values = saved.metadata.values
        try:
            with reading(saved.prefix) as reader:
                if reader.get_tensor(_JSON).decode() != saved.text:
                    return "its JSON file is missing or was changed"
                digest = digest_of((key, reader.get_tensor(key)) for key in values)
        except Exception as error:  # TensorFlow raises errors of many kinds here
            return first_line(error)
        return "" if digest == saved.metadata.sha256 else "its values have another digest"

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
        digest = digest_of((key, tensors[key].numpy()) for key in metadata.values)
        fields = dataclasses.asdict(dataclasses.replace(metadata, sha256=digest))
        text = json.dumps(fields, indent=1, allow_nan=False)
        tensors = {**tensors, _JSON: tf.constant(text)}
        try:
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
            # For `tf.train.latest_checkpoint`; ddl does not read it.
            write_atomically(self.path / "checkpoint", f'model_checkpoint_path: "step-{step}"\n')
        except (tf.errors.OpError, OSError) as error:
            raise ModelDirectoryError(
                f"The checkpoint of step {step} could not be written to {self.path}: "
                f"{first_line(error)}. Check the free disk space and the permissions."
            ) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def remove(self, many: Iterable[SavedCheckpoint]) -> None:
        """Removes checkpoints. Raises OSError if a file cannot be removed."""
        there = self._files()
        for saved in many:
            for ending, path in there.get(saved.step, {}).items():
                if ending != "partial":
                    path.unlink(missing_ok=True)

    def clear_partial(self) -> None:
        """Removes the files that an interrupted save or removal left behind."""
        for files in self._files().values():
            for ending, path in files.items():
                if ending == "partial":
                    shutil.rmtree(path, ignore_errors=True)
                elif "index" not in files:
                    path.unlink(missing_ok=True)

    def _files(self) -> dict[int, dict[str, Path]]:
        """Returns the files by step and ending, each step's index first."""
        try:
            names = os.listdir(self.path)  # `Path.glob` would hide that the folder is not readable
        except (FileNotFoundError, NotADirectoryError):
            return {}
        found: dict[int, dict[str, Path]] = {}
        for file in sorted(names, key=lambda file: not file.endswith(".index")):
            if name := _FILE.fullmatch(file):
                found.setdefault(int(name["step"]), {})[name["ending"]] = self.path / file
        return found


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


def first_line(error: Exception) -> str:
    """Returns an error's first line, without TensorFlow's ` [Op:…` suffix and without full stop."""
    text = str(getattr(error, "strerror", None) or getattr(error, "message", None) or error)
    return (text.strip().splitlines() or [type(error).__name__])[0].split(" [Op:")[0].rstrip(".")
