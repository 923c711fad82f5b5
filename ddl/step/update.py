"""The methods of `update` that a task's own step calls: its verbs.

A task with a method `step(update, batch)` replaces the built-in update. It is written as if one
device held the global batch: it runs in cross-replica context, and each verb divides the work among
the replicas and microbatches.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ddl.data.batch import Batch
from ddl.errors import ConfigError, check_takes, did_you_mean, place_of
from ddl.microbatch import Microbatch
from ddl.optimizers.groups import ONLY
from ddl.step.gradients import Gradients, multiply, trainable_variables, weights_of
from ddl.step.loss import OfExamples, Values
from ddl.step.overflow import restored
from ddl.step.state import OfExample, Pass, Results, StepBatch, TrainingState, add_to
from ddl.tasks.task import LossFunction


class Update:
    """One update, made of the verbs that a task's `step(update, batch)` calls.

        class Sam:  # Foret et al. 2021, "Sharpness-aware minimization"
            def step(self, update, batch):
                up = update.gradients(self.per_example, batch)
                with update.moved(self.model, up * (self.rho / up.norm())):
                    sharp = update.gradients(self.per_example, batch, same_draws_as=up)
                update.apply(sharp)

    A step is written as if one device held the global batch. It runs in cross-replica context, in
    a graph; its losses run in replica context. If a gradient overflows, weights, slots, statistics,
    averages and the task's own variables keep their values.

    Attributes:
      results: The results of the verbs so far.
      taken: Number of batches taken of each source, by its name.
      applied: For each `apply` the optimizer's name, the variables, and whether it is in a branch.
      averaged: Variables that `average` moves.
    """

    def __init__(self, engine: Any, state: TrainingState, batches: Mapping[str, Batch]):
        """Keeps the arguments; `ddl.Trainer` makes the update.

        Args:
          engine: Computes for the verbs: `TrainStep`, or a rehearsal that computes nothing.
          state: The state before the update.
          batches: The batches of each source, by its name, all with the same counter.
        """
        self._engine = engine
        self._state = state
        self._batches = batches
        self.taken = dict.fromkeys(batches, 1)
        self.results = Results()
        self.applied: list[tuple[str, Sequence[keras.Variable], bool]] = []
        self.averaged: list[tf.Variable] = []
        self._passes = 0
        self._moved: set[int] = set()
        self._not_entered = 0
        self._in_branch = False
        self._graph: Any = tf.compat.v1.get_default_graph()
        self._context = tf.distribute.get_replica_context()  # None under a strategy
        counter = next(iter(batches.values())).counter
        self._draws = Microbatch(
            seed=engine.seed, training=True, counter=counter, first_row=0, rows=0, draws=-1
        )

    def run(self, task: Any) -> None:
        """Runs a task's step.

        Raises:
          ConfigError: If the step misuses a verb, branches on a tensor in Python, or makes
            variables; names the line.
        """

        def refuse(create: Callable[..., Any], **arguments: Any) -> Any:
            raise ConfigError(
                f"{type(task).__name__}.step must not make variables, since it runs many times. "
                "Make them in the task's constructor, under `with strategy.scope():`."
            )

        given = {name: StepBatch(name, 0, batch) for name, batch in self._batches.items()}
        with self._draws.forward(), _explained(task), tf.variable_creator_scope(refuse):
            task.step(self, given[""] if list(given) == [""] else given)
        self._graph = None
        if self._not_entered:
            raise ConfigError("update.moved must be used in a `with` statement.")

    @property
    def step(self) -> tf.Tensor:
        """Number of updates made before this one, int64 []."""
        return self._state.step

    def next(self, batch: StepBatch) -> StepBatch:
        """Returns a further batch of the source of a batch, of the same size.

            for _ in range(5):
                update.minimize(self.criticizes, update.next(batch), self.critic)

        Each update reads the same number of batches, so an epoch has fewer updates.

        Raises:
          ConfigError: Within `when`, where the number of batches would depend on a tensor.
        """
        self._check("next", batch)
        if self._in_branch:
            raise ConfigError(
                "update.next must read as many batches each time: not in update.when."
            )
        self.taken[batch.source] += 1
        return dataclasses.replace(batch, place=self.taken[batch.source] - 1)

    def gradients(
        self,
        loss: LossFunction,
        batch: StepBatch,
        model: Any = None,
        *,
        name: str | None = None,
        same_draws_as: Gradients | None = None,
        moves_statistics: bool = True,
        each: OfExample | None = None,
    ) -> Gradients:
        """Computes the gradient of a loss over the global batch.

        The loss is computed on all microbatches and replicas and summed once. The logged values of
        a loss are means over its calls outside of `moved`, or over all calls if there are none.

        Args:
          loss: A method of the task with the arguments and the result of `per_example`.
          batch: The batch that the step was given.
          model: Model, layer or list of variables to differentiate by; None: the task's `model`.
          name: Name of the loss in figures; None: the name of the method.
          same_draws_as: Gradients whose passes drew the numbers to draw again; None: new numbers.
          moves_statistics: Whether this forward pass moves statistics such as moving averages.
          each: Changes the gradient of each example before they are added up, such as to clip it
            (DP-SGD): takes and returns a list with a tensor for each variable. It computes for one
            example, and `tf.vectorized_map` runs it on all. The gradients of all examples of a
            replica are in memory at once.

        Returns:
          The gradients, the same on all replicas: divided by the global weight, unscaled, not
          clipped. Each has shape and dtype of its variable; 0 if the loss does not depend on it.

        Raises:
          ConfigError: If the loss is not a function of the task, or returns something else than a
            `ddl.PerExample`; with `each`, if the model normalizes over the batch.
        """
        if each is not None:
            check_takes("`each` of update.gradients", each, ("gradients",))
        made = Pass(batch, self._state, self._next_draws(same_draws_as), each)
        kept = [] if moves_statistics else self._engine.statistics
        with restored(kept, self._engine.strategy):
            variables, reduced = self._reduced(loss, made, model, name)
        strategy, values = self._engine.strategy, reduced.values
        if reduced.factor is not None:
            values = strategy.run(multiply, args=(values, reduced.factor))
        return Gradients(strategy, variables, values, draws=made.draws)

    def _reduced(
        self, function: LossFunction, made: Pass, model: Any, name: str | None, alone: bool = False
    ) -> tuple[list[keras.Variable], Any]:
        """Returns variables and the `Reduced` gradient of a loss; counts its metric sums."""
        self._check("gradients", made.batch)
        name = self._name_of(function, name)
        variables = trainable_variables(self._model(model), "`model` of update.gradients")
        loss = self._engine.loss(function, name, made.batch.source, is_mean=False)
        reduced = self._engine.gradient(loss, variables, made, in_shares=alone)
        self.results.check(reduced.finite)
        sums = self.results.sums_moved if self._moved else self.results.sums
        add_to(sums, name, reduced.sums)
        return variables, reduced

    def mean(self, function: OfExamples, batch: StepBatch, *, name: str | None = None) -> tf.Tensor:
        """Computes the mean of a function of the examples over the global batch.

            self.center.assign(update.mean(self.outputs_of_teacher, batch))

        Args:
          function: A method of the task with the arguments of a loss, which returns a float tensor
            [batch, …]. The row of an example must depend only on that example.
          batch: The batch that the step was given.
          name: Name of the function; None: its own name.

        Returns:
          Tensor […] of the function's dtype, weighted by the weights of the data; 0 without weight.

        Raises:
          ConfigError: If the function returns something else, or depends on other examples.
        """
        like, total, weight = self._summed("mean", function, batch, name)
        return self._checked(tf.cast(tf.math.divide_no_nan(total, weight), like.dtype), like)

    def sum(self, function: OfExamples, batch: StepBatch, *, name: str | None = None) -> tf.Tensor:
        """Computes the sum of a function of the examples over the global batch.

        The sum of ones is the sum of the weights: the number of examples, if the data have none.

        Args:
          function: As in `mean`.
          batch: As in `mean`.
          name: As in `mean`.

        Returns:
          Tensor […] of the function's dtype, or float32 for half precision: values times weights.

        Raises:
          ConfigError: As `mean`.
        """
        like, total, _ = self._summed("sum", function, batch, name)
        return self._checked(
            tf.cast(total, tf.float32 if like.dtype.size == 2 else like.dtype), like
        )

    def _summed(
        self, verb: str, function: OfExamples, batch: StepBatch, name: str | None
    ) -> tuple[Any, tf.Tensor, tf.Tensor]:
        """Returns shape and dtype of a row, the sums [entries] and the sum of the weights."""
        self._check(verb, batch)
        check_takes(f"The function of update.{verb}", function, ("features", "training"))
        name = self._name_of(function, name)
        values = Values(function, f"update.{verb}")
        loss = self._engine.loss(values, name, batch.source, is_mean=True)
        made = Pass(batch, self._state, self._next_draws(None))
        total, weight = self._engine.sums(loss, made)
        return loss.function.like, total, weight

    def _checked(self, value: tf.Tensor, like: Any) -> tf.Tensor:
        self.results.check(self._engine.finite([value]))
        return tf.reshape(value, like.shape)

    def apply(self, gradients: Gradients, optimizer: str | None = None) -> None:
        """Applies gradients: adds regularization, clips, and lets an optimizer update.

        Args:
          gradients: Gradients of the global batch.
          optimizer: Name of the optimizer, where the Trainer has several.

        Raises:
          ConfigError: If there is no optimizer of that name.
        """
        self._check("apply")
        _check_gradients("update.apply", gradients)
        self.results.check(self._engine.finite(gradients.of_replicas))
        self._apply(gradients.variables, gradients.of_replicas, None, optimizer)

    def minimize(
        self,
        loss: LossFunction,
        batch: StepBatch,
        model: Any = None,
        *,
        optimizer: str | None = None,
        name: str | None = None,
    ) -> None:
        """Computes the gradient of a loss and applies it: `gradients`, then `apply`.

        Args:
          loss: As in `gradients`.
          batch: As in `gradients`.
          model: As in `gradients`.
          optimizer: As in `apply`.
          name: As in `gradients`.

        Raises:
          ConfigError: As `gradients` and `apply`.
        """
        # A gradient that nothing else reads may stay in shares and without its factor.
        made = Pass(batch, self._state, self._next_draws(None))
        variables, reduced = self._reduced(loss, made, model, name, alone=True)
        self._apply(variables, reduced.values, reduced.factor, optimizer)

    def _apply(
        self, variables: Sequence[Any], values: Any, factor: Any, optimizer: str | None
    ) -> None:
        self._check_not_moved("apply", [v.value for v in variables])
        name = self._name_of_optimizer(optimizer)
        self.applied.append((name, variables, self._in_branch))
        norm = self._engine.apply(name, variables, values, factor, self._state)
        add_to(self.results.norms, name, tf.stack([norm, tf.ones([], tf.float64)]))

    def moved(self, model: Any, by: Gradients) -> AbstractContextManager[None]:
        """Adds `by` to the weights within the `with` block; restores them bit for bit after it.

        Args:
          model: Model, layer or list of variables to move; None: the task's `model`.
          by: Values to add, such as a multiple of gradients.

        Returns:
          A context manager, for a `with` statement.

        Raises:
          ConfigError: If `by` holds nothing for a variable, or the weights are moved already.
        """
        self._check("moved")
        _check_gradients("update.moved", by)
        self._not_entered += 1
        return self._moving(
            by.of(trainable_variables(self._model(model), "`model` of update.moved"))
        )

    @contextmanager
    def _moving(self, by: Gradients) -> Iterator[None]:
        self._not_entered -= 1
        strategy, writes = self._engine.strategy, self._engine.writes
        variables = [variable.value for variable in by.variables]
        self._check_not_moved("moved", variables)
        with restored(variables if writes else [], strategy):
            for variable, value in zip(variables, by.of_replicas, strict=True):
                if writes:
                    strategy.extended.update(variable, lambda v, x: v.assign_add(x), args=(value,))
            self._moved |= {id(variable) for variable in variables}
            yield
            self._moved -= {id(variable) for variable in variables}

    def average(self, target: Any, *, of: Any, decay: float | tf.Tensor) -> None:
        """Moves weights towards others: target ← target + (1 - decay)·(of - target).

        As the mean teacher of Tarvainen and Valpola 2017, once for each call, on all replicas.

        Args:
          target: Model, layer or list of variables to move, with its moving statistics.
          of: Model, layer or list of variables of the same shapes.
          decay: Share of the target that stays; a number, or a scalar tensor.

        Raises:
          ConfigError: If the shapes differ, or the decay is out of range.
        """
        self._check("average")
        targets, sources = weights_of("target", target), weights_of("of", of)
        shapes = [[tuple(v.shape) for v in variables] for variables in (targets, sources)]
        if shapes[0] != shapes[1] or {id(v) for v in targets} & {id(v) for v in sources}:
            raise ConfigError(
                "update.average: target and `of` must have weights of the same shapes, none of "
                f"them shared, got {shapes[0]!s:.80} and {shapes[1]!s:.80}. Make the target with "
                "keras.models.clone_model."
            )
        if isinstance(decay, int | float) and not 0 <= decay < 1:
            raise ConfigError(f"update.average: decay must be from 0 to below 1, got {decay}.")
        self._check_not_moved("average", targets)
        self.averaged += targets
        # TensorFlow would read a Python number as float32.
        exact = np.float64(decay) if isinstance(decay, int | float) else decay
        share = 1 - tf.cast(exact, tf.float64)
        for variable, source in zip(targets, sources, strict=True):
            if self._engine.writes:
                self._engine.strategy.extended.update(variable, _move, args=(source, share))

    def when(self, condition: tf.Tensor, function: Callable[[], Any]) -> None:
        """Calls a function, which may call this update, if a condition holds.

            update.when(update.step % 5 == 0, lambda: update.minimize(self.fools, batch, …))

        Args:
          condition: bool [], the same on all replicas, such as a function of `step` or of a norm.
          function: Takes no arguments; its result is not used.

        Raises:
          ConfigError: If the condition is no bool scalar, or the function takes arguments.
        """
        self._check("when")
        holds = tf.convert_to_tensor(condition)
        if holds.dtype != tf.bool or holds.shape.rank != 0:
            raise ConfigError(f"update.when takes a bool scalar, got {condition!r:.80}.")
        check_takes("The function of update.when", function, ())
        of_branch: list[dict[str, Any]] = []

        def made() -> dict[str, Any]:
            earlier = self._graph, self._in_branch, self.results
            self._graph, self._in_branch = tf.compat.v1.get_default_graph(), True
            self.results = Results()
            # In the branch's graph; it continues to count the draws.
            with dataclasses.replace(self._draws).forward():
                function()
            of_branch.append(self.results.tensors())
            self._graph, self._in_branch, self.results = earlier
            return of_branch[0]

        def skipped() -> dict[str, Any]:  # traced after `made`
            zeros = tf.nest.map_structure(lambda x: tf.zeros(x.shape, x.dtype), of_branch[0])
            return zeros | {name: tf.constant(True) for name in zeros if name == "finite"}

        self.results.add(tf.cond(holds, made, skipped))

    def _next_draws(self, earlier: Gradients | None) -> int:
        """Returns the number of the next pass, or that of earlier gradients."""
        self._passes += 1
        if earlier is None:
            return self._passes - 1
        if (draws := getattr(earlier, "draws", None)) is None:
            raise ConfigError("same_draws_as must be gradients of one pass, not of a sum.")
        return int(draws)

    def _check(self, verb: str, batch: Any = None) -> None:
        """Raises ConfigError where a verb cannot be called, or for what is no batch."""
        here = tf.compat.v1.get_default_graph(), tf.distribute.get_replica_context()
        if (here[0] is not self._graph) or (here[1] is not self._context):
            raise ConfigError(
                f"update.{verb} must be called in the step itself: not after it, in a loss, or in "
                "a tf.cond, tf.while_loop or tf.function. Use update.when, or a Python `for`."
            )
        if verb in ("next", "gradients", "mean", "sum") and not isinstance(batch, StepBatch):
            raise ConfigError(
                f"update.{verb} takes a batch that the step was given, after the function, got "
                f"{batch!r:.80}. With several sources, pass one of them."
            )

    def _check_not_moved(self, verb: str, variables: Sequence[tf.Variable]) -> None:
        if any(id(variable) in self._moved for variable in variables):
            raise ConfigError(f"Call update.{verb} after update.moved, which restores the weights.")

    def _model(self, given: Any) -> Any:
        if given is None and not hasattr(self._engine.task, "model"):
            raise ConfigError(
                f"{type(self._engine.task).__name__} has no `model`: name a model, layer or "
                "variables, such as update.minimize(loss, batch, self.generator)."
            )
        return self._engine.task.model if given is None else given

    def _name_of(self, function: Any, name: str | None) -> str:
        """Returns the name of a loss: the given one, or that of the function."""
        where = type(self._engine.task).__name__
        name = getattr(function, "__name__", None) if name is None else name
        if not callable(function) or not isinstance(name, str) or not name.isidentifier():
            raise ConfigError(
                f"{where}.step: a loss must be a function with a name of letters, digits and "
                f'underscores, got {function!r:.80}. Pass a method of the task, or name="…".'
            )
        check_takes(f"{where}.{name}", function, ("features",), ("training",))
        return name

    def _name_of_optimizer(self, name: str | None) -> str:
        """Returns the name of an optimizer; None means the only one."""
        names = self._engine.optimizer_names
        if name in names or (name is None and len(names) == 1):
            return names[0] if name is None else name
        known = "only one, without a name" if list(names) == [ONLY] else ", ".join(names)
        raise ConfigError(
            f"{type(self._engine.task).__name__}.step: there is no optimizer {name!r}; the Trainer "
            f"has {known}.{did_you_mean(str(name), names)} Pass a name of Trainer.optimizer."
        )


def _check_gradients(where: str, given: Any) -> None:
    if not isinstance(given, Gradients):
        raise ConfigError(f"{where} takes the result of update.gradients, got {given!r:.80}.")


def _move(variable: tf.Variable, source: tf.Tensor, share: tf.Tensor) -> tf.Operation:
    """Moves a variable by a share of the distance to a source; counters become the source."""
    source, before = tf.cast(source, variable.dtype), tf.convert_to_tensor(variable)
    if variable.dtype.is_floating:
        moved = before + tf.cast(share, variable.dtype) * (source - before)
        source = tf.where(tf.equal(share, 1) | tf.equal(source, before), source, moved)
    return variable.assign(source)


@contextmanager
def _explained(task: Any) -> Iterator[None]:
    """Converts errors of a task's step in the `with` block, and adds the user's line to them."""
    try:
        yield
    except Exception as error:
        message = str(error) if isinstance(error, ConfigError) else _meaning(error, task)
        if message is None:
            raise
        place = place_of(error)
        text = message if place is None else f"{message}\n{place.note}"
        raise ConfigError(text) from error


def _meaning(error: Exception, task: Any) -> str | None:
    """Returns the message for a misuse that Python or TensorFlow reports; None for other errors."""
    name, text = type(task).__name__, str(error)
    in_python = isinstance(error, tf.errors.OperatorNotAllowedInGraphError)
    if in_python or "'SymbolicTensor'" in text or "symbolic tf.Tensor" in text:
        return (
            f"{name}.step uses a tensor where Python needs a value, such as in `if`. Use "
            "update.when(condition, function), or a Python `for` over a range."
        )
    if "is out of scope" in text:
        return f"{name}.step uses a value of update.when outside of it. Use it within its function."
    if isinstance(error, TypeError) and text.startswith(("Update.", "Gradients.")):
        return f"{name}.step: {text}."
    asked = getattr(error, "obj", None)
    if isinstance(error, AttributeError) and (
        asked is task or isinstance(asked, Update | Gradients | StepBatch)
    ):
        known = [attribute for attribute in dir(asked) if not attribute.startswith("_")]
        near = did_you_mean(str(error.name), known)
        return f"{type(asked).__name__} has no attribute {error.name!r}.{near}"
    return None
