"""A process of the check: runs tasks in one configuration and writes the computed values.

    python -m ddl.checking.worker SPEC

SPEC is a JSON file with the fields of `ddl.checking.processes`. Each configuration runs in a
process of its own, because TensorFlow splits the CPU once per process.
"""

import importlib
import json
import math
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from ddl import config
from ddl.checking.configurations import ONE, UPDATES, WRITER, Configuration
from ddl.checking.recorder import Recorder
from ddl.checking.recording import Failure, Recording
from ddl.checking.small_data import small_data
from ddl.checkpoints.checkpoints import Checkpoints
from ddl.config.registry import user_packages
from ddl.distribution.communication import Communication
from ddl.distribution.devices import configure_devices
from ddl.distribution.strategies import build_strategy
from ddl.distribution.workers import Workers
from ddl.errors import DdlError, check_takes
from ddl.precision import set_precision
from ddl.run import train
from ddl.run.placement import Placement
from ddl.step.observing import observed_by
from ddl.tasks.gather import MicrobatchesError
from ddl.training.checks.same_on_replicas import ReplicasDifferError
from ddl.training.trainer import Trainer
from ddl.user_code import message_of, place_of

_SEED = 1
_ARGUMENTS = ("strategy", "accumulation_steps")  # of a factory
_MOST_LINES = 8  # of an error or of its traceback

_Build = Callable[[], Trainer]


class _CallError(Exception):
    """A mistake in the call of the check, which no configuration can run."""


def main(spec: Mapping[str, Any]) -> None:
    """Runs all jobs of a spec."""
    sys.path[:] = spec["path"]
    configuration = Configuration(*spec["configuration"])
    configure_devices(num_virtual_devices=configuration.replicas)
    strategy = build_strategy("one_device" if configuration.replicas == 1 else "mirrored")
    for job in spec["jobs"]:
        recording = Recording()
        run(job, configuration, strategy, recording)
        file = Path(job["folder"]) / configuration.file
        partial = file.with_suffix(".partial")
        partial.write_bytes(pickle.dumps(recording))
        partial.replace(file)


def run(
    job: Mapping[str, Any],
    configuration: Configuration,
    strategy: tf.distribute.Strategy,
    recording: Recording,
) -> None:
    """Runs a job, and records its values or the error that ended it."""
    try:
        _run(job, configuration, strategy, recording)
    except _CallError as error:
        recording.mistake = str(error)
    except DdlError as error:
        recording.failure = Failure(str(error), is_refusal=True)
    except Exception as error:
        where = place_of(error, user_packages())
        lines = message_of(error).splitlines()[:_MOST_LINES]
        last = traceback.format_exc().splitlines()[-_MOST_LINES:]
        lines += [where.note] if where else last
        recording.failure = Failure("\n".join(lines), is_refusal=False)


def _run(
    job: Mapping[str, Any],
    configuration: Configuration,
    strategy: tf.distribute.Strategy,
    recording: Recording,
) -> None:
    keras.utils.clear_session()
    set_precision("float64")
    keras.utils.set_random_seed(_SEED)
    tf.random.set_seed(_SEED + 1)
    recorder = Recorder(strategy, recording)
    if "gin" in job:
        made = _from_gin(job, configuration, strategy, recording.notes)
    else:
        made = _from_factory(job, configuration, strategy)
    with observed_by(recorder), recorder.watching(), small_data(recording.notes):
        try:
            trainer = _made(made, job, configuration)
        except MicrobatchesError as error:
            recording.skipped = (
                f"Configurations with several microbatches were not checked: {error}"
            )
            return
        _check_trainer(trainer, configuration, strategy)
        recording.task = type(trainer.task).__name__
        sizes = [pipeline.global_batch_size for pipeline in trainer.pipelines.values()]
        recording.batch_size = math.gcd(*sizes)
        recording.normalizing = [
            layer.name
            for layer in trainer.training_layers
            if isinstance(layer, keras.layers.BatchNormalization)
        ]
        _train(trainer, configuration, recorder, Path(job["folder"]) / "checkpoints")


