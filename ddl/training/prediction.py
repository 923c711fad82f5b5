"""Predictions: the outputs of a task for each example, in order and without padding."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ddl.data.batch import Batch
from ddl.data.checks import data_errors, warn_of_another_kind
from ddl.data.pipeline import BatchPipeline
from ddl.data.source import Source
from ddl.data.stream import Stream
from ddl.distribution.traits import traits_of
from ddl.distribution.workers import Workers
from ddl.errors import ConfigError, DataError, check_no_text
from ddl.metrics import OfAllOutputs
from ddl.microbatch import Microbatch
from ddl.random import placing_of
from ddl.step.state import TrainingState
from ddl.tasks.gather import Gathered
from ddl.training.building import in_order
from ddl.training.device_errors import device_errors

Rows = tuple[Any, dict[str, np.ndarray]]
"""Outputs in the structure that `predict` returns, and features by name, without padding."""


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

    def __init__(
        self, function: Callable[..., Any], tracing: Callable[..., Any] = lambda trace: trace()
    ):
        """Keeps the arguments; traces nothing.

        Args:
          function: Takes a pipeline, further objects, and tensors. Cross-replica context.
          tracing: Calls a function that traces.
        """
        self._function, self._tracing = function, tracing
        self._objects: Any = None  # while tracing: a trace must not keep data alive
        self._traced = tf.function(self._call, autograph=False)

    def __call__(self, objects: Sequence[Any], key: Any, *tensors: Any) -> Any:
        """Calls the function.

        Args:
          objects: A pipeline, and objects for a pipeline of this form.
          key: Says all that a trace depends on besides the features of the pipeline.
          *tensors: Tensors, and iterators of the pipeline.

        Raises:
          DataError: If the data cannot be read.
          ConfigError: See `device_errors`, as for DeviceError.
        """
        pipeline = objects[0]
        given = repr((pipeline.always_full, spec_of(pipeline), key)), *tensors
        with data_errors(pipeline.source), device_errors():
            self._objects = objects
            # Not traced by the call: TensorFlow counts the traces of all trainers of a process
            # together, and warns of frequent ones.
            self._tracing(lambda: self._traced.get_concrete_function(*given))
            self._objects = None
            return self._traced(*given)

    def _call(self, form: str, *tensors: Any) -> Any:
        return self._function(*self._objects, *tensors)


class Predictions:
    """Outputs of a task for each example. Eager, cross-replica context, on all workers.

    The data stay on the host. They are freed after the call.
    """

    def __init__(
        self, task: Any, strategy: tf.distribute.Strategy, train: Mapping[str, BatchPipeline]
    ):
        """Keeps the task, the strategy and the pipelines of the training data; traces nothing."""
        self._task, self._strategy, self._train = task, strategy, train
        self._joins_workers = Workers(strategy).number > 1
        self._outputs = TracedByForm(self._outputs_of)

    def all(self, data: Any, state: TrainingState) -> Any:
        """Returns the outputs of all examples, arrays [n, …]; see `batches`."""
        return _joined(list(self.batches(data, state)))[0]

    def outputs(
        self, source: Source | Stream, state: TrainingState, metric: OfAllOutputs, *, keeps: bool
    ) -> Rows | None:
        """Returns outputs and features of the data, without the examples of weight 0.

        Args:
          source: The data.
          state: The training's state.
          metric: Says which features it reads, and how much memory they may take.
          keeps: Whether this process keeps the outputs; else the result is None.

        Raises:
          DataError: If the data lack a feature, or a feature is text.
          ConfigError: If the arrays would be larger than `metric.max_bytes`.
        """
        names, every, held = self.features_of(source, metric.features), list[Rows](), 0
        for rows in self.batches(source, state, tuple(dict.fromkeys([*names, "weight"]))):
            assert rows is not None
            outputs, features = rows
            counts = features["weight"] != 0
            kept = tf.nest.map_structure(
                lambda one, counts=counts: one[counts], (outputs, {n: features[n] for n in names})
            )
            held += sum(array.nbytes for array in tf.nest.flatten(kept))
            if held > metric.max_bytes:
                raise ConfigError(
                    "The outputs and features for OfAllOutputs need more than the "
                    f"{metric.max_bytes:,} bytes of OfAllOutputs.max_bytes. Raise it, name fewer "
                    "features, or let predict return less."
                )
            if keeps:
                every.append(kept)
        return _joined(every) if keeps else None

    def features_of(
        self, source: Source | Stream, features: Sequence[str] | None
    ) -> tuple[str, ...]:
        """Returns the names of the features of a metric; None means all.

        Raises:
          DataError: If the data lack a feature, or a feature is text.
        """
        spec = source.element_spec
        names = tuple(spec) if features is None else tuple(features)
        for name in names:
            if name not in spec or spec[name].dtype == tf.string:
                given = "the data do not have" if name not in spec else "is text"
                raise DataError(
                    f"OfAllOutputs gets features that are numbers, but {name!r} {given}. Set "
                    f"OfAllOutputs.features to some of {', '.join(sorted(spec))}; pass text as "
                    "token numbers."
                )
        return names

    def check_predicts(self, what: str) -> None:
        """Raises ConfigError if the task has no `predict`, or the strategy is asynchronous.

        Args:
          what: Name of what needs the outputs, for the error.
        """
        if not callable(getattr(self._task, "predict", None)):
            raise ConfigError(
                f"{type(self._task).__name__} has no outputs to predict. Give it a method "
                "predict(features) that returns a tensor [batch, …], or a dict or tuple of such "
                f"tensors, for {what}."
            )
        if traits_of(self._strategy).asynchronous:
            raise ConfigError(
                f"{what} does not run with parameter servers. Export the model, or restore a "
                "checkpoint under another strategy."
            )

    def batches(
        self,
        data: Any,
        state: TrainingState,
        features: Sequence[str] = (),
        first_batch: int = 0,
        *,
        keeps: bool = True,
    ) -> Iterator[Rows | None]:
        """Yields the outputs of each batch, and features of the data, without the padding.

        Args:
          data: As `as_source` takes it, or one array of inputs.
          state: The training's state; schedules of layers and tasks follow it.
          features: Names of features to yield beside the outputs.
          first_batch: Number of the first batch, counted from 0.
          keeps: Whether this process keeps the outputs; else each batch is None.

        Raises:
          ConfigError: If the task has no `predict`, the strategy is asynchronous, or the outputs
            are not tensors [batch, …].
          DataError: If the data cannot be read, do not fit the task, or lack a feature.
        """
        check_no_text("predict_batches.features", features)
        self.check_predicts("predict")
        pipeline = in_order(self._named(data), self._train)
        size, total = pipeline.global_batch_size, pipeline.count_examples()
        self._check(pipeline.element_spec, features)
        with data_errors(pipeline.source):
            iterator = pipeline.iterator(self._strategy, first_batch)
        for number in range(first_batch, -(-total // size)):
            # What a batch draws depends on its number, wherever the reading began.
            of_batch = iterator, tf.constant(number, tf.int64), state.step
            found = self._outputs((pipeline, features), tuple(features), *of_batch)
            if not keeps:
                yield None
                continue
            with device_errors():  # as arrays at once: all outputs may not fit on a device
                rows = _joined([tf.nest.map_structure(lambda x: x.numpy(), one) for one in found])
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
        strategy = self._strategy

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
        self,
        pipeline: BatchPipeline,
        names: Sequence[str],
        batch: Batch,
        step: tf.Tensor,
    ) -> tuple[Any, list[tf.Tensor]]:
        features, microbatch = forward(pipeline, batch, step)
        microbatch.gathering = _refuse
        beside = [features[each] for each in names]
        features = {each: v for each, v in features.items() if each != "weight"}
        microbatch.drawn = {}
        with microbatch.forward():
            outputs = self._called(features)
        if microbatch.drawn:  # once more, now that the rows of each draw can be told
            again = dataclasses.replace(microbatch, drawn=None, _calls={})
            with again.forward():
                again.placing = placing_of(self._called, features)
                outputs = self._called(features)
        rows = pipeline.global_batch_size // self._strategy.num_replicas_in_sync
        outputs = tf.nest.map_structure(lambda values: _with_rows(values, rows), outputs)
        for one in tf.nest.flatten(outputs):
            shape = one.shape if tf.is_tensor(one) else tf.TensorShape([])
            if shape.rank == 0 or shape[0] != rows or not shape.is_fully_defined():
                got = f"shape {shape}" if tf.is_tensor(one) else f"a {type(one).__name__}"
                raise ConfigError(
                    f"{type(self._task).__name__}.predict must return tensors of static shape whose"
                    f" first dimension is the batch, {rows}, got {got}."
                )
        return outputs, beside

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

    def _named(self, data: Any) -> Any:
        """Returns data by feature; an array of inputs alone gets the input's name."""
        if not (isinstance(data, np.ndarray) or tf.is_tensor(data)):
            return data
        name = getattr(self._task, "input_name", None)
        if not isinstance(name, str):
            raise DataError(
                f"{type(self._task).__name__} does not name its input, so predict cannot take a "
                "single array. Pass a dict from feature name to array."
            )
        return {name: data}

    def _check(self, given: Mapping[str, tf.TensorSpec], features: Sequence[str]) -> None:
        """Checks that data have some features, and the shapes of the training data."""
        if absent := set(features) - given.keys():
            raise DataError(
                f"The data have no feature {min(absent)!r} to return beside the outputs, only "
                f"{', '.join(sorted(given))}. Name some of these."
            )
        known = self._train[""].element_spec if "" in self._train else {}
        for name in known.keys() & given.keys():
            if given[name].shape != known[name].shape:
                raise DataError(
                    f"Feature {name!r} must have shape {known[name].shape}, as in the training "
                    f"data, got {given[name].shape}. Reshape or resize it; if one example was "
                    "passed, pass a batch of one, x[np.newaxis]."
                )
            warn_of_another_kind(name, known[name].dtype, given[name].dtype)


def _joined(every: Sequence[Any]) -> Any:
    """Returns structures of arrays [b, …] as one structure of arrays [n, …]."""
    return tf.nest.map_structure(lambda *parts: np.concatenate(parts), *every)


def _with_rows(values: Any, rows: int) -> Any:
    """Returns a tensor whose number of rows a layer, such as TextVectorization, has lost."""
    lost = tf.is_tensor(values) and values.shape.rank and values.shape[0] is None
    return tf.ensure_shape(values, [rows, *values.shape[1:]]) if lost else values


def _refuse(tensors: list[tf.Tensor], current: Microbatch) -> Gathered:
    """Refuses `ddl.gather` (`ddl.tasks.gather.Gathering`)."""
    raise ConfigError(
        "ddl.gather was called in predict, but an output must not depend on the other examples of "
        "its batch. Compare examples in a loss, or in a ddl.metrics.OfAllOutputs."
    )


def _gatherable(values: tf.Tensor) -> tf.Tensor:
    """Returns values in a dtype that all workers can gather; cast back, they are the same."""
    if values.dtype.is_integer or values.dtype.is_bool:
        return tf.cast(values, tf.int64)
    return tf.cast(values, tf.float32) if values.dtype == tf.bfloat16 else values
