"""A run from top to bottom: build → compare → restore → loop → close."""

import dataclasses
import math
import re
import secrets
from collections.abc import Sequence
from typing import Literal

import keras
import numpy as np
import tensorflow as tf

from ddl import config
from ddl.actions import Action, EachLoop, Periodic
from ddl.checkpoints import Checkpoints
from ddl.choices import Mode
from ddl.console import RunConsole, format_figures
from ddl.distribution import Communication, describe_devices
from ddl.errors import (
    ConfigError,
    ModelDirectoryError,
    TrainingDiverged,
    TrainingInterrupted,
)
from ddl.export import export_model
from ddl.learning_rate import peak_learning_rate
from ddl.model_checks import depends_on_microbatches, layers_of
from ddl.run_directory import RunDirectory
from ddl.run_plan import RunPlan
from ddl.signals import StopSignals
from ddl.trainer import Trainer
from ddl.writers import JsonLinesWriter, TensorBoardWriter, Writers

# A run may be lengthened, looked at more or less often, or (nearly always) split into other
# microbatches: the updates stay the same. Any other difference makes it another run.
_MAY_CHANGE = (
    "RunPlan.train_steps",
    "RunPlan.train_epochs",
    "RunPlan.eval_every",
    "RunPlan.checkpoint_every",
    "RunPlan.log_every",
    "RunPlan.checkpoints_to_keep",
)
_MICROBATCHES = ("Trainer.accumulation_steps",)


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
) -> None:
    """Runs what the loaded gin config describes.

    Args:
      placement: Where.
      model_dir: Where files are written; None for a dry run only.
      mode: What to do.
      dry_run: Build everything, make one step, print the plan, write nothing.
      allow_unused: Names of bindings that may go unused.

    Raises:
      DdlError: For anything that the person who started the run can put right.
    """
    # ------------------------------------------------------------------ build
    console = RunConsole()
    directory = None if model_dir is None else RunDirectory(model_dir)
    resolve_seed(directory)
    with placement.strategy.scope():
        config.build("set_numerics")
        run_plan: RunPlan = config.build("RunPlan")
        trainer: Trainer = config.build("Trainer", **vars(placement))
    config.check_all_used(allow_unused)
    total = run_plan.total_steps(trainer.steps_per_epoch)
    if not (peak := peak_learning_rate(trainer.optimizer, total)) > 0:
        raise ConfigError(f"the learning rate is {peak:g} at its peak; it is more than 0")
    console.summary("ddl", summary(trainer, total))
    if dry_run or directory is None:
        console.line(f"one step on one batch: {format_figures(trainer.train(1))}")
        console.line("\n" + config.operative_config_text().strip())
        return

    # ------------------------------------------------------------------ compare, restore
    trains = mode in ("train", "train_and_eval")
    checkpoints = Checkpoints(directory.checkpoints, trainer, run_plan.checkpoints_to_keep)
    if checkpoints.latest is not None:
        # Where a layer takes statistics of a microbatch, their number is part of the computation.
        fixed = depends_on_microbatches(layers_of(trainer.task))
        may_change = _MAY_CHANGE + (() if fixed else _MICROBATCHES)
        compare_with_saved_config(directory, console, may_change, strict=trains)
    if checkpoints.restore_latest(model_only=not trains):
        console.line(f"restored step {trainer.step:,} from {checkpoints.latest}")
    elif not trains:
        raise ModelDirectoryError(
            f"--mode={mode} needs a checkpoint, and there is none under {directory.checkpoints}"
        )

    # ------------------------------------------------------------------ do what was asked
    if mode == "export":
        with trainer.evaluation_weights():
            for path in export_model(trainer.model, directory.export):
                console.line(f"exported {path}")
        return
    if trains and trainer.step < total:
        trainer.trace()
    directory.open()
    json_lines = JsonLinesWriter(directory.metrics)
    writers = Writers([json_lines, TensorBoardWriter(directory.path), console])
    try:
        if mode == "eval":
            evaluate(trainer, writers)
        elif trainer.step >= total:
            console.line(f"nothing left to do: step {trainer.step:,} of {total:,} is reached")
        else:
            directory.write_configs(config.config_text(), config.operative_config_text())
            json_lines.drop_after(trainer.step)
            evaluates = mode == "train_and_eval" and trainer.has_eval_data
            loop(trainer, run_plan, total, checkpoints, writers, console, evaluates)
            console.line(f"done: step {total:,}, written to {directory.path}")
    finally:
        writers.close()


