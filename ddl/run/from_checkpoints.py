"""Evaluation and export of the checkpoints of a run, during training or later."""

import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from ddl import config
from ddl.checkpoints.export import export_model
from ddl.choices import check_types
from ddl.distribution.workers import Workers
from ddl.errors import ConfigError, DdlError, ModelDirectoryError, NotReady
from ddl.run.directory import RunDirectory
from ddl.run.plan import Files, Placement, build
from ddl.run.writers import RunConsole
from ddl.tasks.parts import models_of
from ddl.training.trainer import Trainer

_POLL_SECONDS = 1.0


def load(
    model_dir: str | os.PathLike[str],
    checkpoint: str | int = "latest",
    strategy: tf.distribute.Strategy | None = None,
) -> Trainer:
    """Builds the Trainer of a run of `ddl.main` from its config, and restores its weights.

    The config replaces the one that is loaded. Changes nothing on disk. Eager, cross-replica
    context, on all workers.

        trainer = ddl.load("runs/digits")
        print(trainer.evaluate())

    Args:
      model_dir: Directory of the run.
      checkpoint: `latest`; `best`, by the retention's metric; or a step.
      strategy: Where to compute; None takes the strategy of the current scope, if any.

    Raises:
      ModelDirectoryError: If there is no config or no such checkpoint, or it does not fit.
      ConfigError: If the config cannot be built, such as since its modules are not importable.
    """
    directory = RunDirectory(model_dir, writes=False)
    if not directory.operative_config.exists():
        raise ModelDirectoryError(
            f"{directory.operative_config} does not exist: ddl.load needs a run of ddl.main. For a "
            "run of ddl.fit, make the Trainer and pass it to ddl.evaluate."
        )
    config.load([str(directory.operative_config)])
    placement = Placement(strategy or tf.distribute.get_strategy())
    run_plan, trainer = build(placement, Workers(placement.strategy), directory)
    files = Files.of(directory, trainer, run_plan, logging.warning)
    files.checkpoints.restore_model(checkpoint)
    return trainer


def evaluate(
    trainer: Trainer, model_dir: str | os.PathLike[str], checkpoint: str | int = "latest"
) -> dict[str, float]:
    """Restores a checkpoint of a run, evaluates it, and returns loss and metrics.

    Writes them to the files of the run unless metrics.jsonl has them. Eager, cross-replica context,
    on all workers. `trainer.evaluate()` evaluates the weights as they are.

    Args:
      trainer: A trainer as that of the run; it keeps the restored weights.
      model_dir: Directory of the run.
      checkpoint: `latest`, or a step.

    Raises:
      ModelDirectoryError: If there is no such checkpoint, it cannot be restored, or metrics.jsonl
        is invalid or cannot be written.
      ConfigError: If there is no evaluation data.
      DataError: If the data cannot be read.
    """
    check_types(evaluate, locals(), ("return",))
    files = Files.of(RunDirectory(model_dir), trainer, None, logging.warning)
    files.checkpoints.restore_model(checkpoint)
    return evaluate_restored(trainer, files, RunConsole(shows=False))


def evaluate_restored(trainer: Trainer, files: Files, console: RunConsole) -> dict[str, float]:
    """Evaluates a trainer; writes the figures to the files of its run, and prints them."""
    workers, step = Workers(trainer.strategy), trainer.step
    with workers.failing_together():
        if workers.is_chief:  # fails before a long evaluation
            files.json_lines.drop_after(math.inf)  # a cut-off line
    figures, epoch = trainer.evaluate(), trainer.epoch_at(step)
    console.write(step, epoch, "eval", figures)
    with workers.failing_together():
        if workers.is_chief and not _has(files, step, figures):
            files.json_lines.write(step, epoch, "eval", figures)
            files.json_lines.sync()
            files.events.write(step, epoch, "eval", figures)
            files.events.close()
    return figures


def _has(files: Files, step: int, figures: Mapping[str, float]) -> bool:
    """Returns whether metrics.jsonl has these figures of an evaluation, up to rounding."""
    rows = [row for row in files.json_lines.rows() if row["step"] == step]
    known = [[row.get(name) for name in figures] for row in rows if row.get("split") == "eval"]
    values = np.array([*figures.values()])  # None becomes NaN, which equals nothing
    return any(np.allclose(np.array(one, float), values, rtol=1e-5, atol=0) for one in known)


