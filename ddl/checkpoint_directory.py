"""The checkpoint files of a run: each there whole or not at all.

A checkpoint of step N is `step-N.index` and `step-N.data-…`, as TensorFlow writes them, and
`step-N.json`, which says what is known of it beside its tensors. They are written in a folder
`step-N.partial`, brought to the disk, and moved out with the index last: a checkpoint is there
once its index is. `checkpoint` is the list that `tf.train.latest_checkpoint` reads.
"""

import dataclasses
import json
import os
import re
import shutil
import zlib
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import tensorflow as tf

from ddl.durable_files import sync, write_whole
from ddl.errors import ModelDirectoryError

_FILE = re.compile(r"step-(?P<step>\d+)\.(?P<ending>index|json|partial|data-\d+-of-\d+)")


class CheckpointDamagedError(Exception):
    """Bytes of a checkpoint are missing or changed; says which way it was noticed."""


@dataclasses.dataclass(frozen=True)
class Metadata:
    """What is known of a checkpoint beside its tensors.

    Attributes:
      metrics: What an evaluation at its step gave; empty without one.
      global_batch_size: Examples of one update of the run; None where it is not known.
      num_examples: Training examples.
      replicas: How many replicas the run had.
      seconds: Time the run had spent on updates.
      scheduled: Whether it was saved at a step that the run plan names, and not on a signal.
    """

    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    global_batch_size: int | None = None
    num_examples: int | None = None
    replicas: int | None = None
    seconds: float = 0.0
    scheduled: bool = True

    def to_json(self) -> str:
        """A text with a checksum."""
        values = dataclasses.asdict(self)
        return json.dumps({**values, "crc32": _checksum(values)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Metadata":
        """Reads what `to_json` gave.

        Raises:
          CheckpointDamagedError: If a byte of it is missing or changed.
        """
        try:
            values = json.loads(text)
            if values.pop("crc32") == _checksum(values):
                return cls(**values)
        except (ValueError, TypeError, KeyError, AttributeError):
            pass
        raise CheckpointDamagedError("its JSON file is not as it was written")


def _checksum(values: Mapping[str, object]) -> int:
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())


@dataclasses.dataclass(frozen=True)
class SavedCheckpoint:
    """One checkpoint on the disk.

    Attributes:
      step: Updates made before it.
      prefix: Path of its files less their endings, as TensorFlow takes it.
      metadata: What is known of it.
    """

    step: int
    prefix: str
    metadata: Metadata = Metadata()

    def __str__(self) -> str:
        return self.prefix


class CheckpointDirectory:
    """Lists, writes, checks and removes the checkpoints in one folder."""

    def __init__(self, path: str | os.PathLike[str]):
        """Looks at nothing, creates nothing."""
        self.path = Path(path)
        self.damaged = self.path / "damaged"

    def saved(self) -> list[SavedCheckpoint]:
        """What is there, by step. Read from the files alone, not from any list of them."""
        steps = [step for step, files in self._files().items() if "index" in files]
        return [self.at(step) for step in sorted(steps)]

    def write(self, step: int, tensors: Mapping[str, tf.Tensor], metadata: Metadata) -> None:
        """Writes a checkpoint, in the place of one of the same step if there is one.

        Args:
          step: Names it.
          tensors: By the names in TensorFlow's checkpoint, its object graph among them.
          metadata: What goes into the JSON file.

        Raises:
          ModelDirectoryError: If it cannot be written; then nothing of it is left.
        """
        partial = self.path / f"step-{step}.partial"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._check_space(sum(_bytes(tensor) for tensor in tensors.values()))
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            with tf.device("CPU:0"):
                tf.raw_ops.SaveV2(
                    prefix=str(partial / f"step-{step}"),
                    tensor_names=list(tensors),
                    shape_and_slices=[""] * len(tensors),
                    tensors=list(tensors.values()),
                )
            (partial / f"step-{step}.json").write_text(metadata.to_json())
            files = list(partial.iterdir())
            for path in [*files, partial]:
                sync(path)
            self._remove_files(step)
            for path in sorted(files, key=lambda path: path.suffix == ".index"):
                os.replace(path, self.path / path.name)
            sync(self.path)
            partial.rmdir()
            self.write_list()
        except (tf.errors.OpError, OSError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            if not (self.path / f"step-{step}.index").exists():
                self._remove_files(step)
            raise ModelDirectoryError(
                f"the checkpoint of step {step} could not be written to {self.path}: "
                + first_line(error)
            ) from error

    def check(self, saved: SavedCheckpoint) -> None:
        """Reads every byte, of which TensorFlow keeps checksums.

        Raises:
          CheckpointDamagedError: If it cannot be read as it was written.
        """
        self._metadata(saved.step)
        try:
            reader = tf.train.load_checkpoint(saved.prefix)
            for name in reader.get_variable_to_shape_map():
                reader.get_tensor(name)
        except Exception as error:  # TensorFlow raises errors of many kinds here
            raise CheckpointDamagedError(first_line(error)) from error

    def set_aside(self, saved: SavedCheckpoint) -> Path:
        """Moves a damaged checkpoint's files into a folder where nobody takes them for good.

        Raises:
          ModelDirectoryError: If that is not possible.
        """
        target = self.damaged / f"step-{saved.step}"
        number = 1
        while target.exists():
            number += 1
            target = target.with_name(f"step-{saved.step}.{number}")
        try:
            target.mkdir(parents=True)
            # The index last: what has none is taken for the rest of a removal.
            for path in reversed(self._files()[saved.step].values()):
                os.replace(path, target / path.name)
        except OSError as error:
            raise ModelDirectoryError(
                f"{saved} is damaged and could not be moved to {target}: {error.strerror}"
            ) from error
        self.write_list()
        return target

    def remove(self, many: Iterable[SavedCheckpoint]) -> None:
        """Removes checkpoints, none or more; the list of them forgets them first.

        Raises:
          OSError: If a file cannot be removed.
        """
        steps = {saved.step for saved in many}
        if steps:
            self.write_list(without=steps)
        for step in steps:
            self._remove_files(step)

    def clear_partial(self) -> None:
        """Removes what an interrupted save or removal left."""
        for files in self._files().values():
            for ending, path in files.items():
                if ending == "partial":
                    shutil.rmtree(path, ignore_errors=True)
                elif "index" not in files:
                    path.unlink(missing_ok=True)

    def write_list(self, without: Collection[int] = ()) -> None:
        """Writes the file that `tf.train.latest_checkpoint` reads, from what is there.

        No run goes by it, so that it may fall behind where a disk is full.
        """
        names = [f"step-{saved.step}" for saved in self.saved() if saved.step not in without]
        lines = [f'model_checkpoint_path: "{names[-1]}"'] if names else []
        lines += [f'all_model_checkpoint_paths: "{name}"' for name in names]
        with suppress(OSError):
            write_whole(self.path / "checkpoint", "".join(f"{line}\n" for line in lines))

    def at(self, step: int) -> SavedCheckpoint:
        """The checkpoint of a step, which is there."""
        try:
            metadata = self._metadata(step)
        except CheckpointDamagedError:
            metadata = Metadata()  # told by `check`
        return SavedCheckpoint(step, str(self.path / f"step-{step}"), metadata)

    def _metadata(self, step: int) -> Metadata:
        """What the JSON file says; nothing if there is none, as in checkpoints of others."""
        try:
            return Metadata.from_json((self.path / f"step-{step}.json").read_text())
        except UnicodeDecodeError as error:
            raise CheckpointDamagedError("its JSON file is no text") from error
        except OSError:
            return Metadata()

    def _files(self) -> dict[int, dict[str, Path]]:
        """Files by step and ending, each step's index first, since it makes the others count."""
        found: dict[int, dict[str, Path]] = {}
        for path in sorted(self.path.glob("step-*"), key=lambda path: path.suffix != ".index"):
            if name := _FILE.fullmatch(path.name):
                found.setdefault(int(name["step"]), {})[name["ending"]] = path
        return found

    def _remove_files(self, step: int) -> None:
        for ending, path in self._files().get(step, {}).items():
            if ending != "partial":
                path.unlink(missing_ok=True)

    def _check_space(self, needed: int) -> None:
        """Raises OSError, before anything is written, if so many bytes are not free."""
        free = shutil.disk_usage(self.path).free
        if free < needed:
            raise OSError(0, f"it needs {needed / 1e6:,.1f} MB and {free / 1e6:,.1f} MB are free")


def _bytes(tensor: tf.Tensor) -> int:
    return 0 if tensor.dtype == tf.string else tensor.shape.num_elements() * tensor.dtype.size


def first_line(error: Exception) -> str:
    """What an error says first, without TensorFlow's wrapping."""
    text = str(getattr(error, "strerror", None) or getattr(error, "message", None) or error)
    return (text.strip().splitlines() or [type(error).__name__])[0].split(" [Op:")[0]
