"""A check that a task's outputs for an example depend only on that example.

A replica computes its share of a batch, in microbatches, and pads the last batch of an epoch. A
loss across examples (in-batch negatives, mining, mixing, a division by the largest of the batch)
would see only these rows, and would differ on other devices. The check therefore runs the forward
pass on a few rows of the data, then again with some rows replaced, at the same shape. Losses,
weights and metrics of the other rows must not change. Random draws repeat, because they depend on
the position of a row. BatchNormalization reuses the moments of the first run, because ddl takes
moments over the whole microbatch by design. For the same reason `ddl.gather` returns what it
returned in the first run: a loss may depend on other rows through it, and only so; and so do the
layers that mix a row with its partner (`ddl.layers.transforms.mixing`). Two more runs check that
the loss leaves out padding among gathered rows.

The runs are on one device, eager or else traced, and leave every variable unchanged.
"""

import concurrent.futures
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from ddl.data.checks import data_errors
from ddl.data.pipeline import BatchPipeline
from ddl.distribution.devices import local_devices
from ddl.distribution.traits import traits_of
from ddl.errors import ConfigError
from ddl.layers.transforms.mixing import HeldPartners
from ddl.metrics.values import tensors_by_name
from ddl.microbatch import HeldMoments, Microbatch, without_traces_of_the_user
from ddl.random import batch_counter
from ddl.seeds import repeating_draws
from ddl.step.moving_statistics import restoring
from ddl.tasks.gather import HeldRows
from ddl.tasks.parts import models_of, variables_of
from ddl.tasks.task import LossFunction, Task
from ddl.training.checks.first_run import FirstRun
from ddl.training.checks.row_values import RowValues, dependences, noisy, tolerance_of
from ddl.user_code import message_of

_FEWEST, _MOST = 8, 16
"""Bounds of the number of rows. In fewer, mining may find no pair; more only cost time."""

_Features = dict[str, tf.Tensor]


# Losses, weights and metrics by the names that errors use; and what is held.
_Run = tuple[dict[str, tf.Tensor], FirstRun]


