"""TensorBoard's event files of a run."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf
from absl import logging
from google.protobuf.message import DecodeError
from tensorboard.plugins.scalar.summary_v2 import scalar_pb

from ddl.callbacks.moment import Kind
from ddl.checkpoints.directory import first_line
from ddl.checkpoints.durable_files import sync


class TensorBoardWriter:
    """Writes TensorBoard event files, one folder per split. Failed writes are reported and lost."""

    def __init__(self, directory: Path, report: Callable[[str], None] = logging.warning):
        """Keeps the folder; creates no files yet.

        Args:
          directory: Parent of the folders `train` and `eval`, each created at its first write.
          report: Called with a message when writes begin to fail, or a file is damaged.
        """
        self._directory = directory
        self._report = report
        self._writers: dict[str, tf.summary.SummaryWriter] = {}
        self._fails = False

    def write(self, step: int, epoch: float, split: str, values: Mapping[str, float]) -> None:
        """See `Writer`."""
        # Joined protos are one: tf.summary.scalar would take several times as long for each figure.
        scalars = {"epoch": epoch, **values}.items()
        record = b"".join(scalar_pb(*one).SerializeToString() for one in scalars)
        self._summarize(step, split, [lambda: tf.summary.experimental.write_raw_pb(record, step)])

    def write_media(self, step: int, split: str, kind: Kind, name: str, value: Any) -> None:
        """Writes an image, a text or a histogram; see `ddl.callbacks.moment.MediaWriter`."""
        write = {
            "image": lambda: tf.summary.image(name, value, max_outputs=len(value)),
            "text": lambda: tf.summary.text(name, value),
            "histogram": lambda: tf.summary.histogram(name, value),
        }
        self._summarize(step, split, [write[kind]])

    def _summarize(self, step: int, split: str, writes: Sequence[Callable[[], object]]) -> None:
        """Calls functions that write summaries of a split; reports a failure."""
        try:
            if split not in self._writers:
                self._writers[split] = tf.summary.create_file_writer(str(self._directory / split))
            with self._writers[split].as_default(step):
                for write in writes:
                    write()
            self._writers[split].flush()
            self._fails = False
        except tf.errors.OpError as error:
            if not self._fails:
                self._report(
                    f"The event files in {self._directory / split} cannot be written and get a gap:"
                    f" {first_line(error)}. Check the free disk space and the permissions."
                )
            self._fails = True

    def drop_after(self, last_step: int) -> None:
        """Drops events of steps after `last_step`, and cut-off records at the ends of files.

        For a file with other damage, keeps the events before the damage, and keeps the damaged
        file under another name. Reports damaged files, and files that cannot be rewritten.
        """
        self.close()
        for split in ("train", "eval"):
            for path in (self._directory / split).glob("events.out.tfevents.*"):
                try:
                    if aside := _drop_events_after(path, last_step):
                        self._report(f"{path} is damaged and was renamed to {aside}.")
                except (tf.errors.OpError, OSError) as error:
                    self._report(
                        f"{path} keeps the events after step {last_step}, since it cannot be "
                        f"rewritten: {first_line(error)}."
                    )

    def close(self) -> None:
        """Closes the event files; reports a failure."""
        for split, writer in self._writers.items():
            try:
                writer.close()
            except tf.errors.OpError as error:
                self._report(
                    f"The event files in {self._directory / split} may lack their last events: "
                    f"{first_line(error)}."
                )
        self._writers = {}


def _drop_events_after(path: Path, last_step: int) -> Path | None:
    """Rewrites an event file; if it is damaged, returns the path where the original is kept."""
    # Two passes, since the memory may not hold all events, and most files need no second one.
    faults: set[str] = set()
    for _ in _events_until(path, last_step, faults):
        pass
    if not faults:
        return None
    damaged = "damaged" in faults
    aside = path.with_name(path.name.replace("tfevents", "damaged")) if damaged else None
    rewritten = path.with_name("partial")  # TensorBoard reads files with `tfevents` in their names
    try:
        rewritten.unlink(missing_ok=True)  # left by a crash, or a link that somebody planted
        rewritten.touch(exist_ok=False)
        with tf.io.TFRecordWriter(str(rewritten)) as writer:
            for record in _events_until(path, last_step, faults):
                writer.write(record)
        sync(rewritten)
        if aside is not None:
            os.replace(path, aside)
        os.replace(rewritten, path)
    finally:
        rewritten.unlink(missing_ok=True)
    return aside


def _events_until(path: Path, last_step: int, faults: set[str]) -> Iterator[bytes]:
    """Yields events up to a step, until damage; adds `later`, `cut off`, `damaged` to faults."""
    try:
        for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
            if tf.compat.v1.Event.FromString(record).step <= last_step:
                yield record
            else:
                faults.add("later")
    except tf.errors.DataLossError as error:
        faults.add("cut off" if "truncated record" in error.message else "damaged")
    except DecodeError:
        faults.add("damaged")
