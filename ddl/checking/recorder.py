"""The observer that brings the values of an update out of its graph.

Each value passes through a `tf.numpy_function`, which works in loops and in replica context. It has
side effects, so TensorFlow runs it although nothing reads a result.
"""

import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ddl import microbatch
from ddl.checking.facts import Facts
from ddl.checking.recording import AFTER, Key, Layer, Part, Recording
from ddl.checkpoints.slots import WholeSlot
from ddl.metrics.values import tensors_by_name
from ddl.optimizers.named import by_name
from ddl.step.observing import RECORDS
from ddl.step.sharding import InShares
from ddl.step.sharding.shares import gathered
from ddl.tasks.parts import layers_of, own_variables_of
from ddl.training.trainer import Trainer


class Recorder:
    """Records the values of one run (`ddl.step.observing.Observer`).

    Attributes:
      recording: The values recorded so far.
      update: Number of the update that runs; set it before each.
    """

    def __init__(self, strategy: tf.distribute.Strategy, recording: Recording):
        """Records nothing yet.

        Args:
          strategy: The strategy of the run.
          recording: Gets the values.
        """
        self.recording = recording
        self.update = 0
        self._strategy = strategy
        self._facts = Facts(recording)
        self._lock = threading.Lock()
        self._calls = 0  # of verbs in the present trace
        self._in_pass = False
        # Positions in a pass count from 0 on each replica. The entry keeps the microbatch alive.
        self._positions: dict[int, list[Any]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Records the outputs of Keras layers within the `with` block, and collects facts."""
        call = keras.layers.Layer.__call__

        @functools.wraps(call)
        def recorded(layer: keras.layers.Layer, *args: Any, **kwargs: Any) -> Any:
            outputs = call(layer, *args, **kwargs)
            self._layer(layer, outputs)
            return outputs

        keras.layers.Layer.__call__ = recorded
        try:
            with self._facts.collected():
                yield
        finally:
            keras.layers.Layer.__call__ = call

    def __call__(self, event: str, **values: Any) -> None:
        """Takes an event of `ddl.step.observing`."""
        if event == "update":
            self._calls = 0
        elif self._in_pass or event not in ("rows", "outputs"):
            getattr(self, f"_{event}")(**values)

    # ------------------------------------------------------------ cross-replica context

    def _gradients(self, loss: str) -> None:
        self._calls += 1
        self._in_pass = True
        self.recording.losses[self._calls] = loss

    def _reduced(self, variables: Sequence[keras.Variable], reduced: Any) -> None:
        self._in_pass = False
        self._keep(reduced.sums, self._calls, 0, "sums", self.recording.losses[self._calls])
        self._on_each("gradients", variables, self._whole(variables, reduced.values))

    def _summed(self, loss: str, value: tf.Tensor) -> None:
        self._in_pass = False
        self._keep(value, self._calls, 0, "sums", loss)

    def _apply(self, optimizer: str, gradients: Any) -> None:
        self._calls += 1
        given = gradients.to_apply
        values = given if isinstance(given, InShares) else gradients.of_replicas
        variables = gradients.variables
        self._on_each("applied gradients", variables, self._whole(variables, values))

    def _applied(self, optimizer: str, gradients: Any) -> None:
        variables = [variable.value for variable in gradients.variables]
        self._on_each("updated weights", gradients.variables, variables)

    def _whole(self, variables: Sequence[keras.Variable], values: Any) -> Any:
        """Returns values for variables; whole ones, if each replica holds its shares."""
        if not isinstance(values, InShares):
            return values
        shapes = [variable.value.shape for variable in variables]
        return self._strategy.run(lambda own: gathered(own, shapes), args=(list(values.values),))

    def _on_each(
        self, stage: str, variables: Sequence[keras.Variable], values: Sequence[Any]
    ) -> None:
        """Records a value for each variable, on each replica."""
        call = self._calls

        def run(own: Sequence[Any]) -> None:
            replica = _replica()
            for place, (variable, value) in enumerate(zip(variables, own, strict=True)):
                self._keep(value, call, place, stage, variable.path, replica)

        if stage == "updated weights":  # variables are no arguments of `run`
            self._strategy.run(lambda: run(values))
        else:
            self._strategy.run(run, args=(list(values),))

    # ------------------------------------------------------------ replica context

    def _rows(self, features: dict[str, tf.Tensor]) -> None:
        self._facts.loss_begins()
        for name in sorted(features):
            self._example("rows", name, features[name])

    def _outputs(self, name: str, output: Any) -> None:
        self._facts.loss_ends(name)
        self._example("loss", name, output.loss)
        if output.weight is not None:
            self._example("weight", name, output.weight)
        for metric, values in sorted(tensors_by_name(output.metrics).items()):
            self._example("metric", metric, values)

    def _layer(self, layer: keras.layers.Layer, outputs: Any) -> None:
        current = microbatch.current()
        if not self._in_pass or current is None or not current.in_forward:
            return
        # Layers without variables have no path of their own before they are built.
        name = layer.path or layer.name
        self.recording.layers[name] = _described(layer)
        if layer._losses:
            self.recording.note_fact("own_loss", name)
        for output in keras.tree.flatten(outputs):
            self._example("layer", name, output)

    def _example(self, stage: str, name: str, value: Any) -> None:
        """Records the rows of a microbatch. Not called in loops and conditionals of a model."""
        current = microbatch.current()
        if current is None or not tf.is_tensor(value) or not hasattr(value, "dtype"):
            return
        position = self._positions.setdefault(id(current), [current, 0])
        position[1] += 1
        self._keep(value, self._calls, position[1], stage, name, _replica(), current.first_row)

    def _keep(
        self,
        value: Any,
        call: int,
        position: int,
        stage: str,
        name: str,
        replica: int = 0,
        first_row: tf.Tensor | int = 0,
    ) -> None:
        """Adds an operation that records a value, such as a sparse gradient or a variable."""
        with tf.name_scope(RECORDS):
            value = tf.convert_to_tensor(value)
        if not (value.dtype.is_floating or value.dtype.is_integer or value.dtype.is_bool):
            return

        def keep(value: np.ndarray, first_row: np.ndarray) -> list[Any]:
            key = Key(self.update, call, 0, position, stage, name)
            with self._lock:
                self.recording.add(key, Part(replica, int(first_row), np.array(value)))
            return []

        with tf.name_scope(RECORDS):
            tf.numpy_function(keep, [value, tf.cast(first_row, tf.int64)], [])

    # ------------------------------------------------------------ eager

    def variables(self, trainer: Trainer) -> None:
        """Records all variables on each replica, after an update. Eager."""
        shares = [] if trainer.sharding is None else trainer.sharding.slots.values()
        whole = {id(share.variable.value): share.shape for share in shares}
        for place, (stage, name, variable) in enumerate(variables_of(trainer)):
            key = Key(self.update, AFTER, 0, place, stage, name)
            if id(variable) in whole:
                values = [WholeSlot(variable, whole[id(variable)], trainer.strategy).whole()]
            else:
                copies = trainer.strategy.experimental_local_results(variable)
                values = [copy.numpy() for copy in copies]
            for replica, value in enumerate(values):
                self.recording.add(key, Part(replica, 0, np.array(value)))


def variables_of(trainer: Trainer) -> list[tuple[str, str, tf.Variable]]:
    """Returns stage, name and value of each variable that an update may change."""
    layers = layers_of(trainer.task)
    trained = [("weights", v.path, v.value) for x in layers for v in x._trainable_variables]
    moved = [("statistics", v.path, v.value) for x in layers for v in x._non_trainable_variables]
    slots = [
        ("slots", f"{name}: {v.path}", v.value)
        for name, optimizer in by_name(trainer.optimizer).items()
        for v in optimizer.variables
    ]
    averages = trainer.averages.variables if trainer.averages else []
    found = [
        *trained,
        *slots,
        *moved,
        *(("averages", v.name, v) for v in averages),
        *(("own variables", v.name, v) for v in own_variables_of(trainer.task, layers)),
    ]
    unique: dict[int, tuple[str, str, tf.Variable]] = {}
    for one in found:
        unique.setdefault(id(one[2]), one)
    numeric = [one for one in unique.values() if one[2].dtype not in (tf.string, tf.resource)]
    return sorted(numeric, key=lambda one: _ORDER[one[0]])


_ORDER = {"weights": 0, "slots": 1, "statistics": 2, "averages": 3, "own variables": 4}


def _described(layer: keras.layers.Layer) -> Layer:
    normalizes = isinstance(layer, keras.layers.BatchNormalization)
    return Layer(
        type(layer).__name__,
        normalizes,
        normalizes and bool(layer.synchronized),
    )


def _replica() -> int:
    context = tf.distribute.get_replica_context()
    number = tf.get_static_value(context.replica_id_in_sync_group)
    return 0 if number is None else int(number)
