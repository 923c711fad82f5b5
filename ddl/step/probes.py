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

import linecache
import math
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from ddl import draws, microbatch
from ddl.data.checks import data_errors
from ddl.data.pipeline import BatchPipeline
from ddl.distribution.traits import traits_of
from ddl.errors import ConfigError, DdlError, did_you_mean
from ddl.layers.lookups import look_up_rows
from ddl.layers.normalization import take_over_moments
from ddl.layers.transforms.mixing import HeldPartners, Partners
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
from ddl.step.metric_sums import check_dimensions, layout_of
from ddl.step.moving_statistics import allow_replica_writes, restoring
from ddl.step.rows import tables_in
from ddl.tasks.gather import Gathered, HeldRows
from ddl.tasks.parts import layers_of, models_of, variables_of
from ddl.tasks.task import PerExample, Task, names_resembling_weight, unread
from ddl.user_code import message_of, place_of

_EIGHT, _FOUR = 8, 4
# Of the rows of one half the neighbours, mirror images and rows half a batch away lie in the other.
_HALVES = ([0, 3, 5, 6], [1, 2, 4, 7])
_TOLERANCES = {8: 1e-13, 4: 1e-5, 2: 1e-2}
"""Tolerated differences at one shape, relative to the largest value, by the bytes of the dtype.

Kernels give a row the same bits at the same shape. A task that selects tokens from its rows runs
kernels at other shapes, which round differently; so half precision counts only for such a task.
"""
_ALONE = 1e-2
"""Tolerated difference between 8 and 4 rows, where kernels round differently."""

_Features = dict[str, tf.Tensor]


class _Held(NamedTuple):
    """Values of the first run that do not follow the rows of later runs.

    Attributes:
      moments: Moments of the normalization layers.
      rows: What `ddl.gather` returned.
      partners: The partners of rows, which layers mixed them with.
    """

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

        rows = [
            one._replace(rows=[replaced(values) for values in one.rows], mask=mask)
            for one in self.rows
        ]
        return _Held(self.moments, rows, self.partners)


