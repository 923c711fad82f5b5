"""A run from top to bottom: build → compare → restore → loop → close."""

import dataclasses
import re
import secrets
from collections.abc import Sequence
from typing import Literal

import keras
import numpy as np
import tensorflow as tf

from ddl import config
from ddl.actions import EachLoop, Periodic
from ddl.checkpoints import Checkpoints
from ddl.choices import Mode
from ddl.console import RunConsole, format_figures
from ddl.distribution import Communication, describe_devices
from ddl.errors import CheckpointError, ConfigError, TrainingInterrupted
from ddl.experiment import Experiment
from ddl.export import export_model
from ddl.run_directory import RunDirectory
from ddl.signals import StopSignals
from ddl.trainer import Action, Trainer
from ddl.writers import JsonLinesWriter, TensorBoardWriter, Writers

# A run may be lengthened, looked at more or less often, or split into other microbatches: the
# updates stay the same. Any other difference makes it another run.
_MAY_CHANGE = (
    "TRAIN_STEPS",
    "TRAIN_EPOCHS",
    "EVAL_EVERY",
    "CHECKPOINT_EVERY",
    "LOG_EVERY",
    "ACCUMULATION_STEPS",
)


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
    """Runs the experiment that the loaded gin config describes.

    Args:
      placement: Where.
      model_dir: Where files are written; only a dry run goes without.
      mode: What to do.
      dry_run: Build everything, make one step, print the plan, write nothing.
      allow_unused: Names of bindings that may go unused.

    Raises:
      DdlError: For anything that the person who started the run can put right.
    """
    # ------------------------------------------------------------------ build
    console = RunConsole()
    directory = RunDirectory(model_dir) if model_dir is not None else None
    resolve_seed(directory)
    with placement.strategy.scope():
        config.build("set_numerics")
        experiment = config.build("Experiment")
    trainer = build_trainer(experiment, placement)
    config.check_all_used(allow_unused)
    total = experiment.total_steps(trainer.steps_per_epoch)
    console.summary("ddl", plan(experiment, trainer, total))
    if dry_run:
        show_dry_run(console, trainer)
        return
    if directory is None:
        raise ConfigError("--model_dir is missing: give the directory for what the run writes")

    # ------------------------------------------------------------------ compare, restore
    compare_with_saved_config(directory, console, strict=mode in ("train", "train_and_eval"))
    checkpoints = Checkpoints(directory.checkpoints, trainer, experiment.checkpoints_to_keep)
    restored = checkpoints.restore_latest()
    if restored:
        console.line(f"restored step {trainer.step:,} from {checkpoints.latest}")
    elif mode in ("eval", "export"):
        raise CheckpointError(
            f"--mode={mode} needs a checkpoint, and there is none under {directory.checkpoints}"
        )
    if mode == "export":
        for path in export_model(trainer.model, directory.export):
            console.line(f"exported {path}")
        return

    # ------------------------------------------------------------------ open
    directory.open()
    if mode != "eval":
        directory.write_configs(config.config_text(), config.operative_config_text())
    writers = Writers(
        [
            JsonLinesWriter(directory.metrics, trainer.step),
            TensorBoardWriter(directory.path),
            console,
        ]
    )

    # ------------------------------------------------------------------ what happens between loops
    def epoch(step: int) -> float:
        return step / trainer.steps_per_epoch

    def log(step: int) -> None:
        values = trainer.read_metrics()
        values["learning_rate"] = trainer.learning_rate
        speed = trainer.pace.take_steps_per_second()
        if speed is not None:
            values["examples_per_second"] = speed * experiment.global_batch_size
        if trainer.loss_scale is not None:
            values["loss_scale"] = trainer.loss_scale
            values["skipped_updates"] = trainer.skipped_updates
        writers.write(step, epoch(step), "train", values)

    def evaluate(step: int) -> None:
        writers.write(step, epoch(step), "eval", trainer.evaluate())

    def save(step: int) -> None:
        checkpoints.save()

    def show_progress(step: int) -> None:
        if console.shows_progress:
            console.advance(step, trainer.peek_metrics() | speed_of(trainer))

    def stop_if_asked(step: int) -> None:
        if stop.received is not None and step < total:
            checkpoints.save()
            raise TrainingInterrupted(
                f"stopped by {stop.received.name} at step {step:,} of {total:,}, after saving. "
                "The same command goes on from there."
            )

    # ------------------------------------------------------------------ loop
    try:
        if mode == "eval":
            evaluate(trainer.step)
            return
        if trainer.step >= total:
            console.line(f"nothing left to do: step {trainer.step:,} of {total:,} is reached")
            return
        actions: list[Action] = [
            EachLoop(show_progress),
            Periodic(experiment.log_every, log, last=total),
        ]
        if mode == "train_and_eval" and experiment.eval_data is not None:
            actions.append(Periodic(experiment.eval_every, evaluate, last=total))
        actions.append(Periodic(experiment.checkpoint_every, save, last=total))
        actions.append(EachLoop(stop_if_asked))
        with StopSignals() as stop:
            console.start(trainer.step, total)
            trainer.train(total - trainer.step, actions)
    finally:
        # ---------------------------------------------------------------- close
        console.close()
        writers.close()
    console.line(f"done: step {total:,}, written to {directory.path}")


