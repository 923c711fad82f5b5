"""Probes of a loss on a few rows of the data, before the update is traced.

The loss is traced for 8 and for 4 rows, which builds the model's variables and gives the layout of
the metric sums. It then runs four times, with the rows' positions in the global batch:

    rows 0 to 7                          the first run
    the same, with one half replaced     the others must keep their values: same shapes, same bits
    the same, with the other half
    rows 0 to 3 alone                    must be those of the first run, to 1e-2

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
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from ddl import microbatch, random
from ddl.data.checks import data_errors
from ddl.data.pipeline import BatchPipeline
from ddl.distribution.traits import traits_of
from ddl.errors import ConfigError, DdlError, message_of
from ddl.layers.images import HeldPartners, Partners
from ddl.layers.lookups import look_up_rows
from ddl.layers.normalization import take_over_moments
from ddl.metrics.values import tensors_by_name
from ddl.microbatch import HeldMoments, Microbatch, without_traces_of_the_user
from ddl.random import batch_counter
from ddl.step.effects import (
    Generators,
    check_python_draws,
    check_stateless,
    check_writes,
    moved_in,
    written_in,
)
from ddl.step.loss import Form, Loss
from ddl.step.metric_sums import MetricSums, check_dimensions
from ddl.step.moving_statistics import allow_replica_writes, restoring
from ddl.step.rows import tables_in
from ddl.tasks.gather import Gathered, HeldRows
from ddl.tasks.parts import layers_of, models_of, variables_of
from ddl.tasks.task import PerExample, Task, check_read, names_resembling_weight

_EIGHT, _FOUR = 8, 4
# Of the rows of one half the neighbours, mirror images and rows half a batch away lie in the other.
_HALVES = ([0, 3, 5, 6], [1, 2, 4, 7])
_TOLERANCES = {8: 1e-13, 4: 1e-5, 2: 1e-2}
"""Tolerated differences at one shape, relative to the largest value, by the bytes of the dtype.