class _Pass(NamedTuple):
    """A traced pass over some number of rows.

    Attributes:
      run: The concrete function: takes features, held values and a mask, or None each.
      output: The symbolic output of the loss.
      microbatch: The microbatch, which knows what drew and gathered.
      graph: The graph.
      unread: Features named like weights that the loss did not read.
      drew: Whether the trace moved a generator of Python or NumPy.
    """

    run: Any
    output: PerExample
    microbatch: Microbatch
    graph: tf.Graph
    unread: Sequence[str]
    drew: bool


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

    def form(self, loss: Loss, pipeline: BatchPipeline, training: bool) -> Form:
        """Probes a loss for training or for evaluation.

        Raises:
          ConfigError: See `Loss.form`.
          DataError: If the data cannot be read.
          Exception: Any error of the task.
        """
        with self._strategy.scope(), without_traces_of_the_user():
            self._build(loss, pipeline, training)
            first, rows = self._first(loss, pipeline, training)
            self._check_effects(loss, pipeline, training, first, rows)
            placing, few = self._placing(loss, pipeline, training, first, rows)
            asynchronous = traits_of(self._strategy).asynchronous
            if rows == _EIGHT and not asynchronous:  # the chief runs no model
                try:
                    self._check_rows(loss, pipeline, training, first, few)
                except DdlError:
                    raise
                except Exception as error:  # training raises it, and says more
                    logging.warning(
                        "%s: the check that examples are independent of each other could not run: "
                        "%s",
                        loss.where,
                        _short(error),
                    )
        output, current = first.output, first.microbatch
        return Form(
            metrics=layout_of(output, loss.where),
            entries=math.prod(output.loss.shape[1:]),
            weighs=output.weight is not None,
            gathers=current.has_gathered,
            unread=first.unread,
            tables=tables_in(first.graph, rows),
            layers=_used_layers(layers_of(self._task), current),
            placing=placing,
            moved=moved_in(first.graph, self._task) if training else (),
        )

    def _placing(
        self, loss: Loss, pipeline: BatchPipeline, training: bool, first: _Pass, rows: int
    ) -> tuple[Mapping[Any, int] | None, _Pass | None]:
        """Returns which draws follow the rows, and the pass over 4 rows if that needed one."""
        drawn = first.microbatch.drawn
        if not drawn:
            return {}, None
        if rows != _EIGHT:
            return None, None
        few = self._traced(loss, pipeline, training, _FOUR)
        return draws.placing(few.microbatch.drawn or {}, drawn, _FOUR, _EIGHT), few

    def _first(self, loss: Loss, pipeline: BatchPipeline, training: bool) -> tuple[_Pass, int]:
        """Returns the first pass and its number of rows: 8, or those of a replica."""
        try:
            return self._traced(loss, pipeline, training, _EIGHT), _EIGHT
        except ConfigError:
            raise
        except Exception as error:
            if (message := _missing(error, loss, pipeline)) is not None:
                raise ConfigError(message) from error
            replicas = self._strategy.num_replicas_in_sync
            rows = pipeline.global_batch_size // pipeline.microbatches // replicas
            if rows == _EIGHT:
                raise
            with suppress(Exception):
                traced = self._traced(loss, pipeline, training, rows)
                logging.warning(
                    "%s takes batches of %d rows alone, so the check that examples are independent "
                    "of each other did not run.",
                    loss.where,
                    rows,
                )
                return traced, rows
            raise

    def _traced(
        self,
        loss: Loss,
        pipeline: BatchPipeline,
        training: bool,
        rows: int,
        held: Any = None,
    ) -> _Pass:
        """Traces a pass on one replica, which stands for all.

        Args:
          loss: The loss.
          pipeline: The pipeline of its source.
          training: Whether it is traced for training.
          rows: Number of rows.
          held: Values that the pass gets, as later calls give them; None records them.
        """
        spec = {
            name: tf.TensorSpec([rows, *one.shape], one.dtype, name)
            for name, one in pipeline.element_spec.items()
            if name != "weight"
        }
        found: list[Any] = []

        def on_replica(features: _Features, held: _Held | None, mask: Any, one: bool) -> None:
            if found and one:
                return
            # On the device of the replica, which a collective of the user's asks for.
            features = {name: tf.identity(values) for name, values in features.items()}
            moments = HeldMoments(None if held is None else held.moments)
            gathered = HeldRows(None if held is None else held.rows)
            partners = HeldPartners(None if held is None else held.partners)
            zero = tf.zeros([], tf.int64)
            current = Microbatch(
                seed=0,
                training=training,
                counter=batch_counter(zero),
                first_row=0,
                rows=rows,
                position=None if training else zero,
                held_moments=moments,
                gathering=gathered,
                pairing=partners,
                mask=mask,
                drawn={},
            )
            with tf.variable_creator_scope(_refusing(loss)), current.forward():
                output = loss.function(dict(features), training)
            ignored = unread(features, names_resembling_weight(features), output)
            loss.check(output, rows)
            held_now = _Held(moments.moments, gathered.gathered, partners.found)
            found.append((output, current, ignored, held_now))

        def traced(one: bool) -> Any:
            found.clear()

            @tf.function(autograph=False)
            def run(features: _Features, held: _Held | None, mask: Any) -> Any:
                if traits_of(self._strategy).asynchronous:
                    on_replica(features, held, mask, one)
                else:
                    allow_replica_writes(layers_of(self._task), self._strategy)
                    self._strategy.run(on_replica, args=(features, held, mask, one))
                output, _, _, held_now = found[0]
                return _named(output), held_now

            mask = held[1] if held else None
            return run.get_concrete_function(spec, held[0] if held else None, mask)

        generators = Generators(self._task)
        before = generators.states()
        try:
            run = traced(True)
        except DdlError:
            raise
        except Exception:
            if self._strategy.num_replicas_in_sync == 1:
                raise
            run = traced(False)  # a collective of the user's waits for all replicas
        output, current, ignored, _ = found[0]
        drew = generators.states() != before
        return _Pass(run, output, current, run.graph, ignored, drew)

    def _build(self, loss: Loss, pipeline: BatchPipeline, training: bool) -> None:
        """Builds new layers by running the task on zeros, if it can run eagerly.

        TensorFlow cannot make variables for several replicas while it traces.
        """

        def run() -> None:
            current = Microbatch(
                seed=None,
                training=training,
                counter=batch_counter(tf.zeros([], tf.int64)),
                first_row=0,
                rows=_FOUR,
                held_moments=HeldMoments(),
                gathering=HeldRows(),
                pairing=HeldPartners(),
                drawn={},
            )
            with tf.variable_creator_scope(_made_outside), current.forward():
                loss.function(dict(features), training)

        layers = layers_of(self._task)
        if not all(layer.built for layer in layers):
            features = {
                name: tf.zeros([_FOUR, *one.shape], one.dtype)
                for name, one in pipeline.element_spec.items()
                if name != "weight"
            }
            for way in (run, lambda: self._strategy.run(run)):  # then in replica context
                variables = variables_of([self._task, *layers])
                with suppress(Exception), restoring(variables):
                    way()  # the traces that follow raise the errors of the task
                    break
        layers = layers_of(self._task)
        take_over_moments(layers)
        look_up_rows(layers)

    def _check_effects(
        self, loss: Loss, pipeline: BatchPipeline, training: bool, first: _Pass, rows: int
    ) -> None:
        """Raises ConfigError for draws of Python, and for writes that no checkpoint holds."""
        if first.drew:
            check_python_draws(
                loss.where,
                self._task,
                lambda: self._traced(loss, pipeline, training, rows).graph,
            )
        given = (first.graph, self._task, self._optimizers, self._strategy)
        check_writes(loss.where, *given)
        check_stateless(loss.where, first.graph)

    def _check_rows(
        self,
        loss: Loss,
        pipeline: BatchPipeline,
        training: bool,
        first: _Pass,
        few: _Pass | None,
    ) -> None:
        """Raises ConfigError if values of an example depend on other examples.

        Args:
          loss: The loss.
          pipeline: The pipeline of its source.
          training: Whether to check it in training.
          first: The pass over 8 rows.
          few: A pass over 4 rows that holds nothing, if there is one.
        """
        where = f"{loss.where}, with training={training}"
        rows = self._examples(pipeline)
        eight = {name: values[:_EIGHT] for name, values in rows.items()}
        with self._unchanged() as run:
            values, held = run(first, eight, None, None)
            held = held if any(held) else None
            again = first
            if held is not None:
                again = self._traced(loss, pipeline, training, _EIGHT, (held, None))
            tolerance = self._tolerance(first)
            found: dict[str, str] = {}
            for kept, replaced in (_HALVES, _HALVES[::-1]):
                order = np.arange(_EIGHT)
                order[replaced] = np.arange(_EIGHT, _EIGHT + _FOUR)
                other = {name: tf.gather(values, order) for name, values in rows.items()}
                with_others, _ = run(again, other, held, None)
                found = found or _differences(values, with_others, kept, tolerance)
            own = None if held is None else held.of_first(_FOUR)
            if own is not None or few is None:
                given = None if own is None else (own, None)
                few = self._traced(loss, pipeline, training, _FOUR, given)
            check_dimensions(first.output, few.output, loss.where)
            four = {name: values[:_FOUR] for name, values in rows.items()}
            of_four, _ = run(few, four, own, None)
            found = found or _differences(values, of_four, range(_FOUR), _ALONE)
            if found and _differences(
                values, run(first, eight, None, None)[0], range(_EIGHT), tolerance
            ):
                found = {}
                logging.warning(
                    "%s: the check that examples are independent of each other cannot tell, "
                    "because two runs on the same examples differ.",
                    where,
                )
            if held is not None and held.rows and not found:
                self._check_padding(loss, pipeline, training, eight, held, where, run)
        if found:
            raise ConfigError(
                f"{where}: the {' and the '.join(found)} of an example must not depend on other "
                f"examples of the batch (got {next(iter(found.values()))}). A replica sees only "
                "its own microbatch, with padding, so the result would depend on the number of "
                "devices. To compare an example with the others, as for in-batch negatives and "
                "mining, take their rows from ddl.gather(x), which gives those of all replicas and "
                "a mask of the padding. To mix examples, use ddl.layers.Mixup or CutMix. Compute "
                "all else of a row from that row alone: no sums over the batch, and no division by "
                "its size. Use keras.layers.BatchNormalization for moments of the batch."
            )
        for name, value in values.items():
            if (name == "weight" or name.endswith("(weight)'")) and (value < 0).any():
                raise ConfigError(
                    f"{where}: the {name} of an example must be at least 0, because the loss is "
                    f"divided by the sum of the weights, got {value.min():.6g}. To use negative "
                    "factors, multiply the loss by them."
                )

    def _check_padding(
        self,
        loss: Loss,
        pipeline: BatchPipeline,
        training: bool,
        features: _Features,
        held: _Held,
        where: str,
        run: Callable[..., Any],
    ) -> None:
        """Raises ConfigError if rows depend on padding that was gathered."""
        mask = tf.range(_EIGHT) % 3 != 2
        padded = self._traced(loss, pipeline, training, _EIGHT, (held, mask))
        kept = [row for row in range(_EIGHT) if row % 3 != 2]
        one, _ = run(padded, features, held.with_padding(mask, other=False), mask)
        two, _ = run(padded, features, held.with_padding(mask, other=True), mask)
        if found := _differences(one, two, kept, self._tolerance(padded)):
            raise ConfigError(
                f"{where}: the {' and the '.join(found)} of an example must not depend on padding "
                f"(got {next(iter(found.values()))} as padding). Leave out the rows of ddl.gather "
                "whose mask is False, as in tf.where(gathered.mask, logits, logits.dtype.min)."
            )

    @contextmanager
    def _unchanged(self) -> Iterator[Callable[..., Any]]:
        """Gives a function that runs a pass and leaves all variables as they were."""
        layers = [*models_of(self._task).values(), *layers_of(self._task)]
        variables = variables_of([self._task, *layers])
        # A gate that starts at zero would hide a dependence that training opens.
        zeros = [v for v in variables if v.trainable and not np.any(v.numpy())]

        def run(one: _Pass, features: _Features, held: Any, mask: Any) -> Any:
            with restoring(written_in(one.graph, variables)):
                values, held_now = one.run(features, held, mask)
            arrays = {name: tf.cast(v, tf.float64).numpy() for name, v in values.items()}
            return arrays, held_now

        with restoring(zeros):
            for variable in zeros:
                variable.assign(tf.fill(variable.shape, tf.cast(0.02, variable.dtype)))
            yield run

    def _examples(self, pipeline: BatchPipeline) -> _Features:
        """Returns 12 examples of a source, without their weights; they repeat if there are few."""
        if id(pipeline) not in self._rows:
            with data_errors(pipeline.source):
                rows = pipeline.first_examples(_EIGHT + _FOUR)
            rows.pop("weight", None)
            count = pipeline.num_examples
            if count is not None and count < _EIGHT + _FOUR:
                places = np.arange(_EIGHT + _FOUR) % count
                rows = {name: tf.gather(values, places) for name, values in rows.items()}
            self._rows[id(pipeline)] = rows
        return self._rows[id(pipeline)]

    def _tolerance(self, one: _Pass) -> float:
        """Returns the tolerated difference at one shape, relative to the largest value."""
        dtypes = [tf.as_dtype(x.compute_dtype) for x in layers_of(self._task)]
        dtypes.append(one.output.loss.dtype)
        narrowest = min(dtype.size for dtype in dtypes if dtype.is_floating)
        if narrowest == 2 and _has_static_shapes(one.graph):
            narrowest = 4
        return _TOLERANCES[narrowest]


