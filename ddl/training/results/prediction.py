"""Predictions: the outputs of a task for each example, in order and without padding."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ddl.data.batch import Batch
from ddl.data.checks import data_errors
from ddl.data.pipeline import BatchPipeline
from ddl.distribution.workers import Workers
from ddl.draws import placing_of
from ddl.errors import ConfigError, DataError
from ddl.microbatch import Microbatch
from ddl.step.state import TrainingState
from ddl.tasks.gather import Gathered
from ddl.training.loop.device_errors import device_errors


class Prediction:
    """The outputs of a task's `predict`, for data of one form. Eager, cross-replica context."""

    def __init__(
        self,
        function: Callable[[dict[str, tf.Tensor]], Any],
        name: str,
        pipeline: BatchPipeline,
        strategy: tf.distribute.Strategy,
        features: Sequence[str] = (),
        *,
        weightless: bool = True,
        gathers: bool = False,
    ):
        """Keeps the arguments; traces at the first run.

        Args:
          function: The method `predict` of a task, or another function of features.
          name: Name of the function in errors.
          pipeline: A pipeline of this form, not resident and not shuffled.
          strategy: The strategy.
          features: Names of features to return beside the outputs.
          weightless: Whether examples of weight 0 are returned too.
          gathers: Whether the function may call `ddl.gather`, as a loss does.
        """
        self._name = name
        self._strategy = strategy
        self._features = features
        self._weightless = weightless
        beside_outputs = [*features, *([] if weightless else ["weight"])]
        several_workers = Workers(strategy).number > 1
        self._names = ", ".join(sorted(pipeline.source.element_spec))
        rows = pipeline.global_batch_size // strategy.num_replicas_in_sync
        # The pipeline of the call, as `run` gives it, would keep its data alive.
        self._pipeline: BatchPipeline | None = None
        self._structure: Any = None
        self._dtypes: list[tf.DType] = []
        self._bytes_of_example = 0

        @tf.function(autograph=False)
        def outputs(iterator: Any, number: tf.Tensor, position: tf.Tensor, step: tf.Tensor) -> Any:
            pipeline = self._pipeline
            assert pipeline is not None

            def of_replica(batch: Batch) -> Any:
                features = pipeline.examples(batch)
                microbatch = pipeline.microbatch(
                    batch, features, training=False, step=step, position=position
                )
                if not gathers:
                    microbatch.gathering = _refuse
                beside = [features[name] for name in beside_outputs]
                features = {name: v for name, v in features.items() if name != "weight"}

                def call(features: Any) -> Any:
                    return self._call(function, features)

                microbatch.drawn = {}
                with microbatch.forward():
                    outputs = self._checked(call(features), rows)
                if microbatch.drawn:
                    again = dataclasses.replace(microbatch, drawn=None, _calls={})
                    with again.forward():
                        again.placing = placing_of(call, features)
                        outputs = self._checked(call(features), rows)
                self._structure = tf.nest.map_structure(lambda _: None, outputs)
                flat = tf.nest.flatten(outputs) + beside
                self._bytes_of_example = sum(math.prod(x.shape[1:]) * x.dtype.size for x in flat)
                self._dtypes = [x.dtype for x in flat]
                return [gatherable(x, self._name) for x in flat] if several_workers else flat

            batch = pipeline.next_batch(iterator, strategy, number)
            found = strategy.run(of_replica, (batch,))
            if several_workers:
                return [[strategy.gather(one, 0)] for one in found]
            return [strategy.experimental_local_results(one) for one in found]

        self._outputs = outputs

    def run(self, pipeline: BatchPipeline, state: TrainingState) -> Any:
        """Returns the outputs as arrays [n, …], in the structure that the task returns.

        Args:
          pipeline: The data, in this form.
          state: The training's state; schedules of layers and tasks follow it.

        Raises:
          DataError: If the data cannot be read, or lack a feature.
          ConfigError: If the outputs are not tensors [batch, …].
        """
        return self._structured(self._counted(self._arrays(pipeline, state)))

    def run_within(
        self, pipeline: BatchPipeline, state: TrainingState, max_bytes: int, keeps: bool
    ) -> tuple[Any, dict[str, np.ndarray]] | None:
        """Returns the outputs and a dict of the features, arrays [n, …]; see `run`.

        Args:
          pipeline: As in `run`.
          state: As in `run`.
          max_bytes: Largest size of all arrays, checked before they are computed.
          keeps: Whether this process keeps them; else the result is None.

        Raises:
          ConfigError: If the arrays would be larger.
        """
        arrays = self._arrays(pipeline, state, max_bytes, keeps)
        if not keeps:
            return None
        arrays = self._counted(arrays)
        features = arrays[len(arrays) - len(self._features) :]
        return self._structured(arrays), dict(zip(self._features, features, strict=True))

    def _counted(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """Returns outputs and features, of the examples to return."""
        if self._weightless or not arrays:
            return arrays
        *others, weight = arrays
        return [one[weight != 0] for one in others]

    def _structured(self, arrays: list[np.ndarray]) -> Any:
        outputs = arrays[: len(arrays) - len(self._features)]
        return tf.nest.pack_sequence_as(self._structure, outputs)

    def _arrays(
        self,
        pipeline: BatchPipeline,
        state: TrainingState,
        max_bytes: float = math.inf,
        keeps: bool = True,
    ) -> list[np.ndarray]:
        """Returns all outputs and features; empty if they are not kept."""
        arrays: list[np.ndarray] = []
        for number, rows in enumerate(self._batches(pipeline, state, 0, max_bytes, keeps)):
            if keeps:
                _put(arrays, rows, number * pipeline.global_batch_size, pipeline.count_examples())
        return arrays

    def each_batch(
        self, pipeline: BatchPipeline, state: TrainingState, first_batch: int, keeps: bool
    ) -> Iterator[tuple[Any, dict[str, np.ndarray]] | None]:
        """Yields the outputs and a dict of the features of each batch, without the padding.

        Args:
          pipeline: As in `run`.
          state: As in `run`.
          first_batch: Number of the first batch, counted from 0.
          keeps: Whether this process keeps them; else each batch is None.
        """
        for rows in self._batches(pipeline, state, first_batch, keeps=keeps):
            if not keeps:
                yield None
                continue
            features = rows[len(rows) - len(self._features) :]
            yield self._structured(rows), dict(zip(self._features, features, strict=True))

    def _batches(
        self,
        pipeline: BatchPipeline,
        state: TrainingState,
        first_batch: int,
        max_bytes: float = math.inf,
        keeps: bool = True,
    ) -> Iterator[list[np.ndarray]]:
        """Yields outputs and features of each batch, without the padding; [] if not kept."""
        self._pipeline = pipeline
        try:
            with data_errors(pipeline.source), device_errors():
                iterator = pipeline.iterator(self._strategy, first_batch)
                if self._structure is None:
                    # Not by a call: TensorFlow counts the traces of all predictions of a process
                    # together, and warns of frequent ones.
                    self._outputs.get_concrete_function(
                        iterator, tf.constant(first_batch, tf.int64), state.batches, state.step
                    )
                self._check_bytes(pipeline.count_examples(), max_bytes)
            total = pipeline.count_examples()
            left = total - first_batch * pipeline.global_batch_size
            for number in range(first_batch, -(-total // pipeline.global_batch_size)):
                with data_errors(pipeline.source), device_errors():
                    # What a batch draws depends on its number, wherever the reading began.
                    counter = tf.constant(number, tf.int64)
                    batch = self._outputs(iterator, counter, state.batches, state.step)
                    # As arrays at once: all outputs may not fit on a device.
                    rows = [
                        np.concatenate([part.numpy() for part in parts]).astype(
                            dtype.as_numpy_dtype, copy=False
                        )[:left]
                        for parts, dtype in zip(batch if keeps else (), self._dtypes, strict=False)
                    ]
                left -= pipeline.global_batch_size
                yield rows
        finally:
            self._pipeline = None

    def _check_bytes(self, examples: int, max_bytes: float) -> None:
        needed = self._bytes_of_example * examples
        if needed > max_bytes:
            raise ConfigError(
                f"The outputs and features of {examples:,} examples for OfAllOutputs need "
                f"{needed:,} bytes, {self._bytes_of_example:,} each, but OfAllOutputs.max_bytes is "
                f"{max_bytes:,}. Raise it, name fewer features, or let predict return less."
            )

    def _call(
        self, function: Callable[[dict[str, tf.Tensor]], Any], features: dict[str, tf.Tensor]
    ) -> Any:
        try:
            return function(features)
        except KeyError as error:
            if error.args and error.args[0] not in features:
                raise DataError(
                    f"{self._name} reads the feature {error.args[0]!r}, but the "
                    f"data have only {self._names}. Add it to the data."
                ) from error
            raise

    def _checked(self, outputs: Any, rows: int) -> Any:
        for one in tf.nest.flatten(outputs):
            shape = one.shape if tf.is_tensor(one) else None
            if shape is None or shape.rank == 0 or shape[0] != rows:
                got = f"a {type(one).__name__}" if shape is None else f"shape {shape}"
                raise ConfigError(
                    f"{self._name} must return tensors whose first dimension is "
                    f"the batch, {rows}, got {got}."
                )
            if not shape.is_fully_defined():
                raise ConfigError(
                    f"{self._name} must return tensors of static shape, got {shape}: a later "
                    "dimension depends on the values. Pad it to a fixed length, or call "
                    "tf.ensure_shape if all examples have one shape."
                )
        return outputs


def _refuse(tensors: list[tf.Tensor], current: Microbatch) -> Gathered:
    """Refuses `ddl.gather` (`ddl.tasks.gather.Gathering`)."""
    raise ConfigError(
        "ddl.gather was called in predict, but an output must not depend on the other examples of "
        "its batch. Compute it from the features of its example. Compare examples in a loss, or in "
        "a function of all outputs (ddl.metrics.OfAllOutputs)."
    )


def gatherable(values: tf.Tensor, name: str) -> tf.Tensor:
    """Returns values in a dtype that all workers can gather; cast back, they are the same.

    Args:
      values: Array of any shape.
      name: Name of the function that returned them, for the error.

    Raises:
      ConfigError: If they are no real numbers.
    """
    dtype = values.dtype
    if dtype in (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64):
        return values
    if dtype == tf.uint64:
        return tf.bitcast(values, tf.int64)
    if dtype.is_bool or dtype.is_integer:
        return tf.cast(values, tf.int64 if dtype.size > 2 else tf.int32)
    if dtype.is_floating:
        return tf.cast(values, tf.float32)
    raise ConfigError(
        f"{name} returns {dtype.name}, or is to return such features, which several workers cannot "
        "exchange. Return real numbers."
    )


def _put(arrays: list[np.ndarray], batch: list[np.ndarray], first: int, examples: int) -> None:
    """Puts the rows of a batch into arrays [examples, …], from row `first` on; makes these at 0."""
    if first == 0:
        arrays += [np.empty((examples, *rows.shape[1:]), rows.dtype) for rows in batch]
    for array, rows in zip(arrays, batch, strict=True):
        array[first : first + len(rows)] = rows
