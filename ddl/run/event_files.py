"""TensorBoard's event files of a run."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import tensorflow as tf
from absl import logging
from google.protobuf.message import DecodeError
from tensorboard.plugins.hparams.api_pb2 import Status
from tensorboard.plugins.hparams.summary import session_end_pb
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.scalar.summary_v2 import scalar_pb

from ddl.callbacks.moment import Kind
from ddl.checkpoints.directory import first_line
from ddl.checkpoints.durable_files import sync
from ddl.errors import TrainingInterrupted

_OF_SESSIONS = ".hparams"  # suffix of event files


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


@contextmanager
def session(
    folder: Path, macros: Mapping[str, Any], report: Callable[[str], None]
) -> Iterator[None]:
    """Writes a session of the HParams tab: its start before the `with` block, its end after it.

    A block that a signal stops gets no end: the run is not over. The session of an earlier call is
    replaced, because TensorBoard shows the first one of a folder. A failed write is reported.

    Args:
      folder: Folder of event files whose scalars are the metrics of the session.
      macros: Macros of the config by name. None is left out, and what is neither a number nor
        a text is written as text.
      report: Called with a message if a write fails.
    """
    values = {
        name: value if isinstance(value, bool | int | float | str) else str(value)
        for name, value in macros.items()
        if value is not None
    }
    for earlier in folder.glob(f"events.out.tfevents.*{_OF_SESSIONS}"):
        with suppress(OSError):
            earlier.unlink()
    _write_alone(folder, hparams_pb(values), report)
    status = Status.STATUS_FAILURE
    try:
        yield
        status = Status.STATUS_SUCCESS
    except (TrainingInterrupted, KeyboardInterrupt):
        status = Status.STATUS_RUNNING
        raise
    finally:
        if status != Status.STATUS_RUNNING:
            _write_alone(folder, session_end_pb(status), report)


def _write_alone(folder: Path, summary: Any, report: Callable[[str], None]) -> None:
    """Writes a summary to an event file of its own."""
    try:
        writer = tf.summary.create_file_writer(str(folder), filename_suffix=_OF_SESSIONS)
        with writer.as_default(0):
            tf.summary.experimental.write_raw_pb(summary.SerializeToString(), 0)
        writer.close()
    except tf.errors.OpError as error:
        report(f"TensorBoard's hyperparameters are not written: {first_line(error)}.")
