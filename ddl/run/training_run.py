"""A run that trains: compare → restore → loop → close."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from ddl.callbacks.calling import holders_of, names_of
from ddl.callbacks.early_stopping import Evaluations
from ddl.checkpoints.checkpoints import Checkpoints
from ddl.checkpoints.directory import SavedCheckpoint
from ddl.distribution.workers import Workers
from ddl.errors import ConfigError
from ddl.figures import is_measured
from ddl.run.checks.learning_rate import constant_rates, report_restored_rates
from ddl.run.console import RunConsole
from ddl.run.directory import NoCheckpoints, RunDirectory
from ddl.run.event_files import session
from ddl.run.loop import OuterLoop
from ddl.run.plan import RunPlan
from ddl.run.profiling import Profiler, check_steps, missed
from ddl.run.trackers.tracker import TrackerWriter
from ddl.run.writers import (
    JsonLinesWriter,
    TensorBoardWriter,
    WithoutMeasured,
    Writer,
    Writers,
)
from ddl.signals import StopSignals
from ddl.training.actions import Action
from ddl.training.pace import Monitor
from ddl.training.trainer import Trainer


@dataclasses.dataclass(frozen=True)
class Files:
    """The files of a run, without the config.

    Attributes:
      directory: The directory.
      json_lines: Writes metrics.jsonl.
      events: Writes TensorBoard's event files.
      checkpoints: The checkpoints of the run's trainer.
    """

    directory: RunDirectory
    json_lines: JsonLinesWriter
    events: TensorBoardWriter
    checkpoints: Checkpoints

    @classmethod
    def of(
        cls, directory: RunDirectory, trainer: Trainer, run_plan: RunPlan, console: RunConsole
    ) -> "Files":
        """Returns the files of a run in a directory. Creates nothing on disk."""
        json_lines = JsonLinesWriter(directory.metrics, report=console.line)
        return cls(
            directory,
            json_lines,
            TensorBoardWriter(directory.path, report=console.line),
            Checkpoints(
                directory.checkpoints,
                trainer,
                run_plan.retention,
                report=console.line,
                before_write=json_lines.sync,
                callbacks=holders_of(run_plan.calls),
            ),
        )


def nothing() -> None:
    """Does nothing."""


def train_to_end(
    trainer: Trainer,
    run_plan: RunPlan,
    files: Files | None,
    console: RunConsole,
    stop: StopSignals | None,
    *,
    evaluates: bool,
    actions: Sequence[Action] = (),
    before_restore: Callable[[], None] = nothing,
    opened: Callable[[], None] = nothing,
    keeps_history: bool = False,
    profile: tuple[int, int] | None = None,
    remedy: str = "Raise TRAIN_STEPS or TRAIN_EPOCHS to train longer.",
) -> None:
    """Resumes a run or begins it, and trains to its end, its early end or a stop.

    Call it on all workers, in eager, cross-replica context, within `stop`.

    Args:
      trainer: The trainer.
      run_plan: Length of the run, and periods of its actions.
      files: Files that the run writes and resumes from; None writes nothing.
      console: Shows progress and lines.
      stop: Holds the signal that asked to stop, if any.
      evaluates: Whether the run evaluates.
      actions: Further actions, called after the evaluations and before a checkpoint.
      before_restore: Called if there are checkpoints, before one is restored.
      opened: Called on the chief when the directory is created and locked.
      keeps_history: Whether an empty history gets the lines of metrics.jsonl.
      profile: The step to begin a profile after, and its last step; None profiles nothing.
      remedy: Remedy for a run that has reached its end already.

    Raises:
      DdlError: As `OuterLoop.run`, `Checkpoints.restore_latest` and `RunDirectory.open`.
    """
    workers = Workers(trainer.strategy)
    total = run_plan.total_steps(trainer.steps_per_epoch)
    check_steps(profile, total)
    evaluations = Evaluations(run_plan.early_stopping) if run_plan.early_stopping else None
    with ExitStack() as stack:
        if files is not None:
            stack.callback(files.directory.release)
            if workers.is_chief:
                files.directory.claim()
                files.json_lines.check()
            if files.checkpoints.saved():
                before_restore()
        ended_by = _restore(trainer, run_plan, files, console)
        if keeps_history and files is not None and not len(trainer.history):
            trainer.history.extend(
                {name: value for name, value in row.items() if not is_measured(name)}
                for row in files.json_lines.rows()
                if row["step"] <= trainer.step and row.get("split") in ("train", "eval")
            )
        if trainer.step >= total:
            console.line(f"The run has reached step {trainer.step:,} of {total:,}. {remedy}")
            return
        if evaluations is not None and workers.is_chief:
            rows = trainer.history if files is None else files.json_lines.rows()
            _add_earlier(evaluations, rows, trainer.step, run_plan.eval_every)
        if evaluations is not None and workers.broadcast(evaluations.are_over):
            console.line(f"The run ended early at step {trainer.step:,}: {evaluations}.")
            return
        if ended_by in names_of(run_plan.calls):
            console.line(
                f"The callback {ended_by} ended the run at step {trainer.step:,}. Train further in "
                "a new run from its weights (WarmStart), or without the callback."
            )
            return
        if (without := missed(profile, trainer.step)) is not None:
            console.line(without)
        trainer.trace()
        own: list[Writer] = [WithoutMeasured(trainer.history)]
        if files is not None:
            files.checkpoints.check()
            if workers.is_chief:
                files.directory.open()
                opened()
                own = [files.json_lines, files.events, *own]
        if workers.is_chief:
            directory = None if files is None else files.directory
            own += [TrackerWriter(one, directory, console.line) for one in run_plan.trackers]
            own.append(WithoutMeasured(console))
        writers = Writers(own)
        writers.drop_after(trainer.step)
        checkpoints = files.checkpoints if files is not None else NoCheckpoints()
        profiler = None
        if files is not None and profile is not None:
            folder = files.directory.profiles(workers.index, workers.number)
            profiler = Profiler(folder, profile, trainer.pace, console.line)
        loop = OuterLoop(
            *(trainer, run_plan, checkpoints, writers, console, stop, evaluates),
            evaluations=evaluations,
            actions=actions,
            media=files.events if files is not None and workers.is_chief else None,
            profiler=profiler,
            monitor=Monitor(trainer) if workers.is_chief else None,
        )
        shown: AbstractContextManager[None] = nullcontext()
        if files is not None and workers.is_chief and (macros := files.directory.macros()):
            split = files.directory.path / ("eval" if evaluates else "train")
            shown = session(split, macros, console.line)
        try:
            with shown:
                loop.run()
        finally:
            writers.close()
        where = "" if files is None else f", written to {files.directory.path}"
        seconds = trainer.pace.total_seconds
        console.line(f"Done: step {trainer.step:,} after {seconds:,.1f} s of training{where}.")


def _restore(
    trainer: Trainer, run_plan: RunPlan, files: Files | None, console: RunConsole
) -> str | None:
    """Restores the newest checkpoint, or else applies the warm start.

    A trainer that saved or restored this checkpoint last is kept as it is: a learning rate that was
    assigned since then takes effect, as it does without files.

    Returns:
      Name of the callback that ended the run, if one did.
    """
    rates = constant_rates(trainer.optimizer)
    saved, kept = (None, False) if files is None else files.checkpoints.resume()
    if saved is not None and kept:
        console.line(f"Continuing at step {trainer.step:,}, at which the trainer saved {saved}.")
        return saved.metadata.ended_by
    if saved is not None:
        console.line(f"Restored step {trainer.step:,} from {saved}.")
        report_replica_change(saved, trainer, console)
        report_restored_rates(rates, trainer.optimizer, console.line)
        return saved.metadata.ended_by
    if trainer.step == 0:
        warm_start(trainer, run_plan, console)
    return None


def _add_earlier(
    evaluations: Evaluations,
    rows: Iterable[Mapping[str, Any]],
    last_step: int,
    eval_every: int | None,
) -> None:
    """Adds the evaluations of earlier calls that the run made by its period, up to a step."""
    for row in rows:
        step = row["step"]
        is_due = step <= last_step and step % (eval_every or 1) == 0
        # A callback's figures are in a line of their own.
        if is_due and row.get("split") == "eval" and evaluations.rule.metric in row:
            evaluations.add(step, row[evaluations.rule.metric])


def warm_start(trainer: Trainer, run_plan: RunPlan, console: RunConsole) -> None:
    """Applies the plan's warm start, if any, and prints the matches.

    Raises:
      ConfigError: As `WarmStart.apply` does.
    """
    if run_plan.warm_start is not None:
        if trainer.model is None:
            raise ConfigError(
                f"WarmStart reads the weights of the task's `model`, and "
                f"{type(trainer.task).__name__} has none. Give the task a `model`, or remove "
                "RunPlan.warm_start."
            )
        console.line(str(run_plan.warm_start.apply(trainer.model, trainer.averages)))


def report_replica_change(saved: SavedCheckpoint, trainer: Trainer, console: RunConsole) -> None:
    """Prints a line if a run resumes with another number of replicas."""
    was, now = saved.metadata.replicas, trainer.strategy.num_replicas_in_sync
    if was is not None and was != now:
        console.line(f"The number of replicas is now {now}; before, it was {was}.")
