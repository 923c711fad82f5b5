"""Where figures go: metrics.jsonl, TensorBoard, the console. One interface for all."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import tensorflow as tf

from ddl.errors import ModelDirectoryError


class Writer(Protocol):
    """Takes the figures of one split at one step."""

    def write(self, step: int, epoch: float, split: str, values: Mapping[str, float]) -> None:
        """Writes `values` by name; `epoch` counts passes over the training data."""
        ...

    def close(self) -> None:
        """Writes what is left."""
        ...


class JsonLinesWriter:
    """Appends one JSON object a line. A figure that is not finite becomes null."""

    def __init__(self, path: Path):
        """Goes on at the end of the file, if there is one."""
        self._path = path

    def drop_after(self, last_step: int) -> None:
        """Drops lines of later steps than `last_step`, and what was cut off in a line.

        They come from a run that ended between two checkpoints: their steps are made again.
        """
        if not self._path.exists():
            return
        lines = self._path.read_text().splitlines(keepends=True)
        kept = []
        for number, line in enumerate(lines, start=1):
            if not line.endswith("\n"):
                continue
            try:
                step = json.loads(line)["step"]
            except (ValueError, KeyError, TypeError) as error:
                raise ModelDirectoryError(
                    f"{self._path}:{number} is not a line that ddl wrote. Correct or remove it."
                ) from error
            if step <= last_step:
                kept.append(line)
        partial = self._path.with_name(self._path.name + ".partial")
        partial.write_text("".join(kept))
        os.replace(partial, self._path)

    def write(self, step: int, epoch: float, split: str, values: Mapping[str, float]) -> None:
        """See `Writer`."""
        finite = {name: v if math.isfinite(v) else None for name, v in values.items()}
        line = json.dumps({"step": step, "epoch": round(epoch, 6), "split": split, **finite})
        try:
            with self._path.open("a") as file:
                file.write(line + "\n")
        except OSError as error:
            raise ModelDirectoryError(
                f"{self._path} cannot be written: {error.strerror}"
            ) from error

    def close(self) -> None:
        """Nothing is kept back."""


class TensorBoardWriter:
    """Event files, one folder a split."""

    def __init__(self, directory: Path):
        """Writes to `directory`/train and `directory`/eval, each made when first needed."""
        self._directory = directory
        self._writers: dict[str, tf.summary.SummaryWriter] = {}

    def write(self, step: int, epoch: float, split: str, values: Mapping[str, float]) -> None:
        """See `Writer`."""
        if split not in self._writers:
            self._writers[split] = tf.summary.create_file_writer(str(self._directory / split))
        with self._writers[split].as_default(step):
            for name, value in {"epoch": epoch, **values}.items():
                tf.summary.scalar(name, value)
        self._writers[split].flush()

    def close(self) -> None:
        """Closes the event files."""
        for writer in self._writers.values():
            writer.close()


class Writers:
    """Several writers as one."""

    def __init__(self, writers: Sequence[Writer]):
        """Keeps them in order."""
        self._writers = list(writers)

    def write(self, step: int, epoch: float, split: str, values: Mapping[str, float]) -> None:
        """Writes to each."""
        for writer in self._writers:
            writer.write(step, epoch, split, values)

    def close(self) -> None:
        """Closes each."""
        for writer in self._writers:
            writer.close()
