"""The parts of a run: its plan, its place on devices, its Trainer from the config, its files.

The training data and the batch size are built first: `@steps_per_epoch()` in a config, which
periods and schedules may call, follows from them.
"""

import dataclasses
import secrets
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from ddl import config
from ddl.checkpoints.checkpoints import Checkpoints
from ddl.checkpoints.directory import Retention
from ddl.checkpoints.warm_start import WarmStart
from ddl.choices import JitCompile, check_count, check_positive
from ddl.config import registry
from ddl.data.conversion import sources_by_name
from ddl.data.pipeline import BatchPipeline
from ddl.distribution.devices import replica_devices
from ddl.distribution.traits import traits_of
from ddl.distribution.workers import Workers
from ddl.errors import ConfigError, did_you_mean
from ddl.optimizers.schedules import total_steps
from ddl.run.callbacks import AfterEvaluation, Callback, EarlyStopping, checked_callbacks
from ddl.run.directory import RunDirectory
from ddl.run.trackers import Tracker
from ddl.run.writers import JsonLinesWriter, TensorBoardWriter
from ddl.training.checks import sizes_by_source
from ddl.training.trainer import Trainer

Kind = TypeVar("Kind")


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """Lengths and periods of a run, in steps unless stated otherwise. A step is one update.

    Attributes:
      train_steps: Length of the run. Exactly one of `train_steps` and `train_epochs` is given.
      train_epochs: Length of the run in passes over the training data.
      eval_every: Period of evaluations; None evaluates at the end only.
      checkpoint_every: Period of checkpoints; None saves at the end only.
      log_every: Period of training lines in metrics.jsonl.
      retention: Which checkpoints to keep.
      warm_start: Source of a new run's initial weights; None keeps the initializers'. A resumed
        run ignores it.
      callbacks: Functions to call between loops, after evaluations and after saves, and an
        `EarlyStopping`.
      trackers: Services that get the figures of the run, such as `@MLflow()`.

    Raises:
      ConfigError: If a value is not positive, `callbacks` hold something else,
        not exactly one length is given, or `retention.every` is not a multiple of
        `checkpoint_every`.
    """

    train_steps: int | None = None
    train_epochs: float | None = None
    eval_every: int | None = None
    checkpoint_every: int | None = None
    log_every: int = 100
    retention: Retention = dataclasses.field(default_factory=Retention)
    warm_start: WarmStart | None = None
    callbacks: Sequence[Callback | EarlyStopping] = ()
    trackers: Sequence[Tracker] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "callbacks", checked_callbacks(self.callbacks))
        total_steps(self.train_steps, self.train_epochs, steps_per_epoch=1)  # checks the length
        for name in ("eval_every", "checkpoint_every", "log_every"):
            if getattr(self, name) is not None or name == "log_every":
                check_count(f"RunPlan.{name}", getattr(self, name))
        every, saved_every = self.retention.every, self.checkpoint_every
        if every is not None and (saved_every is None or every % saved_every):
            what = f"Retention.every must be a multiple of CHECKPOINT_EVERY, here {saved_every}"
            raise ConfigError(f"{what}, got {every}. Change one of the two.")

    def of(self, kind: type[Kind]) -> list[Kind]:
        """Returns the callbacks of a kind, such as `Every`."""
        return [one for one in self.callbacks if isinstance(one, kind)]

    def total_steps(self, trainer: Trainer) -> int:
        """Returns the length of the run in steps; a fraction of a batch counts as a whole one.

        Raises:
          DataError: If it is given in epochs, and the data have no end.
        """
        if self.train_epochs is not None:
            trainer.count_examples()
        return total_steps(self.train_steps, self.train_epochs, trainer.steps_per_epoch)

    def check(self, trainer: Trainer) -> None:
        """Checks that the run is possible with the trainer.

        Args:
          trainer: The trainer.

        Raises:
          ConfigError: If something needs evaluations, or a metric that they do not report.
        """
        for rule in self.of(EarlyStopping):
            check_metric("EarlyStopping.metric", rule.metric, trainer)
        check_metric("Retention.best_metric", self.retention.best_metric, trainer)
        needs = self.eval_every is not None or self.of(AfterEvaluation)
        if needs and trainer.eval_pipeline is None:
            raise ConfigError(
                "eval_every (macro EVAL_EVERY) and AfterEvaluation need data to evaluate on. Give "
                "Trainer.eval_data, or set eval_every to None and leave the callback out."
            )


def check_metric(parameter: str, metric: str | None, trainer: Trainer) -> None:
    """Raises ConfigError if evaluations do not report the metric of a parameter; None passes."""
    names = trainer.eval_metric_names
    if metric is not None and metric not in names:
        raise ConfigError(
            f"{parameter} must be a metric of the evaluation ({', '.join(names) or 'none'}), got "
            f"{metric!r}.{did_you_mean(metric, names, 0.6)} Correct it, or give Trainer.eval_data."
        )


def global_batch_size(total: int | None = None, per_replica: int | None = None) -> int:
    """Returns the global batch size, in examples. Call it in the strategy's scope.

    Args:
      total: Examples per update, for any number of replicas.
      per_replica: Examples per replica and update. The global batch, and with it the result of
        training, then depends on the number of replicas.

    Raises:
      ConfigError: If both are given, or neither, or if the size is not positive.
    """
    size = per_replica if total is None else total
    if size is None or (total is not None and per_replica is not None):
        raise ConfigError(
            "Exactly one of GLOBAL_BATCH_SIZE and PER_REPLICA_BATCH_SIZE must be given, got "
            f"{total} and {per_replica}. Set one of them to a number and the other to None."
        )
    check_positive("GLOBAL_BATCH_SIZE", total)
    check_positive("PER_REPLICA_BATCH_SIZE", per_replica)
    return size if per_replica is None else size * tf.distribute.get_strategy().num_replicas_in_sync


