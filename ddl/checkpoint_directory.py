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
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import tensorflow as tf

from ddl.durable_files import sync, write_whole
from ddl.errors import ModelDirectoryError


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known of a checkpoint beside its tensors.

    Attributes:
      metrics: What an evaluation at its step gave; empty without one.
      global_batch_size: Examples of one update of the run; None where it is not known.
      num_examples: Training examples.
      replicas: How many replicas the run had.
      seconds: Time the run had spent on updates.
      since_log: Updates timed since the last log, and their seconds.
    """

    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    global_batch_size: int | None = None
    num_examples: int | None = None
    replicas: int | None = None
    seconds: float = 0.0
    since_log: tuple[int, float] = (0, 0.0)


@dataclasses.dataclass(frozen=True)
class SavedCheckpoint:
    """One checkpoint on the disk.

    Attributes:
      step: Updates made before it.
      prefix: Path of its files less their endings, as TensorFlow takes it.
      facts: What is known of it.
    """

    step: int
    prefix: str
    facts: Facts = Facts()

    def __str__(self) -> str:
        return self.prefix


class CheckpointDamagedError(Exception):
    """Bytes of a checkpoint are missing or changed; says which way it was noticed."""


class CheckpointDirectory:
    """Lists, writes, checks and removes the checkpoints in one folder."""

    def __init__(self, path: str | os.PathLike[str]):
        """Looks at nothing, creates nothing."""
        self.path = Path(path)
        self.damaged = self.path / "damaged"

    def saved(self) -> list[SavedCheckpoint]:
        """What is there, by step. Read from the files alone, not from any list of them."""
        steps = [
            int(found[1])
            for path in self.path.glob("step-*.index")
            if (found := re.fullmatch(r"step-(\d+)\.index", path.name))
        ]
        return [self._at(step) for step in sorted(steps)]

    def write(self, step: int, tensors: Mapping[str, tf.Tensor], facts: Facts) -> SavedCheckpoint:
        """Writes a checkpoint, in the place of one of the same step if there is one.

        The list of checkpoints is left as it is; see `remove`.

        Args:
          step: Names it.
          tensors: By the names in TensorFlow's checkpoint, its object graph among them.
          facts: What goes into the JSON file.

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
            (partial / f"step-{step}.json").write_text(json.dumps(dataclasses.asdict(facts)))
            files = list(partial.iterdir())
            for path in [*files, partial]:
                sync(path)
            self._remove_files(step)
            for path in sorted(files, key=lambda path: path.suffix == ".index"):
                os.replace(path, self.path / path.name)
            sync(self.path)
            partial.rmdir()
        except (tf.errors.OpError, OSError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            if not (self.path / f"step-{step}.index").exists():
                self._remove_files(step)
            raise ModelDirectoryError(
                f"the checkpoint of step {step} could not be written to {self.path}: "
                + _reason(error)
            ) from error
        return self._at(step)

    def check(self, saved: SavedCheckpoint) -> None:
        """Reads every byte, of which TensorFlow keeps checksums.

        Raises:
          CheckpointDamagedError: If it cannot be read as it was written.
        """
        try:
            reader = tf.train.load_checkpoint(saved.prefix)
            for name in reader.get_variable_to_shape_map():
                reader.get_tensor(name)
        except Exception as error:  # TensorFlow raises errors of many kinds here
            raise CheckpointDamagedError(_reason(error)) from error

    def set_aside(self, saved: SavedCheckpoint) -> Path:
        """Moves a damaged checkpoint's files into a folder where nobody takes them for good."""
        target = self.damaged / Path(saved.prefix).name
        number = 1
        while target.exists():
            number += 1
            target = target.with_name(f"{Path(saved.prefix).name}.{number}")
        target.mkdir(parents=True)
        for path in self._files(saved.step):
            os.replace(path, target / path.name)
        self._write_list()
        return target

    def remove(self, many: Iterable[SavedCheckpoint]) -> None:
        """Removes checkpoints, none or more, and brings the list of those that stay up to date."""
        steps = {saved.step for saved in many}
        self._write_list(without=steps)
        for step in steps:
            self._remove_files(step)

    def clear_partial(self) -> None:
        """Removes what an interrupted save or removal left."""
        whole = {saved.step for saved in self.saved()}
        for path in self.path.glob("step-*"):
            found = re.fullmatch(r"step-(\d+)\.(partial|json|data-\d+-of-\d+)", path.name)
            if found is None or (found[2] != "partial" and int(found[1]) in whole):
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def _write_list(self, without: Collection[int] = ()) -> None:
        """Writes the file that `tf.train.latest_checkpoint` reads, from what is there.

        ddl itself does not need it, so that it may fall behind where a disk is full.
        """
        names = [
            json.dumps(Path(saved.prefix).name)
            for saved in self.saved()
            if saved.step not in without
        ]
        lines = [f"model_checkpoint_path: {names[-1]}"] if names else []
        lines += [f"all_model_checkpoint_paths: {name}" for name in names]
        with suppress(OSError):
            write_whole(self.path / "checkpoint", "".join(f"{line}\n" for line in lines))

    def _at(self, step: int) -> SavedCheckpoint:
        prefix = self.path / f"step-{step}"
        try:
            facts = Facts(**json.loads(prefix.with_name(prefix.name + ".json").read_text()))
        except (OSError, ValueError, TypeError):
            facts = Facts()  # the tensors are what counts, and they can be had without
        return SavedCheckpoint(step, str(prefix), facts)

    def _files(self, step: int) -> list[Path]:
        """Its files, the index first."""
        paths = [
            path
            for path in self.path.glob(f"step-{step}.*")
            if path.suffix in (".index", ".json") or path.suffix.startswith(".data-")
        ]
        return sorted(paths, key=lambda path: path.suffix != ".index")

    def _remove_files(self, step: int) -> None:
        for path in self._files(step):
            path.unlink(missing_ok=True)

    def _check_space(self, needed: int) -> None:
        """Raises OSError, before anything is written, if so many bytes are not free."""
        free = shutil.disk_usage(self.path).free
        if free < needed:
            raise OSError(0, f"it needs {needed / 1e6:,.1f} MB and {free / 1e6:,.1f} MB are free")


def _bytes(tensor: tf.Tensor) -> int:
    return 0 if tensor.dtype == tf.string else tensor.shape.num_elements() * tensor.dtype.size


def _reason(error: Any) -> str:
    """The first line of what an error says, without TensorFlow's wrapping."""
    text = str(getattr(error, "strerror", None) or getattr(error, "message", None) or error)
    return (text.strip().splitlines() or [type(error).__name__])[0].split(" [Op:")[0]
