"""The check of a task: the same updates on 1, 2 and 4 devices, and after a resume.

All runs but the resumed one take place in this process, each with a trainer of its own.
"""

import math
import multiprocessing
import pickle
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from ddl.checking.comparison import Value, compare, values_of
from ddl.checking.report import ONE, RESUMED, TWO, Difference, Place, Report, cause_of
from ddl.config.registry import user_packages
from ddl.distribution.devices import configure_devices
from ddl.errors import ConfigError, DdlError, TrainingInterrupted, check_takes, message_of, place_of
from ddl.precision import set_numerics
from ddl.run.fit import fit
from ddl.tasks.parts import layers_of
from ddl.training.trainer import Trainer

UPDATES = 3
"""Updates of each run; data that are cut have padding in the batch of the last one."""

MakeTrainer = Callable[[tf.distribute.Strategy], Trainer]

_TOLERANCES = {8: 1e-9, 4: 1e-4, 2: 5e-2}
"""Tolerated relative differences, by the bytes of the narrowest dtype of a layer."""

FOUR = Place("4 devices", 4)
CENTRAL = Place("central storage on 2 devices", 2)
PLACES = (TWO, FOUR, CENTRAL)
"""Places that are compared with one device; the resumed run follows."""

SEED = 1


def check(make_trainer: MakeTrainer) -> Report:
    """Checks that a task computes the same on any number of devices, and after a resume.

    The task makes three updates on 1, 2 and 4 virtual CPU devices and with central storage, in
    float64. After each one, figures and variables are compared. The third update is made again by a
    new process that resumes from a checkpoint, which must compute the same bits.

    Call it before TensorFlow has started: it splits the CPU. It clears Keras's session.

    Args:
      make_trainer: Function of a module. It is called with a `tf.distribute.Strategy`, in its
        scope, and returns a new `ddl.Trainer`; the task must be built anew in each call. With data
        of 2.5 batches the last update has padding.

    Returns:
      The report, with the first difference of each place.

    Raises:
      ConfigError: If the function makes no such trainer, or the task fails on one device.
      DdlError: If ddl refuses the task on one device.
    """
    check_takes("check.make_trainer", make_trainer, ("strategy",))
    _check_importable(make_trainer)
    configure_devices(num_virtual_devices=FOUR.devices)
    precision = keras.config.floatx(), keras.config.dtype_policy()
    try:
        with tempfile.TemporaryDirectory(prefix="ddl-check-") as folder:
            return _checked(make_trainer, folder)
    finally:
        keras.config.set_floatx(precision[0])
        keras.config.set_dtype_policy(precision[1])


def _checked(make_trainer: MakeTrainer, folder: str) -> Report:
    first = run(make_trainer, ONE)
    if isinstance(first, str):
        raise ConfigError(
            f"The task fails on one device, in float64: {first}\nIf dtypes differ, cast to that of "
            "a tensor, as in tf.cast(noise, x.dtype)."
        )
    places = [place for place in PLACES if place != FOUR or not first.divisor % FOUR.devices]
    runs: dict[Place, Run | str] = {}
    resuming = None
    try:
        for place in places:
            runs[place] = run(make_trainer, place, folder if place == TWO else None)
            if place == TWO and isinstance(runs[TWO], Run):
                resuming = Resuming(make_trainer, folder)
        if resuming is not None:
            runs[RESUMED] = resuming.result()
    finally:
        if resuming is not None:
            resuming.end()
    return _report(make_trainer, first, runs)


class Run(NamedTuple):
    """A run of a task.

    Attributes:
      task: Name of the task's class.
      divisor: Largest number that divides the microbatches of all sources.
      itemsize: Bytes of the narrowest dtype of a layer.
      steps_per_epoch: Updates of an epoch that ends with padding; else None.
      values: The values after each update, in the order of the computation.
    """

    task: str
    divisor: int
    itemsize: int
    steps_per_epoch: int | None
    values: Sequence[Value]


def run(make_trainer: MakeTrainer, place: Place, folder: str | None = None) -> Run | str:
    """Makes the updates of a run.

    Args:
      make_trainer: See `check`.
      place: Where it computes; `RESUMED` makes the last update alone.
      folder: Directory for the checkpoints before the last update, or of those to resume from.

    Returns:
      The run, or the error that ended it.

    Raises:
      DdlError: If a signal asked to stop, or ddl refuses the task on one device.
    """
    try:
        return _run(make_trainer, place, folder)
    except DdlError as error:
        if place == ONE or isinstance(error, TrainingInterrupted):
            raise
        return str(error)
    except Exception as error:
        text, where = message_of(error), place_of(error, user_packages())
        return f"{text}\n{where.note}" if where else text


