"""The sanity modes as runs: what each trains, writes and prints."""

import dataclasses
from collections.abc import Callable

import tensorflow as tf

from ddl.choices import SanityMode
from ddl.distribution.traits import traits_of
from ddl.errors import ConfigError
from ddl.run.console import RunConsole
from ddl.run.from_checkpoints import SavedWeights, export_saved
from ddl.run.plan import RunPlan
from ddl.run.sanity import fast_run, overfit
from ddl.run.sanity.directory import SanityDirectory
from ddl.run.training_run import Files, train_to_end
from ddl.signals import StopSignals
from ddl.tasks.parts import models_of
from ddl.training.trainer import Trainer


def check_one_process(mode: SanityMode, strategy: tf.distribute.Strategy) -> None:
    """Raises ConfigError if several processes train."""
    if traits_of(strategy).several_processes:
        raise ConfigError(
            f"--{mode} must run in one process, got {type(strategy).__name__}. Start one process "
            "with --cluster=none, and a --strategy such as mirrored."
        )


def note_of(mode: SanityMode, directory: SanityDirectory, trainer: Trainer) -> str:
    """Returns the line that tells that this is no real run."""
    if mode == "fast_run":
        trained = "two updates, evaluations on two batches"
    else:
        trained = "each batch is the first one"
        trained += ", and evaluations read it too" if _evaluates_it(trainer) else ""
    return f"--{mode}: NOT A REAL RUN, {trained}. It writes to {directory.path}."


def run_sanity_mode(
    mode: SanityMode,
    trainer: Trainer,
    run_plan: RunPlan,
    directory: SanityDirectory,
    console: RunConsole,
    stop: StopSignals | None,
    *,
    evaluates: bool,
    opened: Callable[[], None],
) -> None:
    """Runs a mode from its start, whatever an earlier call has written. Eager, cross-replica.

    Args:
      mode: The mode.
      trainer: A new trainer, with the data of `ddl.run.sanity.rows`.
      run_plan: The plan of the real run.
      directory: The directory of the mode.
      console: Shows progress and lines.
      stop: Holds the signal that asked to stop, if any.
      evaluates: Whether the run evaluates.
      opened: Called when the directory is created and locked.

    Raises:
      DdlError: As `train_to_end`, `check_restoring` and `export_saved`.
    """
    # A sanity run is no run to compare others with.
    run_plan = dataclasses.replace(run_plan, trackers=())
    if mode == "overfit_batch":
        run_plan = overfit.plan_of(run_plan, trainer.steps_per_epoch)
    else:
        run_plan = fast_run.plan_of(run_plan)
    files = Files.of(directory, trainer, run_plan, console)
    first = overfit.FirstLoss(trainer)
    directory.begin()
    train_to_end(
        *(trainer, run_plan, files, console, stop),
        evaluates=evaluates,
        actions=[first],
        opened=opened,
    )
    if mode == "overfit_batch":
        last = {row["split"]: row for row in trainer.history}
        evaluated = last.get("eval", {}) if _evaluates_it(trainer) else {}
        verdict = overfit.verdict(first.figures, last.get("train", {}), evaluated, trainer.step)
        console.line(verdict)
        return
    number = fast_run.check_restoring(trainer, files.checkpoints)
    done = ["trained 2 updates", *(["evaluated"] if evaluates else []), "saved"]
    done.append(f"restored {number} variables bit for bit")
    if getattr(trainer.task, "exported_models", None) or models_of(trainer.task):
        export_saved(SavedWeights(), trainer, files.checkpoints, directory, console)
        done.append("exported")
    else:
        console.line("Nothing was exported: the task has no Keras model.")
    console.line(f"--fast_run: {', '.join(done)}, without an error.")


def _evaluates_it(trainer: Trainer) -> bool:
    """Returns whether --overfit_batch evaluates on its batch: not with several sources."""
    return trainer.has_eval_data and list(trainer.pipelines) == [""]
