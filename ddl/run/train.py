"""One run from a config: build → train, evaluate, export or predict."""

import math
import resource
from collections.abc import Sequence
from functools import partial
from tempfile import TemporaryDirectory

import keras
import tensorflow as tf

from ddl import config
from ddl.choices import Mode
from ddl.data.pipeline import BatchPipeline
from ddl.distribution.traits import traits_of
from ddl.distribution.workers import Workers
from ddl.errors import ConfigError, DdlError
from ddl.metrics.history import format_figures
from ddl.optimizers.groups import ONLY, by_name
from ddl.optimizers.learning_rate import LearningRate, learning_rate_at
from ddl.run.callbacks import AfterEvaluation, AfterSave, Every
from ddl.run.comparing import check_same_on_all, compare_with_saved_config
from ddl.run.directory import RunDirectory
from ddl.run.from_checkpoints import evaluate_restored, export, exported_models, follow
from ddl.run.loop import Run, warm_start
from ddl.run.plan import Files, Placement, RunPlan, build, describe_devices
from ddl.run.predicting import check_predicts, predict
from ddl.run.writers import RunConsole
from ddl.tasks.parts import models_of
from ddl.training.trainer import Trainer


def run(
    placement: Placement,
    model_dir: str | None,
    mode: Mode = "train_and_eval",
    dry_run: bool | str = False,
    allow_unused: Sequence[str] = (),
    checkpoint: str | int = "latest",
    follow_timeout: float | None = None,
    profile: tuple[int, int] | None = None,
    predictions: str | None = None,
) -> None:
    """Trains, evaluates, exports or predicts, as the loaded gin config and the mode say.

    Call it on all workers, in eager, cross-replica context.

    Args:
      placement: Strategy and the other settings from flags.
      model_dir: Directory the run writes to and resumes from; None makes it a dry run.
      mode: Whether to train, evaluate, do both, export, or predict.
      dry_run: Build everything, make one step of all, print the plan and write nothing; "config"
        prints all values used before the plan, as operative_config.gin would hold them.
      allow_unused: Names of bindings that may go unused.
      checkpoint: The checkpoint to evaluate, export or predict with: `latest`, `best` or a step.
      follow_timeout: With mode `eval`, seconds to wait for each next checkpoint; None evaluates
        one checkpoint.
      profile: The step to begin a profile after, and its last step.
      predictions: With mode `predict`, the file to write: .jsonl or .npz.

    Raises:
      ConfigError: If the config, a flag or the mode is invalid, or workers differ in them.
      DataError: If the data are not what the task needs.
      ModelDirectoryError: If the directory or a checkpoint cannot be used or written.
      TrainingInterrupted: If a signal stopped the training.
      TrainingDiverged: If the loss is no longer finite.
      DdlError: For other errors that the user can fix.
    """
    flags: dict[str, object] = {"mode": mode, "dry_run": dry_run, "checkpoint": checkpoint}
    flags |= {"follow_timeout": follow_timeout, "predictions": predictions, "profile": profile}
    flags |= {x: getattr(placement, x) for x in ("jit_compile", "shard_optimizer_state")}
    # ------------------------------------------------------------------ build
    workers = Workers(placement.strategy)
    console = RunConsole(shows=workers.is_chief)
    directory = None if model_dir is None else RunDirectory(model_dir, writes=mode != "predict")
    check_same_on_all(workers, flags)
    console.line("Building data, model and optimizer.")
    run_plan, trainer = build(placement, workers, directory)
    exported_models(trainer)
    trains = mode in ("train", "train_and_eval")
    evaluates = mode != "train" and trainer.eval_pipeline is not None
    total = run_plan.total_steps(trainer)
    dropped = config.check_all_used(allow_unused)
    if trains:
        run_plan.check(trainer)
    if mode == "predict":
        if predictions is None:
            raise ConfigError("--mode=predict needs --predictions=FILE, got none. Pass it.")
        wanted = config.build("Predictions")
        data = wanted.data() if callable(wanted.data) else wanted.data
        source = check_predicts(trainer, predictions, data)
    named = summary(trainer, total).items()
    lines = "\n".join([*(f"{name}: {text}" for name, text in named), *dropped])
    if dry_run or directory is None:
        try_all(trainer, run_plan, evaluates, console)
        hint = "--dry_run=config prints all values that the run would use."
        shown = config.operative_config_text().strip() if dry_run == "config" else hint
        console.line(f"{shown}\n{lines}\nThe dry run found no error, and wrote nothing.")
        return
    console.line(lines)
    files = Files.of(directory, trainer, run_plan, console.line)

    # ------------------------------------------------------------------ train
    if trains:
        Run(trainer, run_plan, files, console, evaluates, profile).train(
            compare=partial(compare_with_saved_config, directory, trainer, console.line),
            opened=partial(_write_configs, directory),
        )
        return

    # ------------------------------------------------------------------ evaluate, export, predict
    if follow_timeout is not None:
        follow(trainer, files, follow_timeout, total, console)
        return
    saved = files.checkpoints.restore_model(checkpoint)
    console.line(f"Restored step {trainer.step:,} from {saved}.")
    if mode == "eval":
        evaluate_restored(trainer, files, console)
    elif mode == "export":
        for path in export(trainer, directory.export):
            console.line(f"Exported {path}.")
    elif predictions is not None:
        text, features = config.config_text(), wanted.features
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
    warm_start(trainer, run_plan, console)
    made = trainer.train(1, progress=False)
    console.line(f"One step on one batch: {format_figures(made)}")
    console.line(f"Peak memory: {_peak_memory()}")
    evaluated = made
    if evaluates and (pipeline := trainer.eval_pipeline) is not None:
        rows = pipeline.first_examples(pipeline.global_batch_size)
        evaluated = trainer.evaluate({name: value.numpy() for name, value in rows.items()})
        console.line(f"An evaluation of one batch: {format_figures(evaluated)}")
    with TemporaryDirectory(prefix="ddl-dry-run-") as folder:
        directory = RunDirectory(folder)
        files = Files.of(directory, trainer, run_plan, console.line)
        run, checkpoints = Run(trainer, run_plan, files, console, evaluates), files.checkpoints
        for writer in (files.json_lines, files.events):
            writer.write(trainer.step, trainer.epoch_at(trainer.step), "train", made)
        for every in run_plan.of(Every):
            run.call(every, "train", made)
        for after in run_plan.of(AfterEvaluation):
            run.call(after, "eval", evaluated)
        checkpoints.save()
        path = checkpoints.written()
        for callback in run_plan.of(AfterSave):
            run.call(callback, "train", made, path)
        checkpoints.finish()
        files.events.close()
        if Workers(trainer.strategy).number == 1 and not traits_of(trainer.strategy).asynchronous:
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


