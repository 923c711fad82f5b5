"""A run from top to bottom: build → compare → restore → loop → close."""

import dataclasses
import re
import secrets
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Literal

import keras
import numpy as np
import tensorflow as tf

from ddl import config
from ddl.checkpoint_directory import SavedCheckpoint
from ddl.checkpoints import Checkpoints
from ddl.choices import Mode
from ddl.config_changes import compare_with_saved_config
from ddl.console import RunConsole, format_figures
from ddl.data import as_source
from ddl.distribution import Communication, describe_devices
from ddl.errors import ConfigError
from ddl.learning_rate_checks import check_plateau, learning_rate_summary
from ddl.outer_loop import OuterLoop
from ddl.plateau import plateau_of
from ddl.run_directory import RunDirectory
from ddl.run_plan import RunPlan
from ddl.same_start import check_same_on_all
from ddl.saved_weights import SavedWeights, evaluate_saved, export_saved, follow
from ddl.signals import StopSignals
from ddl.strategy_notes import notes
from ddl.trainer import Trainer
from ddl.workers import Workers
from ddl.writers import JsonLinesWriter, TensorBoardWriter, Writers


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a run takes place: what the flags say. Nothing in it changes results.

    Attributes:
      strategy: Devices and how they work together.
      communication: How gradients travel between them.
      steps_per_loop: Updates a Python call; None adapts.
      data_on_device: Whether arrays live on the devices; "auto" decides by size.
    """

    strategy: tf.distribute.Strategy
    communication: Communication
    steps_per_loop: int | None = None
    data_on_device: bool | Literal["auto"] = "auto"


def run(
    placement: Placement,
    model_dir: str | None,
    mode: Mode = "train_and_eval",
    dry_run: bool = False,
    allow_unused: Sequence[str] = (),
    saved_weights: SavedWeights | None = None,
    follow_timeout: float | None = None,
) -> None:
    """Runs what the loaded gin config describes.

    Args:
      placement: Where.
      model_dir: Where files are written; None for a dry run only.
      mode: What to do.
      dry_run: Build everything, make one step, print the plan, write nothing.
      allow_unused: Names of bindings that may go unused.
      saved_weights: What is evaluated or exported; None takes the newest checkpoint.
      follow_timeout: In an evaluation, seconds to wait for each next checkpoint; None evaluates
        one and ends.

    Raises:
      DdlError: For anything that the person who started the run can put right.
    """
    # ------------------------------------------------------------------ build
    workers = Workers(placement.strategy)
    if workers.number > 1 and mode == "export":
        raise ConfigError("--mode=export runs in one process. Start it with --cluster=none.")
    console = RunConsole(shows=workers.is_chief)
    directory = None if model_dir is None else RunDirectory(model_dir)
    what = saved_weights or SavedWeights()
    flags = {
        **{"mode": mode, "dry_run": dry_run, "follow_timeout": follow_timeout},
        **{"bytes_per_pack": placement.communication.bytes_per_pack},
        **{"collectives": placement.communication.collectives},
        **{"checkpoint": what.checkpoint, "averaged_weights": what.averaged},
    }
    check_same_on_all(workers, flags)
    run_plan, trainer = build(placement, workers, directory)
    config.check_all_used(allow_unused)
    check_best_metric(run_plan, trainer)
    evaluates = mode != "train" and trainer.has_eval_data
    if (plateau := plateau_of(trainer.optimizer)) is not None:
        check_plateau(plateau, run_plan, trainer.metric_names, evaluates)
    total = run_plan.total_steps(trainer.steps_per_epoch)
    console.summary("ddl", summary(trainer, total))
    for note in notes(trainer):
        console.line(note)
    if dry_run or directory is None:
        warm_start(trainer, run_plan, console)
        console.line(f"one step on one batch: {format_figures(trainer.train(1))}")
        console.line("\n" + config.operative_config_text().strip())
        return

    # ------------------------------------------------------------------ evaluate, export
    json_lines = JsonLinesWriter(directory.metrics, report=console.line)
    events = TensorBoardWriter(directory.path, report=console.line)
    checkpoints = Checkpoints(
        directory.checkpoints,
        trainer,
        run_plan.retention,
        report=console.line,
        before_write=json_lines.sync,
    )
    if mode in ("eval", "export"):
        compare_with_saved_config(directory, trainer, console, strict=False)
        if mode == "export":
            export_saved(what, trainer, checkpoints, directory, console)
            return
        parts = (trainer, checkpoints, json_lines, events, console)
        with closing(events):
            if follow_timeout is None:
                evaluate_saved(what, *parts)
            else:
                follow(what, follow_timeout, total, *parts)
        return

    # ------------------------------------------------------------------ compare, restore, train
    with ExitStack() as stack:
        stack.callback(directory.release)
        if workers.is_chief:
            directory.claim()
        stop = stack.enter_context(StopSignals(trainer.request_stop))
        if checkpoints.saved():
            compare_with_saved_config(directory, trainer, console, strict=True)
        if (saved := checkpoints.restore_latest()) is not None:
            console.line(f"restored step {trainer.step:,} from {saved}")
            report_replica_change(saved, trainer, console)
        else:
            warm_start(trainer, run_plan, console)
        if trainer.step >= total:
            console.line(f"nothing left to do: step {trainer.step:,} of {total:,} is reached")
            return
        trainer.trace()
        writers = Writers([json_lines, events, console] if workers.is_chief else [])
        if workers.is_chief:
            directory.open()
            directory.write_configs(config.config_text(), config.operative_config_text())
        writers.drop_after(trainer.step)
        if checkpoints.keeps_best and not evaluates:
            console.line(f"--mode={mode} evaluates nothing, so that no checkpoint is the best")
        try:
            OuterLoop(trainer, run_plan, checkpoints, writers, console, stop, evaluates).run()
        finally:
            writers.close()
        console.line(
            f"done: step {total:,} after {trainer.pace.total_seconds:,.1f} s of training, written "
            f"to {directory.path}"
        )


def build(
    placement: Placement, workers: Workers, directory: RunDirectory | None = None
) -> tuple[RunPlan, Trainer]:
    """Builds what the config describes.

    Args:
      placement: Where.
      workers: Of its strategy.
      directory: Of the run, whose seed is taken where the config leaves it open.

    Raises:
      DdlError: For anything that the person who started the run can put right.
    """
    resolve_seed(directory, workers)
    with placement.strategy.scope():
        config.build("set_numerics")
        run_plan: RunPlan = config.build("RunPlan")
        resolve_lengths(run_plan)
        return run_plan, config.build("Trainer", **vars(placement))


def check_best_metric(run_plan: RunPlan, trainer: Trainer) -> None:
    """Raises ConfigError if the best checkpoint is to be kept by what no evaluation gives."""
    metric = run_plan.retention.best_metric
    if metric is not None and not trainer.has_eval_data:
        raise ConfigError(
            f"Retention.best_metric is {metric!r}, but there is no data to evaluate on"
        )
    if metric is not None and metric not in trainer.metric_names:
        raise ConfigError(
            f"Retention.best_metric is {metric!r}; an evaluation gives "
            + ", ".join(trainer.metric_names)
        )


def warm_start(trainer: Trainer, run_plan: RunPlan, console: RunConsole) -> None:
    """Gives a new run the weights that it is to begin with, and says what was found."""
    if run_plan.warm_start is not None:
        console.line(str(run_plan.warm_start.apply(trainer.model, trainer.averages)))


def report_replica_change(saved: SavedCheckpoint, trainer: Trainer, console: RunConsole) -> None:
    """Says so if a run goes on with another number of replicas."""
    was, now = saved.metadata.replicas, trainer.strategy.num_replicas_in_sync
    if was is not None and was != now:
        console.line(f"the run goes on with {now} replicas; it had {was}")


def resolve_seed(directory: RunDirectory | None, workers: Workers) -> None:
    """Binds SEED where the config leaves it open: to the earlier run's here, or to a new one."""
    if config.get_macro("SEED") is not None:
        return
    saved = (directory.saved_config() if directory else None) or ""
    earlier = re.search(r"^SEED = (\d+)", saved, re.MULTILINE)
    seed = int(earlier[1]) if earlier else secrets.randbelow(2**31)
    config.set_macro("SEED", workers.of_chief(seed))


