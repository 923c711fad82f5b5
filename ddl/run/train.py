"""One run from a config: build → train, evaluate, export or predict."""

import resource
from collections.abc import Sequence
from functools import partial
from tempfile import TemporaryDirectory

import tensorflow as tf

from ddl import config
from ddl.choices import Mode
from ddl.distribution.traits import traits_of
from ddl.distribution.workers import Workers
from ddl.errors import ConfigError, DdlError
from ddl.run.callbacks import AfterEvaluation, AfterSave, Moment
from ddl.run.comparing import check_same_on_all, compare_with_saved_config
from ddl.run.console import RunConsole, format_figures
from ddl.run.directory import RunDirectory
from ddl.run.from_checkpoints import evaluate_restored, export, follow, restore
from ddl.run.loop import Run, check_profile, warm_start
from ddl.run.plan import Files, Placement, RunPlan, build
from ddl.run.predicting import check_predicts, predict
from ddl.run.summary import summary
from ddl.signals import StopSignals
from ddl.training.trainer import Trainer


def run(
    placement: Placement,
    model_dir: str | None,
    mode: Mode = "train_and_eval",
    dry_run: bool = False,
    allow_unused: Sequence[str] = (),
    checkpoint: str | int = "latest",
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
      dry_run: Build everything, make one step of all, print the plan and write nothing.
      allow_unused: Names of bindings that may go unused.
      checkpoint: The checkpoint to evaluate, export or predict with: `latest`, `best` or a step.
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
    flags: dict[str, object] = {"mode": mode, "dry_run": dry_run, "checkpoint": checkpoint}
    flags |= {"profile": profile, "follow_timeout": follow_timeout, "predictions": predictions}
    flags |= {"jit_compile": placement.jit_compile}
    flags |= {"shard_optimizer_state": placement.shard_optimizer_state}
    # ------------------------------------------------------------------ build
    workers = Workers(placement.strategy)
    if workers.number > 1 and mode == "export":
        raise ConfigError(
            f"--mode=export must run in one process, got {workers.number} workers. Start one "
            "process with --cluster=none."
        )
    console = RunConsole(shows=workers.is_chief)
    directory = None if model_dir is None else RunDirectory(model_dir)
    check_same_on_all(workers, flags)
    console.line("Building data, model and optimizer.")
    run_plan, trainer = build(placement, workers, directory)
    trains = mode in ("train", "train_and_eval")
    evaluates = mode != "train" and trainer.has_eval_data
    total = run_plan.total_steps(trainer.steps_per_epoch)
    dropped = config.check_all_used(allow_unused)
    if trains:
        run_plan.check(trainer, evaluates)
        check_profile(profile, total)
    if mode == "predict":
        if predictions is None:
            raise ConfigError("--mode=predict needs --predictions=FILE, got none. Pass it.")
        wanted = config.build("Predictions")
        source = check_predicts(trainer, predictions, wanted.data, wanted.features)
    rows = summary(trainer, total)
    if dry_run or directory is None:
        try_all(trainer, run_plan, evaluates, console)
        console.line(config.operative_config_text().strip())
        console.summary(rows)
        return
    console.summary(rows)
    for note in dropped:
        console.line(note)
    files = Files.of(directory, trainer, run_plan, console.line)

    # ------------------------------------------------------------------ train
    if trains:
        with StopSignals(trainer.request_stop) as stop:
            Run(trainer, run_plan, files, console, evaluates, stop, profile).train(
                compare=partial(compare_with_saved_config, directory, trainer, console.line),
                opened=partial(_write_configs, directory),
            )
        return

    # ------------------------------------------------------------------ evaluate, export, predict
    if follow_timeout is not None:
        follow(trainer, files, follow_timeout, total, console)
        return
    saved = restore(trainer, files.checkpoints, checkpoint)
    console.line(f"Restored step {trainer.step:,} from {saved}.")
    if mode == "eval":
        evaluate_restored(trainer, files, console)
    elif mode == "export":
        for path in export(trainer, directory.export):
            console.line(f"Exported {path}.")
    elif predictions is not None:
        text = config.config_text()
        features = wanted.features
        predict(trainer, predictions, source, features, report=console.line, settings=text)


def _write_configs(directory: RunDirectory) -> None:
    directory.write(directory.config, config.config_text())
    directory.write(directory.operative_config, config.operative_config_text())


def try_all(trainer: Trainer, run_plan: RunPlan, evaluates: bool, console: RunConsole) -> None:
    """Makes one update, one batch of an evaluation, a save, a restore and an export.

    Calls each callback once. Leaves nothing on disk.

    Raises:
      DdlError: As the run would.
    """
    workers = Workers(trainer.strategy)
    warm_start(trainer, run_plan, console)
    made = trainer.train(1, progress=False)
    console.line(f"One step on one batch: {format_figures(made)}")
    console.line(f"Peak memory: {_peak_memory()}")
    evaluated = made
    pipeline = trainer.eval_pipeline
    if evaluates and pipeline is not None:
        rows = pipeline.first_examples(pipeline.global_batch_size)
        evaluated = trainer.evaluate({name: value.numpy() for name, value in rows.items()})
        console.line(f"An evaluation of one batch: {format_figures(evaluated)}")
    with TemporaryDirectory(prefix="ddl-dry-run-") as folder:
        directory = RunDirectory(folder)
        files = Files.of(directory, trainer, run_plan, console.line)
        for writer in (files.json_lines, files.events):
            writer.write(trainer.step, trainer.epoch_at(trainer.step), "train", made)
        checkpoints = files.checkpoints
        for callback in run_plan.calls:
            if not isinstance(callback, AfterSave):
                figures = evaluated if isinstance(callback, AfterEvaluation) else made
                with files.events.summaries("train", trainer.step):
                    callback(Moment(trainer, dict(figures).copy))
        checkpoints.check()
        checkpoints.save()
        path = checkpoints.written()
        for callback in run_plan.calls:
            if isinstance(callback, AfterSave):
                with files.events.summaries("train", trainer.step):
                    callback(Moment(trainer, dict(made).copy, path))
        checkpoints.finish()
        files.events.close()
        if workers.number == 1 and not traits_of(trainer.strategy).asynchronous:
            checkpoints.restore_latest()
            try:
                export(trainer, directory.export)
            except DdlError as error:
                console.line(f"--mode=export would fail: {error}")


def _peak_memory() -> str:
    """Returns the largest memory that this process, and each of its GPUs, has used so far."""
    peaks = {"process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10}  # Linux: KiB
    for gpu in tf.config.list_logical_devices("GPU"):
        name = gpu.name.removeprefix("/device:")
        peaks[name] = tf.config.experimental.get_memory_info(name)["peak"]
    return ", ".join(f"{name} {peak / 2**20:,.0f} MiB" for name, peak in peaks.items())
