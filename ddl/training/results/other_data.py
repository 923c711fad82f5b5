"""Evaluations and predictions on data that a call gives, with one trace for each form of data."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ddl.data.checks import check_same_classes, check_same_features, warn_of_another_kind
from ddl.data.conversion import as_source
from ddl.data.pipeline import BatchPipeline
from ddl.data.source import Source
from ddl.data.stream import Stream
from ddl.distribution.traits import traits_of
from ddl.errors import ConfigError, DataError, check_no_text, check_takes
from ddl.step.compiled import Compiler
from ddl.step.loss import Loss
from ddl.step.state import TrainingState
from ddl.training.asynchronous.loop import CoordinatedEvaluation
from ddl.training.evaluation import Evaluation
from ddl.training.results.prediction import Prediction

_FORMS = 8
"""Number of forms of data whose traces are kept."""


class OtherData:
    """Evaluates and predicts on other data than a trainer's own. Eager, on all workers.

    The data stay on the host. They are freed after the call.
    """

    def __init__(
        self,
        task: Any,
        strategy: tf.distribute.Strategy,
        pipeline: Callable[[Any, Source | Stream, bool], BatchPipeline],
        objective: Callable[[BatchPipeline], Loss],
        compiler: Callable[[], Compiler],
        trained_on: dict[str, tf.TensorSpec] | None,
        training: Source | Stream | None,
    ):
        """Keeps the arguments; traces nothing.

        Args:
          task: The task.
          strategy: The strategy.
          pipeline: Makes the pipeline of a source in order, checked by the given task unless that
            is None; the flag says whether its arrays may reside on the devices.
          objective: Makes the objective of an evaluation.
          compiler: Makes the compiler of an evaluation.
          trained_on: `element_spec` of the training data; None if they have several sources.
          training: The training data; None if they have several sources.
        """
        self._task = task
        self._strategy = strategy
        self._pipeline = pipeline
        self._objective = objective
        self._compiler = compiler
        self._trained_on = trained_on
        self._training = training
        self._evaluations: dict[Any, Evaluation] = {}
        self._predictions: dict[Any, Prediction] = {}

    def evaluated(self, data: Any) -> BatchPipeline:
        """Returns the pipeline of data to evaluate on.

        Raises:
          DataError: If the data do not fit the task, or have other features or classes than the
            training data.
        """
        asynchronous = traits_of(self._strategy).asynchronous
        pipeline = self._pipeline(self._task, as_source(data), asynchronous)
        pipeline.count_examples()
        if self._trained_on is not None:
            check_same_features(self._trained_on, pipeline.element_spec)
            check_same_classes(self._training, pipeline.source)
        return pipeline

    def evaluate(self, pipeline: BatchPipeline, state: TrainingState) -> dict[str, float]:
        """Returns the means of loss and metrics; see `Evaluation.run`.

        Args:
          pipeline: From `evaluated`.
          state: The training's state.
        """
        if traits_of(self._strategy).asynchronous:
            objective = self._objective(pipeline)
            return CoordinatedEvaluation(objective, pipeline, self._strategy).run(state)
        form = _form(pipeline)
        if form not in self._evaluations:
            objective = self._objective(pipeline)
            evaluation = Evaluation(objective, None, self._strategy, self._compiler())
            _keep(self._evaluations, form, evaluation)
        return self._evaluations[form].run_on(pipeline, state)

    def predict(
        self,
        data: Any,
        state: TrainingState,
        function: Callable[[dict[str, tf.Tensor]], Any] | None = None,
        *,
        weightless: bool = True,
    ) -> Any:
        """Returns the task's outputs; see `Prediction.run`.

        Args:
          data: As `as_source` takes it, or one array of inputs, or a `tf.data.Dataset` of inputs.
          state: The training's state.
          function: Function of features to call in place of the task's `predict`.
          weightless: Whether examples of weight 0 are returned too.

        Raises:
          ConfigError: If the task has no `predict`, or the strategy is asynchronous.
          DataError: If the data do not fit the task.
        """
        if function is None:
            self.check_predicts("predict")
        else:
            check_takes("The function of predict", function, ("features",))
            self._check_strategy("predict")
        pipeline = self._pipeline_of_outputs(self._source_of_inputs(data), "predict")
        return self._prediction(pipeline, (), function, weightless).run(pipeline, state)

    def predict_batches(
        self,
        data: Any,
        state: TrainingState,
        features: Sequence[str],
        first_batch: int,
        *,
        keeps: bool,
    ) -> Iterator[tuple[Any, dict[str, np.ndarray]] | None]:
        """Yields the outputs and features of each batch; see `Prediction.each_batch`.

        Args:
          data: As in `predict`.
          state: The training's state.
          features: Names of features to yield beside the outputs.
          first_batch: Number of the first batch.
          keeps: Whether this process keeps them; else each batch is None.

        Raises:
          ConfigError: If the task has no `predict`, or the strategy is asynchronous.
          DataError: If the data have no order, do not fit the task or lack a feature.
        """
        check_no_text("predict_batches.features", features)
        self.check_predicts("predict_batches")
        source = self._source_of_inputs(data)
        pipeline = self._pipeline_of_outputs(source, "predict_batches")
        if absent := set(features) - pipeline.element_spec.keys():
            raise DataError(
                f"The data have no feature {min(absent)!r} to return beside the outputs, only "
                f"{', '.join(sorted(source.element_spec))}. Name some of these."
            )
        prediction = self._prediction(pipeline, tuple(features))
        return prediction.each_batch(pipeline, state, first_batch, keeps)

    def outputs(
        self,
        source: Source | Stream,
        state: TrainingState,
        features: Sequence[str] | None,
        max_bytes: int,
        *,
        keeps: bool,
    ) -> tuple[Any, dict[str, np.ndarray]] | None:
        """Returns the task's outputs and features of the data; see `Prediction.run_within`.

        Examples of weight 0 are left out.

        Args:
          source: The data.
          state: The training's state.
          features: Names of the features; None: all.
          max_bytes: Largest size of all arrays.
          keeps: Whether this process keeps them; else the result is None.

        Raises:
          DataError: If the data lack a feature, or a feature is text.
          ConfigError: If the arrays would be larger.
        """
        names = self.check_outputs(source, features)
        pipeline = self._pipeline_of_outputs(source, "OfAllOutputs")
        prediction = self._prediction(pipeline, names, weightless=False)
        return prediction.run_within(pipeline, state, max_bytes, keeps)

    def check_outputs(
        self, source: Source | Stream, features: Sequence[str] | None
    ) -> tuple[str, ...]:
        """Checks data for `outputs`, without reading any; returns the names of the features.

        Args:
          source: The data.
          features: As `outputs` takes them.

        Raises:
          DataError: If the data have no order or lack a feature, or a feature is text.
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
        self._check_strategy(what)

    def _check_strategy(self, what: str) -> None:
        if traits_of(self._strategy).asynchronous:
            raise ConfigError(
                f"{what} does not run with parameter servers. Export the model, or restore a "
                "checkpoint under another strategy."
            )

    def _pipeline_of_outputs(self, source: Source | Stream, what: str) -> BatchPipeline:
        pipeline = self._pipeline(None, source, False)
        pipeline.count_examples()
        self._check_shapes(pipeline)
        return pipeline

    def _prediction(
        self,
        pipeline: BatchPipeline,
        features: tuple[str, ...],
        function: Callable[[dict[str, tf.Tensor]], Any] | None = None,
        weightless: bool = True,
    ) -> Prediction:
        weightless = weightless or "weight" not in pipeline.source.element_spec
        form = (_form(pipeline), features, function, weightless)
        if form not in self._predictions:
            name = f"{type(self._task).__name__}.predict"
            if function is not None:
                name = getattr(function, "__name__", "function")
            called = function or self._task.predict
            made = Prediction(
                called,
                name,
                pipeline,
                self._strategy,
                features,
                weightless=weightless,
                gathers=function is not None,
            )
            _keep(self._predictions, form, made)
        return self._predictions[form]

    def _source_of_inputs(self, data: Any) -> Source | Stream:
        if isinstance(data, tf.data.Dataset) and isinstance(data.element_spec, tf.TensorSpec):
            name = self._name_of_input()
            named = tf.autograph.experimental.do_not_convert(lambda inputs: {name: inputs})
            return as_source(data.map(named))
        if not (isinstance(data, np.ndarray) or tf.is_tensor(data)):
            return as_source(data)
        return Source({self._name_of_input(): data})

    def _name_of_input(self) -> str:
        name = getattr(self._task, "input_name", None)
        if not isinstance(name, str):
            raise DataError(
                f"{type(self._task).__name__} does not name its input, so predict cannot take a "
                "single array. Pass a dict from feature name to array."
            )
        return name

    def _check_shapes(self, pipeline: BatchPipeline) -> None:
        """Raises DataError if a feature has another shape than in training; some may be missing."""
        given = pipeline.element_spec
        for name, spec in (self._trained_on or {}).items():
            if name in given and given[name].shape != spec.shape:
                raise DataError(
                    f"Feature {name!r} must have shape {spec.shape}, as in the training data, got "
                    f"{given[name].shape}. Reshape or resize it; if one example was passed, pass a "
                    "batch of one, x[np.newaxis]."
                )
            if name in given:
                warn_of_another_kind(name, spec.dtype, given[name].dtype)


def _form(pipeline: BatchPipeline) -> Any:
    """Returns all of a pipeline that a trace depends on."""
    spec = [(name, one.shape, one.dtype) for name, one in sorted(pipeline.element_spec.items())]
    return (
        *((name, tuple(shape), dtype.name) for name, shape, dtype in spec),
        pipeline.always_full,
    )


def _keep(kept: dict[Any, Any], form: Any, value: Any) -> None:
    if len(kept) >= _FORMS:
        del kept[next(iter(kept))]
    kept[form] = value