class RowIndependence:
    """Checks a task once for training and once for evaluation. Eager, cross-replica context."""

    def __init__(
        self,
        task: Task,
        layers: Iterable[keras.layers.Layer],
        strategy: tf.distribute.Strategy,
        losses: Callable[[bool, str], Sequence[tuple[LossFunction, Mapping[Any, int] | None]]],
    ):
        """Keeps the arguments; runs nothing.

        Args:
          task: The task.
          layers: All layers of the task (`ddl.tasks.parts.layers_of`).
          strategy: The strategy; its first device runs the task.
          losses: Returns the losses of training (True) or of an evaluation (False), for the data of
            a source, each with the placing of its draws.
        """
        self._task = task
        self._losses = losses
        self._layers = list(layers)
        self._strategy = strategy
        self._device = next(iter(local_devices(strategy)), None)
        dtypes = [tf.as_dtype(layer.compute_dtype) for layer in self._layers]
        self._tolerance = max(map(tolerance_of, dtypes), default=0.0)
        self._checked: set[tuple[bool, str]] = set()

    def check(self, pipeline: BatchPipeline, modes: Iterable[bool], source: str = "") -> None:
        """Checks the task on the first rows of the data, at the first call for each mode.

        An error of the task is logged and not raised: the traces of training and evaluation raise
        it.

        Args:
          pipeline: The pipeline of the data.
          modes: The values of `training` to check.
          source: Name of the source of the data.

        Raises:
          ConfigError: If an example's loss, weight or metric depends on other examples, or the task
            gives a negative weight.
          DataError: If the data cannot be read.
        """
        if traits_of(self._strategy).asynchronous:  # the chief runs no model
            return
        modes = [training for training in modes if (training, source) not in self._checked]
        if not modes:
            return
        share = pipeline.global_batch_size // pipeline.microbatches
        rows = min(max(share, _FEWEST), _MOST)
        with data_errors(pipeline.source):
            examples = pipeline.first_examples(2 * rows)
            examples.pop("weight", None)  # tasks do not get this feature
        different = min(pipeline.num_examples or 2 * rows, 2 * rows)
        batches = _batches(examples, rows, different)
        for training in modes:
            for loss, placing in self._losses(training, source):
                name = getattr(loss, "__name__", "loss")
                where = f"{type(self._task).__name__}.{name}, with training={training}"
                made = _outside_of_scopes(self._runs, loss, batches, training, placing)
                if made is not None:
                    _check_runs(made[0], where)
                    _check_padding(made[1], where)
            self._checked.add(
                (training, source)
            )  # not after a refusal: the next call refuses again

    def _runs(
        self,
        loss: LossFunction,
        batches: list[_Features],
        training: bool,
        placing: Mapping[Any, int] | None,
    ) -> tuple[list[dict[str, RowValues]], list[dict[str, RowValues]]] | None:
        """Returns the loss's values for each batch, and those for padding among gathered rows.

        If the values seem to depend on other rows, all batches are run again with the same draws of
        TensorFlow, and the first one once more, at the end. The result is None if the task cannot
        run here.
        """
        variables = variables_of([self._task, *models_of(self._task).values(), *self._layers])
        # A gate that starts at zero would hide a dependence that training opens.
        zeros = [v for v in variables if v.trainable and not np.any(v.numpy())]

        def run(features: _Features, held: FirstRun | None) -> _Run:
            moments = HeldMoments(None if held is None else held.moments)
            rows = HeldRows(None if held is None else held.rows)
            partners = HeldPartners(None if held is None else held.partners)
            current = Microbatch(
                seed=0,
                training=training,
                counter=batch_counter(tf.zeros([], tf.int64)),
                first_row=0,
                rows=next(iter(features.values())).shape[0],
                held_moments=moments,
                gathering=rows,
                pairing=partners,
                placing=placing,
                mask=None if held is None else held.mask,
            )
            with tf.device(self._device), current.forward():
                output = loss(dict(features), training)
            weight = {} if output.weight is None else {"weight": output.weight}
            metrics = {f"metric {name!r}": v for name, v in tensors_by_name(output.metrics).items()}
            held_now = FirstRun(moments.moments, rows.gathered, partners.found)
            return {"loss": output.loss, **weight, **metrics}, held_now

        def all_of(run: Callable[[_Features, FirstRun | None], _Run]) -> Any:
            held: FirstRun | None = None
            strict = False

            def values(features: _Features, given: FirstRun | None = None) -> dict[str, RowValues]:
                nonlocal held
                with restoring(variables, only_changed=True):  # all runs start from the same
                    tensors, now = run(features, given or held)
                held = now if held is None else held
                made = {name: self._values(tensor) for name, tensor in tensors.items()}
                return _strict([made])[0] if strict else made

            with restoring(zeros):
                for variable in zeros:
                    variable.assign(tf.fill(variable.shape, tf.cast(0.02, variable.dtype)))
                runs = [values(features) for features in batches]
                if not dependences(runs) and dependences(_strict(runs)):
                    strict = _has_static_shapes(run, batches[0])
                    runs = _strict(runs) if strict else runs
                repeating: Callable[[], AbstractContextManager[None]] = nullcontext
                if dependences(runs):  # or draws of TensorFlow itself
                    repeating, runs = repeating_draws, []
                    for features in [*batches, batches[0]]:
                        with repeating():
                            runs.append(values(features))
                if held is None or not held.rows or dependences(runs) or noisy(runs):
                    return runs, []
                padded = []
                for one in held.with_padding():
                    with repeating():
                        padded.append(values(batches[0], one))
                return runs, padded

        # A recurrent layer runs each of its time steps in Python if it runs eagerly.
        recurrent = any(isinstance(layer, keras.layers.RNN) for layer in self._layers)
        ways = [_in_graphs(run), run] if recurrent else [run, _in_graphs(run)]
        with without_traces_of_the_user():
            for way in ways:  # a task may run only eagerly, or only in graphs
                try:
                    return all_of(way)
                except Exception as error:
                    reason = error
        logging.warning(
            "The check that examples are independent of each other could not run: %s",
            _short(reason),
        )
        return None

    def _values(self, values: Any) -> RowValues:
        tensor = tf.convert_to_tensor(values)
        tolerance = max(self._tolerance, tolerance_of(tensor.dtype))
        return RowValues(tf.cast(tensor, tf.float64).numpy(), tolerance)


