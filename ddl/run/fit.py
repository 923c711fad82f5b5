"""A whole run from Python, with plain arguments: what `ddl.main` does, without a config."""

import numbers
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from signal import SIGINT
from typing import Any, Literal

from ddl.callbacks.calling import checked_callbacks
from ddl.callbacks.early_stopping import EarlyStopping
from ddl.callbacks.schedule import Callback
from ddl.checkpoints.retention import Retention
from ddl.checkpoints.warm_start import WarmStart
from ddl.distribution.workers import Workers
from ddl.errors import ConfigError, ModelDirectoryError, TrainingInterrupted
from ddl.optimizers.plateau import plateaus_of
from ddl.run.checks.learning_rate import check_plateau
from ddl.run.checks.plan import check_best_metric, without_effect
from ddl.run.console import RunConsole
from ddl.run.directory import RunDirectory
from ddl.run.plan import RunPlan
from ddl.run.summary import notes
from ddl.run.trackers.tracker import Tracker, checked_trackers
from ddl.run.training_run import Files, train_to_end
from ddl.signals import StopSignals
from ddl.training.actions import Action, checked_actions
from ddl.training.history import History
from ddl.training.progress import is_interactive
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
    early_stopping: EarlyStopping | None = None,
    restore_best: bool = False,
    retention: Retention | None = None,
    on_divergence: Literal["stop", "rewind"] = "stop",
    max_rewinds: int = 3,
    warm_start: WarmStart | None = None,
    actions: Sequence[Action] = (),
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
      early_stopping: Ends the run when its evaluations no longer improve; None trains to the end.
      restore_best: Whether the trainer has the best checkpoint's weights and step after the run.
        The best is that of `retention.best_metric`, or else of `early_stopping`.
      retention: Which checkpoints to keep; None keeps the last three, and the best if
        `early_stopping` or `restore_best` is given.
      on_divergence: See `ddl.run.plan.RunPlan`.
      max_rewinds: See `RunPlan`.
      warm_start: Source of a new run's initial weights; a resumed run ignores it.
      actions: Further actions, called between loops; see `Trainer.train`.
      callbacks: Functions to call every so many steps, after evaluations, or after saves; see
        `ddl.callbacks`. Pass the same ones to resume the run.
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
        this trainer's run.
      TrainingDiverged: If the loss is no longer finite, and the run cannot rewind.
      KeyboardInterrupt: On SIGINT, after the update in progress, and after saving.
      TrainingInterrupted: On SIGTERM, as on SIGINT; on a signal to another worker too.
    """
    if not isinstance(trainer, Trainer):
        raise ConfigError(
            f"fit needs a ddl.Trainer, got {type(trainer).__name__}. Write ddl.fit(ddl.Trainer(…), "
            "train_epochs=5)."
        )
    _check_length(train_steps, train_epochs)
    callbacks = checked_callbacks(callbacks, "callbacks", EarlyStopping)
    given_rules = [one for one in callbacks if isinstance(one, EarlyStopping)]
    if early_stopping is None and len(given_rules) == 1:
        (early_stopping,) = given_rules
        callbacks = tuple(one for one in callbacks if one is not early_stopping)
    if train_epochs is not None:
        trainer.count_examples()
    evaluates = trainer.has_eval_data
    if not evaluates and (early_stopping is not None or eval_every not in ("epoch", None)):
        given = "eval_every" if early_stopping is None else "early_stopping"
        raise ConfigError(
            f"{given} needs evaluation data. Pass eval_data to the Trainer, or leave {given} out."
        )
    retention = _with_best(retention or Retention(), early_stopping, restore_best)
    _check_directory(model_dir, retention, restore_best, on_divergence, profile)
    run_plan = RunPlan(
        train_steps=train_steps,
        train_epochs=train_epochs,
        eval_every=_steps("eval_every", eval_every, trainer),
        checkpoint_every=_steps("checkpoint_every", checkpoint_every, trainer),
        log_every=_steps("log_every", log_every, trainer) or _LOG_EVERY,
        retention=retention,
        on_divergence=on_divergence,
        max_rewinds=max_rewinds,
        warm_start=warm_start,
        early_stopping=early_stopping,
        callbacks=callbacks,
        trackers=checked_trackers(trackers, "trackers"),
    )
    for callback in run_plan.calls:
        callback.check(trainer)
    if early_stopping is not None:
        check_best_metric(early_stopping.metric, trainer, "EarlyStopping.metric")
    check_best_metric(retention.best_metric, trainer)
    for plateau in plateaus_of(trainer.optimizer).values():
        check_plateau(plateau, run_plan, trainer.eval_metric_names, evaluates)
    actions = checked_actions(actions)
    console = RunConsole(shows=progress and Workers(trainer.strategy).is_chief)
    directory = None if model_dir is None else RunDirectory(model_dir)
    files = None if directory is None else Files.of(directory, trainer, run_plan, console)
    if files is not None:
        _check_same_run(files, trainer)
    for note in [*notes(trainer), *without_effect(run_plan, trainer, evaluates)]:
        console.line(note)
    with _stopping(trainer) as stop:
        try:
            train_to_end(
                *(trainer, run_plan, files, console, stop),
                evaluates=evaluates,
                actions=actions,
                keeps_history=True,
                profile=profile,
                remedy="Raise train_steps or train_epochs to train longer.",
            )
        except TrainingInterrupted as interrupted:
            received = stop is not None and stop.received is not None
            if Workers(trainer.strategy).any(received):
                raise
            console.line(str(interrupted))  # an action called `request_stop`
        if restore_best and files is not None:
            _restore_best(files, trainer, console)
        is_stopped = Workers(trainer.strategy).any(stop is not None and stop.received is not None)
    if is_stopped:  # else `_stopping` has raised
        raise _ended_before("A signal to another worker")
    return trainer.history


def _restore_best(files: Files, trainer: Trainer, console: RunConsole) -> None:
    """Restores the best checkpoint; the history stays whole."""
    rows = list(trainer.history)
    if (best := files.checkpoints.restore_best()) is not None:
        trainer.history.extend(row for row in rows if row["step"] > best.step)
        console.line(f"The trainer has the best checkpoint's weights, of step {best.step:,}.")


def _check_length(train_steps: Any, train_epochs: Any) -> None:
    if (train_steps is None) == (train_epochs is None):
        got = f"train_steps = {train_steps!r:.60} and train_epochs = {train_epochs!r:.60}"
        raise ConfigError(
            "fit needs a length, either train_steps or train_epochs, got "
            f"{'neither' if train_steps is None else got}. Write fit(trainer, train_epochs=5)."
        )
    _check_number("train_steps", train_steps, numbers.Integral, "an integer")
    _check_number("train_epochs", train_epochs, numbers.Real, "a number")


def _check_number(name: str, value: Any, kind: type, wanted: str) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, kind) or not value > 0:  # type: ignore[operator]
        raise ConfigError(f"{name} must be {wanted} greater than 0, got {value!r:.60}.")


def _steps(name: str, period: Any, trainer: Trainer) -> int | None:
    """Returns a period in updates; None for none."""
    if period == "epoch":
        evaluates = trainer.has_eval_data or name != "eval_every"
        return (trainer.steps_per_epoch or _LOG_EVERY) if evaluates else None
    if name == "log_every" and period is None:
        raise ConfigError("log_every must be an integer or 'epoch', got None.")
    _check_number(name, period, numbers.Integral, "'epoch', or an integer")
    return None if period is None else int(period)


def _with_best(
    retention: Retention, early_stopping: EarlyStopping | None, restore_best: bool
) -> Retention:
    """Returns the retention with the metric of `early_stopping`, if it has none."""
    if retention.best_metric is None and early_stopping is not None:
        rule = early_stopping
        return replace(retention, best_metric=rule.metric, best_mode=rule.mode)
    if retention.best_metric is None and restore_best:
        return replace(retention, best_metric="loss")
    return retention


def _check_directory(
    model_dir: Any,
    retention: Retention,
    restore_best: bool,
    on_divergence: str,
    profile: tuple[int, int] | None,
) -> None:
    """Raises ConfigError if an argument needs a directory to write to and there is none."""
    if model_dir is not None:
        if not isinstance(model_dir, str | os.PathLike) or not os.fspath(model_dir):
            raise ConfigError(f"model_dir must be the path of a directory, got {model_dir!r:.60}.")
        return
    needs = {
        "restore_best": restore_best,
        "on_divergence='rewind'": on_divergence == "rewind",
        "retention.every": retention.every is not None,
    }
    if profile is not None:
        raise ConfigError("profile needs a place to write to. Pass model_dir, such as 'runs/a'.")
    for name, given in needs.items():
        if given:
            raise ConfigError(f"{name} needs checkpoints. Pass model_dir, such as 'runs/digits'.")


def _check_same_run(files: Files, trainer: Trainer) -> None:
    """Raises ModelDirectoryError if the trainer has made updates that no checkpoint holds."""
    workers = Workers(trainer.strategy)
    with workers.failing_together():
        saved = files.checkpoints.saved() if workers.is_chief else []
        if saved and trainer.step and trainer.step not in [each.step for each in saved]:
            raise ModelDirectoryError(
                f"model_dir={files.directory.path} holds a run with checkpoints up to step "
                f"{saved[-1].step:,}, but the trainer has made {trainer.step:,} updates, and none "
                "of the checkpoints is of that step. Resuming would drop these updates. Create a "
                "new Trainer to resume the run, or pass another model_dir."
            )


@contextmanager
def _stopping(trainer: Trainer) -> Iterator[StopSignals | None]:
    """Stops the training on SIGINT and SIGTERM; yields None outside of the main thread.

    Raises:
      KeyboardInterrupt: If a SIGINT was received.
      TrainingInterrupted: If a SIGTERM was received.
    """
    if threading.current_thread() is not threading.main_thread():
        yield None
        return
    stop = StopSignals(trainer.request_stop, second_ends=not is_interactive())
    try:
        with stop:
            yield stop
    except TrainingInterrupted as interrupted:
        if stop.received != SIGINT:
            raise
        raise KeyboardInterrupt(str(interrupted)) from None
    finally:
        if stop.received is not None:
            trainer.withdraw_stop()
    if stop.received == SIGINT:
        raise KeyboardInterrupt
    if stop.received is not None:
        raise _ended_before(stop.received.name)


def _ended_before(signal: str) -> TrainingInterrupted:
    return TrainingInterrupted(
        f"{signal} arrived when the run had ended, so no update is lost. Run the program again for "
        "what follows ddl.fit: with model_dir, a run that is complete is not trained again."
    )