def build_trainer(experiment: Experiment, placement: Placement) -> Trainer:
    """The Trainer of an experiment in its place."""
    return Trainer(
        experiment.task,
        experiment.optimizer,
        experiment.train_data,
        global_batch_size=experiment.global_batch_size,
        eval_data=experiment.eval_data,
        strategy=placement.strategy,
        seed=experiment.seed,
        accumulation_steps=experiment.accumulation_steps,
        clip_norm=experiment.clip_norm,
        loss_scale=experiment.loss_scale or "auto",
        max_skipped_updates=experiment.max_skipped_updates,
        steps_per_loop=placement.steps_per_loop,
        data_on_device=placement.data_on_device,
        communication=placement.communication,
    )


def resolve_seed(directory: RunDirectory | None) -> None:
    """Binds SEED where the config leaves it open: to the earlier run's here, or to a new one."""
    if config.get("SEED") is not None:
        return
    saved = (directory.saved_config() if directory else None) or ""
    earlier = re.search(r"^SEED = (\d+)", saved, re.MULTILINE)
    config.set("SEED", int(earlier[1]) if earlier else secrets.randbelow(2**31))


def compare_with_saved_config(directory: RunDirectory, console: RunConsole, strict: bool) -> None:
    """Makes sure that a directory with checkpoints belongs to this experiment.

    Raises:
      CheckpointError: If `strict` and it was written by another config.
    """
    saved = directory.saved_config()
    if saved is None:
        return
    changes = config.differences(saved, ignore=_MAY_CHANGE)
    if not changes:
        return
    listing = "\n".join(f"  {line}" for line in changes)
    if strict:
        raise CheckpointError(
            f"--model_dir={directory.path} holds a run of another config. It differs in\n"
            f"{listing}\nGive a new --model_dir, or the config of that run."
        )
    console.line(f"the config differs from that of the run in {directory.path}:\n{listing}")


def plan(experiment: Experiment, trainer: Trainer, total: int) -> dict[str, str]:
    """What is about to happen, as names and texts."""
    replicas = trainer.strategy.num_replicas_in_sync
    batch = experiment.global_batch_size
    microbatch = batch // replicas // experiment.accumulation_steps
    split = f"{replicas} replicas × " if replicas > 1 else ""
    if experiment.accumulation_steps > 1:
        split += f"{experiment.accumulation_steps} microbatches × "
    parameters = sum(int(np.prod(v.shape)) for v in trainer.model.trainable_variables)
    return {
        "devices": f"{describe_devices(trainer.strategy)}, {type(trainer.strategy).__name__}",
        "replicas": str(replicas),
        "global batch size": f"{batch:,} = {split}{microbatch:,}" if split else f"{batch:,}",
        "batch per replica": f"{batch // replicas:,}",
        "precision": keras.config.dtype_policy().name,
        "model": f"{trainer.model.name}, {parameters:,} trainable parameters",
        "training data": f"{trainer.num_examples:,} examples, "
        f"{trainer.steps_per_epoch:,} steps an epoch",
        "steps": f"{total:,} ({total / trainer.steps_per_epoch:.1f} epochs)",
        "learning rate": f"{peak_learning_rate(trainer, total):.6g} at its peak",
        "seed": str(experiment.seed),
    }


def peak_learning_rate(trainer: Trainer, total: int) -> float:
    """The largest learning rate of the run, to the nearest thousandth of its length."""
    schedule = trainer.optimizer._learning_rate
    if not isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
        return trainer.learning_rate
    return max(float(schedule(step)) for step in {*range(0, total, max(1, total // 1000)), 0})


def show_dry_run(console: RunConsole, trainer: Trainer) -> None:
    """Makes one step and prints what came of it, with the resolved config."""
    console.line(f"one step on one batch: {format_figures(trainer.train(1))}")
    console.line("\n" + config.operative_config_text().strip())


def speed_of(trainer: Trainer) -> dict[str, float]:
    """Examples per second of the latest loops, for the progress bar."""
    speed = trainer.pace.steps_per_second
    return {} if speed is None else {"examples_per_second": speed * trainer.global_batch_size}
