"""Hyperparameters of a run, and how it ended, for TensorBoard's HParams tab."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorboard.plugins.hparams.api_pb2 import Status
from tensorboard.plugins.hparams.summary import session_end_pb
from tensorboard.plugins.hparams.summary_v2 import hparams_pb

from ddl.checkpoints.directory import first_line
from ddl.errors import TrainingInterrupted

_SUFFIX = ".hparams"


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
    for earlier in folder.glob(f"events.out.tfevents.*{_SUFFIX}"):
        with suppress(OSError):
            earlier.unlink()
    _write(folder, hparams_pb(values), report)
    status = Status.STATUS_FAILURE
    try:
        yield
        status = Status.STATUS_SUCCESS
    except (TrainingInterrupted, KeyboardInterrupt):
        status = Status.STATUS_RUNNING
        raise
    finally:
        if status != Status.STATUS_RUNNING:
            _write(folder, session_end_pb(status), report)


def _write(folder: Path, summary: Any, report: Callable[[str], None]) -> None:
    """Writes a summary to an event file of its own."""
    try:
        writer = tf.summary.create_file_writer(str(folder), filename_suffix=_SUFFIX)
        with writer.as_default(0):
            tf.summary.experimental.write_raw_pb(summary.SerializeToString(), 0)
        writer.close()
    except tf.errors.OpError as error:
        report(f"TensorBoard's hyperparameters are not written: {first_line(error)}.")