def _run(make_trainer: MakeTrainer, place: Place, folder: str | None) -> Run:
    keras.utils.clear_session()  # layers get the same names in each run
    set_numerics("float64", SEED)
    strategy = _strategy(place)
    with strategy.scope():
        trainer = make_trainer(strategy)
    if not isinstance(trainer, Trainer) or trainer.step:
        raise ConfigError(f"make_trainer must return a new ddl.Trainer, got {trainer!r:.80}.")
    values: list[Value] = []
    for update in range(UPDATES if place == RESUMED else 1, UPDATES + 1):
        writes = place == RESUMED or update < UPDATES
        model_dir = folder if writes else None
        fit(trainer, model_dir, train_steps=update, log_every=1, progress=False)
        values += values_of(trainer, update)
    given = trainer.global_batch_size
    sizes = [*given.values()] if isinstance(given, Mapping) else [given]
    dtypes = [tf.as_dtype(layer.compute_dtype) for layer in layers_of(trainer.task)]
    pads = any((p.num_examples or 0) % p.global_batch_size for p in trainer.pipelines.values())
    return Run(
        type(trainer.task).__name__,
        math.gcd(*sizes) // trainer.accumulation_steps,
        min((dtype.size for dtype in dtypes), default=8),
        trainer.steps_per_epoch if pads else None,
        values,
    )


def _strategy(place: Place) -> tf.distribute.Strategy:
    devices = [f"CPU:{number}" for number in range(place.devices)]
    if place == ONE:
        return tf.distribute.OneDeviceStrategy(devices[0])
    if place == CENTRAL:
        return tf.distribute.experimental.CentralStorageStrategy(devices, devices[0])
    # TensorFlow's own choice has collectives, whose keys repeat in a second strategy.
    one_device = tf.distribute.ReductionToOneDevice()
    return tf.distribute.MirroredStrategy(devices, cross_device_ops=one_device)


class Resuming:
    """A process that restores the checkpoint of two devices and makes the last update."""

    def __init__(self, make_trainer: MakeTrainer, folder: str):
        """Starts the process; it ends with this one."""
        context = multiprocessing.get_context("spawn")
        self._receiver, sender = context.Pipe(duplex=False)
        arguments = (make_trainer, folder, sender)
        self._process = context.Process(target=_resume, args=arguments, daemon=True)
        self._process.start()
        sender.close()

    def result(self) -> Run | str:
        """Waits for the run, and returns it or the error that ended it."""
        try:
            return self._receiver.recv()
        except EOFError:
            self._process.join()
            return f"The process ended with status {self._process.exitcode}; see its output above."

    def end(self) -> None:
        """Ends the process, if it still runs."""
        self._process.kill()
        self._process.join()


def _resume(make_trainer: MakeTrainer, folder: str, sender: Connection) -> None:
    configure_devices(num_virtual_devices=FOUR.devices)
    sender.send(run(make_trainer, RESUMED, folder))


def _report(make_trainer: MakeTrainer, first: Run, runs: Mapping[Place, "Run | str"]) -> Report:
    tolerance = _TOLERANCES[first.itemsize]
    found, differences, values, largest = {}, [], 0, 0.0
    for place, one in runs.items():
        if isinstance(one, str):
            differences.append(Difference(place, "error", message=one))
            continue
        expected, tolerated = first.values, tolerance
        if place == RESUMED:
            of_two: Any = runs[TWO]
            expected, tolerated = [v for v in of_two.values if v.update == UPDATES], 0.0
        found[place], most = compare(expected, one.values, tolerated)
        values, largest = values + len(expected), max(largest, most)
    repeats = True
    if any(one is not None for place, one in found.items() if place != RESUMED):
        again = run(make_trainer, ONE)
        repeats = isinstance(again, Run) and not compare(first.values, again.values, tolerance)[0]
    padded = UPDATES if first.steps_per_epoch == UPDATES else None
    for place, first_found in found.items():
        if first_found is not None:
            cause = cause_of(first_found, place, repeats, padded)
            differences.append(Difference(place, cause, first_found))
    differences.sort(key=_order)
    return Report(first.task, differences, list(runs), values, largest, _notes(first))


def _order(one: Difference) -> tuple[int, ...]:
    return (one.found.value.update, one.place == RESUMED, one.found.position) if one.found else (0,)


def _notes(first: Run) -> list[str]:
    notes = []
    if first.divisor % FOUR.devices:
        notes.append(f"{FOUR.name} were not checked: they do not divide {first.divisor} rows.")
    if first.steps_per_epoch is None or first.steps_per_epoch > UPDATES:
        notes.append("No batch with padding was checked. Check with arrays of 2.5 batches.")
    if first.itemsize < 8:
        rounding = _TOLERANCES[first.itemsize]
        notes.append(f"A layer computes in a narrower dtype, so {rounding} counted as rounding.")
    return notes


def _check_importable(make_trainer: Any) -> None:
    """Raises ConfigError unless another process can import the function."""
    try:
        pickle.dumps(make_trainer)
        is_importable = getattr(make_trainer, "__module__", "") != "__main__"
    except (pickle.PicklingError, AttributeError, TypeError):
        is_importable = False
    if not is_importable:
        raise ConfigError(
            "check.make_trainer must be a function of a module, which a new process can import to "
            f"resume, got {make_trainer!r:.80}. Write it into a file."
        )
