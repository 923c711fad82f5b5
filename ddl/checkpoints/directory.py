"""The checkpoint files of a run, written atomically.

The checkpoint of step N consists of `step-N.index` and `step-N.data-…`, in TensorFlow's format, and
of `step-N.json` with the metadata. The files are written to a folder `step-N.partial`, synced to
disk and moved out, the index last: a checkpoint exists once its index does. The file `checkpoint`
is the list that `tf.train.latest_checkpoint` reads.
"""

import dataclasses
import json
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

import tensorflow as tf

from ddl.checkpoints.durable_files import sync, write_atomically
from ddl.checkpoints.snapshot import digest_of
from ddl.errors import ModelDirectoryError

_FILE = re.compile(r"step-(?P<step>\d+)\.(?P<ending>index|json|partial|data-\d+-of-\d+)")


class CheckpointDamagedError(Exception):
    """A checkpoint with missing or changed bytes; the message says how this was detected."""


OfSources: TypeAlias = int | Mapping[str, int]
"""A number, or that of each source by its name."""


@dataclasses.dataclass(frozen=True)
class Metadata:
    """Metadata of a checkpoint.

    Attributes:
      metrics: Metrics of the evaluation at this step; empty if there was none.
      global_batch_size: Examples per batch, of each source by its name if there are several; None
        if unknown.
      num_examples: Number of training examples, in the form of `global_batch_size`.
      batches_per_update: Batches per update, in the form of `global_batch_size`.
      packing: Digest of the rows of packed examples; None if there are none, or it is unknown.
      replicas: Number of replicas of the run; None if unknown.
      seconds: Seconds that the run had spent on updates.
      scheduled: Whether the run plan saves at this step; False for a save on a signal.
      ended_by: Name of the callback that ended the run at this step, if any.
      strategy: Name of the run's strategy, as --strategy takes it; None if unknown.
      device: Kind of the replicas' devices, such as CPU; None if unknown.
      shard_optimizer_state: Whether the replicas kept shares of the slots; None if unknown.
      jit_compile: The run's --jit_compile; None if unknown.
      tf32: Whether GPUs may round float32 to TF32; None if unknown.
      sha256: Digest of names and bytes of weights, slots, statistics and averages, which equal runs
        share; None if unknown. `write` fills it in.
    """

    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    global_batch_size: OfSources | None = None
    num_examples: OfSources | None = None
    batches_per_update: OfSources | None = None
    packing: int | None = None
    replicas: int | None = None
    seconds: float = 0.0
    scheduled: bool = True
    ended_by: str | None = None
    strategy: str | None = None
    device: str | None = None
    shard_optimizer_state: bool | None = None
    jit_compile: str | None = None
    tf32: bool | None = None
    sha256: str | None = None

    def to_json(self) -> str:
        """Returns JSON text with a CRC-32 checksum."""
        values = dataclasses.asdict(self)
        return json.dumps({**values, "crc32": _checksum(values)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Metadata":
        """Parses the text that `to_json` returned.

        Raises:
          CheckpointDamagedError: If the text does not match its checksum.
        """
        try:
            values = json.loads(text)
            if values.pop("crc32") == _checksum(values):
                return cls(**values)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            pass
        raise CheckpointDamagedError("its JSON file is invalid or was changed")


def _checksum(values: Mapping[str, object]) -> int:
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())


@dataclasses.dataclass(frozen=True)
class SavedCheckpoint:
    """One checkpoint on disk.

    Attributes:
      step: Number of updates made before the save.
      prefix: Path of the files without their endings, as TensorFlow expects it.
      metadata: The metadata; defaults if the JSON file is missing or damaged.
    """

    step: int
    prefix: str
    metadata: Metadata = Metadata()

    def __str__(self) -> str:
        return self.prefix


class CheckpointDirectory:
    """Lists, writes, checks and removes the checkpoints in one folder."""

    def __init__(self, path: str | os.PathLike[str]):
        """Keeps the path; reads and creates no files."""
        self.path = Path(path)
        self.damaged = self.path / "damaged"

    def saved(self) -> list[SavedCheckpoint]:
        """Returns the checkpoints in the folder, sorted by step; ignores the file `checkpoint`.

        Raises:
          ModelDirectoryError: If the folder may not be read.
        """
        steps = [step for step, files in self._files().items() if "index" in files]
        return [self.at(step) for step in sorted(steps)]

    def write(self, step: int, tensors: Mapping[str, tf.Tensor], metadata: Metadata) -> None:
        """Writes a checkpoint; replaces one of the same step.

        Args:
          step: Number of updates made; names the files.
          tensors: Tensors by their names in TensorFlow's checkpoint, including its object graph.
          metadata: Content of the JSON file.

        Raises:
          ModelDirectoryError: If the checkpoint cannot be written. No incomplete checkpoint
            remains; an earlier one of the same step may.
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
            metadata = dataclasses.replace(metadata, sha256=digest_of(tensors))
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
                f"The checkpoint of step {step} could not be written to {self.path}: "
                f"{first_line(error)}. Check the free disk space and the permissions."
            ) from error

    def check(self, saved: SavedCheckpoint) -> None:
        """Reads the metadata and every tensor, so that their checksums are verified.

        Raises:
          CheckpointDamagedError: If a file is missing, unreadable or does not match its checksum.
        """
        self._metadata(saved.step)
        try:
            with readable(saved.prefix) as prefix:
                reader = tf.train.load_checkpoint(prefix)
                for name in reader.get_variable_to_shape_map():
                    reader.get_tensor(name)
        except Exception as error:  # TensorFlow raises errors of many kinds here
            raise CheckpointDamagedError(first_line(error)) from error

    def set_aside(self, saved: SavedCheckpoint) -> Path:
        """Moves a damaged checkpoint's files to a new folder in `damaged/`.

        Returns:
          The new folder.

        Raises:
          ModelDirectoryError: If the files cannot be moved.
        """
        target = self.damaged / f"step-{saved.step}"
        number = 1
        while target.exists():
            number += 1
            target = target.with_name(f"step-{saved.step}.{number}")
        try:
            target.mkdir(parents=True)
            # The index last: files without an index count as left over from a removal.
            for path in reversed(self._files()[saved.step].values()):
                os.replace(path, target / path.name)
        except OSError as error:
            raise ModelDirectoryError(
                f"{saved} is damaged and could not be moved to {target}: {error.strerror}. Remove "
                "its files, or correct the permissions."
            ) from error
        self.write_list()
        return target

    def remove(self, many: Iterable[SavedCheckpoint]) -> None:
        """Removes checkpoints, first from the file `checkpoint`, then from disk.

        Raises:
          OSError: If a file cannot be removed.
        """
        steps = {saved.step for saved in many}
        if steps:
            self.write_list(without=steps)
        for step in steps:
            self._remove_files(step)

    def clear_partial(self) -> None:
        """Removes the files that an interrupted save or removal left behind."""
        for files in self._files().values():
            for ending, path in files.items():
                if ending == "partial":
                    shutil.rmtree(path, ignore_errors=True)
                elif "index" not in files:
                    path.unlink(missing_ok=True)

    def write_list(self, without: Collection[int] = ()) -> None:
        """Writes the file `checkpoint`, which `tf.train.latest_checkpoint` reads.

        Ignores an OSError, such as a full disk: no run depends on this file.

        Args:
          without: Steps to leave out.
        """
        names = [f"step-{saved.step}" for saved in self.saved() if saved.step not in without]
        lines = [f'model_checkpoint_path: "{names[-1]}"'] if names else []
        lines += [f'all_model_checkpoint_paths: "{name}"' for name in names]
        with suppress(OSError):
            write_atomically(self.path / "checkpoint", "".join(f"{line}\n" for line in lines))

    def at(self, step: int) -> SavedCheckpoint:
        """Returns the checkpoint of a step, which must exist."""
        try:
            metadata = self._metadata(step)
        except CheckpointDamagedError:
            metadata = Metadata()  # `check` raises the error
        return SavedCheckpoint(step, str(self.path / f"step-{step}"), metadata)

    def _metadata(self, step: int) -> Metadata:
        """Reads the JSON file; returns defaults if it is missing, as with other tools."""
        try:
            return Metadata.from_json((self.path / f"step-{step}.json").read_text())
        except UnicodeDecodeError as error:
            raise CheckpointDamagedError("its JSON file is not UTF-8 text") from error
        except OSError:
            return Metadata()

    def _files(self) -> dict[int, dict[str, Path]]:
        """Returns the files by step and ending, each step's index first."""
        try:
            names = os.listdir(self.path)  # `Path.glob` would hide that the folder is not readable
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except PermissionError as error:
            raise ModelDirectoryError(
                f"The checkpoints in {self.path} cannot be read: {error.strerror}. Change the "
                "permissions of the folder, or pass another --model_dir."
            ) from error
        found: dict[int, dict[str, Path]] = {}
        for file in sorted(names, key=lambda file: not file.endswith(".index")):
            if name := _FILE.fullmatch(file):
                found.setdefault(int(name["step"]), {})[name["ending"]] = self.path / file
        return found

    def _remove_files(self, step: int) -> None:
        for ending, path in self._files().get(step, {}).items():
            if ending != "partial":
                path.unlink(missing_ok=True)

    def _check_space(self, needed: int) -> None:
        """Raises OSError, before anything is written, if fewer than `needed` bytes are free."""
        free = shutil.disk_usage(self.path).free
        if free < needed:
            raise OSError(0, f"it needs {needed / 1e6:,.1f} MB, but {free / 1e6:,.1f} MB are free")


@contextmanager
def readable(prefix: str) -> Iterator[str]:
    """Yields a prefix of the same checkpoint that TensorFlow can read.

    TensorFlow reads the prefix as a glob pattern and finds nothing in a folder such as `lr[0.1]`.
    For such a folder the yielded prefix goes through a temporary symbolic link.
    """
    if not set(prefix) & set("*?[\\"):
        yield prefix
        return
    folder, name = os.path.split(os.path.abspath(prefix))
    with tempfile.TemporaryDirectory(prefix="ddl-") as temporary:
        link = os.path.join(temporary, "checkpoints")
        os.symlink(folder, link)
        yield os.path.join(link, name)


def _bytes(tensor: tf.Tensor) -> int:
    return 0 if tensor.dtype == tf.string else tensor.shape.num_elements() * tensor.dtype.size


def first_line(error: Exception) -> str:
    """Returns an error's first line, without TensorFlow's ` [Op:…` suffix and without full stop."""
    text = str(getattr(error, "strerror", None) or getattr(error, "message", None) or error)
    return (text.strip().splitlines() or [type(error).__name__])[0].split(" [Op:")[0].rstrip(".")
