"""Evaluation and export of the checkpoints of a run, during training or later."""

import dataclasses
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import keras

from ddl.checkpoints.checkpoints import Checkpoints
from ddl.checkpoints.directory import SavedCheckpoint
from ddl.checkpoints.export import export_model
from ddl.distribution.workers import Workers
from ddl.errors import ConfigError, ModelDirectoryError, NotReady
from ddl.run.console import RunConsole
from ddl.run.directory import RunDirectory
from ddl.run.writers import JsonLinesWriter, TensorBoardWriter, Writer
from ddl.tasks.parts import models_of
from ddl.tasks.task import Task
from ddl.training.trainer import Trainer

_POLL_SECONDS = 1.0

# Number of file names that a message lists.
_SOME = 8

# A checkpoint's files: names, sizes in bytes, and modification times in nanoseconds.
_Version = tuple[tuple[str, int, int], ...]


@dataclasses.dataclass(frozen=True)
class SavedWeights:
    """The weights of a run to evaluate, export or predict with.

    Attributes:
      checkpoint: `latest`; `best`, by the retention's metric; or a step.
    """

    checkpoint: str | int = "latest"


def evaluate_saved(
    what: SavedWeights,
    trainer: Trainer,
    checkpoints: Checkpoints,
    json_lines: JsonLinesWriter,
    events: TensorBoardWriter,
    console: RunConsole,
) -> None:
    """Evaluates one checkpoint.

    Prints the metrics, and writes them to the files of the run unless metrics.jsonl already has
    them. Eager, cross-replica context, on all workers.

    Raises:
      ModelDirectoryError: If there is no such checkpoint, it cannot be restored, or metrics.jsonl
        is invalid or cannot be written.
      ConfigError: If there is no evaluation data, or no metric for `best`.
      DataError: If the data cannot be read.
    """
    restore(what, trainer, checkpoints, console)
    _evaluate(what, trainer, json_lines, events, console)


def follow(
    what: SavedWeights,
    timeout: float,
    total: int,
    trainer: Trainer,
    checkpoints: Checkpoints,
    json_lines: JsonLinesWriter,
    events: TensorBoardWriter,
    console: RunConsole,
) -> None:
    """Evaluates the newest checkpoint, then each newer one when it appears, once each.

    Returns after evaluating step `total`, or when no new checkpoint appears for `timeout` seconds.
    Reports and skips checkpoints that are damaged or do not fit the trainer. Eager, cross-replica
    context, on all workers.

    Args:
      what: Whether to use the weight averages; its `checkpoint` is ignored.
      timeout: Seconds.
      total: Last step of the run.
      trainer: Evaluates.
      checkpoints: The checkpoints to follow.
      json_lines: Writes metrics.jsonl.
      events: Writes TensorBoard event files.
      console: Prints the metrics.

    Raises:
      NotReady: If no checkpoint of the run could be evaluated within the timeout.
      ModelDirectoryError: If there is no run at all, or metrics.jsonl is invalid or cannot be
        written.
      ConfigError: If there is no evaluation data.
      DataError: If the data cannot be read.
    """
    workers = Workers(trainer.strategy)
    evaluated: set[_Version] = set()
    step, failure = None, ""
    for _ in _each_newest(checkpoints, timeout, workers):
        try:
            saved = checkpoints.restore_model()
        except ModelDirectoryError as error:
            failure = str(error)
            console.line(f"{failure}\nWaiting for the next checkpoint.")
            continue
        if not workers.broadcast(_version(saved) in evaluated):
            evaluated.add(_version(saved))
            step = trainer.step
            _evaluate(what, trainer, json_lines, events, console)
        if trainer.step >= total:
            console.line(f"Step {total:,} is the last step of the run.")
            return
    if step is None:
        may_come = workers.broadcast(checkpoints.folder.parent.exists())
        workers.barrier()
        raise (NotReady if may_come else ModelDirectoryError)(
            f"No checkpoint that can be evaluated appeared in {checkpoints.folder} within "
            f"{timeout:g} s. {failure or _holds(checkpoints)} Check --model_dir, or pass a larger "
            "--follow_timeout."
        )
    console.line(f"No checkpoint after step {step:,} appeared within {timeout:g} s.")


def _each_newest(checkpoints: Checkpoints, timeout: float, workers: Workers) -> Iterator[None]:
    """Yields when the chief sees a new newest checkpoint; ends after `timeout` s without one."""
    newest, deadline = None, time.monotonic() + timeout
    while True:
        found = checkpoints.saved()[-1:] if workers.is_chief else []
        version = _version(found[0]) if found else None
        if workers.broadcast(version not in (None, newest)):
            newest = version
            yield
            deadline = time.monotonic() + timeout
            continue
        rest = workers.broadcast_float(deadline - time.monotonic())
        if rest <= 0:
            return
        time.sleep(min(rest, _POLL_SECONDS))


