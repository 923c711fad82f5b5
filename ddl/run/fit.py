"""A whole run from Python, with plain arguments: what `ddl.main` does, without a config."""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from signal import SIGINT
from typing import Literal

from ddl.checkpoints.directory import Retention
from ddl.checkpoints.warm_start import WarmStart
from ddl.choices import check_types
from ddl.distribution.traits import traits_of
from ddl.distribution.workers import Workers
from ddl.errors import ConfigError, ModelDirectoryError, TrainingInterrupted
from ddl.metrics.history import History
from ddl.run.callbacks import Callback, EarlyStopping
from ddl.run.comparing import arguments_of, compare_arguments
from ddl.run.directory import RunDirectory
from ddl.run.loop import Run
from ddl.run.plan import Files, RunPlan, describe_devices
from ddl.run.trackers import Tracker
from ddl.run.writers import RunConsole
from ddl.signals import deferring_interrupt
from ddl.training.trainer import Trainer

Period = int | Literal["epoch"] | None

_LOG_EVERY = 100  # updates, for data without a known length


def fit(
    trainer: Trainer,
    model_dir: str | os.PathLike[str] | None = None,
    *,
    train_steps: int | None = None,
    train_epochs: float | None = None,
    eval_every: Period = "epoch",
    checkpoint_every: Period = "epoch",
    log_every: int | Literal["epoch"] = "epoch",
    restore_best: bool = False,
    retention: Retention | None = None,
    warm_start: WarmStart | None = None,
    callbacks: Sequence[Callback | EarlyStopping] = (),
    trackers: Sequence[Tracker] = (),
    progress: bool = True,
    profile: tuple[int, int] | None = None,
) -> History:
    """Makes a whole run: trains, evaluates, logs, saves and resumes, as `ddl.main` does.

    Call it again, with a new or the same trainer, to resume the run of `model_dir`, or to lengthen
    it. Eager, cross-replica context, on all workers.

    Args:
      trainer: The trainer.
      model_dir: Directory for checkpoints, metrics.jsonl and TensorBoard's files, which the run
        resumes from; None writes nothing.
      train_steps: Length of the run in updates, those of an earlier call included.
      train_epochs: Length of the run in passes over the training data, instead of `train_steps`.
      eval_every: Updates between evaluations; "epoch" evaluates after each epoch, None at the end
        only. Without evaluation data the run does not evaluate.
      checkpoint_every: Updates between checkpoints, "epoch", or None: at the end only.
      log_every: Updates between training lines, or "epoch".
      restore_best: Whether the trainer has the best checkpoint's weights and step after the run. To
        train further, call `fit` again. The best is that of `retention.best_metric`, or else of an
        `EarlyStopping`, or else that of the smallest loss.
      retention: Which checkpoints to keep, by default the last three. Without `best_metric`, the
        best is kept too if `restore_best` or an `EarlyStopping` is given.
      warm_start: Source of a new run's initial weights; a resumed run ignores it.
      callbacks: Functions to call every so many steps, after evaluations, or after saves, and an
        `EarlyStopping`. Pass the same ones to resume the run.
      trackers: Services that get the figures of the run; see `ddl.run.trackers`.
      progress: Whether to print lines, and in a terminal or a notebook a progress bar.
      profile: The step to begin a profile after and its last step, such as (100, 110). The profile
        is written under `model_dir`, for TensorBoard.

    Returns:
      The trainer's history, with the figures of earlier calls.

    Raises:
      ConfigError: If an argument is invalid, or excludes another.
      DataError: As `Trainer.train`.
      ModelDirectoryError: If the directory or a checkpoint cannot be used or written, or is not of
        this trainer's run: compared are plain values of task and optimizer, seed and shuffle.
      TrainingDiverged: If the loss is no longer finite.
      KeyboardInterrupt: On SIGINT, after the update in progress, and after saving.
      TrainingInterrupted: On SIGTERM, as on SIGINT; on a signal to another worker too.
    """
    check_types(fit, locals(), ("callbacks", "return"))
    if train_epochs is not None and train_steps is None:
        trainer.count_examples()
    every = trainer.steps_per_epoch or _LOG_EVERY
    if eval_every == "epoch":
        eval_every = every if trainer.eval_pipeline else None
    run_plan = RunPlan(
        train_steps=train_steps,
        train_epochs=train_epochs,
        eval_every=eval_every,
        checkpoint_every=every if checkpoint_every == "epoch" else checkpoint_every,
        log_every=every if log_every == "epoch" else log_every,
        retention=retention or Retention(),
        warm_start=warm_start,
        callbacks=callbacks,
        trackers=trackers,
    )
    run_plan = replace(run_plan, retention=_with_best(run_plan, restore_best))
    if model_dir is None and (profile or restore_best or run_plan.retention.every):
        what = "restore_best, profile and retention.every need a directory"
        raise ConfigError(f"{what}: pass model_dir.")
    run_plan.check(trainer)
    workers = Workers(trainer.strategy)
    console = RunConsole(shows=progress and workers.is_chief)
    files, compare, opened = None, None, None
    if model_dir is not None:
        directory = RunDirectory(model_dir)
        files = Files.of(directory, trainer, run_plan, console.line)
        given = arguments_of(trainer)
        compare = partial(compare_arguments, directory, given)
        if trainer.step > 0:  # training may change attributes of a task
            compare = partial(_check_same_run, files, trainer)
        if trainer.step == 0 or not directory.arguments.exists():
            opened = partial(directory.write, directory.arguments, json.dumps(given, indent=1))
    run = Run(trainer, run_plan, files, console, trainer.eval_pipeline is not None, profile)
    replicas = trainer.strategy.num_replicas_in_sync
    console.line(f"devices: {describe_devices(trainer.strategy)}; replicas: {replicas}")
    if note := traits_of(trainer.strategy).note:
        console.line(note)
    message = "A signal arrived when the run had ended, so no update is lost."
    try:
        run.train(compare, opened, "Raise train_steps or train_epochs to train longer.")
    except TrainingInterrupted as error:  # on a signal, or a callback called `request_stop`
        message = str(error)
        console.line(message)
    is_stopped = workers.any(run.stop.received is not None)
    if restore_best and files is not None and not is_stopped:
        with deferring_interrupt():
            rows, best = list(trainer.history), files.checkpoints.restore_model("best")
            trainer.history.add(row for row in rows if row["step"] > best.step)
            console.line(f"The trainer has the best checkpoint's weights, of step {best.step:,}.")
    if run.stop.received == SIGINT:
        raise KeyboardInterrupt(message)
    if is_stopped:
        raise TrainingInterrupted(message)
    return trainer.history


def _with_best(run_plan: RunPlan, restore_best: bool) -> Retention:
    """Returns the retention with the metric of an `EarlyStopping`, if it has none."""
    retention, rules = run_plan.retention, run_plan.of(EarlyStopping)
    if retention.best_metric is not None or not (rules or restore_best):
        return retention
    rule = rules[0] if rules else EarlyStopping("loss")
    return replace(retention, best_metric=rule.metric, best_mode=rule.mode)


def _check_same_run(files: Files, trainer: Trainer) -> None:
    """Raises ModelDirectoryError if the trainer has made updates that no checkpoint holds."""
    if not files.checkpoints.hold_updates():
        raise ModelDirectoryError(
            f"The trainer has made {trainer.step:,} updates, which resuming {files.directory.path} "
            "would drop. Create a new Trainer, or pass another model_dir."
        )