def follow(trainer: Trainer, files: Files, timeout: float, total: int, console: RunConsole) -> None:
    """Evaluates the newest checkpoint, then each newer one when it appears, once each.

    Returns after evaluating step `total`, or when no new checkpoint appears for `timeout` seconds.
    Reports and skips checkpoints that are damaged or do not fit the trainer. Eager, cross-replica
    context, on all workers.

    Args:
      trainer: Evaluates.
      files: The files of the run.
      timeout: Seconds.
      total: Last step of the run.
      console: Prints the metrics.

    Raises:
      NotReady: If no checkpoint of the run could be evaluated within the timeout.
      ModelDirectoryError: If there is no run at all, or metrics.jsonl is invalid or cannot be
        written.
      ConfigError: If there is no evaluation data.
      DataError: If the data cannot be read.
    """
    workers, checkpoints = Workers(trainer.strategy), files.checkpoints
    step, failure, deadline = -1, "", time.monotonic() + timeout
    while step < total:
        with workers.failing_together():
            found = checkpoints.saved()[-1:] if workers.is_chief else []
        if workers.broadcast(bool(found) and found[0].step > step):
            try:
                checkpoints.restore_model()  # an older one, if the newest is damaged
            except DdlError as error:  # of this worker, or of another one
                if failure != str(error):
                    console.line(f"{error}\nWaiting for the next checkpoint.")
                failure = str(error)
            else:
                if trainer.step > step:
                    evaluate_restored(trainer, files, console)
                    step, deadline = trainer.step, time.monotonic() + timeout
                    continue
        if (rest := workers.broadcast_float(deadline - time.monotonic())) > 0:
            time.sleep(min(rest, _POLL_SECONDS))
        elif step >= 0:
            console.line(f"No checkpoint after step {step:,} appeared within {timeout:g} s.")
            return
        else:
            break
    if step >= total:
        console.line(f"Step {total:,} is the last step of the run.")
        return
    may_come = workers.broadcast(files.directory.path.exists())
    workers.barrier()
    raise (NotReady if may_come else ModelDirectoryError)(
        f"No checkpoint that can be evaluated appeared in {checkpoints.folder} within {timeout:g} "
        f"s. {failure} Check --model_dir, or pass a larger --follow_timeout."
    )


def export(trainer: Trainer, directory: str | os.PathLike[str]) -> list[Path]:
    """Exports the models of a trainer's task as .keras files and SavedModels.

    The models have the averages of the weights, if the trainer keeps any. Exported are
    `exported_models` of the task, a dict from name to model, or else its `model`, or else all its
    models. A single `model` goes to `directory` itself, others to a folder each. Eager,
    cross-replica context, in one process.

    Args:
      trainer: The trainer, trained or restored.
      directory: Folder for `model.keras` and `saved_model`; see `ddl.checkpoints.export`.

    Returns:
      The paths written.

    Raises:
      ModelDirectoryError: If the export cannot be written.
      ConfigError: If the task has no model, Keras cannot save one, or `directory` names a file.
    """
    check_types(export, locals(), ("return",))
    if (number := Workers(trainer.strategy).number) > 1:
        raise ConfigError(f"An export needs one process, got {number}: set --cluster=none.")
    models = exported_models(trainer) or models_of(trainer.task)
    if not models:
        raise ConfigError(
            f"{type(trainer.task).__name__} has no model to export. Keep it in an attribute, or "
            "give the task exported_models, a dict from name to model."
        )
    folder, single = Path(directory), {*models} == {"model"}
    if folder.suffix == ".keras":
        raise ConfigError(f"export writes model.keras into a folder, got {folder}. Pass a folder.")
    with trainer.evaluation_weights():
        return [
            path
            for name, model in models.items()
            for path in export_model(
                model, folder if single else folder / name, _signature(trainer, model)
            )
        ]


def _signature(trainer: Trainer, model: keras.Model) -> list[Any] | None:
    """Returns the inputs of a subclassed model in their dtypes; None for one whose Keras knows."""
    if getattr(model, "inputs", None):
        return None
    inputs = trainer.inputs.get(id(model), ())
    if len(inputs) != 1:
        raise ConfigError(
            f"The model {model.name!r} must be called with its inputs as one argument in a loss of "
            f"the task, as Keras exports no other, got {len(inputs)}. Call model([x, y]) or "
            "model({'x': x, 'y': y}); or export keras.Model(x, model(x)) of x = keras.Input(…)."
        )
    return list(inputs)


def exported_models(trainer: Trainer) -> dict[str, keras.Model]:
    """Returns the task's `exported_models`; ConfigError if they are no dict of models by name."""
    models = getattr(trainer.task, "exported_models", None) or {}
    if not isinstance(models, dict) or not all(
        isinstance(name, str) and isinstance(one, keras.Model) for name, one in models.items()
    ):
        raise ConfigError(
            f"{type(trainer.task).__name__}.exported_models must be a dict from name to Keras "
            f"model, got {models!r:.80}. Correct it, or leave it out to export all models."
        )
    return models
