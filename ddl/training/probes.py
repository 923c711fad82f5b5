"""Probes of a loss on a few rows of the data, before the update is traced.

The loss is traced for 8 and for 4 rows, which builds the model's variables and gives the layout of
the metric sums. It then runs four times, with the rows' positions in the global batch:

    rows 0 to 7                            the first run
    the same, with one half replaced       the others must keep their values: same shapes, same bits
    the same, with the other half
    rows 0 to 3 alone                      must be those of the first run, to 1e-2

A replica computes its share of a batch, in microbatches, and pads the last batch of an epoch. A
loss across examples (in-batch negatives, mining, a division by the largest of the batch or by the
batch's size) would see only these rows, and would differ on other devices: it is refused.
BatchNormalization reuses the moments of the first run, because ddl takes moments over the whole
microbatch by design. For the same reason `ddl.gather`, and layers that mix a row with its partner,
return what they returned in the first run. Two more runs check that a loss that gathers leaves out
padding.

All runs are on one device and leave every variable unchanged.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from ddl import microbatch, random
from ddl.data.checks import data_errors
from ddl.data.pipeline import BatchPipeline
from ddl.distribution.traits import traits_of
from ddl.errors import ConfigError, DataError, DdlError, message_of
from ddl.layers.checks import check_are_means
from ddl.layers.lookups import look_up_rows
from ddl.layers.normalization import take_over_moments
from ddl.microbatch import Microbatch, without_traces_of_the_user
from ddl.optimizers.weight_average import restoring
from ddl.random import batch_counter
from ddl.step.effects import (
    check_python_draws,
    check_stateless,
    check_writes,
    names_written_in,
    states_of_generators,
    written_in,
)
from ddl.step.loss import Form, Loss
from ddl.step.metric_sums import MetricSums, check_dimensions, check_output, tensors_of
from ddl.step.moving_statistics import allow_replica_writes
from ddl.step.rows import tables_in
from ddl.tasks.gather import Gathered, positions_of
from ddl.tasks.parts import copies_of, layers_of, variables_of
from ddl.tasks.task import (
    LossFunction,
    PerExample,
    Task,
    evaluation_loss,
    has_step,
    names_resembling_weight,
)
from ddl.training.checks import naming_features

_MIXED_DTYPES = re.compile(r"has type \w+ that does not match type|have types \[")
"""Errors of TensorFlow for an operation whose inputs have several dtypes."""
_EIGHT, _FOUR = 8, 4
# Of the rows of one half the neighbours, mirror images and rows half a batch away lie in the other.
_HALVES = {(0, 3, 5, 6): [0, 8, 9, 3, 10, 5, 6, 11], (1, 2, 4, 7): [8, 1, 2, 9, 4, 10, 11, 7]}
"""The kept rows, and the rows with the others replaced: the largest is in one half."""
_AT_ONE_SHAPE = {8: 1e-13, 4: 1e-5, 2: 1e-5}
"""Tolerated differences, relative to the largest value, by the bytes of the dtype.

