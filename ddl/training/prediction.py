"""Predictions: the outputs of a task for each example, in order and without padding."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ddl.data.batch import Batch
from ddl.data.checks import check_same_features, data_errors
from ddl.data.pipeline import BatchPipeline
from ddl.distribution.traits import traits_of
from ddl.distribution.workers import Workers
from ddl.errors import ConfigError, DataError, check_no_text
from ddl.microbatch import Microbatch
from ddl.random import placing_of
from ddl.step.compiled import Compiler
from ddl.step.replicas import distributed_iterator
from ddl.step.state import TrainingState
from ddl.tasks.gather import Gathered
from ddl.training.checks import check_has_outputs
from ddl.training.device_errors import device_errors
from ddl.training.other_data import in_order

# Outputs in the structure that `predict` returns, and features by name, without padding.
Rows = tuple[Any, dict[str, np.ndarray]]


def spec_of(pipeline: BatchPipeline) -> tuple[Any, ...]:
    """Returns names, shapes and dtypes of the features."""
    spec = sorted(pipeline.element_spec.items())
    return tuple((name, tuple(one.shape), one.dtype.name) for name, one in spec)


def forward(
    pipeline: BatchPipeline, batch: Batch, step: tf.Tensor
) -> tuple[dict[str, tf.Tensor], Microbatch]:
    """Returns a replica's features of a batch, and the `Microbatch` for an evaluation of them.

    Args:
      pipeline: The data.
      batch: The batch on this replica.
      step: Updates that the training has made, int64 [].
    """
    features = pipeline.examples(batch)
    return features, pipeline.microbatch(batch, features, training=False, step=step)


class TracedByForm:
    """A function of data and tensors, traced once for all data of one form. Eager."""

    def __init__(self, function: Callable[..., Any], compiler: Compiler):
        """Keeps the arguments; traces nothing.

        Args:
          function: Takes a pipeline, and iterators of it, tensors and names. Cross-replica context.
          compiler: Compiles pieces of it.
        """
        self._function, self._compiler = function, compiler
        self._pipeline: Any = None  # while tracing: a trace must not keep data alive
        self._traced = tf.function(self._call, autograph=False)

    def __call__(self, pipeline: BatchPipeline, *given: Any) -> Any:
        """Calls the function.

        Args:
          pipeline: The data.
          *given: Iterators of the pipeline, tensors, and tuples of names.

        Raises:
          DataError: If the data cannot be read.
          ConfigError: See `device_errors`, as for DeviceError.
        """
        form = repr((pipeline.always_full, pipeline.resident, spec_of(pipeline)))
        with data_errors(pipeline.source), device_errors():
            self._pipeline = pipeline
            # Not traced by the call: TensorFlow counts the traces of all trainers of a process
            # together, and warns of frequent ones.
            trace = self._traced.get_concrete_function
            self._compiler.tracing(lambda: trace(form, *given))
            self._pipeline = None
            return self._traced(form, *given)

    def _call(self, form: str, *given: Any) -> Any:
        return self._function(self._pipeline, *given)


class Predictions:
    """Outputs of a task for each example. Eager, cross-replica context, on all workers.

    The data stay on the host. They are freed after the call.

    Attributes:
      strategy: The strategy; with parameter servers, that of the chief alone.
      compiler: Compiles an evaluation.
    """

    def __init__(
        self,
        task: Any,
        strategy: tf.distribute.Strategy,
        train: Mapping[str, BatchPipeline],
        compiler: Compiler,
    ):
        """Keeps the task, the pipelines of the training data and others; traces nothing."""
        self.strategy, self.compiler = _evaluating(strategy), compiler
        self._task, self._train = task, train
        self._joins_workers = Workers(strategy).number > 1
        self._outputs = TracedByForm(self._outputs_of, compiler)

    def check_features(self, spec: Mapping[str, tf.TensorSpec], names: Sequence[str]) -> None:
        """Raises DataError if data lack a feature to return beside the outputs.

        Several workers cannot gather text.
        """
        kept = [n for n in spec if not (self._joins_workers and spec[n].dtype == tf.string)]
        if absent := set(names) - {*kept}:
            numbers = " of numbers" if self._joins_workers else ""
            raise DataError(
                f"The data have no feature {min(absent)!r}{numbers} to return beside the outputs, "
                f"only {', '.join(sorted(kept))}. Name some of these."
            )

    def batches(
        self, data: Any, state: TrainingState, features: Sequence[str] = (), first_batch: int = 0
    ) -> Iterator[Rows]:
        """Yields the outputs of each batch, and features of the data, without the padding.

        Args:
          data: As `as_source` takes it, or one array of inputs.
          state: The training's state; schedules of layers and tasks follow it.
          features: Names of features to yield beside the outputs.
          first_batch: Number of the first batch, counted from 0.

        Raises:
          ConfigError: If the task has no `predict`, or the outputs are not tensors [batch, …].
          DataError: If the data cannot be read, do not fit the task, or lack a feature.
        """
        check_no_text("predict_batches.features", features)
        check_has_outputs(self._task, "predict")
        pipeline = in_order(self._task, data, "The argument of predict", self._train)
        size, total = pipeline.global_batch_size, pipeline.count_examples()
        spec = pipeline.element_spec
        self.check_features(spec, features)
        known = self._train[""].element_spec if "" in self._train else {}
        check_same_features({name: one for name, one in known.items() if name in spec}, spec)
        with data_errors(pipeline.source):
            iterator = distributed_iterator(pipeline, self.strategy, first_batch)
        for number in range(first_batch, -(-total // size)):
            # What a batch draws depends on its number, wherever the reading began.
            now = tf.constant(number, tf.int64), state.step
            found = self._outputs(pipeline, tuple(features), iterator, *now)
            with device_errors():  # as arrays at once: all outputs may not fit on a device
                rows = joined([tf.nest.map_structure(lambda x: x.numpy(), one) for one in found])
            left = total - number * size
            outputs, beside = tf.nest.map_structure(lambda x, left=left: x[:left], rows)
            yield outputs, dict(zip(features, beside, strict=True))

    def _outputs_of(
        self,
        pipeline: BatchPipeline,
        features: Sequence[str],
        iterator: Any,
        number: tf.Tensor,
        step: tf.Tensor,
    ) -> list[Any]:
        """Returns outputs and features of a batch, of each replica or of all workers."""
        strategy = self.strategy

        def of_replica(batch: Batch) -> Any:
            return self._of_replica(pipeline, features, batch, step)

        def of_all(values: Any) -> tf.Tensor:
            given = local(values)[0].dtype
            return tf.cast(strategy.gather(strategy.run(_gatherable, (values,)), 0), given)

        local = strategy.experimental_local_results
        found = strategy.run(of_replica, (pipeline.next_batch(iterator, strategy, number),))
        if self._joins_workers:
            return [tf.nest.map_structure(of_all, found)]
        replicas = range(Workers(strategy).replicas_of_each)
        return [tf.nest.map_structure(lambda x, r=r: local(x)[r], found) for r in replicas]

    def _of_replica(
        self, pipeline: BatchPipeline, names: Sequence[str], batch: Batch, step: tf.Tensor
    ) -> tuple[Any, list[tf.Tensor]]:
        features, microbatch = forward(pipeline, batch, step)
        beside = [features[each] for each in names]
        features = {each: v for each, v in features.items() if each != "weight"}
        microbatch.gathering, microbatch.drawn = _refuse, {}
        with microbatch.forward():
            outputs = self._called(features)
        if microbatch.drawn:  # once more, now that the rows of each draw can be told
            again = dataclasses.replace(microbatch, drawn=None, _calls={})
            with again.forward():
                again.placing = placing_of(self._called, features)
                outputs = self._called(features)
        rows = pipeline.global_batch_size // self.strategy.num_replicas_in_sync
        return tf.nest.map_structure(lambda output: self._checked(output, rows), outputs), beside

    def _called(self, features: dict[str, tf.Tensor]) -> Any:
        try:
            return self._task.predict(features)
        except KeyError as error:
            if error.args and error.args[0] not in features:
                raise DataError(
                    f"{type(self._task).__name__}.predict reads the feature {error.args[0]!r}, but "
                    f"the data have only {', '.join(sorted(features))}. Add it to the data."
                ) from error
            raise

    def _checked(self, output: Any, rows: int) -> tf.Tensor:
        """Returns an output, with the number of rows that a layer (TextVectorization) has lost."""
        shape = output.shape if tf.is_tensor(output) else tf.TensorShape(None)
        if shape.rank and shape[0] is None:
            output = tf.ensure_shape(output, [rows, *shape[1:]])
            shape = output.shape
        if not (shape.rank and shape[0] == rows and shape.is_fully_defined()):
            raise ConfigError(
                f"{type(self._task).__name__}.predict must return tensors of static shape whose "
                f"first dimension is the batch, {rows}, got {output!r:.100}."
            )
        return output


def _evaluating(strategy: tf.distribute.Strategy) -> tf.distribute.Strategy:
    """Returns a strategy; for parameter servers the chief's device, which reads their weights."""
    if not traits_of(strategy).asynchronous:
        return strategy
    has_gpu = tf.config.get_visible_devices("GPU")
    return tf.distribute.OneDeviceStrategy("GPU:0" if has_gpu else "CPU:0")


def joined(every: Sequence[Any]) -> Any:
    """Returns structures of arrays [b, …] as one structure of arrays [n, …]."""
    return tf.nest.map_structure(lambda *parts: np.concatenate(parts), *every)


def _refuse(tensors: list[tf.Tensor], current: Microbatch) -> Gathered:
    """Refuses `ddl.gather` (`Microbatch.gathering`)."""
    raise ConfigError(
        "ddl.gather was called in predict, but an output must not depend on the other examples of "
        "its batch. Compare examples in a loss, or in a ddl.metrics.CorpusMetric."
    )


def _gatherable(values: tf.Tensor) -> tf.Tensor:
    """Returns values in a dtype that all workers can gather; cast back, they are the same."""
    if values.dtype.is_integer or values.dtype.is_bool:
        return tf.cast(values, tf.int64)
    return tf.cast(values, tf.float32) if values.dtype == tf.bfloat16 else values