def _used_layers(
    layers: Sequence[keras.layers.Layer], current: Microbatch
) -> list[keras.layers.Layer]:
    """Returns the layers but for normalizations that took no moments, such as a teacher's."""
    held = current.held_moments
    normalizing = {id(layer) for layer in held.layers} if held is not None else set()
    kind = keras.layers.BatchNormalization
    return [x for x in layers if not isinstance(x, kind) or id(x) in normalizing]


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
        with np.errstate(invalid="ignore"):
            distance = np.abs(own - other)
        same = (own == other) | (np.isnan(own) & np.isnan(other))
        distance = np.where(same, 0.0, np.nan_to_num(distance, nan=np.inf))
        if (distance > tolerance * np.abs(one[np.isfinite(one)]).max(initial=0.0)).any():
            place = np.unravel_index(np.argmax(distance), distance.shape)
            found[name] = (
                f"{own[place]:.6g} in row {rows[int(place[0])] if len(own) > 1 else 0}, but "
                f"{other[place]:.6g} with other rows in the batch"
            )
    return found


def _short(error: Exception) -> str:
    """Returns why a loss could not run, without the frames that TensorFlow adds."""
    if "cannot be accessed from here" in str(error) or "out of scope" in str(error):
        return (
            "the loss uses a tensor of the step, which does not exist where the check calls the "
            "loss alone. If the loss is right for each example alone, nothing needs to be done."
        )
    lines = [line for line in message_of(error).splitlines() if line and not line[0].isspace()]
    return " ".join([*lines[:1], *lines[1:][-1:]])