Kernels give a row the same bits at the same shape. A task that selects tokens from its rows runs
kernels at other shapes, which round differently.
"""
_ALONE = 1e-2
"""Tolerated difference between 8 and 4 rows, where kernels round differently."""

_Features = dict[str, tf.Tensor]


class _Held(NamedTuple):
    """Moments, gathered rows and partners of the first run, which later runs get."""

    moments: list[tf.Tensor]
    rows: list[Gathered]
    partners: list[Partners]

    def of_first(self, rows: int) -> "_Held":
        """Returns the values for the first rows alone."""
        gathered = [one._replace(own=one.own[:rows]) for one in self.rows]
        partners = [Partners([v[:rows] for v in p.values], p.mask[:rows]) for p in self.partners]
        return _Held(self.moments, gathered, partners)

    def with_padding(self, mask: tf.Tensor, other: bool) -> "_Held":
        """Returns gathered rows of which a mask leaves out some, perhaps with others there."""

        def replaced(values: tf.Tensor) -> tf.Tensor:
            kept = tf.reshape(mask, [_EIGHT] + [1] * (values.shape.rank - 1))
            return tf.where(kept, values, tf.roll(values, 1, axis=0)) if other else values

        rows = [one._replace(rows=[*map(replaced, one.rows)], mask=mask) for one in self.rows]
        return self._replace(rows=rows)


class _Pass(NamedTuple):
    """A traced pass: its function of features, held values and mask, and what the trace told."""

    run: Any
    output: PerExample
    microbatch: Microbatch


class Probes:
    """Probes the losses of a task. Eager, cross-replica context."""

    def __init__(
        self,
        task: Task,
        strategy: tf.distribute.Strategy,
        optimizers: Sequence[keras.optimizers.Optimizer],
    ):
        """Keeps the arguments; traces nothing.

        Args:
          task: The task.
          strategy: The strategy.
          optimizers: Optimizers whose variables checkpoints hold.
        """
        self._task = task
        self._strategy = strategy
        self._optimizers = optimizers
        self._rows: dict[int, _Features] = {}
        self._read: set[str] = set()  # features named like weights that any loss has read

    def form(self, loss: Loss, pipeline: BatchPipeline, training: bool) -> Form:
        """Probes a loss for training or for evaluation.

        Raises:
          ConfigError: See `Loss.form`, as for DataError.
          DataError: If the data cannot be read.
          Exception: Any error of the task.
        """
        probe = Probe(self._task, self._strategy, loss, pipeline, training, self._read)
        with self._strategy.scope(), without_traces_of_the_user():
            probe.build()
            first, rows = probe.first(self._optimizers)
            graph, current = first.run.graph, first.microbatch
            few, drawn = None, current.drawn or {}
            placing: Mapping[Any, int] | None = None if drawn else {}
            if rows == _EIGHT and drawn:
                few = probe.traced(_FOUR)
                placing = random.placing(few.microbatch.drawn or {}, drawn, _FOUR, _EIGHT)
            if rows == _EIGHT and not traits_of(self._strategy).asynchronous:
                try:
                    probe.check_rows(first, few, self._examples(pipeline))
                except DdlError:
                    raise
                except Exception as error:  # training raises it, and says more
                    reason = message_of(error).splitlines()[0]
                    logging.warning("%s: the check of rows could not run: %s", loss.where, reason)
        held: Any = current.held_moments
        normalizing = {id(layer) for layer in held.layers}  # others are as in an evaluation
        kind = keras.layers.BatchNormalization
        every = layers_of(self._task)
        return Form(
            metrics=MetricSums(first.output, loss.where),
            entries=math.prod(first.output.loss.shape[1:]),
            weighs=first.output.weight is not None,
            gathers=current.has_gathered,
            tables=tables_in(graph, rows),
            layers=[x for x in every if not isinstance(x, kind) or id(x) in normalizing],
            placing=placing,
            moved=moved_in(graph, self._task) if training else (),
        )

    def _examples(self, pipeline: BatchPipeline) -> _Features:
        """Returns 12 examples of a source, without their weights; they repeat if there are few."""
        if id(pipeline) not in self._rows:
            count = _EIGHT + _FOUR
            with data_errors(pipeline.source):
                rows = pipeline.first_examples(count)
            rows.pop("weight", None)
            places = np.arange(count) % min(count, pipeline.num_examples or count)
            self._rows[id(pipeline)] = {k: tf.gather(v, places) for k, v in rows.items()}
        return self._rows[id(pipeline)]


@dataclasses.dataclass(frozen=True)
class Probe:
    """The probe of one loss, for training or for evaluation."""

    task: Task
    strategy: tf.distribute.Strategy
    loss: Loss
    pipeline: BatchPipeline
    training: bool
    read: set[str]

    def microbatch(self, rows: int, held: _Held | None = None, mask: Any = None) -> Microbatch:
        """Returns the first rows of the first batch; None records what later passes hold."""
        zero = tf.zeros([], tf.int64)
        moments, gathered, partners = held or (None, None, None)
        return Microbatch(
            seed=0,
            training=self.training,
            counter=batch_counter(zero),
            first_row=0,
            rows=rows,
            position=None if self.training else zero,
            held_moments=HeldMoments(moments),
            gathering=HeldRows(gathered),
            pairing=HeldPartners(partners),
            mask=mask,
            drawn={},
        )

    def specs(self, rows: int) -> dict[str, tf.TensorSpec]:
        """Returns the specs of the features of some rows, without their weight."""
        every = self.pipeline.element_spec.items()
        return {
            name: tf.TensorSpec([rows, *one.shape], one.dtype, name)
            for name, one in every
            if name != "weight"
        }

    def build(self) -> None:
        """Builds new layers by running the task on zeros, if it can run eagerly.

        TensorFlow cannot make variables for several replicas while it traces.
        """

        def run() -> None:
            features = {k: tf.zeros(v.shape, v.dtype) for k, v in self.specs(_FOUR).items()}
            with tf.variable_creator_scope(_made_outside), self.microbatch(_FOUR).forward():
                self.loss.function(features, self.training)

        layers = layers_of(self.task)
        if not all(layer.built for layer in layers):
            for way in (run, lambda: self.strategy.run(run)):  # then in replica context
                with suppress(Exception), restoring(variables_of([self.task, *layers])):
                    way()  # the traces that follow raise the errors of the task
                    break
        layers = layers_of(self.task)
        take_over_moments(layers)
        look_up_rows(layers)

    def first(self, optimizers: Sequence[keras.optimizers.Optimizer]) -> tuple[_Pass, int]:
        """Returns the first pass and its number of rows: 8, or those of a replica.

        Raises:
          ConfigError: If it draws by Python, or writes a variable that no checkpoint holds.
        """
        where, names = self.loss.where, sorted(self.specs(1))
        generators = Generators(self.task)
        before, rows = generators.states(), _EIGHT
        try:
            first = self.traced(rows)
        except ConfigError:
            raise
        except Exception as error:
            if isinstance(error, KeyError) and error.args[0] not in names:
                raise ConfigError(
                    f"{where} raised {error!r}; the features of the data are {', '.join(names)}."
                ) from error
            shares = self.pipeline.microbatches * self.strategy.num_replicas_in_sync
            rows = self.pipeline.global_batch_size // shares
            try:
                first = self.traced(rows)
            except Exception:
                raise error from None
            logging.warning(
                "%s takes %d rows alone, so the check of rows did not run.", where, rows
            )
        if generators.states() != before:
            check_python_draws(where, self.task, lambda: self.traced(rows).run.graph)
        check_writes(where, first.run.graph, self.task, optimizers, self.strategy)
        check_stateless(where, first.run.graph)
        return first, rows

    def traced(self, rows: int, held: _Held | None = None, mask: Any = None) -> _Pass:
        """Traces a pass on one replica, which stands for all.

        Args:
          rows: Number of rows.
          held: Values that the pass gets, as later calls give them; None records them.
          mask: Which rows are no padding; None: all.
        """
        loss, found = self.loss, list[Any]()
        every = False  # a collective of the user's waits for all replicas

        def on_replica(features: _Features, held: _Held | None, mask: Any) -> None:
            if found and not every:
                return
            # On the device of the replica, which a collective of the user's asks for.
            features = {name: tf.identity(values) for name, values in features.items()}
            current = self.microbatch(rows, held, mask)
            with tf.variable_creator_scope(_refusing(loss)), current.forward():
                output = loss.function(dict(features), self.training)
            loss.check(output, rows)
            names = names_resembling_weight(features)
            weights = {name: features[name] for name in names if name not in self.read}
            check_read(weights, type(self.task).__name__, output)
            self.read.update(weights)  # an evaluation may leave out what training reads
            moments: Any = current.held_moments
            now = _Held(moments.moments, current.gathering.gathered, current.pairing.found)
            found.append((output, current, now))

        @tf.function(autograph=False)
        def run(features: _Features, held: _Held | None, mask: Any) -> Any:
            found.clear()
            if traits_of(self.strategy).asynchronous:
                on_replica(features, held, mask)
            else:
                allow_replica_writes(layers_of(self.task), self.strategy)
                self.strategy.run(on_replica, args=(features, held, mask))
            output, _, now = found[0]
            return _named(output), now

        given = self.specs(rows), held, mask
        try:
            concrete = run.get_concrete_function(*given)
        except DdlError:
            raise
        except Exception:
            if self.strategy.num_replicas_in_sync == 1:
                raise
            every = True
            concrete = run.get_concrete_function(*given)
        output, current, _ = found[0]
        return _Pass(concrete, output, current)

    def check_rows(self, first: _Pass, few: _Pass | None, rows: _Features) -> None:
        """Raises ConfigError if values of an example depend on other examples.

        Args:
          first: The pass over 8 rows.
          few: A pass over 4 rows that holds nothing, if there is one.
          rows: 12 examples.
        """
        where = f"{self.loss.where}, with training={self.training}"

        def taken(places: Any) -> _Features:
            return {name: tf.gather(values, places) for name, values in rows.items()}

        eight, tolerance = taken(np.arange(_EIGHT)), self._tolerance(first)
        with self._unchanged() as run:
            values, held = run(first, eight, None, None)
            held = held if any(held) else None
            again = first if held is None else self.traced(_EIGHT, held)
            found: dict[str, str] = {}
            for kept, replaced in (_HALVES, _HALVES[::-1]):
                order = np.arange(_EIGHT)
                order[replaced] = np.arange(_EIGHT, _EIGHT + _FOUR)
                with_others, _ = run(again, taken(order), held, None)
                found = found or _differences(values, with_others, kept, tolerance)
            own = None if held is None else held.of_first(_FOUR)
            if own is not None or few is None:
                few = self.traced(_FOUR, own)
            check_dimensions(first.output, few.output, self.loss.where)
            of_four, _ = run(few, taken(np.arange(_FOUR)), own, None)
            found = found or _differences(values, of_four, range(_FOUR), _ALONE)
            if held is not None and held.rows and not found:
                self._check_padding(eight, held, where, run)
        if found:
            raise ConfigError(
                f"{where}: the {' and the '.join(found)} of an example must not depend on other "
                f"examples of the batch (got {next(iter(found.values()))}), nor on its size: a "
                "replica sees only its own microbatch, with padding. Take other rows, as for "
                "in-batch negatives, from ddl.gather(x), mix rows by ddl.layers.Mixup or CutMix, "
                "and take moments of the batch by keras.layers.BatchNormalization."
            )
        for name, value in values.items():
            if (name == "weight" or name.endswith("(weight)'")) and (value < 0).any():
                raise ConfigError(
                    f"{where}: the {name} of an example must be at least 0, got "
                    f"{value.min():.6g}. To use negative factors, multiply the loss by them."
                )

    def _check_padding(
        self, features: _Features, held: _Held, where: str, run: Callable[..., Any]
    ) -> None:
        """Raises ConfigError if rows depend on padding that was gathered."""
        mask = tf.range(_EIGHT) % 3 != 2
        padded = self.traced(_EIGHT, held, mask)
        one, _ = run(padded, features, held.with_padding(mask, other=False), mask)
        two, _ = run(padded, features, held.with_padding(mask, other=True), mask)
        kept = [row for row in range(_EIGHT) if row % 3 != 2]
        if found := _differences(one, two, kept, self._tolerance(padded)):
            raise ConfigError(
                f"{where}: the {' and the '.join(found)} of an example must not depend on padding "
                f"(got {next(iter(found.values()))} as padding). Leave out gathered rows whose "
                "mask is False, as in tf.where(gathered.mask, logits, logits.dtype.min)."
            )

    @contextmanager
    def _unchanged(self) -> Iterator[Callable[..., Any]]:
        """Gives a function that runs a pass and leaves all variables as they were."""
        layers = [*models_of(self.task).values(), *layers_of(self.task)]
        variables = variables_of([self.task, *layers])
        # A gate that starts at zero would hide a dependence that training opens.
        zeros = [v for v in variables if v.trainable and not np.any(v.numpy())]

        def run(one: _Pass, features: _Features, held: Any, mask: Any) -> Any:
            with restoring(written_in(one.run.graph, variables)):
                values, held_now = one.run(features, held, mask)
            arrays = {name: tf.cast(v, tf.float64).numpy() for name, v in values.items()}
            return arrays, held_now

        with restoring(zeros):
            for variable in zeros:
                variable.assign(tf.fill(variable.shape, tf.cast(0.02, variable.dtype)))
            yield run

    def _tolerance(self, one: _Pass) -> float:
        """Returns the tolerated difference at one shape, relative to the largest value."""
        dtypes = [tf.as_dtype(x.compute_dtype) for x in layers_of(self.task)]
        dtypes.append(one.output.loss.dtype)
        narrowest = min(dtype.size for dtype in dtypes if dtype.is_floating)
        return _TOLERANCES[narrowest]


def _named(output: PerExample) -> dict[str, tf.Tensor]:
    """Returns the tensors of an output by the names that errors use."""
    weight = {} if output.weight is None else {"weight": output.weight}
    metrics = {f"metric {name!r}": v for name, v in tensors_by_name(output.metrics).items()}
    return {"loss": output.loss, **weight, **metrics}


def _differences(
    first: Mapping[str, np.ndarray],
    second: Mapping[str, np.ndarray],
    rows: Sequence[int],
    tolerance: float,
) -> dict[str, str]:
    """Returns the values that differ in some rows, each with an example of the difference."""
    found: dict[str, str] = {}
    for name, one in first.items():
        # A first dimension of 1 belongs to all rows.
        own, other = (x if len(x) == 1 else x[list(rows)] for x in (one, second[name]))
        same = np.isclose(own, other, rtol=0, atol=0, equal_nan=True)
        with np.errstate(invalid="ignore"):
            distance = np.where(same, 0.0, np.nan_to_num(np.abs(own - other), nan=np.inf))
        if (distance > tolerance * np.abs(one[np.isfinite(one)]).max(initial=0.0)).any():
            place = np.unravel_index(np.argmax(distance), distance.shape)
            found[name] = (
                f"{own[place]:.6g} in row {rows[int(place[0])] if len(own) > 1 else 0}, but "
                f"{other[place]:.6g} with other rows in the batch"
            )
    return found


def _made_outside(create: Callable[..., Any], **arguments: Any) -> Any:
    """Makes a variable outside of the pass: initial weights do not depend on rows."""
    with microbatch.none():
        return create(**arguments)


def _refusing(loss: Loss) -> Callable[..., Any]:
    """Returns a creator of variables that raises: a loss must make none."""

    def refuse(create: Callable[..., Any], **arguments: Any) -> Any:
        raise ConfigError(
            f"{loss.where} makes the variable {arguments.get('name') or 'Variable'!r} in each "
            "call, so that it could not be trained. Make layers and variables once, in __init__, "
            "and keep them in attributes of the task."
        )

    return refuse
