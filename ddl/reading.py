"""Evaluating and exporting what a run has saved, while it goes on or later."""

import dataclasses

import tensorflow as tf

from ddl.checkpoint_directory import SavedCheckpoint
from ddl.checkpoints import Checkpoints
from ddl.console import RunConsole
from ddl.errors import ConfigError, ModelDirectoryError
from ddl.export import export_model
from ddl.run_directory import RunDirectory
from ddl.trainer import Trainer
from ddl.writers import JsonLinesWriter, TensorBoardWriter, Writers


@dataclasses.dataclass(frozen=True)
class Reading:
    """What is evaluated or exported.

    Attributes:
      checkpoint: `latest`, `best` by the run plan's metric, or a step.
      averaged: Take the averages of the weights, if the run keeps any.
      follow_timeout: In an evaluation, seconds to wait for each next checkpoint; None evaluates
        one and ends.
    """

    checkpoint: str | int = "latest"
    averaged: bool = True
    follow_timeout: float | None = None


def evaluate_saved(
    reading: Reading,
    trainer: Trainer,
    checkpoints: Checkpoints,
    directory: RunDirectory,
    console: RunConsole,
    total: int,
) -> None:
    """Evaluates one checkpoint, or each new one as it comes until step `total` is there.

    Figures go to the console, and into the files of the run unless these have them of that step.

    Raises:
      ModelDirectoryError: If there is no such checkpoint, or none comes in time.
      ConfigError: If there is nothing to evaluate on.
    """
    if reading.follow_timeout is None:
        saved = _restore(reading, checkpoints, directory)
        console.line(f"restored step {trainer.step:,} from {saved}")
        _evaluate(reading, trainer, directory, console)
        return
    seen = None
    for _ in tf.train.checkpoints_iterator(
        str(directory.checkpoints), timeout=reading.follow_timeout
    ):
        try:
            found = checkpoints.restore_model()
        except ModelDirectoryError as error:
            console.line(f"{error}\nwaiting for the next checkpoint")
            continue
        if found is not None and trainer.step != seen:
            seen = trainer.step
            _evaluate(reading, trainer, directory, console)
        if seen is not None and seen >= total:
            console.line(f"step {total:,} is the last one of the run")
            return
    if seen is None:
        raise ModelDirectoryError(
            f"no checkpoint came to {directory.checkpoints} in {reading.follow_timeout:g} s"
        )
    console.line(f"no other checkpoint after that of step {seen:,} in {reading.follow_timeout:g} s")


def export_saved(
    reading: Reading,
    trainer: Trainer,
    checkpoints: Checkpoints,
    directory: RunDirectory,
    console: RunConsole,
) -> None:
    """Exports one checkpoint.

    Raises:
      ModelDirectoryError: If there is no such checkpoint, or the export cannot be written.
    """
    saved = _restore(reading, checkpoints, directory)
    console.line(f"restored step {trainer.step:,} from {saved}")
    with trainer.evaluation_weights(reading.averaged):
        for path in export_model(trainer.model, directory.export):
            console.line(f"exported {path}")


def _restore(
    reading: Reading, checkpoints: Checkpoints, directory: RunDirectory
) -> SavedCheckpoint:
    if reading.checkpoint == "latest":
        saved = checkpoints.restore_model()
        if saved is None:
            raise ModelDirectoryError(
                f"there is no checkpoint in {directory.checkpoints} to read. Train first, with "
                "the same --model_dir."
            )
        return saved
    there = checkpoints.saved()
    if reading.checkpoint == "best":
        if not checkpoints.keeps_best:
            raise ConfigError(
                "--checkpoint=best: nothing says by which metric. Bind RunPlan.best_metric, such "
                "as 'accuracy', for the training and here."
            )
        found = checkpoints.best()
        missing = f"no checkpoint in {directory.checkpoints} was evaluated by that metric"
    else:
        found = next((each for each in there if each.step == reading.checkpoint), None)
        steps = ", ".join(str(each.step) for each in there) or "none"
        missing = f"there is no checkpoint of step {reading.checkpoint}; there are: {steps}"
    if found is None:
        raise ModelDirectoryError(f"--checkpoint={reading.checkpoint}: {missing}")
    checkpoints.restore_model(found)
    return found


def _evaluate(
    reading: Reading, trainer: Trainer, directory: RunDirectory, console: RunConsole
) -> None:
    figures = trainer.evaluate(reading.averaged)
    json_lines = JsonLinesWriter(directory.metrics, report=console.line)
    writers = Writers([console])
    if not json_lines.has(trainer.step, "eval", figures):
        events = TensorBoardWriter(directory.path, report=console.line)
        writers = Writers([json_lines, events, console])
    writers.write(trainer.step, trainer.step / trainer.steps_per_epoch, "eval", figures)
    writers.close()