def loop(
    trainer: Trainer,
    run_plan: RunPlan,
    total: int,
    checkpoints: Checkpoints,
    writers: Writers,
    console: RunConsole,
    evaluates: bool,
) -> None:
    """Trains up to step `total`, and does between loops what the run plan says.

    Raises:
      TrainingInterrupted: If a signal asked to stop; after saving.
      TrainingDiverged: If the loss is no longer finite.
    """

    def show_progress(step: int) -> None:
        if console.shows_progress:
            figures = trainer.peek_metrics()
            console.advance(step, with_speed(figures, trainer, trainer.pace.steps_per_second))

    def log(step: int) -> None:
        figures = trainer.read_metrics()
        figures["learning_rate"] = trainer.learning_rate
        if trainer.loss_scale is not None:
            figures["loss_scale"] = trainer.loss_scale
            figures["skipped_updates"] = trainer.skipped_updates
        with_speed(figures, trainer, trainer.pace.take_steps_per_second())
        writers.write(step, step / trainer.steps_per_epoch, "train", figures)

    def look(step: int) -> None:
        if not math.isfinite(evaluate(trainer, writers)["loss"]):
            raise TrainingDiverged(
                f"training diverged by step {step:,}: the loss on the evaluation data is not "
                "finite. Lower the learning rate, or clip the gradient."
            )

    def save(step: int) -> None:
        trainer.check_weights()
        checkpoints.save()

    with StopSignals() as stop:

        def stop_if_asked(step: int) -> None:
            if stop.received is not None and step < total:
                save(step)
                raise TrainingInterrupted(
                    f"stopped by {stop.received.name} at step {step:,} of {total:,}, after "
                    "saving. The same command goes on from there."
                )

        # The checkpoint comes last: once a step is saved, all that belongs to it is written.
        actions: list[Action] = [
            EachLoop(show_progress),
            Periodic(run_plan.log_every, log, last=total),
            *([Periodic(run_plan.eval_every, look, last=total)] if evaluates else []),
            Periodic(run_plan.checkpoint_every, save, last=total),
            EachLoop(stop_if_asked),
        ]
        console.start(trainer.step, total)
        trainer.train(total - trainer.step, actions)


def evaluate(trainer: Trainer, writers: Writers) -> dict[str, float]:
    """Evaluates at the present step, and writes and returns the figures."""
    figures = trainer.evaluate()
    writers.write(trainer.step, trainer.step / trainer.steps_per_epoch, "eval", figures)
    return figures


def with_speed(
    figures: dict[str, float], trainer: Trainer, steps_per_second: float | None
) -> dict[str, float]:
    """Adds examples per second, where it was measured."""
    if steps_per_second is not None:
        figures["examples_per_second"] = steps_per_second * trainer.global_batch_size
    return figures


def resolve_seed(directory: RunDirectory | None) -> None:
    """Binds SEED where the config leaves it open: to the earlier run's here, or to a new one."""
    if config.get_macro("SEED") is not None:
        return
    saved = (directory.saved_config() if directory else None) or ""
    earlier = re.search(r"^SEED = (\d+)", saved, re.MULTILINE)
    config.set_macro("SEED", int(earlier[1]) if earlier else secrets.randbelow(2**31))


def compare_with_saved_config(
    directory: RunDirectory, console: RunConsole, may_change: Sequence[str], strict: bool
) -> None:
    """Makes sure that a directory with checkpoints belongs to this config.

    Raises:
      ModelDirectoryError: If `strict` and it was written by another config.
    """
    saved = directory.saved_config()
    changes = [] if saved is None else config.differences(saved, ignore=may_change)
    if not changes:
        return
    listing = "\n".join(f"  {line}" for line in changes)
    if strict:
        raise ModelDirectoryError(
            f"--model_dir={directory.path} holds a run of another config. It differs in\n"
            f"{listing}\nGive a new --model_dir, or the config of that run."
        )
    console.line(f"the config differs from that of the run in {directory.path}:\n{listing}")


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
        "learning rate": f"{peak_learning_rate(trainer.optimizer, total):.6g} at its peak",
        "seed": str(config.get_macro("SEED")),
    }