def steps_per_epoch(batches_per_update: int = 1) -> int | None:
    """Returns the updates of a pass over the first source of the config's training data.

    For configs, such as `EVAL_EVERY = @steps_per_epoch()`. Call it in the strategy's scope.

    Args:
      batches_per_update: Batches of the source that an update reads: those of a step that calls
        `update.next`.

    Raises:
      ConfigError: If the batch size is not bound, or the data use the result.
      DataError: If the data are not bound, or have no end.
    """
    sources = sources_by_name(training_data())
    size = config.build_bound("Trainer", "global_batch_size")
    name, first = next(iter(sources.items()))
    pipeline = BatchPipeline(first, sizes_by_source(size, [*sources])[name])
    pipeline.batches_per_update = batches_per_update
    pipeline.count_examples()
    return pipeline.steps_per_epoch


def training_data() -> Any:
    """Builds the training data of the config once; None if it binds none."""
    return config.build_bound("Trainer", "train_data", _converted)


def _converted(data: Any) -> Any:
    sources = sources_by_name(data)
    return sources.get("", sources)


def check_lengths(trainer: Trainer) -> None:
    """Raises ConfigError if `@steps_per_epoch()` counted other batches than the trainer reads."""
    reads = next(iter(trainer.pipelines.values())).batches_per_update
    name = registry.full_name("steps_per_epoch")
    for key, given in registry.operative_values().items():
        if key[1:] == (name, "batches_per_update") and given != reads:
            raise ConfigError(
                f"steps_per_epoch.batches_per_update must be {reads}, by the batches of each "
                f"update (update.next), got {given}. Add steps_per_epoch.batches_per_update = "
                f"{reads} to the config."
            )


@dataclasses.dataclass(frozen=True)
class Placement:
    """The settings of a run that come from flags, as arguments of the Trainer.

    Synchronous strategies compute the same updates up to rounding. Under a
    ParameterServerStrategy updates are asynchronous.

    Attributes:
      strategy: The `tf.distribute` strategy.
      steps_per_loop: Updates per Python call; None adapts the number.
      jit_compile: Whether XLA compiles the updates; "auto" does on GPUs.
      shard_optimizer_state: Whether each replica keeps the slots of its share of the weights alone.
    """

    strategy: tf.distribute.Strategy
    steps_per_loop: int | None = None
    jit_compile: JitCompile = "auto"
    shard_optimizer_state: bool = False


def build(
    placement: Placement, workers: Workers, directory: RunDirectory | None = None
) -> tuple[RunPlan, Trainer]:
    """Builds the run plan and the Trainer from the loaded config.

    Enters the strategy's scope. Call it on all workers, in eager, cross-replica context.

    Args:
      placement: Strategy and the other settings from flags.
      workers: The workers of the strategy.
      directory: Directory of the run; its saved seed is used if the config binds none.

    Raises:
      DdlError: For errors that the user can fix, such as a ConfigError or a DataError.
    """
    _resolve_seed(directory, workers)
    with placement.strategy.scope():
        config.build("set_numerics")
        training_data()
        config.build_bound("Trainer", "global_batch_size")
        trainer = config.build("Trainer", **vars(placement))
        # Building the plan would report a mistyped metric as one without a direction.
        metric = config.build_bound("Retention", "best_metric")
        check_metric("Retention.best_metric", metric, trainer)
        # Used in every mode, so that a config may bind what another mode needs.
        config.build_bound("Predictions", "data")
        config.build("Predictions")
        run_plan = config.build("RunPlan")
        check_lengths(trainer)
        return run_plan, trainer


def _resolve_seed(directory: RunDirectory | None, workers: Workers) -> None:
    """Binds SEED if the config does not: to the saved config's seed, or to a random one.

    All workers take the chief's seed.
    """
    if config.get_macro("SEED") is not None:
        return
    saved = directory.macros().get("SEED") if directory else None
    seed = secrets.randbelow(2**31) if saved is None else saved
    config.set_macro("SEED", workers.broadcast(seed))


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
        cls,
        directory: RunDirectory,
        trainer: Trainer,
        run_plan: RunPlan | None,
        report: Callable[[str], None],
    ) -> "Files":
        """Returns the files of a run in a directory. Creates nothing on disk."""
        json_lines = JsonLinesWriter(directory.metrics, report)
        retention = Retention() if run_plan is None else run_plan.retention
        folder, sync = directory.checkpoints, json_lines.sync
        checkpoints = Checkpoints(folder, trainer, retention, report, before_write=sync)
        return cls(directory, json_lines, TensorBoardWriter(directory.path, report), checkpoints)


def describe_devices(strategy: tf.distribute.Strategy) -> str:
    """Describes the devices of this process's replicas: 'GPU:0, GPU:1, MirroredStrategy'.

    GPUs have their numbers on this machine, as in --gpus; '2 of GPU:0' is one that is split. With
    parameter servers, describes the cluster: 'workers: 2, parameter servers: 1'.
    """
    traits, devices = traits_of(strategy), replica_devices(strategy)
    if traits.asynchronous:
        return f"workers: {strategy._num_workers}, parameter servers: {strategy._num_ps}"
    kind = tf.DeviceSpec.from_string(devices[0]).device_type
    seen = sorted(one.name.split(":", 1)[1] for one in tf.config.get_visible_devices(kind))
    names = ", ".join(seen) or kind
    count = "" if len(devices) == len(seen) else f"{len(devices)} of "
    return f"{count}{names}, {traits.class_name}"