def _made(build: _Build, job: Mapping[str, Any], configuration: Configuration) -> Trainer:
    """Returns the trainer; an error of a factory on one device is one of the call."""
    try:
        return build()
    except DdlError:
        raise
    except (Exception, SystemExit) as error:
        if configuration != ONE or "factory" not in job:
            raise
        place = place_of(error, user_packages())
        where = f"\n{place.note}" if place else ""
        reason = "\n".join(message_of(error).splitlines()[:_MOST_LINES])
        raise _CallError(f"The factory {job['factory']!r} raised {reason}{where}") from error


def _train(
    trainer: Trainer, configuration: Configuration, recorder: Recorder, folder: Path
) -> None:
    """Makes the updates; the run of `WRITER` saves a checkpoint before the last one."""
    checkpoints = Checkpoints(folder, trainer)
    if configuration.resumed and checkpoints.restore_latest() is None:
        return  # the other run has failed, and reports why
    for update in range(trainer.step, UPDATES):
        if configuration == WRITER and update == UPDATES - 1:
            checkpoints.check()
            with suppress(ReplicasDifferError):  # the report names the variable
                checkpoints.save()
                checkpoints.finish()
        recorder.update = update
        with suppress(ReplicasDifferError):  # after the first update
            trainer.train(1)
        recorder.variables(trainer)


def _from_factory(
    job: Mapping[str, Any], configuration: Configuration, strategy: tf.distribute.Strategy
) -> _Build:
    """Returns a function that calls the factory of a job, such as "package.module:function"."""
    module, _, name = job["factory"].partition(":")
    try:
        factory = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise _CallError(
            f"{job['factory']!r} cannot be imported: {error}. Pass the name of a function in a "
            'module, such as "my_package.my_module:make_trainer"; move a function of a notebook '
            "to a file."
        ) from error

    try:
        check_takes(f"The factory {job['factory']!r}", factory, (), _ARGUMENTS)
    except DdlError as error:
        raise _CallError(str(error)) from error

    def build() -> Trainer:
        with strategy.scope():
            return factory(strategy=strategy, accumulation_steps=configuration.microbatches)

    return build


def _from_gin(
    job: Mapping[str, Any],
    configuration: Configuration,
    strategy: tf.distribute.Strategy,
    notes: list[str],
) -> _Build:
    """Returns a function that builds the trainer of a config; adds notes."""
    gin = job["gin"]
    own = (
        "set_numerics.precision = 'float64'",
        f"Trainer.accumulation_steps = {configuration.microbatches}",
    )
    try:
        given = gin["files"], gin["search_path"], gin["allow_unused"]
        config.load(given[0], [*gin["params"], *own], *given[1:])
    except DdlError as error:
        raise _CallError(str(error)) from error
    if config.get_macro("PER_REPLICA_BATCH_SIZE") is not None:
        raise _CallError(
            "PER_REPLICA_BATCH_SIZE makes the global batch, and with it the result, depend on the "
            "number of replicas. Check the task with --gin_param='PER_REPLICA_BATCH_SIZE = None' "
            "and --gin_param='GLOBAL_BATCH_SIZE = 64'."
        )
    if config.get_macro("SEED") is None:
        config.set_macro("SEED", _SEED)
    placement = Placement(strategy, Communication())
    return lambda: train.build(placement, Workers(strategy))[1]


def _check_trainer(
    trainer: Any, configuration: Configuration, strategy: tf.distribute.Strategy
) -> None:
    """Raises _CallError unless a factory has made the trainer that it was asked for."""
    if not isinstance(trainer, Trainer):
        raise _CallError(
            f"The factory must return a ddl.Trainer, got {trainer!r:.80}. End it with "
            "`return ddl.Trainer(…)`."
        )
    if trainer.accumulation_steps != configuration.microbatches:
        raise _CallError(
            "The factory must pass its argument accumulation_steps on to ddl.Trainer: expected "
            f"{configuration.microbatches}, got {trainer.accumulation_steps}."
        )
    if trainer.strategy is not strategy:
        raise _CallError("The factory must make the ddl.Trainer under its argument `strategy`.")
    if configuration != ONE and trainer.step:
        raise _CallError("The factory must return a ddl.Trainer that has made no update.")


def _end_with_parent() -> None:
    """Ends this process and its children once standard input is closed: the check has ended."""
    parent = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # a task that reads its standard input finds it empty
    os.close(nothing)

    def wait() -> None:
        while os.read(parent, 1024):
            pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    _end_with_parent()
    main(json.loads(Path(sys.argv[1]).read_text()))
