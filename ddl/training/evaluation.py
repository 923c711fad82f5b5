"""Evaluation and prediction: forward passes over a data set, each example counted once.

Here `tf.distribute` is at its plainest: the iterator of a distributed data set gives each replica
its rows (`ddl.step.replicas.distributed_iterator`), `strategy.run` computes sums on each replica,
and `strategy.reduce` adds them up. Predictions are gathered instead, in order and without padding.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ddl.data.batch import Batch
from ddl.data.checks import check_same_classes, check_same_features, data_errors
from ddl.data.conversion import as_source
from ddl.data.pipeline import BatchPipeline
from ddl.distribution.path import on_host_if_placed
from ddl.distribution.traits import traits_of
from ddl.distribution.workers import Workers, gatherable
from ddl.errors import ConfigError, DataError, check_no_text
from ddl.metrics import CorpusMetric
from ddl.metrics.corpus_metric import checked_corpus_metrics
from ddl.microbatch import Microbatch, without_traces_of_the_user
from ddl.random import placing_of
from ddl.step.compiled import Compiler
from ddl.step.fixed_order import fixed_order_of_sums
from ddl.step.loss import Loss
from ddl.step.replicas import distributed_iterator
from ddl.step.state import TrainingState
from ddl.tasks.gather import Gathered
from ddl.tasks.task import Task, check_has_outputs
from ddl.training.checks import naming_features
from ddl.training.device_errors import device_errors
from ddl.training.probes import Probes

# Outputs in the structure that `predict` returns, and features by name, without padding.
Rows = tuple[Any, dict[str, np.ndarray]]


def in_order(
    task: Any, data: Any, argument: str, train: Mapping[str, BatchPipeline], resident: Any = False
) -> BatchPipeline:
    """Returns the pipeline of other data, in their order, with batches of the first source's size.

    Args:
      task: The task. Inputs alone, and x of (x, y), get the name of its input.
      data: As `ddl.Trainer` takes it, or one array of inputs.
      argument: Name of the argument that the data are, for errors.
      train: The pipelines of the training data.
      resident: As `BatchPipeline` takes it.

    Raises:
      DataError: If the data are of another kind.
    """
    is_known = "" in train and "input" in train[""].element_spec  # x of (x, y)
    name = getattr(task, "input_name", "input" if is_known else None)
    x, *others = data if isinstance(data, tuple) and len(data) in (2, 3) else [data]
    is_array = isinstance(x, np.ndarray) or tf.is_tensor(x)
    if isinstance(name, str) and (is_array or others) and not isinstance(x, Mapping):
        data = ({name: x}, *others) if others else {name: x}
    first, source = next(iter(train.values())), as_source(data, argument)
    size = first.global_batch_size
    return BatchPipeline(source, size, seed=first.seed, shuffle=False, resident=resident)


def evaluation_pipeline(
    task: Task, data: Any, argument: str, train: Mapping[str, BatchPipeline], resident: Any = False
) -> BatchPipeline:
    """Returns the pipeline of evaluation data, which have the form of the training data.

    Args:
      task: The task, whose `check` the data must pass.
      data: As `in_order` takes it, and the further arguments.
      argument: See there.
      train: See there.
      resident: See there.

    Raises:
      DataError: If the data are of another kind, do not fit, or have no end.
    """
    pipeline = in_order(task, data, argument, train, resident)
    if getattr(pipeline.source, "is_endless", False):
        pipeline.count_examples()  # raises the error now, and not after the training
    if "" in train:
        check_same_features(train[""].element_spec, pipeline.element_spec)
        check_same_classes(train[""].source, pipeline.source)
    if hasattr(task, "check"):
        task.check(pipeline.source)
    return pipeline


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
            self._compiler.tracing(lambda: self._traced.get_concrete_function(form, *given))
            self._pipeline = None
            return self._traced(form, *given)

    def _call(self, form: str, *given: Any) -> Any:
        return self._function(self._pipeline, *given)


class Evaluations:
    """Means of loss and metrics over data, figures of all outputs, and the outputs themselves.

    Eager, cross-replica context, on all workers. With parameter servers, the chief alone computes,
    and reads their weights. Data that a call gives stay on the host and are freed after it.

    Attributes:
      names: Names of the figures of the trainer's own evaluation data; empty without any.
    """

    def __init__(
        self,
        probes: Probes,
        train: Mapping[str, BatchPipeline],
        own: BatchPipeline | None,
        corpus_metrics: Any,
        compiler: Compiler,
    ):
        """Probes the loss on the trainer's own evaluation data; traces nothing.

        Args:
          probes: The probes of the task.
          train: The pipelines of the training data.
          own: The trainer's own evaluation data.
          corpus_metrics: As `ddl.Trainer` takes it.
          compiler: Compiles pieces of an evaluation.

        Raises:
          ConfigError: If the task cannot be evaluated, `corpus_metrics` has another type, two
            figures have one name, or there are no outputs.
          DataError: If the data lack what `corpus_metrics` read.
        """
        self._probes, self._train, self._own, self._compiler = probes, train, own, compiler
        self._task: Any = probes.task
        self._strategy = probes.strategy
        if traits_of(self._strategy).asynchronous:
            has_gpu = tf.config.get_visible_devices("GPU")
            self._strategy = tf.distribute.OneDeviceStrategy("GPU:0" if has_gpu else "CPU:0")
        self._workers = Workers(self._strategy)
        self._joins_workers = self._workers.number > 1
        self._losses: dict[Any, Loss] = {}  # by the features of the data
        self._sums = TracedByForm(self._sums_of, compiler)
        self._outputs = TracedByForm(self._outputs_of, compiler)
        self._iterators: dict[BatchPipeline, Any] = {}  # of the trainer's own data
        self._corpus_metrics = checked_corpus_metrics(corpus_metrics, [])
        of_corpora = [name for metric in self._corpus_metrics for name in metric.names]
        self.names = () if own is None else (*self._loss(own).form.metrics.names, *of_corpora)
        for metric in self._corpus_metrics:
            check_has_outputs(self._task, "Trainer.corpus_metrics")
            if own is not None:
                self._check_features(own.element_spec, metric.features or ())

    def means(self, data: Any, state: TrainingState) -> dict[str, float]:
        """Returns the figures of data by name, for the present weights.

        Every evaluation reads the first epoch, whether or not the run was resumed: later epochs of
        a mixture, or of examples that draw by their seed, are others.

        Args:
          data: As `ddl.Trainer` takes it; None takes the trainer's own.
          state: The training's state; schedules of layers and tasks follow it.

        Raises:
          DataError: If the data cannot be read, or if their feature "weight" is always 0.
          ConfigError: If there are no data, or the task cannot be evaluated.
        """
        pipeline = self._own
        if data is not None:
            pipeline = evaluation_pipeline(self._task, data, "The data of evaluate", self._train)
        if pipeline is None:
            raise ConfigError(
                "The Trainer has no evaluation data. Pass eval_data to it, or data to evaluate."
            )
        pipeline.count_examples()
        form, is_own = self._loss(pipeline).form, pipeline is self._own
        # Not kept while in use: after an error its position would be wrong.
        iterator = self._iterators.pop(pipeline, None)
        iterator = iterator or distributed_iterator(pipeline, self._strategy, repeats=is_own)
        count = tf.constant(pipeline.steps_per_epoch, tf.int32)
        sums = self._sums(pipeline, iterator, count, state.step)
        if is_own:
            self._iterators[pipeline] = iterator
        # Weights of the task may depend on the model and all be 0 for a while: means are NaN.
        if sums[0] == 0 and not form.weighs:
            raise DataError(
                "Feature 'weight' is 0 for all examples of the evaluation data, so the mean is "
                "undefined. Give a positive weight to the examples to evaluate on."
            )
        means = form.metrics.means(sums)
        for metric in self._corpus_metrics:
            means |= self._corpus_metric(metric, pipeline, state, means["loss"])
        return means

    def _loss(self, pipeline: BatchPipeline) -> Loss:
        """Returns the loss; probes it on the first data that have these features.

        Raises:
          ConfigError: If two figures have one name.
        """
        spec = spec_of(pipeline)
        if spec not in self._losses:
            with self._workers.failing_together():
                loss = self._probes.loss(pipeline)
                checked_corpus_metrics(self._corpus_metrics, loss.form.metrics.names)
            self._losses[spec] = loss
        return self._losses[spec]

    @fixed_order_of_sums()
    @without_traces_of_the_user()
    def _sums_of(
        self, pipeline: BatchPipeline, iterator: Any, count: tf.Tensor, step: tf.Tensor
    ) -> tf.Tensor:
        """Returns the metric sums over batches: float64 [size]. Cross-replica context, in a graph.

        Args:
          pipeline: The data.
          iterator: Their distributed iterator.
          count: Number of batches, int32 [], which stays on the host: a GPU would make it wait.
          step: Updates that the training has made, int64 [].
        """
        strategy, loss = self._strategy, self._loss(pipeline)

        def sums_of(batch: Batch) -> tf.Tensor:
            features, microbatch = forward(pipeline, batch, step)
            with microbatch.forward():
                return loss(features, training=False)[1]

        def of_replica(batch: Batch) -> tf.Tensor:
            return self._compiler.of_pass(lambda: sums_of(batch))

        def add_batch(number: tf.Tensor, sums: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            with on_host_if_placed(strategy):
                of_run = tf.cast(number, tf.int64)
            batch = pipeline.next_batch(iterator, strategy, of_run)
            per_replica = strategy.run(of_replica, args=(batch,))
            return number + 1, sums + strategy.reduce("SUM", per_replica, axis=None)

        first = tf.zeros([], tf.int32), loss.form.metrics.zeros()
        return tf.while_loop(lambda number, _: number < count, add_batch, first)[1]

    def _corpus_metric(
        self, metric: CorpusMetric, pipeline: BatchPipeline, state: TrainingState, loss: float
    ) -> dict[str, float]:
        """Returns the figures of one metric, which the chief computes, on all workers.

        Examples of weight 0 are left out.
        """
        if not math.isfinite(loss):  # which the run reports
            return dict.fromkeys(metric.names, math.nan)
        source, every, own = pipeline.source, list[Any](), dict[str, float]()
        names = tuple(source.element_spec if metric.features is None else metric.features)
        features = tuple(dict.fromkeys([*names, "weight"]))
        for outputs, beside in self.outputs(source, state, features):
            counts, kept = beside["weight"] != 0, (outputs, {name: beside[name] for name in names})
            if self._workers.is_chief:
                every.append(tf.nest.map_structure(lambda x, counts=counts: x[counts], kept))
        with self._workers.failing_together():
            if self._workers.is_chief:
                own = metric(*joined(every))
        return {n: self._workers.broadcast_float(own.get(n, 0.0)) for n in metric.names}

    def _check_features(self, spec: Mapping[str, tf.TensorSpec], names: Sequence[str]) -> None:
        """Raises DataError if data lack a feature to return beside the outputs.

        Several workers cannot gather text.
        """
        kept = [n for n in spec if not (self._joins_workers and spec[n].dtype == tf.string)]
        if absent := set(names) - {*kept}:
            raise DataError(
                f"The data have no feature {min(absent)!r} to return beside the outputs, only "
                f"{', '.join(sorted(kept))} (of several workers, no texts). Name some of these."
            )

    def outputs(
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
        pipeline = in_order(self._task, data, "The data of predict", self._train)
        size, total = pipeline.global_batch_size, pipeline.count_examples()
        spec = pipeline.element_spec
        self._check_features(spec, features)
        known = self._train[""].element_spec if "" in self._train else {}
        check_same_features({name: one for name, one in known.items() if name in spec}, spec)
        with data_errors(pipeline.source):
            iterator = distributed_iterator(pipeline, self._strategy, first_batch)
        for number in range(first_batch, -(-total // size)):
            # What a batch draws depends on its number, wherever the reading began.
            now = tf.constant(number, tf.int64), state.step
            found = self._outputs(pipeline, tuple(features), iterator, *now)
            with device_errors():  # as arrays at once: all outputs may not fit on a device
                rows = joined([tf.nest.map_structure(lambda x: x.numpy(), one) for one in found])
            left = total - number * size
            outputs, beside = tf.nest.map_structure(lambda x, left=left: x[:left], rows)
            yield outputs, dict(zip(features, beside, strict=True))

    @without_traces_of_the_user()
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

        def of_all(values: Any) -> tf.Tensor:
            given = local(values)[0].dtype
            return tf.cast(strategy.gather(strategy.run(gatherable, (values,)), 0), given)

        local = strategy.experimental_local_results
        batch = pipeline.next_batch(iterator, strategy, number)
        found = strategy.run(self._of_replica, (pipeline, features, batch, step))
        if self._joins_workers:
            return [tf.nest.map_structure(of_all, found)]
        replicas = range(self._workers.replicas_of_each)
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
        rows = pipeline.global_batch_size // self._strategy.num_replicas_in_sync
        return tf.nest.map_structure(lambda output: self._checked(output, rows), outputs), beside

    def _called(self, features: dict[str, tf.Tensor]) -> Any:
        with naming_features(f"{type(self._task).__name__}.predict", features):
            return self._task.predict(features)

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


def joined(every: Sequence[Any]) -> Any:
    """Returns structures of arrays [b, …] as one structure of arrays [n, …]."""
    return tf.nest.map_structure(lambda *parts: np.concatenate(parts), *every)


def _refuse(tensors: list[tf.Tensor], current: Microbatch) -> Gathered:
    """Refuses `ddl.gather` (`Microbatch.gathering`)."""
    raise ConfigError(
        "ddl.gather was called in predict, but an output must not depend on the other examples of "
        "its batch. Compare examples in a loss, or in a ddl.metrics.CorpusMetric."
    )
