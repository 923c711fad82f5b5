"""Where figures go: metrics.jsonl, TensorBoard, the console. One interface for all."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import tensorflow as tf

from ddl.errors import CheckpointError


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

    def __init__(self, path: Path, last_step: int):
        """Goes on after the lines up to `last_step`.

        Later ones come from a run that was cut off after its last checkpoint: they are dropped,
        since their steps are made again.
        """
        self._path = path
        kept = []
        if path.exists():
            for line in path.read_text().splitlines(keepends=True):
                if line.endswith("\n") and json.loads(line)["step"] <= last_step:
                    kept.append(line)
            partial = path.with_name(path.name + ".partial")
            partial.write_text("".join(kept))
            os.replace(partial, path)

    def write(self, step: int, epoch: float, split: str, values: Mapping[str, float]) -> None:
        """See `Writer`."""
        finite = {name: v if math.isfinite(v) else None for name, v in values.items()}
        line = json.dumps({"step": step, "epoch": round(epoch, 6), "split": split, **finite})
        try:
            with self._path.open("a") as file:
                file.write(line + "\n")
        except OSError as error:
            raise CheckpointError(f"{self._path} cannot be written: {error.strerror}") from error

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
