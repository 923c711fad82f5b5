"""One run from a config: build → train, evaluate, export or predict."""

import re
import resource
import secrets
from collections.abc import Sequence
from contextlib import closing

import tensorflow as tf

from ddl import config
from ddl.checkpoints.checkpoints import Checkpoints
from ddl.choices import Mode
from ddl.distribution.workers import Workers
from ddl.errors import ConfigError
from ddl.optimizers.plateau import plateaus_of
from ddl.run.checks.config_changes import compare_with_saved_config
from ddl.run.checks.learning_rate import check_plateau
from ddl.run.checks.plan import check_best_metric, check_run_plan, without_effect
from ddl.run.checks.same_on_all_workers import check_same_on_all
from ddl.run.console import RunConsole, format_figures
from ddl.run.directory import RunDirectory
from ddl.run.from_checkpoints import SavedWeights, evaluate_saved, export_saved, follow
from ddl.run.lengths import check_lengths, resolve_lengths, withhold_lengths
from ddl.run.placement import Placement
from ddl.run.plan import RunPlan
from ddl.run.predicting.predict import Predicting
from ddl.run.profiling import check_steps
from ddl.run.summary import notes, summary
from ddl.run.training_run import Files, train_to_end, warm_start
from ddl.signals import StopSignals
from ddl.training.trainer import Trainer


def run(
    placement: Placement,
    model_dir: str | None,
    mode: Mode = "train_and_eval",
    dry_run: bool = False,
    allow_unused: Sequence[str] = (),
    saved_weights: SavedWeights | None = None,
    follow_timeout: float | None = None,
    profile: tuple[int, int] | None = None,
    predictions: str | None = None,
) -> None:
    """Trains, evaluates, exports or predicts, as the loaded gin config and the mode say.

    Call it on all workers, in eager, cross-replica context.

    Args:
      placement: Strategy, communication and the other settings from flags.
      model_dir: Directory the run writes to and resumes from; None makes it a dry run.
      mode: Whether to train, evaluate, do both, export, or predict.
      dry_run: Build everything, make one step, print the plan and write nothing.
      allow_unused: Names of bindings that may go unused.
      saved_weights: Weights to evaluate, export or predict with; None takes the newest checkpoint,
        and its averages if it has any.
      follow_timeout: With mode `eval`, seconds to wait for each next checkpoint; None evaluates
        one checkpoint.
      profile: The step to begin a profile after, and its last step.
      predictions: With mode `predict`, the file to write: .jsonl, .npz or .parquet.

    Raises:
      ConfigError: If the config, a flag or the mode is invalid, or workers differ in them.
      DataError: If the data are not what the task needs.
      ModelDirectoryError: If the directory or a checkpoint cannot be used or written.
      TrainingInterrupted: If a signal stopped the training.
      TrainingDiverged: If the loss is no longer finite.
      DdlError: For other errors that the user can fix.
    """
    # ------------------------------------------------------------------ build
    workers = Workers(placement.strategy)
    if workers.number > 1 and mode == "export":
        raise ConfigError(
            f"--mode=export must run in one process, got {workers.number} workers. Start one "
            "process with --cluster=none."
        )
    console = RunConsole(shows=workers.is_chief)
    directory = None if model_dir is None else RunDirectory(model_dir)
    what = saved_weights or SavedWeights()
    flags = {
        **{"mode": mode, "dry_run": dry_run, "follow_timeout": follow_timeout},
        **{"bytes_per_pack": placement.communication.bytes_per_pack},
        **{"jit_compile": placement.jit_compile, "profile": profile},
        **{"shard_optimizer_state": placement.shard_optimizer_state},
        **{"checkpoint": what.checkpoint},
        "predictions": predictions,
    }
    check_same_on_all(workers, flags)
    run_plan, trainer = build(placement, workers, directory)
    predicting = None
    if mode == "predict":
        if predictions is None:
            raise ConfigError("--mode=predict needs --predictions=FILE, got none. Pass it.")
        predicting = Predicting(predictions, config.build("Predictions"), trainer, console)
    dropped = config.check_all_used(allow_unused)
    check_best_metric(run_plan.retention.best_metric, trainer)
    trains = mode in ("train", "train_and_eval")
    if trains:
        check_run_plan(run_plan, trainer)
        check_steps(profile, run_plan.total_steps(trainer.steps_per_epoch))
    evaluates = mode != "train" and trainer.has_eval_data
    for plateau in plateaus_of(trainer.optimizer).values():
        check_plateau(plateau, run_plan, trainer.eval_metric_names, evaluates)
    total = run_plan.total_steps(trainer.steps_per_epoch)
    console.summary("ddl", summary(trainer, total))
    effectless = without_effect(run_plan, trainer, evaluates) if trains else []
    for note in [*dropped, *notes(trainer), *effectless]:
        console.line(note)
    if dry_run or directory is None:
        warm_start(trainer, run_plan, console)
        figures = trainer.train(1)
        console.line(f"One step on one batch: {format_figures(figures)}")
        console.line(f"Peak memory: {peak_memory()}")
        Checkpoints("", trainer).check()  # reads and writes no files
        console.line("\n" + config.operative_config_text().strip())
        return

    # ------------------------------------------------------------------ evaluate, export, predict
    files = Files.of(directory, trainer, run_plan, console)
    if not trains:
        compare_with_saved_config(directory, trainer, console, strict=False)
        if mode == "export":
            export_saved(what, trainer, files.checkpoints, directory, console)
            return
        if predicting is not None:
            predicting.run(what, files.checkpoints)
            return
        parts = (trainer, files.checkpoints, files.json_lines, files.events, console)
        with closing(files.events):
            if follow_timeout is None:
                evaluate_saved(what, *parts)
            else:
                follow(what, follow_timeout, total, *parts)
        return

    # ------------------------------------------------------------------ train
    def opened() -> None:
        directory.write_configs(config.config_text(), config.operative_config_text())

    with StopSignals(trainer.request_stop) as stop:
        train_to_end(
            *(trainer, run_plan, files, console, stop),
            evaluates=evaluates,
            profile=profile,
            before_restore=lambda: compare_with_saved_config(
                directory, trainer, console, strict=True
            ),
            opened=opened,
        )