def summary(trainer: Trainer, total: int) -> dict[str, str]:
    """Returns the start-up summary of a run as texts by name.

    Args:
      trainer: The trainer of the run.
      total: Length of the run in steps.

    Raises:
      ConfigError: If a learning rate is unusable, or a parameter group stays frozen.
    """
    replicas, each = trainer.strategy.num_replicas_in_sync, trainer.steps_per_epoch
    note = traits_of(trainer.strategy).note
    models = [
        f"{model.name}, {sum(math.prod(v.shape) for v in model.trainable_variables):,} trainable "
        "parameters"
        for model in models_of(trainer.task).values()
    ]
    sources = trainer.pipelines.items()
    return {
        **({"strategy": note} if note else {}),
        "devices": describe_devices(trainer.strategy),
        "replicas": str(replicas),
        "global batch size": "; ".join(f"{n} {_batch(x, replicas)}".strip() for n, x in sources),
        "precision": keras.config.dtype_policy().name,
        "model": ", ".join(models),
        "training data": "; ".join(f"{n} {_examples(x)}".strip() for n, x in sources),
        "steps": f"{total:,}" + (f" ({total / each:.1f} epochs)" if each else ""),
        **_learning_rates(trainer, total),
        "seed": str(config.get_macro("SEED")),
    }


def _examples(pipeline: BatchPipeline) -> str:
    if pipeline.num_examples is None:
        return "examples without a known end"
    return f"{pipeline.num_examples:,} examples, {pipeline.steps_per_epoch:,} steps per epoch"


def _batch(pipeline: BatchPipeline, replicas: int) -> str:
    """Describes how the batches of an update are divided."""
    size, each = pipeline.global_batch_size, pipeline.microbatches
    several = f"{pipeline.batches_per_update} × " if pipeline.batches_per_update > 1 else ""
    text = f"{several}{size:,}"
    if replicas * each == 1:
        return text
    of_each = f"{each} microbatches × " if each > 1 else ""
    return f"{text} = {replicas} replicas × {of_each}{size // replicas // each:,}"


def _learning_rates(trainer: Trainer, total: int) -> dict[str, str]:
    """Describes the learning rate of each optimizer; refuses one that is unusable."""
    described: dict[str, str] = {}
    for name, optimizer in by_name(trainer.optimizer).items():
        texts = _learning_rate(optimizer, total * (trainer.updates_per_step[name] or 1))
        of = "" if name == ONLY else f" ({name})"
        described |= {f"{what}{of}": text for what, text in texts.items()}
    return described


def _learning_rate(optimizer: keras.optimizers.Optimizer, steps: int) -> dict[str, str]:
    """Describes a learning rate over a run; refuses one that is unusable at a sampled step."""
    schedule = optimizer._learning_rate
    sampled = {round(place * max(steps - 1, 0) / 20) for place in range(21)}
    description = {}
    if isinstance(schedule, LearningRate):
        if schedule.warmup_steps >= steps:
            raise ConfigError(
                f"The warm-up of {schedule.warmup_steps:,} updates must be shorter than the run of "
                f"{steps:,}. Lower WARMUP_STEPS or WARMUP_EPOCHS, or train longer."
            )
        sampled.add(schedule.warmup_steps)
        description = schedule.description()
    rates = {step: learning_rate_at(optimizer, step) for step in sorted(sampled)}
    peak, last = max(rates.values()), rates[max(steps - 1, 0)]
    for step, rate in rates.items():
        if not 0 <= rate < math.inf or not peak > 0:
            raise ConfigError(
                f"The learning rate must be finite, at least 0 and not always 0, got {rate:g} at "
                f"update {step:,}. Check LEARNING_RATE and the arguments of the schedule."
            )
    end = f", {last:.6g} at the end" if last != peak else ""
    return {"learning rate": f"{peak:.6g} at its peak{end}", **description}