Kernels give a row the same bits at one shape. In single and double precision these also hold for a
task that selects tokens from its rows, and so runs kernels at other shapes.
"""
_AT_OTHERS = 1e-2
"""Tolerated difference between 8 and 4 rows; and at other shapes in half precision."""

_OF_LAYERS = "losses of layers"
_Features = dict[str, tf.Tensor]
_Values = dict[str, np.ndarray]


class _Pass(NamedTuple):
    """A traced pass: its function of features and mask, and what the trace told."""

    function: Any
    output: PerExample
    microbatch: Any


@dataclasses.dataclass(eq=False)
class Probes:
    """Probes the losses of a task. Eager, cross-replica context.

    Attributes:
      task: The task.
      strategy: The strategy.
      optimizers: Optimizers whose variables checkpoints hold.
    """

    task: Task
    strategy: tf.distribute.Strategy
    optimizers: Sequence[keras.optimizers.Optimizer]
    # Whether any loss has read each feature that is named like a weight.
    _read: dict[str, bool] = dataclasses.field(default_factory=dict)

    def loss(self, pipeline: BatchPipeline, function: LossFunction | None = None) -> Loss:
        """Returns a loss after its probes.

        Args:
          pipeline: The examples.
          function: A loss in training; None takes the loss of an evaluation.

        Raises:
          ConfigError: If the task cannot be evaluated, an operation mixes dtypes, or as
            `Probe.form`.
          DataError: As `Probe.form`; in an evaluation as `check_read`.
        """
        task, training = self.task, function is not None
        function = function or getattr(task, "per_example", None) or evaluation_loss(task)
        if function is None:
            raise ConfigError(
                f"{type(task).__name__} cannot be evaluated. Give it a method evaluate(features) "
                "that returns a ddl.PerExample, or leave out eval_data."
            )
        replicas = self.strategy.num_replicas_in_sync
        loss = Loss(task, function, pipeline.global_batch_size, replicas)
        probe = Probe(self.strategy, loss, pipeline, training, self._read)
        try:
            loss.form = probe.form(self.optimizers)
            if not training:  # in training, another loss may read it
                self.check_read()
        except TypeError as error:
            if not _MIXED_DTYPES.search(text := message_of(error)):
                raise
            kinds = sorted({layer.compute_dtype for layer in layers_of(task)})
            spec = sorted(pipeline.element_spec.items())
            given = ", ".join(f"{name!r} {x.dtype.name}" for name, x in spec if name != "weight")
            raise ConfigError(
                f"{loss.where} mixes dtypes (layers compute in {', '.join(kinds)}; the features "
                f"are {given}): {text} Convert outputs with tf.cast(…, 'float32'), or the data "
                "with .astype('float32'); or compute in float64 (PRECISION, ddl.precision)."
            ) from error
        return loss

    def check_read(self) -> None:
        """Raises DataError if the data have a feature named like a weight that no loss reads."""
        if unread := [name for name, is_read in self._read.items() if not is_read]:
            raise DataError(
                f"The data have a feature {unread[0]!r} that {type(self.task).__name__} does not "
                "read. Give one 'weight' for each example, read it in the task, or remove it."
            )


@dataclasses.dataclass(eq=False)
class Probe:
    """The probe of one loss, for training or for evaluation."""

    strategy: tf.distribute.Strategy
    loss: Loss
    pipeline: BatchPipeline
    training: bool
    read: dict[str, bool]
    # Whether all replicas are traced, and not only the first one, which stands for all.
    every: bool = False
    # What the first run computed across rows: by whether `ddl.gather` did, and number of the call.
    kept: dict[tuple[bool, int], list[np.ndarray]] = dataclasses.field(default_factory=dict)

    def form(self, optimizers: Sequence[keras.optimizers.Optimizer]) -> Form:
        """Probes the loss.

        Args:
          optimizers: Optimizers whose variables checkpoints hold.

        Raises:
          ConfigError: If the task's losses, weights or metrics have wrong types or shapes, or
            depend on other examples; if the loss draws by Python or NumPy, or writes a variable
            that no checkpoint holds.
          DataError: If the data cannot be read, or lack a feature that the task reads.
          Exception: Any error of the task.
        """
        task, where = self.loss.task, self.loss.where
        with self.strategy.scope(), without_traces_of_the_user():
            self.build()
            first = self.first(optimizers)
            graph, current = first.function.graph, first.microbatch
            placing: Mapping[Any, int] | None = None if current.drawn else {}
            if current.rows == _EIGHT:
                try:
                    few = self.traced(_FOUR, _EIGHT)
                    placing = random.placing(few.microbatch.drawn, current.drawn, _FOUR, _EIGHT)
                    check_dimensions(first.output, few.output, where)
                    if not traits_of(self.strategy).asynchronous:
                        self.check_rows(first, few)
                except DdlError:
                    raise
                except Exception as error:  # training raises it, and says more
                    reason = message_of(error).splitlines()[0]
                    logging.warning("%s: the check of rows could not run: %s", where, reason)
        normalizing = {id(layer) for layer in current.normalizing}  # others are as in an evaluation
        kind = keras.layers.BatchNormalization
        return Form(
            metrics=MetricSums(first.output, where),
            entry=tf.TensorSpec(first.output.loss.shape[1:], first.output.loss.dtype),
            weighs=first.output.weight is not None,
            gathers=current.has_gathered,
            tables=tables_in(graph),
            layers=[x for x in layers_of(task) if not isinstance(x, kind) or id(x) in normalizing],
            placing=placing,
            written=names_written_in(graph, task) if self.training else (),
        )

    def microbatch(self, rows: int, total: int, mask: tf.Tensor | None) -> Microbatch:
        """Returns the first rows of the first batch; arguments as in `traced`."""
        zero, numbers = tf.zeros([], tf.int64), itertools.count()

        def keep(tensors: Sequence[tf.Tensor], size: int | None, gathers: bool = False) -> Any:
            place = gathers, next(numbers)

            def first(*now: np.ndarray) -> list[np.ndarray]:
                return self.kept.setdefault(place, [np.array(value) for value in now])

            kept = tf.numpy_function(first, tensors, [x.dtype for x in tensors])
            shapes = [[size, *x.shape[1:]] if size else x.shape for x in tensors]
            return [tf.ensure_shape(x, shape) for x, shape in zip(kept, shapes, strict=True)]

        def held(tensors: Sequence[tf.Tensor], of_rows: bool) -> Any:
            return [x[:rows] for x in keep(tensors, total)] if of_rows else keep(tensors, None)

        def gathering(tensors: list[tf.Tensor], current: Microbatch) -> Gathered:
            every = tf.ones([total], tf.bool) if mask is None else mask
            return Gathered(keep(tensors, total, gathers=True), every, positions_of(current))

        return Microbatch(
            seed=0,
            training=self.training,
            counter=batch_counter(zero),
            first_row=0,
            rows=rows,
            held=held,
            gathering=gathering,
            mask=mask,
            drawn={},
        )

    def specs(self, rows: int) -> dict[str, tf.TensorSpec]:
        """Returns the specs of the features of some rows, without their weight."""
        every = self.pipeline.element_spec.items()
        return {k: tf.TensorSpec([rows, *v.shape], v.dtype, k) for k, v in every if k != "weight"}

    def build(self) -> None:
        """Builds new layers by running the task on zeros, if it can run eagerly.

        TensorFlow cannot make variables for several replicas while it traces.
        """
        layers = layers_of(self.loss.task)
        if not all(layer.built for layer in layers):
            features = {k: tf.zeros(v.shape, v.dtype) for k, v in self.specs(_FOUR).items()}
            # The traces that follow raise the errors of the task.
            with suppress(Exception), ExitStack() as stack, self.microbatch(4, 4, None).forward():
                stack.enter_context(restoring(self._variables()))
                made = functools.partial(_made_outside, stack)
                with tf.variable_creator_scope(made):
                    self.loss.function(features, training=self.training)
            self.kept.clear()
        layers = layers_of(self.loss.task)
        take_over_moments(layers)
        look_up_rows(layers)

    def first(self, optimizers: Sequence[keras.optimizers.Optimizer]) -> _Pass:
        """Returns the first pass, over 8 rows or those of a replica.

        Raises:
          ConfigError: If it draws by Python, or writes a variable that no checkpoint holds.
        """
        where, before = self.loss.where, states_of_generators(self.loss.task)
        errors: list[Exception] = []
        shares = self.pipeline.microbatches * self.strategy.num_replicas_in_sync
        own = self.pipeline.global_batch_size // shares
        # A collective of the user's waits for all replicas.
        for rows, self.every in ((_EIGHT, False), (_EIGHT, True), (own, True)):
            try:
                first = self.traced(rows)
                break
            except DdlError:
                raise
            except Exception as error:
                errors.append(error)
        else:
            raise errors[0]
        if rows != _EIGHT:
            logging.warning("%s takes %d rows alone: the check of rows did not run.", where, rows)
        graph = first.function.graph
        if states_of_generators(self.loss.task) != before:
            check_python_draws(where, self.loss.task, lambda: self.traced(rows).function.graph)
        check_writes(where, graph, self.loss.task, optimizers, self.strategy)
        check_stateless(where, graph)
        return first

    def traced(self, rows: int, total: int | None = None, padded: bool = False) -> _Pass:
        """Traces a pass.

        Args:
          rows: Number of rows.
          total: Number of rows that `ddl.gather` returns; None: the same.
          padded: Whether the pass takes a mask of the rows that are no padding.
        """
        loss, found = self.loss, list[tuple[PerExample, Microbatch]]()
        added, adds = list[tf.Tensor](), self.training and not (padded or has_step(loss.task))

        def on_replica(features: _Features, mask: tf.Tensor | None) -> None:
            if found and not self.every:
                return
            # On the device of the replica, which a collective of the user's asks for.
            features = {name: tf.identity(values) for name, values in features.items()}
            current = self.microbatch(rows, total or rows, mask)
            no_variables = tf.variable_creator_scope(functools.partial(_refuse, loss.where))
            with no_variables, naming_features(loss.where, features), current.forward():
                output = loss.function(dict(features), training=self.training)
                own = loss.losses_of_layers() if adds else ()
            check_output(output, loss.where, rows)
            for name in names_resembling_weight(features):
                feature = features[name]  # read if the loss computes with it or returns it
                is_read = feature.consumers() or any(feature is x for x in tf.nest.flatten(output))
                self.read[name] = self.read.get(name, False) or bool(is_read)
            added[:] = added if found else [tf.cast(x, tf.float64) for x in own]
            found.append((output, current))

        @tf.function(autograph=False)
        def run(features: _Features, mask: tf.Tensor | None) -> _Features:
            found.clear()
            if traits_of(self.strategy).asynchronous:
                on_replica(features, mask)
            else:
                allow_replica_writes(layers_of(self.loss.task), self.strategy)
                self.strategy.run(on_replica, args=(features, mask))
            return tensors_of(found[0][0]) | ({_OF_LAYERS: tf.stack([added])} if added else {})

        mask = tf.TensorSpec([rows], tf.bool) if padded else None
        return _Pass(run.get_concrete_function(self.specs(rows), mask), *found[0])

    def check_rows(self, first: _Pass, few: _Pass) -> None:
        """Raises ConfigError if values of an example depend on other examples.

        Args:
          first: The pass over 8 rows.
          few: The pass over 4 rows.
        """
        where = f"{self.loss.where}, with training={self.training}"
        with data_errors(self.pipeline.source):
            rows = self.pipeline.first_examples(_EIGHT + _FOUR)
        rows.pop("weight", None)
        tolerance, eight = _tolerance(first.function.graph), np.arange(_EIGHT)
        with self._gates_open():
            values = self._run(first, rows, eight)
            found: dict[str, str] = {}
            for kept, rows_with_others in _HALVES.items():
                with_others = self._run(first, rows, rows_with_others)
                found = found or _differences(values, with_others, kept, tolerance)
            alone = self._run(few, rows, eight[:_FOUR])
            if _OF_LAYERS in values and self.loss.replicas * self.pipeline.microbatches > 1:
                self._check_losses_of_layers(first, few, rows, (values, alone), tolerance)
            found = found or _differences(values, alone, [*eight[:_FOUR]], _AT_OTHERS)
            if found:
                raise ConfigError(
                    f"{where}: the {' and the '.join(found)} of an example must not depend on "
                    f"other examples of the batch (got {next(iter(found.values()))}), nor on its "
                    "size: a replica sees only its own microbatch, with padding. Take other rows, "
                    "as for in-batch negatives, from ddl.gather(x), mix rows by ddl.layers.Mixup "
                    "or CutMix, and take moments of the batch by keras.layers.BatchNormalization."
                )
            if first.microbatch.has_gathered:
                padded, mask = self.traced(_EIGHT, padded=True), eight % 3 != 2
                one = self._run(padded, rows, eight, tf.constant(mask))
                for (gathers, _), kept_values in self.kept.items():
                    for value in kept_values if gathers else ():
                        value[~mask] = np.roll(value, 1, axis=0)[~mask]
                two = self._run(padded, rows, eight, tf.constant(mask))
                found = _differences(one, two, [*eight[mask]], tolerance)
        if found:
            raise ConfigError(
                f"{where}: the {' and the '.join(found)} of an example must not depend on padding "
                f"(got {next(iter(found.values()))} as padding). Leave out gathered rows whose "
                "mask is False, as in tf.where(gathered.mask, logits, logits.dtype.min)."
            )
        for name, value in values.items():
            if (name == "weight" or name.endswith("(weight)'")) and (value < 0).any():
                raise ConfigError(
                    f"{where}: the {name} of an example must be at least 0, got "
                    f"{value.min():.6g}. To use negative factors, multiply the loss by them."
                )

    def _check_losses_of_layers(
        self, first: _Pass, few: _Pass, rows: _Features, before: Sequence[_Values], tolerance: float
    ) -> None:
        """Raises ConfigError unless the losses of layers are means; after runs of both passes."""
        places = [8, 9, 10, 11, 4, 5, 6, 7]
        of_eight = before[0][_OF_LAYERS], self._run(first, rows, places)[_OF_LAYERS]
        of_four = before[1][_OF_LAYERS], self._run(few, rows, places[:_FOUR])[_OF_LAYERS]
        check_are_means(self.loss.where, of_eight, of_four, max(tolerance, 1e-4))

    def _variables(self) -> list[tf.Variable]:
        return variables_of([self.loss.task, *layers_of(self.loss.task)])

    def _run(self, one: _Pass, rows: _Features, places: Any, mask: Any = None) -> _Values:
        """Returns a pass's values of some rows by name; restores the variables that it writes."""
        features = {name: tf.gather(values, places) for name, values in rows.items()}
        with restoring(written_in(one.function.graph, self._variables())):
            values = one.function(features, mask)
        return {name: np.atleast_1d(tf.cast(x, tf.float64)) for name, x in values.items()}

    @contextmanager
    def _gates_open(self) -> Iterator[None]:
        """Moves variables that are zero away from it within the `with` block.

        A gate that starts at zero would hide a dependence that training opens.
        """
        zeros = [v for v in self._variables() if v.trainable and not np.any(v.numpy())]
        with restoring(zeros):
            for variable in zeros:
                variable.assign(tf.fill(variable.shape, tf.cast(0.02, variable.dtype)))
            yield