def resolve_lengths(run_plan: RunPlan) -> None:
    """Sets the macros STEPS_PER_EPOCH and TOTAL_STEPS, in which a config may give lengths.

    They need the data, which are built for it before what is given in them. What depends on the
    length of the run so differs from the saved config when a run is lengthened, and is told.

    Raises:
      ConfigError: If the config gives one of them itself, and another number.
    """
    data = config.build_bound("Trainer", "train_data")
    batch = config.build_bound("Trainer", "global_batch_size")
    if data is None or batch is None:
        return  # which the trainer tells
    an_epoch = as_source(data).steps_per_epoch(batch)
    for name, value in (
        ("STEPS_PER_EPOCH", an_epoch),
        ("TOTAL_STEPS", run_plan.total_steps(an_epoch)),
    ):
        if (given := config.get_macro(name)) not in (None, value):
            raise ConfigError(
                f"{name} is given as {given}, and is {value} by the data and the run's length. It "
                f"is not for setting: leave it out, or give --gin_param='{name} = None'."
            )
        config.set_macro(name, value)


def summary(trainer: Trainer, total: int) -> dict[str, str]:
    """What is about to happen, as names and texts."""
    replicas = trainer.strategy.num_replicas_in_sync
    batch = trainer.global_batch_size
    microbatches = trainer.accumulation_steps
    split = f" = {replicas} replicas × " if replicas > 1 else ""
    if microbatches > 1:
        split = f"{split or ' = '}{microbatches} microbatches × "
    split += f"{batch // replicas // microbatches:,}" if split else ""
    parameters = sum(int(np.prod(v.shape)) for v in trainer.model.trainable_variables)
    steps_per_epoch = trainer.steps_per_epoch
    return {
        "devices": f"{describe_devices(trainer.strategy)}, {type(trainer.strategy).__name__}",
        "replicas": str(replicas),
        "global batch size": f"{batch:,}{split}",
        "batch per replica": f"{batch // replicas:,}",
        "precision": keras.config.dtype_policy().name,
        "model": f"{trainer.model.name}, {parameters:,} trainable parameters",
        "training data": f"{trainer.num_examples:,} examples, {steps_per_epoch:,} steps an epoch",
        "weight average": str(trainer.averages.rule) if trainer.averages else "none",
        "steps": f"{total:,} ({total / steps_per_epoch:.1f} epochs)",
        **learning_rate_summary(trainer.optimizer, total),
        "seed": str(config.get_macro("SEED")),
    }