def _has_static_shapes(graph: Any) -> bool:
    """Returns whether kernels get the same shapes whatever the rows hold."""
    waiting = [graph]
    while waiting:
        graph = waiting.pop()
        outputs = (x for operation in graph.get_operations() for x in operation.outputs)
        if not all(x.shape.is_fully_defined() for x in outputs):
            return False
        waiting += [graph._get_function(name).graph for name in graph._functions]
    return True


def _made_outside(create: Callable[..., Any], **arguments: Any) -> Any:
    """Makes a variable outside of the pass: initial weights do not depend on rows."""
    with microbatch.none():
        return create(**arguments)


def _refusing(loss: Loss) -> Callable[..., Any]:
    """Returns a creator of variables that raises: a loss must make none."""

    def refuse(create: Callable[..., Any], **arguments: Any) -> Any:
        name = str(arguments.get("name") or "Variable")
        error = ConfigError(
            f"{loss.where} makes the variable {name!r} in each call, so that it could not be "
            "trained. Make layers and variables once, in __init__, and keep them in attributes of "
            "the task."
        )
        raise error

    return refuse


def _missing(error: Exception, loss: Loss, pipeline: BatchPipeline) -> str | None:
    """Returns the message if a loss needs a value, or reads a feature that does not exist."""
    if isinstance(error, tf.errors.OperatorNotAllowedInGraphError):
        return (
            f"{loss.where} uses a tensor where Python needs a value, such as in `if` or `for`: a "
            "loss is traced once, before any value is known. Use tf.where, tf.cond or "
            "tf.while_loop."
        )
    names = sorted({*pipeline.element_spec} - {"weight"})
    if isinstance(error, KeyError) and error.args:
        name, asked = error.args[0], "features[{!r}]"
    elif isinstance(error, AttributeError):
        name, asked = error.name, "features.{}"
    else:
        return None
    asked_of, place = _asked_object(error), place_of(error)
    if place is None or not isinstance(asked_of, dict) or {*asked_of} != {*names}:
        return None
    near = did_you_mean(str(name), names)
    if name in names:
        near = f' It is a dict: write features["{name}"].'
    return (
        f"{loss.where} reads {asked.format(name)}, but the features of the data are "
        f"{', '.join(names)}.{near}\n{place.note}"
    )


def _asked_object(error: Exception) -> Any:
    """Returns the local variable whose key or attribute the last line of the traceback reads."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    last = traceback.extract_tb(error.__traceback__)[-1]
    line = linecache.getline(last.filename, last.lineno or 0).encode()
    read = re.match(r"(\w+)\s*[.\[]", line[last.colno or 0 :].decode(errors="replace"))
    return frame.f_locals.get(read[1]) if read else None