def build(
    placement: Placement, workers: Workers, directory: RunDirectory | None = None
) -> tuple[RunPlan, Trainer]:
    """Builds the run plan and the Trainer from the loaded config.

    Enters the strategy's scope. Call it on all workers, in eager, cross-replica context.

    Args:
      placement: Strategy, communication and the other settings from flags.
      workers: The workers of the strategy.
      directory: Directory of the run; its saved seed is used if the config binds none.

    Raises:
      DdlError: For errors that the user can fix, such as a ConfigError or a DataError.
    """
    withhold_lengths()
    resolve_seed(directory, workers)
    with placement.strategy.scope():
        config.build("set_numerics")
        batches = resolve_lengths()
        trainer = config.build("Trainer", **vars(placement))
        check_lengths(batches, trainer)
        # Building the plan would report a mistyped metric as one without a direction.
        check_best_metric(config.build_bound("Retention", "best_metric"), trainer)
        # Used in every mode, so that a config may bind what another mode needs.
        config.build_bound("Predictions", "data")
        config.build("Predictions")
        return config.build("RunPlan"), trainer


def peak_memory() -> str:
    """Returns the largest memory that this process, and each of its GPUs, has used so far."""
    peaks = {"process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10}  # Linux: KiB
    for gpu in tf.config.list_logical_devices("GPU"):
        name = gpu.name.removeprefix("/device:")
        peaks[name] = tf.config.experimental.get_memory_info(name)["peak"]
    return ", ".join(f"{name} {peak / 2**20:,.0f} MiB" for name, peak in peaks.items())


def resolve_seed(directory: RunDirectory | None, workers: Workers) -> None:
    """Binds SEED if the config does not: to the saved config's seed, or to a random one.

    All workers take the chief's seed.
    """
    if config.get_macro("SEED") is not None:
        return
    saved = (directory.saved_config() if directory else None) or ""
    earlier = re.search(r"^SEED = (\d+)", saved, re.MULTILINE)
    seed = int(earlier[1]) if earlier else secrets.randbelow(2**31)
    config.set_macro("SEED", workers.broadcast(seed))
