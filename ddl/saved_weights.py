"""Evaluating and exporting what a run has saved, while it goes on or later."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import tensorflow as tf

from ddl.checkpoint_directory import SavedCheckpoint
from ddl.checkpoints import Checkpoints
from ddl.console import RunConsole
from ddl.errors import ConfigError, ModelDirectoryError
from ddl.export import export_model
from ddl.run_directory import RunDirectory
from ddl.trainer import Trainer
from ddl.workers import Workers
from ddl.writers import JsonLinesWriter, TensorBoardWriter, Writer


@dataclasses.dataclass(frozen=True)
class SavedWeights:
    """Which weights of a run are evaluated or exported.

    Attributes:
      checkpoint: `latest`, `best` by the metric of the retention, or a step.
      averaged: Take the averages of the weights, if the run keeps any.
    """

    checkpoint: str | int = "latest"
    averaged: bool = True


def evaluate_saved(
    what: SavedWeights,
    trainer: Trainer,
    checkpoints: Checkpoints,
    json_lines: JsonLinesWriter,
    events: TensorBoardWriter,
    console: RunConsole,
) -> None:
    """Evaluates one checkpoint.

    The figures go to the console, and into the files of the run unless these have them already.

    Raises:
      ModelDirectoryError: If there is no such checkpoint.
      ConfigError: If there is nothing to evaluate on.
    """
    _restore(what, trainer, checkpoints, console)
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
    """Evaluates the newest checkpoint, and each newer one as it comes.

    Ends with step `total`, or when none has come for `timeout` seconds.

    Raises:
      ModelDirectoryError: If none comes at all.
      ConfigError: If there is nothing to evaluate on.
    """
    seen = None
    for _ in _each_new(checkpoints.folder, timeout, Workers(trainer.strategy)):
        try:
            checkpoints.restore_model()
        except ModelDirectoryError as error:
            console.line(f"{error}\nwaiting for the next checkpoint")
            continue
        if trainer.step != seen:
            seen = trainer.step
            _evaluate(what, trainer, json_lines, events, console)
        if seen >= total:
            console.line(f"step {total:,} is the last one of the run")
            return
    if seen is None:
        raise ModelDirectoryError(f"no checkpoint came to {checkpoints.folder} in {timeout:g} s")
    console.line(f"no other checkpoint after that of step {seen:,} in {timeout:g} s")


def _each_new(folder: Path, timeout: float, workers: Workers) -> Iterator[None]:
    """Comes back for each new checkpoint that the chief sees, until none came for so long."""
    seen = tf.train.checkpoints_iterator(str(folder), timeout=timeout)
    while workers.of_chief(workers.is_chief and next(seen, None) is not None):
        yield


def export_saved(
    what: SavedWeights,
    trainer: Trainer,
    checkpoints: Checkpoints,
    directory: RunDirectory,
    console: RunConsole,
) -> None:
    """Exports one checkpoint.

    Raises:
      ModelDirectoryError: If there is no such checkpoint, or the export cannot be written.
    """
    _restore(what, trainer, checkpoints, console)
    with trainer.evaluation_weights(what.averaged):
        for path in export_model(trainer.model, directory.export):
            console.line(f"exported {path}")


def _restore(
    what: SavedWeights, trainer: Trainer, checkpoints: Checkpoints, console: RunConsole
) -> None:
    workers = Workers(trainer.strategy)
    with workers.failing_together():
        found = _find(what, checkpoints) if workers.is_chief else None
    saved = checkpoints.restore_model(found)
    console.line(f"restored step {trainer.step:,} from {saved}")


def _find(what: SavedWeights, checkpoints: Checkpoints) -> SavedCheckpoint | None:
    """The one that is meant; None for the newest that can be read."""
    there = checkpoints.saved()
    if what.checkpoint == "latest":
        found, missing = None, ""
    elif what.checkpoint == "best":
        if not checkpoints.keeps_best:
            raise ConfigError(
                "--checkpoint=best: nothing says by which metric. Bind Retention.best_metric, "
                "such as 'accuracy', for the training and here."
            )
        found, missing = checkpoints.best(), "none was evaluated by that metric"
    else:
        found = next((each for each in there if each.step == what.checkpoint), None)
        missing = f"there are: {', '.join(str(each.step) for each in there)}"
    if not there:
        raise ModelDirectoryError(
            f"there is no checkpoint in {checkpoints.folder}. Train first, with this --model_dir."
        )
    if missing and found is None:
        raise ModelDirectoryError(
            f"--checkpoint={what.checkpoint}: not in {checkpoints.folder}; {missing}"
        )
    return found


def _evaluate(
    what: SavedWeights,
    trainer: Trainer,
    json_lines: JsonLinesWriter,
    events: TensorBoardWriter,
    console: RunConsole,
) -> None:
    figures = trainer.evaluate(what.averaged)
    if not Workers(trainer.strategy).is_chief:
        return
    has_them = json_lines.has(trainer.step, "eval", figures)
    writers: list[Writer] = [console] if has_them else [json_lines, events, console]
    for writer in writers:
        writer.write(trainer.step, trainer.step / trainer.steps_per_epoch, "eval", figures)
    json_lines.sync()
