"""Traces of a task's loss on symbolic examples, before anything is trained."""

import linecache
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import tensorflow as tf

from ddl import microbatch
from ddl.distribution.traits import traits_of
from ddl.errors import ConfigError, did_you_mean
from ddl.random import batch_counter
from ddl.step.effects.python_draws import Generators, check_python_draws
from ddl.step.moving_statistics import allow_replica_writes, restoring
from ddl.tasks.gather import own_rows
from ddl.tasks.parts import layers_of, variables_of
from ddl.tasks.task import LossFunction, PerExample, Task, names_resembling_weight, unread
from ddl.user_code import place_of

# One replica stands for all: each costs as much time to trace as the others. Two kinds of tasks
# need another way: a collective waits for all replicas, and variables are made in cross-replica
# context.
_Way = Literal["one replica", "all replicas", "cross-replica"]
_WAYS: tuple[_Way, ...] = ("one replica", "all replicas", "cross-replica")


class Probe:
    """Traces of a task, in replica context as in training and evaluation.

    Attributes:
      graph: Graph of the last trace.
      microbatch: Microbatch of the last trace, which holds the draws.
      gathers: Whether the last trace that succeeded called `ddl.gather`.
      unread: Features of the last evaluation trace that are named like weights and that the task
        did not read.
    """

    def __init__(
        self,
        task: Task,
        loss: LossFunction,
        element_spec: Mapping[str, tf.TensorSpec],
        strategy: tf.distribute.Strategy,
        check: Callable[[PerExample, int], None],
    ):
        """Keeps the arguments; traces nothing.

        Args:
          task: The task.
          loss: The loss of the task to trace.
          element_spec: One example by feature name, without the batch dimension.
          strategy: An unbuilt model gets its variables in the strategy's scope.
          check: Called with the task's output and the number of rows.
        """
        self._task = task
        self._loss = loss
        self._element_spec = element_spec
        self._strategy = strategy
        self._check = check
        self.graph = tf.Graph()
        self.microbatch: microbatch.Microbatch | None = None
        self.gathers = False
        self.unread: Sequence[str] = ()
        self._drawn: tuple[bool, int, _Way] | None = None

    @property
    def draws(self) -> Mapping[Any, microbatch.Drawn]:
        """The draws of the last trace, by place and number."""
        return (self.microbatch and self.microbatch.drawn) or {}

    def check_python_draws(self, where: str) -> None:
        """Raises ConfigError if the last trace drew by the generators of Python or NumPy.

        Args:
          where: Name of the loss.
        """
        if self._drawn is None:
            return
        drawn = self._drawn

        def again() -> tf.Graph:
            self._trace(*drawn)
            return self.graph

        check_python_draws(where, self._task, again)

    def output(self, training: bool, rows: int) -> PerExample:
        """Traces the task, which builds its layers if needed; returns its output.

        Args:
          training: As in `Task.per_example`.
          rows: Number of rows of the batch.

        Raises:
          ConfigError: From `check`, or if the task makes variables in each call.
          Exception: Any error of the task.
        """
        self._drawn = None
        if traits_of(self._strategy).asynchronous:  # the chief has no replica context
            return self._trace(training, rows, "cross-replica")
        self._build(training, rows)
        errors: list[Exception] = []
        for way in _WAYS:
            try:
                return self._trace(training, rows, way)
            except ConfigError:
                raise
            except tf.errors.OperatorNotAllowedInGraphError as error:
                self._refuse_variables(errors)  # their initial values are tensors too
                name = f"{type(self._task).__name__}.{getattr(self._loss, '__name__', 'loss')}"
                raise ConfigError(
                    f"{name} uses a tensor where Python needs a value, such as in `if` or `for`: a "
                    "loss is traced once, before any value is known. Use tf.where, tf.cond or "
                    "tf.while_loop."
                ) from error
            except Exception as error:
                if (message := self._missing(error)) is not None:
                    raise ConfigError(message) from error
                errors.append(error)
        if _cannot_make(errors[-1]):
            self._refuse_variables(errors)
        raise next(error for error in errors if not isinstance(error, _NewVariableError))

    def _refuse_variables(self, errors: Sequence[Exception]) -> None:
        """Raises ConfigError if the loss makes variables in each call."""
        for error in errors:
            if isinstance(error, _NewVariableError):
                name = f"{type(self._task).__name__}.{getattr(self._loss, '__name__', 'loss')}"
                place = place_of(error)
                raise ConfigError(
                    f"{name} makes the variable {error.variable!r} in each call, so that it could "
                    "not be trained. Make layers and variables once, in __init__, and keep them in "
                    "attributes of the task." + (f"\n{place.note}" if place else "")
                ) from error

    def _missing(self, error: Exception) -> str | None:
        """Returns the message if the loss reads a feature that does not exist; None otherwise."""
        names = sorted({*self._element_spec} - {"weight"})
        if isinstance(error, KeyError) and error.args:
            name, asked = error.args[0], "features[{!r}]"
        elif isinstance(error, AttributeError):
            name, asked = error.name, "features.{}"
        else:
            return None
        asked_of, place = _asked_object(error), place_of(error)
        if place is None or not isinstance(asked_of, dict) or {*asked_of} != {*names}:
            return None
        where = f"{type(self._task).__name__}.{getattr(self._loss, '__name__', 'loss')}"
        near = did_you_mean(str(name), names)
        if name in names:
            near = f' It is a dict: write features["{name}"].'
        return (
            f"{where} reads {asked.format(name)}, but the features of the data are "
            f"{', '.join(names)}.{near}\n{place.note}"
        )

    def _build(self, training: bool, rows: int) -> None:
        """Builds new layers by running the task on zeros, if it can run eagerly.

        TensorFlow cannot make variables for several replicas while it traces. A variable whose
        trace failed later would keep no initial value.
        """

        def run() -> None:
            with _first_microbatch(training, rows).forward():
                self._loss(dict(examples), training=training)

        ways = (run, lambda: self._strategy.run(run))  # cross-replica, then in replica context
        with (
            self._strategy.scope(),
            microbatch.without_traces_of_the_user(),
            tf.variable_creator_scope(_make),
        ):
            for way in ways:
                layers = layers_of(self._task)
                if all(layer.built for layer in layers):
                    return
                examples = {
                    name: tf.zeros([rows, *spec.shape], spec.dtype)
                    for name, spec in self._element_spec.items()
                    if name != "weight"
                }
                with suppress(Exception), restoring(variables_of([self._task, *layers])):
                    way()  # the traces that follow raise the errors of the task
                    return

    def _trace(self, training: bool, rows: int, way: _Way) -> PerExample:
        batch = {
            name: tf.TensorSpec([rows, *spec.shape], spec.dtype, name)
            for name, spec in self._element_spec.items()
        }
        outputs: list[PerExample] = []

        def run(features: dict[str, tf.Tensor]) -> None:
            if outputs and way == "one replica":
                return
            features = dict(features)
            weight = features.pop("weight")
            self.microbatch = _first_microbatch(training, rows)
            creator = _refuse if way != "cross-replica" else _make
            with (
                tf.variable_creator_scope(creator),
                self.microbatch.forward(),
            ):
                outputs.append(self._loss(dict(features), training=training))
            if not training:
                self.unread = unread(features, names_resembling_weight(features), outputs[-1])
            self._check(outputs[-1], weight.shape[0])

        @tf.function(autograph=False)
        def probe(features: dict[str, tf.Tensor]) -> None:
            if way == "cross-replica":
                run(features)
            else:
                allow_replica_writes(layers_of(self._task), self._strategy)
                self._strategy.run(run, args=(features,))

        generators = Generators(self._task)
        before = generators.states()
        with self._strategy.scope(), microbatch.without_traces_of_the_user():
            self.graph = probe.get_concrete_function(batch).graph
        if generators.states() != before:
            self._drawn = training, rows, way
        assert self.microbatch is not None
        self.gathers = self.microbatch.has_gathered
        return outputs[-1]