def _batches(examples: _Features, rows: int, distinct: int) -> list[_Features]:
    """Returns a batch of the first rows, and two batches in which two thirds of these are replaced.

    Keeping every third row replaces the neighbour of a kept row, its mirror image and the row half
    a batch away.

    Args:
      examples: Examples by feature name, of which the first `distinct` differ.
      rows: Number of rows of a batch.
      distinct: Number of distinct examples.
    """
    places = np.arange(rows)
    own = places % distinct
    # The first replacement takes other examples. The second takes copies of kept rows, which makes
    # pairs of equal examples.
    others = (places + max(distinct // 2, 1)) % distinct
    staying = places[places % 3 == 1]
    copies = own[staying[places % len(staying)]]
    indices = [
        own,
        np.where(places % 3 == 0, own, others),
        np.where(places % 3 == 1, own, copies),
    ]
    return [{name: tf.gather(v, index) for name, v in examples.items()} for index in indices]


def _check_runs(runs: Sequence[dict[str, RowValues]], where: str) -> None:
    """Raises ConfigError if rows depend on other rows, or have negative weights."""
    if found := dependences(runs):
        raise ConfigError(
            f"{where}: the {' and the '.join(found)} of an example must not depend on other "
            f"examples of the batch (got {next(iter(found.values()))}). A replica sees only its "
            "own microbatch, with padding, so the result would depend on the number of devices. "
            "To compare an example with the others, as for in-batch negatives and mining, take "
            "their rows from ddl.gather(x), which gives those of all replicas and a mask of the "
            "padding. To mix examples, use ddl.layers.Mixup or CutMix. Compute all else of a row "
            "from that row alone: no sums over the batch. Use keras.layers.BatchNormalization for "
            "moments of the batch."
        )
    for name, (weight, _) in runs[0].items():
        if (name == "weight" or name.endswith("(weight)'")) and (weight < 0).any():
            raise ConfigError(
                f"{where}: the {name} of an example must be at least 0, because the loss is "
                f"divided by the sum of the weights, got {weight.min():.6g}. To use negative "
                "factors, multiply the loss by them."
            )
    if unlike := noisy(runs):
        logging.warning(
            "%s: the check that examples are independent of each other cannot tell for the %s, "
            "which differs between two runs on the same examples. Draw random numbers with "
            "keras.random, with ddl.random or with layers of Keras, which repeat them.",
            where,
            " and the ".join(unlike),
        )


def _check_padding(runs: Sequence[dict[str, RowValues]], where: str) -> None:
    """Raises ConfigError if rows depend on padding that was gathered.

    Args:
      runs: Values for `FirstRun.with_padding`; empty if nothing was gathered.
      where: Name of the loss, for the error.
    """
    if runs and (found := dependences([runs[0], runs[1], runs[1]])):
        raise ConfigError(
            f"{where}: the {' and the '.join(found)} of an example must not depend on padding "
            f"(got {next(iter(found.values()))} as padding). Leave out the rows of "
            "ddl.gather whose mask is False, as in tf.where(gathered.mask, logits, "
            "logits.dtype.min)."
        )


def _strict(runs: Sequence[dict[str, RowValues]]) -> list[dict[str, RowValues]]:
    return [{name: one.at_one_shape() for name, one in run.items()} for run in runs]


def _has_static_shapes(run: Callable[..., _Run], features: _Features) -> bool:
    """Returns whether kernels get the same shapes whatever the rows hold; False if unknown."""
    try:
        traced = tf.function(run, autograph=False).get_concrete_function(features, None)
    except Exception:  # a task may run only eagerly
        return False
    waiting = [traced.graph]
    while waiting:
        graph = waiting.pop()
        outputs = (x for operation in graph.get_operations() for x in operation.outputs)
        if not all(x.shape.is_fully_defined() for x in outputs):
            return False
        waiting += [graph._get_function(name).graph for name in graph._functions]
    return True


def _in_graphs(run: Callable[..., _Run]) -> Callable[..., _Run]:
    """Returns the function traced: once to compute moments, once to use given moments."""
    traced: dict[tuple[bool, bool], Any] = {}

    def run_traced(features: _Features, held: FirstRun | None) -> _Run:
        key = held is None, held is not None and held.mask is not None
        if key not in traced:
            function = tf.function(run, autograph=False)
            traced[key] = function.get_concrete_function(features, held)
        return traced[key](features, held)

    return run_traced


def _outside_of_scopes(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function under the default strategy; within a scope, in a new thread."""
    if not tf.distribute.has_strategy():
        return function(*args)
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(function, *args).result()


def _short(error: Exception) -> str:
    """Returns why a loss could not be called, without the frames that TensorFlow adds."""
    if "cannot be accessed from here" in str(error):
        return (
            "the loss uses a tensor of the step, which does not exist where the check calls the "
            "loss alone. If the loss is right for each example alone, nothing needs to be done."
        )
    lines = [line for line in message_of(error).splitlines() if line and not line[0].isspace()]
    return " ".join([*lines[:1], *lines[1:][-1:]])