def _version(saved: SavedCheckpoint) -> _Version:
    """Identifies the files of a checkpoint, since a rewound run writes some steps again.

    The result also changes while files are being copied, so that a checkpoint that looked damaged
    is tried again.
    """
    prefix = Path(saved.prefix)
    files = []
    for path in prefix.parent.glob(f"{prefix.name}.*"):
        with suppress(FileNotFoundError):  # the run has just removed the file
            status = path.stat()
            files.append((path.name, status.st_size, status.st_mtime_ns))
    return tuple(sorted(files))


def _holds(checkpoints: Checkpoints) -> str:
    """Describes the content of a folder that has no ddl checkpoint."""
    folder = checkpoints.folder
    if not folder.is_dir():
        return "The folder does not exist."
    names = sorted(path.name for path in folder.iterdir())
    if not names:
        return "The folder is empty."
    more = ", …" if len(names) > _SOME else ""
    return f"The folder holds {', '.join(names[:_SOME])}{more}; ddl's files are named step-N."


def export_saved(
    what: SavedWeights,
    trainer: Trainer,
    checkpoints: Checkpoints,
    directory: RunDirectory,
    console: RunConsole,
) -> None:
    """Exports one checkpoint to `directory.export`. Eager, cross-replica context.

    Raises:
      ModelDirectoryError: If there is no such checkpoint, it cannot be restored, or the export
        cannot be written.
      ConfigError: If there is no metric for `best`.
    """
    restore(what, trainer, checkpoints, console)
    with trainer.evaluation_weights():
        for folder, model in _exports(trainer.task, directory.export):
            for path in export_model(model, folder):
                console.line(f"Exported {path}.")


def _exports(task: Task, folder: Path) -> list[tuple[Path, keras.Model]]:
    """Returns the models to export and their folders.

    These are `exported_models` of the task, a dict from name to model, or else its `model`, or else
    all its models. A single `model` goes to `folder` itself, others to a folder each.
    """
    models = getattr(task, "exported_models", None) or models_of(task)
    if not models:
        raise ConfigError(
            f"{type(task).__name__} has no model to export: neither `model` nor a Keras model in "
            "an attribute. Give it an attribute exported_models, a dict from name to model."
        )
    if set(models) == {"model"}:
        return [(folder, models["model"])]
    return [(folder / name, model) for name, model in models.items()]


def restore(
    what: SavedWeights, trainer: Trainer, checkpoints: Checkpoints, console: RunConsole
) -> None:
    """Restores the weights of one checkpoint. Eager, cross-replica context, on all workers.

    Raises:
      ModelDirectoryError: If there is no such checkpoint, or it cannot be restored.
      ConfigError: If there is no metric for `best`.
    """
    workers = Workers(trainer.strategy)
    with workers.failing_together():
        found = _find(what, checkpoints) if workers.is_chief else None
    saved = checkpoints.restore_model(found)
    console.line(f"Restored step {trainer.step:,} from {saved}.")


def _find(what: SavedWeights, checkpoints: Checkpoints) -> SavedCheckpoint | None:
    """Returns the requested checkpoint; None stands for the newest readable one."""
    there = checkpoints.saved()
    if what.checkpoint == "latest":
        found, missing = None, ""
    elif what.checkpoint == "best":
        if checkpoints.retention.best_metric is None:
            raise ConfigError(
                "--checkpoint=best requires Retention.best_metric, got None. Set it, such as to "
                "'accuracy', for the training and for this command."
            )
        found = checkpoints.best()
        missing = "No checkpoint was evaluated with Retention.best_metric. Pass a step, or latest."
    else:
        found = next((each for each in there if each.step == what.checkpoint), None)
        missing = f"Pass one of the steps {', '.join(str(each.step) for each in there)}."
    if not there:
        raise ModelDirectoryError(
            f"There is no checkpoint in {checkpoints.folder}. {_holds(checkpoints)} Train with "
            "this --model_dir first, or pass another one."
        )
    if missing and found is None:
        raise ModelDirectoryError(
            f"--checkpoint={what.checkpoint} does not exist in {checkpoints.folder}. {missing}"
        )
    return found


def _evaluate(
    what: SavedWeights,
    trainer: Trainer,
    json_lines: JsonLinesWriter,
    events: TensorBoardWriter,
    console: RunConsole,
) -> None:
    workers = Workers(trainer.strategy)
    with workers.failing_together():
        if workers.is_chief:
            json_lines.check()  # fail before a long evaluation
    figures = trainer.evaluate()
    if not workers.is_chief:
        return
    has_them = json_lines.has(trainer.step, "eval", figures)
    writers: list[Writer] = [console] if has_them else [json_lines, events, console]
    for writer in writers:
        writer.write(trainer.step, trainer.epoch_at(trainer.step), "eval", figures)
    json_lines.sync()
