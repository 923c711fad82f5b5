"""Predictions: the outputs of a task for each example, in order and without padding."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ddl.data.batch import Batch
from ddl.data.checks import data_errors, warn_of_another_kind
from ddl.data.conversion import as_source
from ddl.data.pipeline import BatchPipeline
from ddl.data.source import Source
from ddl.data.stream import Stream
from ddl.distribution.traits import traits_of
from ddl.distribution.workers import Workers
from ddl.draws import placing_of
from ddl.errors import ConfigError, DataError, check_no_text, check_takes
from ddl.metrics import OfAllOutputs
from ddl.microbatch import Microbatch
from ddl.step.state import TrainingState
from ddl.tasks.gather import Gathered
from ddl.training.device_errors import device_errors

_FORMS = 8  # of data, whose traces are kept

Function = Callable[[dict[str, tf.Tensor]], Any]
"""Maps features [batch, …] to a structure of outputs [batch, …]."""

Rows = tuple[Any, dict[str, np.ndarray]]
"""Outputs in the structure of the function, and features by name, without padding."""


def form_of(pipeline: BatchPipeline) -> Any:
    """Returns all of a pipeline's data that a trace depends on."""
    spec = sorted(pipeline.element_spec.items())
    return (pipeline.always_full, *((n, tuple(one.shape), one.dtype.name) for n, one in spec))


@dataclasses.dataclass
class _Form:
    """What a trace found of the outputs for data of one form."""

    number: int
    structure: Any = None
    dtypes: Sequence[tf.DType] = ()
    bytes_of_example: int = 0