def _tolerance(graph: tf.Graph) -> float:
    """Returns the tolerated difference at one shape, relative to the largest value."""
    tensors = [x for op in graph.get_operations() if op.type != "PyFunc" for x in op.outputs]
    narrowest = min(x.dtype.size for x in tensors if x.dtype.is_floating)
    is_static = all(x.shape.is_fully_defined() for x in tensors)
    return _AT_ONE_SHAPE[narrowest] if narrowest > 2 or is_static else _AT_OTHERS


def _differences(
    first: _Values, second: _Values, rows: Sequence[int], tolerance: float
) -> dict[str, str]:
    """Returns the values that differ in some rows, each with an example of the difference."""
    found: dict[str, str] = {}
    for name, one in first.items():
        # A first dimension of 1 belongs to all rows.
        own, other = (x if len(x) == 1 else x[list(rows)] for x in (one, second[name]))
        atol = tolerance * np.abs(one[np.isfinite(one)]).max(initial=0.0)
        wrong = np.argwhere(~np.isclose(own, other, rtol=0, atol=atol, equal_nan=True))
        if len(wrong) and name != _OF_LAYERS:
            place = tuple(wrong[0])
            found[name] = (
                f"{own[place]:.6g} in row {rows[place[0]] if len(own) > 1 else 0}, but "
                f"{other[place]:.6g} with other rows in the batch"
            )
    return found


def _made_outside(stack: ExitStack, create: Callable[..., Any], **arguments: Any) -> Any:
    """Makes a variable outside of the pass, which thus changes neither weights nor counters."""
    with microbatch.entered(None):
        variable = create(**arguments)
    stack.enter_context(restoring(copies_of(variable)))
    return variable


def _refuse(where: str, create: Callable[..., Any], **arguments: Any) -> Any:
    """Refuses to make a variable in a loss."""
    raise ConfigError(
        f"{where} makes the variable {arguments.get('name') or 'Variable'!r} in each call, so that "
        "it could not be trained. Make layers and variables once, in __init__, and keep them in "
        "attributes of the task."
    )