def _asked_object(error: Exception) -> Any:
    """Returns the local variable whose key or attribute the last line of the traceback reads."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    last = traceback.extract_tb(error.__traceback__)[-1]
    line = linecache.getline(last.filename, last.lineno or 0).encode()
    read = re.match(r"(\w+)\s*[.\[]", line[last.colno or 0 :].decode(errors="replace"))
    return frame.f_locals.get(read[1]) if read else None


class _NewVariableError(Exception):
    """A task makes a variable, which another way of tracing allows.

    Attributes:
      variable: Name of the variable.
    """

    def __init__(self, variable: str):
        super().__init__(f"The task makes the variable {variable!r} in replica context.")
        self.variable = variable


def _refuse(create: Callable[..., Any], **arguments: Any) -> Any:
    raise _NewVariableError(str(arguments.get("name") or "Variable"))


def _cannot_make(error: Exception) -> bool:
    """Returns whether TensorFlow says that a trace may not make the variables that it makes."""
    return type(error).__name__ == "UnliftableError" or "singleton tf.Variable" in str(error)


def _make(create: Callable[..., Any], **arguments: Any) -> Any:
    with microbatch.none():  # initial weights do not depend on rows
        return create(**arguments)


def _first_microbatch(training: bool, rows: int) -> microbatch.Microbatch:
    """Returns the microbatch of the first rows of the first batch. In a graph."""
    zero = tf.zeros([], tf.int64)
    return microbatch.Microbatch(
        seed=0,
        training=training,
        counter=batch_counter(zero),
        first_row=0,
        rows=rows,
        position=None if training else zero,
        held_moments=microbatch.HeldMoments() if training else None,
        gathering=own_rows,
        drawn={},
    )
