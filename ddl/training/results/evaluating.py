"""Evaluations and predictions of a trainer."""

import functools
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from ddl.data.pipeline import BatchPipeline
from ddl.errors import ConfigError
from ddl.signals import deferring_interrupt
from ddl.step.state import TrainingState
from ddl.training.checks.arguments import check_one_data_set
from ddl.training.results.readings import Readings


class Evaluating(Readings):
    """The part of `ddl.Trainer` that evaluates and predicts."""

    def evaluate(self, data: Any = None, *others: Any, averaged: bool = True) -> dict[str, float]:
        """Returns loss and metrics of a data set, each example counted once.

        Eager, cross-replica context, on all workers.

        Args:
          data: As `train_data`; None takes the trainer's `eval_data`, whose means are added to
            `history`.
          *others: Must be empty.
          averaged: Whether to evaluate the averaged weights, if the trainer keeps an average.
            Within `evaluation_weights` the weights of that block are evaluated.

        Raises:
          ConfigError: If there are no data, or several.
          DataError: If the data cannot be read, have other features than the training data, or if
            all examples have weight 0.
          KeyboardInterrupt: On SIGINT, in the main thread, after the evaluation.
        """
        parts = self._parts
        check_one_data_set("evaluate", data, others)
        parts.workers.check_together("Trainer.evaluate")
        self._runner.check_not_lost()
        run: Callable[[TrainingState], dict[str, float]]
        if data is not None:
            given = parts.given.evaluated(data)
            pipeline: BatchPipeline | None = given
            run = functools.partial(parts.given.evaluate, given)
        elif parts.evaluation is not None:
            pipeline, run = parts.eval_pipeline, parts.evaluation.run
        else:
            raise ConfigError(
                "The Trainer has no evaluation data. Pass eval_data to its constructor, or data to "
                "evaluate."
            )
        with deferring_interrupt(), self.evaluation_weights(averaged=averaged):
            means = run(self._runner.state)
            if pipeline is not None:
                means |= parts.corpus.of(pipeline.source, self._runner.state, means["loss"])
            if data is None and averaged:
                self._record("eval", means)
        return means

    def predict(
        self,
        data: Any,
        *others: Any,
        averaged: bool = True,
        function: Callable[[dict[str, Any]], Any] | None = None,
        weightless: bool = True,
    ) -> Any:
        """Returns the outputs of the task's `predict` for each example, in order.

        Eager, cross-replica context, on all workers.

        Args:
          data: As `train_data`, without the features that `predict` does not read; or an array or
            a `tf.data.Dataset` of inputs.
          *others: Must be empty.
          averaged: As in `evaluate`.
          function: Function of the features [batch, …] to call in place of the task's `predict`,
            such as another method of the task. It is traced once.
          weightless: Whether the outputs of examples of weight 0 are returned too.

        Returns:
          Arrays [n, …], in the structure that `predict` of the task, or `function`, returns.

        Raises:
          ConfigError: If the task has no `predict` or its outputs are not [batch, …].
          DataError: If the data cannot be read, or a feature is missing or has another shape than
            in the training data.
          KeyboardInterrupt: On SIGINT, in the main thread, after the prediction.
        """
        check_one_data_set("predict", data, others)
        self._parts.workers.check_together("Trainer.predict")
        self._runner.check_not_lost()
        with deferring_interrupt(), self.evaluation_weights(averaged=averaged):
            return self._parts.given.predict(
                data, self._runner.state, function, weightless=weightless
            )

    def predict_batches(
        self,
        data: Any,
        *,
        features: Sequence[str] = (),
        first_batch: int = 0,
        averaged: bool = True,
        keeps: bool = True,
    ) -> Generator[tuple[Any, dict[str, Any]] | None, None, None]:
        """Yields the outputs of the task's `predict` batch by batch, which needs little memory.

        The model holds the evaluation weights until the last batch, or until the iterator is
        closed; training before that is an error. If several iterators, or a block of
        `evaluation_weights` around them, are open, the first one determines the weights, and the
        last one to end restores the model's own. Eager, cross-replica context, on all workers, each
        of which must take all batches.

        Args:
          data: As in `predict`.
          features: Names of features of the data to yield beside the outputs.
          first_batch: Number of the first batch, counted from 0; batches have `global_batch_size`
            rows.
          averaged: As in `evaluate`.
          keeps: Whether this process needs the outputs. If False, each batch is None.

        Yields:
          The outputs, arrays [b, …] in the structure that `predict` of the task returns, and a dict
          of the features. The last batch may have fewer rows than the others.

        Raises:
          ConfigError: As `predict`.
          DataError: As `predict`, or if the data lack one of `features`.
        """
        parts = self._parts
        parts.workers.check_together("Trainer.predict_batches")
        self._runner.check_not_lost()
        with self.evaluation_weights(averaged=averaged):
            yield from parts.given.predict_batches(
                data, self._runner.state, features, first_batch, keeps=keeps
            )

    def check_predicts(self, what: str) -> None:
        """Checks that the task has outputs.

        Args:
          what: Name of what needs the outputs, for the error.

        Raises:
          ConfigError: If the task has no `predict`, or the strategy is asynchronous.
        """
        self._parts.given.check_predicts(what)

    def evaluation_weights(self, *, averaged: bool = True) -> AbstractContextManager[None]:
        """Gives the model the weights for evaluation and export within the `with` block.

        These weights are the averages, if the trainer keeps them and `averaged` is True, or else
        the model's own. After the block, and after the last batch of iterators of `predict_batches`
        that are still open, the model's own weights are restored bit for bit; training and
        checkpoints need the own weights. Eager, cross-replica context, on all workers.

        Raises:
          ConfigError: If `averaged` is not a bool.
        """
        if not isinstance(averaged, bool):
            raise ConfigError(f"averaged must be True or False, got {averaged!r:.60}.")
        return self._parts.evaluation_weights.applied(averaged)

    def check_has_own_weights(self) -> None:
        """Raises ConfigError within `evaluation_weights`."""
        self._parts.evaluation_weights.check_not_applied()
