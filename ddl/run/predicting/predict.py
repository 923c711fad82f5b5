"""`--mode=predict`: writes the outputs of a run's weights, and resumes after a stop."""

import time
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext

import numpy as np

from ddl.checkpoints.checkpoints import Checkpoints
from ddl.data.pipeline import BatchPipeline
from ddl.data.source import Source
from ddl.data.stream import Stream
from ddl.distribution.workers import Workers
from ddl.errors import DataError, DdlError, ModelDirectoryError, TrainingInterrupted
from ddl.run.console import RunConsole
from ddl.run.from_checkpoints import SavedWeights, restore
from ddl.run.predicting.columns import Column, bytes_of_rows, columns_of, forms_of
from ddl.run.predicting.formats import check_columns, check_format
from ddl.run.predicting.identity import identity_of
from ddl.run.predicting.parts import PartialFile
from ddl.run.predicting.settings import Predictions
from ddl.signals import StopSignals
from ddl.training.trainer import Trainer

_PART_SECONDS, _PART_BYTES = 10.0, 16 << 20


class Predicting:
    """One file of predictions. Eager, cross-replica context, on all workers."""

    def __init__(self, path: str, predictions: Predictions, trainer: Trainer, console: RunConsole):
        """Checks all that can be checked before weights are restored. Changes nothing on disk.

        Args:
          path: The file to write; its ending is that of a format.
          predictions: Data and settings of the prediction.
          trainer: Predicts.
          console: Shows progress.

        Raises:
          ConfigError: If the task has no outputs, or the config no data, or no format has the
            ending.
          DataError: If the data have no end, no order or no rows, or lack a feature.
          ModelDirectoryError: If the file is there already.
        """
        check_format(path)
        self._trainer, self._console = trainer, console
        self._workers = Workers(trainer.strategy)
        self._source: Source | Stream = predictions.source(trainer)
        trainer.check_predicts("--mode=predict")
        self._features = predictions.features_of(self._source)
        self._batch = next(iter(trainer.pipelines.values())).global_batch_size
        self._total = BatchPipeline(self._source, self._batch).count_examples()
        if not self._total:
            raise DataError(
                f"--mode=predict needs at least one row, but {predictions.place_of_data} has none. "
                "Correct the files or the split that it reads."
            )
        with self._workers.failing_together():
            self._file = PartialFile(path) if self._workers.is_chief else None

    def run(self, what: SavedWeights, checkpoints: Checkpoints) -> None:
        """Restores the weights, computes the rows that are missing, and writes the file.

        Raises:
          TrainingInterrupted: If a signal stopped it; the same command resumes it.
          ConfigError: If the outputs are not [batch, …], or the format cannot hold them.
          DataError: If the data cannot be read, or do not fit the task.
          ModelDirectoryError: If there is no such checkpoint, the file cannot be written, or a
            stopped command computed other rows or columns.
        """
        file = self._file
        restore(what, self._trainer, checkpoints, self._console)
        with (
            self._trainer.evaluation_weights(),
            closing(file) if file is not None else nullcontext(),
        ):
            first = self._opened(what)
            self._compute(first)
            with self._workers.failing_together():
                if file is not None:
                    columns = file.columns() or []
                    file.complete(columns, self._total)
                    self._console.line(
                        f"Wrote {self._total:,} rows to {file.path}: "
                        f"{', '.join(map(str, columns))}."
                    )

    def _opened(self, what: SavedWeights) -> int:
        """Returns the first row to compute."""
        rows = 0
        with self._workers.failing_together():
            if self._file is not None:
                identity = identity_of(
                    self._trainer,
                    source=self._source,
                    batch=self._batch,
                    total=self._total,
                )
                self._file.open(identity)
                rows = self._file.rows(self._batch, self._total)
        rows = self._workers.broadcast(rows)
        if rows:
            self._console.line(f"Resuming after {rows:,} of {self._total:,} rows.")
        return rows

    def _compute(self, first: int) -> None:
        """Computes the rows from `first` on, and writes them in parts."""
        if first >= self._total:
            return
        parts = _Parts(self._file, first, self._total, self._console)
        failure: DdlError | None = None
        stopped = False
        batches = self._trainer.predict_batches(
            self._source,
            features=self._features,
            first_batch=first // self._batch,
            keeps=self._file is not None,
        )
        with StopSignals(lambda: None) as stop, closing(batches):
            for batch in batches:
                try:
                    if batch is not None:
                        parts.add(*batch)
                except DdlError as error:
                    failure = error
                # A worker that left alone would leave the others waiting for it.
                stopped = self._workers.any(stop.received is not None or failure is not None)
                if stopped:
                    break
        with self._workers.failing_together():
            if failure is not None:
                raise failure
            parts.write()
        end = self._workers.broadcast(parts.end)
        if stopped and end < self._total:
            self._workers.barrier()
            name = "a signal to another worker" if stop.received is None else stop.received.name
            raise TrainingInterrupted(
                f"Prediction stopped on {name} after {end:,} of {self._total:,} rows. Run "
                "the same command to resume."
            )


class _Parts:
    """Joins batches into parts, each written after some seconds or bytes. On the chief."""

    def __init__(self, file: PartialFile | None, first: int, total: int, console: RunConsole):
        self.end = first
        self._file, self._total, self._console = file, total, console
        self._columns: list[Column] | None = None if file is None or not first else file.columns()
        self._waiting: list[dict[str, np.ndarray]] = []
        self._bytes = 0
        self._since = time.monotonic()

    def add(self, outputs: object, features: Mapping[str, np.ndarray]) -> None:
        columns = columns_of(outputs, features, self.end)
        forms = forms_of(columns)
        if self._columns is None:
            assert self._file is not None
            check_columns(self._file.path.name, forms)
            self._file.write_columns(forms)
            self._columns = forms
        elif sorted(forms) != sorted(self._columns):
            raise self._other_columns(forms)
        self._waiting.append(columns)
        self._bytes += int(bytes_of_rows(columns).sum())
        self.end += len(next(iter(columns.values())))
        is_due = time.monotonic() - self._since >= _PART_SECONDS
        if (is_due or self._bytes >= _PART_BYTES) and self.end < self._total:
            self.write()
            if is_due:
                self._console.line(f"Predicted {self.end:,} of {self._total:,} rows.")

    def _other_columns(self, forms: Sequence[Column]) -> ModelDirectoryError:
        assert self._file is not None
        before, now = (", ".join(map(str, those)) for those in (self._columns or (), forms))
        return ModelDirectoryError(
            f"{self._file.folder} holds rows of the columns {before}, but row {self.end:,} "
            f"(counted from 0) has the columns {now}. Repeat the stopped command with its code and "
            "data; or remove the folder to start over; or pass another --predictions."
        )

    def write(self) -> None:
        """Writes the rows that wait, if any."""
        if self._file is None or not self._waiting:
            return
        names = self._waiting[0]
        part = {name: np.concatenate([one[name] for one in self._waiting]) for name in names}
        self._file.add(self.end - len(next(iter(part.values()))), part)
        self._waiting, self._bytes, self._since = [], 0, time.monotonic()