class Predictions:
    """Outputs of a task for each example. Eager, cross-replica context, on all workers.

    The data stay on the host. They are freed after the call.
    """

    def __init__(
        self,
        task: Any,
        strategy: tf.distribute.Strategy,
        pipeline: Callable[[Source | Stream], BatchPipeline],
        trained_on: dict[str, tf.TensorSpec] | None,
    ):
        """Keeps the arguments; traces nothing.

        Args:
          task: The task.
          strategy: The strategy.
          pipeline: Makes the pipeline of a source, in order and not resident.
          trained_on: `element_spec` of the training data; None if they have several sources.
        """
        self._task = task
        self._strategy = strategy
        self._pipeline_of = pipeline
        self._trained_on = trained_on or {}
        self._joins_workers = Workers(strategy).number > 1
        self._forms: dict[Any, _Form] = {}
        self._outputs = tf.function(self._traced, autograph=False)
        # Pipeline, features, function and form; only while tracing: they would keep data alive.
        self._tracing: Any = None

    def all(self, data: Any, state: TrainingState, function: Function | None = None) -> Any:
        """Returns the outputs of all examples, arrays [n, …]; see `batches`."""
        return _joined(self.batches(data, state, function=function))[0]

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
        names = self.features_of(source, metric.features)
        read = tuple(dict.fromkeys([*names, "weight"]))
        batches = self.batches(source, state, read, keeps=keeps, max_bytes=metric.max_bytes)
        if not keeps:
            return next((one for one in batches if one is not None), None)
        outputs, features = _joined(batches)
        counts = features["weight"] != 0
        outputs = tf.nest.map_structure(lambda one: one[counts], outputs)
        return outputs, {name: features[name][counts] for name in names}

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

    def check_predicts(self, what: str, function: Function | None = None) -> None:
        """Raises ConfigError if the task has no `predict`, or the strategy is asynchronous.

        Args:
          what: Name of what needs the outputs, for the error.
          function: Function that is called in place of `predict`.
        """
        if function is not None:
            check_takes("The function of predict", function, ("features",))
        elif not callable(getattr(self._task, "predict", None)):
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
        function: Function | None = None,
        *,
        keeps: bool = True,
        max_bytes: float = math.inf,
    ) -> Iterator[Rows | None]:
        """Yields the outputs of each batch, and features of the data, without the padding.

        Args:
          data: As `as_source` takes it, or one array of inputs, or a `tf.data.Dataset` of inputs.
          state: The training's state; schedules of layers and tasks follow it.
          features: Names of features to yield beside the outputs.
          first_batch: Number of the first batch, counted from 0.
          function: Function to call in place of the task's `predict`; it may call `ddl.gather`.
          keeps: Whether this process keeps the outputs; else each batch is None.
          max_bytes: Largest size of all arrays, checked before they are computed.

        Raises:
          ConfigError: If the task has no `predict`, the strategy is asynchronous, or the outputs
            are not tensors [batch, …], or larger than allowed.
          DataError: If the data cannot be read, do not fit the task, or lack a feature.
        """
        check_no_text("predict_batches.features", features)
        self.check_predicts("predict", function)
        pipeline = self._checked(self._source_of_inputs(data), features)
        size, total = pipeline.global_batch_size, pipeline.count_examples()
        with data_errors(pipeline.source), device_errors():
            iterator = pipeline.iterator(self._strategy, first_batch)
        form = self._form(pipeline, iterator, state, tuple(features), function)
        if (needed := form.bytes_of_example * total) > max_bytes:
            raise ConfigError(
                f"The outputs and features of {total:,} examples for OfAllOutputs need "
                f"{needed:,} bytes, {form.bytes_of_example:,} each, but OfAllOutputs.max_bytes is "
                f"{max_bytes:,}. Raise it, name fewer features, or let predict return less."
            )
        for number in range(first_batch, -(-total // size)):
            with data_errors(pipeline.source), device_errors():
                # What a batch draws depends on its number, wherever the reading began.
                counter = tf.constant(number, tf.int64)
                found = self._outputs(form.number, iterator, counter, state.batches, state.step)
                if not keeps:
                    yield None
                    continue
                # As arrays at once: all outputs may not fit on a device.
                rows = [
                    np.concatenate([part.numpy() for part in parts]).astype(
                        dtype.as_numpy_dtype, copy=False
                    )[: total - number * size]
                    for parts, dtype in zip(found, form.dtypes, strict=True)
                ]
            beside = [rows.pop() for _ in features][::-1]
            outputs = tf.nest.pack_sequence_as(form.structure, rows)
            yield outputs, dict(zip(features, beside, strict=True))

    def _form(
        self,
        pipeline: BatchPipeline,
        iterator: Any,
        state: TrainingState,
        features: tuple[str, ...],
        function: Function | None,
    ) -> _Form:
        """Returns the form of outputs; traces them at first."""
        key = (form_of(pipeline), features, function)
        if key in self._forms:
            return self._forms[key]
        if len(self._forms) >= _FORMS:  # such as by functions that each call defines anew
            self._forms.clear()
            self._outputs = tf.function(self._traced, autograph=False)
        form = _Form(len(self._forms))
        self._tracing = (pipeline, features, function, form)
        try:
            with data_errors(pipeline.source), device_errors():
                # Not by a call: TensorFlow counts the traces of all predictions of a process
                # together, and warns of frequent ones.
                zero = tf.constant(0, tf.int64)
                self._outputs.get_concrete_function(
                    form.number, iterator, zero, state.batches, state.step
                )
        finally:
            self._tracing = None
        self._forms[key] = form
        return form

    def _traced(
        self, form: int, iterator: Any, number: tf.Tensor, position: tf.Tensor, step: tf.Tensor
    ) -> list[Any]:
        """Returns outputs and features of a batch: a list of each replica's, or of all workers'."""
        strategy, tracing = self._strategy, self._tracing
        batch = tracing[0].next_batch(iterator, strategy, number)
        found = strategy.run(functools.partial(self._of_replica, tracing), (batch, position, step))
        if self._joins_workers:
            return [[strategy.gather(one, 0)] for one in found]
        return [strategy.experimental_local_results(one) for one in found]

    def _of_replica(
        self, tracing: Any, batch: Batch, position: tf.Tensor, step: tf.Tensor
    ) -> list[tf.Tensor]:
        pipeline, names, function, form = tracing
        name = getattr(function, "__name__", "function")
        if function is None:
            function, name = self._task.predict, f"{type(self._task).__name__}.predict"
        features = pipeline.examples(batch)
        microbatch = pipeline.microbatch(
            batch, features, training=False, step=step, position=position
        )
        if function == getattr(self._task, "predict", None):
            microbatch.gathering = _refuse
        beside = [features[each] for each in names]
        features = {each: v for each, v in features.items() if each != "weight"}
        call = functools.partial(_called, function, name)
        microbatch.drawn = {}
        with microbatch.forward():
            outputs = call(features)
        if microbatch.drawn:  # once more, now that the rows of each draw can be told
            again = dataclasses.replace(microbatch, drawn=None, _calls={})
            with again.forward():
                again.placing = placing_of(call, features)
                outputs = call(features)
        rows = pipeline.global_batch_size // self._strategy.num_replicas_in_sync
        for one in tf.nest.flatten(outputs):
            shape = one.shape if tf.is_tensor(one) else tf.TensorShape([])
            if shape.rank == 0 or shape[0] != rows or not shape.is_fully_defined():
                got = f"shape {shape}" if tf.is_tensor(one) else f"a {type(one).__name__}"
                raise ConfigError(
                    f"{name} must return tensors of static shape whose first dimension is the "
                    f"batch, {rows}, got {got}. Pad a dimension that depends on the values."
                )
        form.structure = tf.nest.map_structure(lambda _: None, outputs)
        flat = tf.nest.flatten(outputs) + beside
        form.bytes_of_example = sum(math.prod(x.shape[1:]) * x.dtype.size for x in flat)
        form.dtypes = [x.dtype for x in flat]
        return [_gatherable(x) for x in flat] if self._joins_workers else flat

    def _source_of_inputs(self, data: Any) -> Source | Stream:
        is_dataset = isinstance(data, tf.data.Dataset)
        of_inputs = is_dataset and isinstance(data.element_spec, tf.TensorSpec)
        if not (of_inputs or isinstance(data, np.ndarray) or tf.is_tensor(data)):
            return as_source(data)
        name = getattr(self._task, "input_name", None)
        if not isinstance(name, str):
            raise DataError(
                f"{type(self._task).__name__} does not name its input, so predict cannot take a "
                "single array. Pass a dict from feature name to array."
            )
        if not of_inputs:
            return Source({name: data})
        named = tf.autograph.experimental.do_not_convert(lambda inputs: {name: inputs})
        return as_source(data.map(named))

    def _checked(self, source: Source | Stream, features: Sequence[str]) -> BatchPipeline:
        """Returns a pipeline of data that have the shapes of the training data, and features."""
        pipeline = self._pipeline_of(source)
        pipeline.count_examples()
        given = pipeline.element_spec
        if absent := set(features) - given.keys():
            raise DataError(
                f"The data have no feature {min(absent)!r} to return beside the outputs, only "
                f"{', '.join(sorted(source.element_spec))}. Name some of these."
            )
        for name, spec in self._trained_on.items():
            if name in given and given[name].shape != spec.shape:
                raise DataError(
                    f"Feature {name!r} must have shape {spec.shape}, as in the training data, got "
                    f"{given[name].shape}. Reshape or resize it; if one example was passed, pass a "
                    "batch of one, x[np.newaxis]."
                )
            if name in given:
                warn_of_another_kind(name, spec.dtype, given[name].dtype)
        return pipeline


def _called(function: Function, name: str, features: dict[str, tf.Tensor]) -> Any:
    try:
        return function(features)
    except KeyError as error:
        if error.args and error.args[0] not in features:
            raise DataError(
                f"{name} reads the feature {error.args[0]!r}, but the data have only "
                f"{', '.join(sorted(features))}. Add it to the data."
            ) from error
        raise


def _joined(batches: Iterator[Rows | None]) -> Rows:
    """Returns outputs and features of all batches, arrays [n, …]."""
    every = [one for one in batches if one is not None]
    return tf.nest.map_structure(lambda *parts: np.concatenate(parts), *every)


def _refuse(tensors: list[tf.Tensor], current: Microbatch) -> Gathered:
    """Refuses `ddl.gather` (`ddl.tasks.gather.Gathering`)."""
    raise ConfigError(
        "ddl.gather was called in predict, but an output must not depend on the other examples of "
        "its batch. Compute it from the features of its example. Compare examples in a loss, or in "
        "a function of all outputs (ddl.metrics.OfAllOutputs)."
    )


def _gatherable(values: tf.Tensor) -> tf.Tensor:
    """Returns values in a dtype that all workers can gather; cast back, they are the same."""
    if values.dtype.is_integer or values.dtype.is_bool:
        return tf.cast(values, tf.int64)
    return tf.cast(values, tf.float32) if values.dtype == tf.bfloat16 else values
